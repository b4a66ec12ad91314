"use strict";
// Quality against what it costs in time and memory, with the Pareto front.

/** The runs that no other beats: [{x, y}] -> the front by x; smaller x and larger y are better. */
kvexp.pareto = (points) => {
  const front = [];
  for (const point of [...points].sort((a, b) => a.x - b.x || b.y - a.y)) {
    if (!front.length || point.y > front[front.length - 1].y) front.push(point);
  }
  return front;
};

kvexp.section("cost", (root, data, page) => {
  const { el, choice, missing } = kvexp;
  const P = kvexp.panels;
  const MIB = 2 ** 20;
  const SPEED = { tpot_s: ["ms per token", 1e3], ttft_s: ["ms to the first token", 1e3] };
  const MEMORY = { kv_bytes: ["KV cache at the end, MiB per row", 1 / MIB], peak_kv_bytes: ["peak KV cache, MiB per row", 1 / MIB] };
  const KINDS = [["speed", SPEED], ["memory", MEMORY]];
  const chosen = { speed: "tpot_s", memory: "kv_bytes" };
  let last = [];
  const body = el("div");
  const picks = KINDS.map(([kind, axes]) => {
    const options = Object.entries(axes).map(([key, [title]]) => [key, title]);
    return choice(kind === "speed" ? "Time" : "Memory", options, chosen[kind], (value) => {
      chosen[kind] = value;
      draw(last);
    });
  });
  root.append(el("div", { class: "row" }, picks), body);

  /** What keeps these runs from one comparison: a front across such a difference would rank the wrong thing. */
  function obstacle(runs, kind) {
    const differ = (word, of) => (new Set(runs.map(of)).size > 1 ? word : null);
    const found = [
      differ("batch sizes", (run) => `${run.smallest_batch}-${run.batch_size}`),
      differ("NUMERICS", (run) => run.numerics),
      kind === "speed" ? differ("machines or threads", (run) => run.place) : null,
    ].filter((word) => word);
    return found.length ? `No Pareto front: the runs differ in ${found.join(" and ")}.` : "";
  }

  /** Of finished runs with enough examples: the others' percentages rest on other examples, or on next to none. */
  function front(runs, x, state) {
    const done = runs.filter((run) => run.status === "done" && !run.few);
    const best = kvexp.pareto(done.map((run) => ({ x: x(run), y: run.full ? 100 : P.quality(run, state)[0] })));
    return {
      type: "scatter", mode: "lines", name: "Pareto front", showlegend: false, hoverinfo: "skip",
      x: best.map((point) => point.x), y: best.map((point) => point.y),
      line: { color: "#8a8a8a", width: 5, shape: "hv" }, opacity: 0.45,
    };
  }

  function fullPoint(run, x) {
    return {
      type: "scatter", mode: "markers", name: "full", showlegend: false, x: [x(run)], y: [100], cliponaxis: false, hoverinfo: "text",
      text: [`<b>full cache</b><br>${x(run).toPrecision(3)}`], marker: { color: "#000", symbol: "circle", size: 10 },
    };
  }

  /** Why there is no chart; runs: those with a place on its upright axis. */
  function none(runs, key) {
    if (!runs.some((run) => !run.full)) return "Nothing to draw: no run shown here has a percentage of its baseline.";
    if (key in MEMORY) return "No run shown here has recorded this.";
    return "No times were recorded: runs of a sweep that share each prompt's prefill are not timed, and choices are not "
      + "generated. hydra/launcher=basic takes and times one run after the other.";
  }

  /** The chart of one kind, or why there is none. */
  function panel(box, runs, kind, axes) {
    const key = chosen[kind];
    const [title, unit] = axes[key];
    const x = (run) => run[key] * unit;
    const whole = runs.filter((run) => run.full || P.quality(run, page.state));
    const here = whole.filter((run) => !missing(run[key]));
    const others = here.filter((run) => !run.full);
    if (!others.length) {
      P.empty(box, none(whole, key));
      return null;
    }
    return () => chart(box, runs, key, { title, x, whole, here, others, kind });
  }

  function chart(box, runs, key, { title, x, whole, here, others, kind }) {
    const groups = P.lines(others);
    const value = (run) => `${title}: ${x(run).toPrecision(3)}`;
    const range = [0, Math.max(...here.map(x)) * 1.06];
    const places = P.beside(groups, x, range, box.clientWidth);
    const traces = groups.map((group) => ({ ...P.trace(group, places, page.state, value), mode: "markers" }));
    const stopped = obstacle(here, kind);
    const base = here.filter((run) => run.full).map((run) => fullPoint(run, x));
    const all = [...(stopped ? [] : [front(here, x, page.state)]), ...traces, ...base];
    const metric = P.metric(others[0], page.state);
    P.chart(box, `${metric} against ${title}: ${runs[0].panel}`, all, P.layout(all, title, `${metric}, % of full`, range));
    box.append(P.legend(groups));
    if (stopped) box.append(el("p", { class: "small" }, stopped));
    box.append(P.left(whole.filter((run) => missing(run[key])), () => "it has not recorded this") ?? "");
  }

  function draw(shown) {
    last = shown;
    const grid = P.fresh(body, "pairs");
    const later = P.compared(body, shown).flatMap((runs) => {
      const boxes = KINDS.map(() => el("div", { class: "panel" }));
      grid.append(el("div", { class: "pair" }, el("h3", {}, runs[0].panel), boxes));
      return KINDS.map(([kind, axes], i) => panel(boxes[i], runs, kind, axes));
    });
    for (const chart of later) chart?.();
  }
  return draw;
});
