"use strict";
// Which budget is safe: for each model and task the loss that a share of the prompts stays within, against bytes.
kvexp.section("advise", (root, data) => {
  const { el, plain, missing } = kvexp;
  const P = kvexp.panels;
  const LEAST = 1e-6; // on a log axis, which cannot hold 0
  const at = (value) => Math.max(value, LEAST);

  function trace(line, part) {
    const said = (p) => [
      `<b>${plain(`${line.method} ${p.budget}`)}</b>`,
      `${plain(part.head)} of ${part.share} of the prompts: ${p.quantile.toPrecision(3)}`,
      missing(p.bound) ? "no bound: too few prompts" : `of new ones at most ${p.bound.toPrecision(3)}`,
      p.n ? `${p.beyond} of ${p.n} beyond the limit${p.holds ? "; the promise holds" : ""}` : "not tested",
    ].join("<br>");
    return {
      type: "scatter", mode: "lines+markers", showlegend: false, hoverinfo: "text", text: line.points.map(said), cliponaxis: false,
      x: line.points.map((p) => p.bytes), y: line.points.map((p) => at(p.quantile)),
      line: { color: line.color, dash: line.dash, width: 2 },
      error_y: {
        type: "data", symmetric: false, thickness: 1, width: 2, color: line.color,
        array: line.points.map((p) => (missing(p.bound) ? 0 : Math.max(0, at(p.bound) - at(p.quantile)))), arrayminus: line.points.map(() => 0),
      },
      marker: {
        color: line.points.map((p) => (p.holds ? line.color : "#ffffff")), symbol: line.symbol, size: line.points.map((p) => (p.holds ? 12 : 8)),
        line: { color: line.color, width: 1.5 },
      },
    };
  }

  function panel(box, { part, lines }) {
    box.append(el("h3", {}, part.title));
    const limit = { type: "line", xref: "paper", x0: 0, x1: 1, y0: part.limit, y1: part.limit, line: { color: "#000", width: 2 }, layer: "below" };
    const settings = {
      ...P.frame(P.WIDE, { title: { text: "bytes of the cache, % of the full one", standoff: 6 }, rangemode: "tozero" },
        { type: "log", dtick: 1, exponentformat: "power", title: { text: plain(`${part.head} of ${part.share} of prompts`), standoff: 4 } }),
      shapes: [limit],
    };
    P.chart(box, `${part.head} against bytes: ${part.title}`, lines.map((line) => trace(line, part)), settings);
    box.append(el("div", { class: "legend" }, lines.map((line) => el("span", {}, P.swatch(line), line.method))));
    for (const text of part.said) box.append(el("p", { class: "small" }, text));
  }

  return (shown) => {
    const kept = new Set(shown.map((run) => run.hash));
    const panels = data.flatMap((part) => {
      const lines = part.lines.map((line) => ({ ...line, points: line.points.filter((p) => kept.has(p.hash)) }));
      const drawn = lines.filter((line) => line.points.length);
      return drawn.length ? [{ part, lines: drawn }] : [];
    });
    const inside = P.fresh(root);
    P.fill(inside, P.cap(root, panels), panel);
    if (!panels.length) root.append(el("p", { class: "small" }, "None of the runs shown has enough prompts."));
  };
});
