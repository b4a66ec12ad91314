"use strict";
// Quality against the budget.
kvexp.section("explorer", (root, data, page) => {
  const { el, choice, missing } = kvexp;
  const P = kvexp.panels;
  const AXES = { kv_ratio: "kv_ratio (budget / prompt tokens)", slots: "slots kept per kv head (mean)" };
  let axis = "kv_ratio";
  let last = [];
  const body = el("div");
  const pick = (value) => {
    axis = value;
    draw(last);
  };
  root.append(el("div", { class: "row" }, choice("Across", Object.entries(AXES), axis, pick)), body);

  function why(run) {
    if (!P.quality(run, page.state)) return run.note || `no percentage of full in ${P.metric(run, page.state) ?? "any metric"}`;
    return `it has no ${axis}: choose another axis`;
  }

  function panel(box, runs) {
    const others = runs.filter((run) => !run.full);
    const here = others.filter((run) => P.quality(run, page.state) && !missing(run[axis]));
    const full = runs.find((run) => run.full);
    box.append(el("h3", {}, runs[0].panel));
    if (here.length) {
      const groups = P.lines(here);
      const x = (run) => run[axis];
      const widest = Math.max(...here.map(x), axis === "kv_ratio" ? 1 : full?.slots ?? 0);
      const range = [0, widest * 1.03];
      const places = P.beside(groups, x, range, box.clientWidth);
      const traces = groups.map((group) => P.trace(group, places, page.state));
      const shown = P.metric(here[0], page.state);
      const label = `${shown}, percent of the full cache, against ${axis}: ${runs[0].panel}`;
      P.chart(box, label, traces, P.layout(traces, AXES[axis], `${shown}, % of full`, range));
      box.append(P.legend(groups));
    } else {
      box.append(el("p", { class: "small" }, "Nothing to draw: no run shown here has a percentage of its baseline."));
    }
    box.append(P.left(others.filter((run) => !here.includes(run)), why) ?? "");
  }

  function draw(shown) {
    last = shown;
    const grid = P.fresh(body);
    P.fill(grid, P.compared(body, shown), panel);
  }
  return draw;
});
