"use strict";
// KL divergence from the full cache against budget or bytes, on a log axis, and by the place in the answer.
kvexp.section("divergence", (root, data, page) => {
  const { el, choice, fixed, missing, name, plain } = kvexp;
  const P = kvexp.panels;
  const MIB = 2 ** 20;
  const AXES = {
    kv_ratio: ["kv_ratio (budget / prompt tokens)", (run) => run.kv_ratio],
    kv_bytes: ["KV cache at the end, MiB per row", (run, own) => (missing(own.kv_bytes) ? null : own.kv_bytes / MIB)],
    position: ["place of the token in the text", null],
  };
  const TEXTS = { own: "the full cache's own answer", reference: "the reference answer" };
  const at = (kl) => (missing(kl) ? kl : Math.max(kl, P.LEAST));
  const chosen = { axis: "kv_ratio", text: data.texts[0] };
  let last = [];
  const body = el("div");
  const pick = (label, key, options) => choice(label, options, chosen[key], (value) => {
    chosen[key] = value;
    draw(last);
  });
  root.append(el("div", { class: "row" },
    pick("Against", "axis", Object.entries(AXES).map(([key, [title]]) => [key, title])),
    data.texts.length > 1 ? pick("Along", "text", data.texts.map((text) => [text, TEXTS[text]])) : null), body);

  const own = (run) => data.runs[run.hash]?.[chosen.text];

  function said(run) {
    const found = own(run);
    const interval = missing(found.kl_low) ? " (too few examples)" : ` (${fixed(found.kl_low, 4)}..${fixed(found.kl_high, 4)})`;
    return [
      `<b>${plain(name(run))}</b>`,
      `KL ${fixed(found.kl, 4)}${interval}; 99 % of tokens below ${fixed(found.kl_p99, 2)}`,
      `${plain(found.verdict_kl)} (equivalent below ${found.epsilon}); same likeliest token ${fixed(100 * found.top1, 1)} %`,
      `${found.n} examples, ${found.tokens} tokens`,
    ].join("<br>");
  }

  /** One line of a method and setting, its runs by x. */
  function curve(runs, x) {
    const sorted = [...runs].sort((a, b) => x(a, own(a)) - x(b, own(b)));
    const points = sorted.map((run) => {
      const { kl, kl_low: low, kl_high: high } = own(run);
      return { x: x(run, own(run)), y: at(kl), low: at(low), high: at(high), hollow: missing(low), text: said(run) };
    });
    return { ...P.series(points, sorted[0]), cliponaxis: true };
  }

  /** One run's KL at each place of the text. */
  function along(run) {
    const found = own(run);
    const { color, dash } = run;
    const kl = found.along.map(at);
    return {
      type: "scatter", mode: "lines", showlegend: false, hoverinfo: "text", x: found.position, y: kl,
      text: kl.map((value, i) => `<b>${plain(name(run))}</b><br>token ${found.position[i]}: KL ${value.toPrecision(3)}`),
      line: { color, dash, width: 0.8 + 1.6 * (missing(run.kv_ratio) ? 0.5 : run.kv_ratio) },
    };
  }

  function layout(runs, title) {
    const levels = [...new Set(runs.map((run) => own(run).epsilon))];
    return {
      ...P.frame(P.WIDE, { title: { text: plain(title), standoff: 6 }, rangemode: "tozero" }, P.logAxis("KL, nats per token")),
      shapes: levels.map((y) => P.level(y, { color: "#000", dash: "dash", width: 1.2 })),
      annotations: levels.map((y) => ({
        xref: "paper", x: 0, xanchor: "left", y: Math.log10(y), yanchor: "bottom", text: `equivalent below ${y}`,
        showarrow: false, font: { color: "#000", size: 10 },
      })),
    };
  }

  function panel(box, runs) {
    const conclusion = data.said[runs[0].panel];
    box.append(el("h3", {}, runs[0].panel), ...(conclusion && chosen.text === data.texts[0] ? [el("p", {}, conclusion)] : []));
    const [title, x] = AXES[chosen.axis];
    const measured = runs.filter(own);
    const here = x === null ? measured : measured.filter((run) => !missing(x(run, own(run))));
    if (!here.length) {
      P.empty(box, `Nothing to draw: no run shown here has a divergence along ${TEXTS[chosen.text]} and a place on this axis.`);
      return;
    }
    const groups = P.lines(here);
    const traces = x === null ? here.map(along) : groups.map((group) => curve(group, x));
    P.chart(box, `KL divergence against ${title}: ${runs[0].panel}`, traces, layout(here, title));
    box.append(P.key(P.linesOf(groups)));
    if (x === null) box.append(el("p", { class: "small" }, "Thicker lines: a larger kv_ratio."));
    const rest = runs.filter((run) => !run.full && !here.includes(run));
    box.append(P.left(rest, (run) => (own(run) ? "it has no place on this axis" : "no divergence is measured")) ?? "");
  }

  function draw(shown) {
    last = shown;
    const grid = P.fresh(body);
    const groups = P.byTask(shown).filter((runs) => runs.some((run) => data.runs[run.hash]));
    P.fill(grid, P.cap(body, groups), panel);
  }
  return draw;
});
