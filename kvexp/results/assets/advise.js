"use strict";
// Which budget is safe: for each model and task the loss that a share of the prompts stays within, against bytes.
kvexp.section("advise", (root, data) => {
  const { el, plain, missing } = kvexp;
  const P = kvexp.panels;
  const at = (value) => (missing(value) ? value : Math.max(value, P.LEAST));

  function trace(line, part) {
    const said = (p) => [
      `<b>${plain(`${line.method} ${p.budget}`)}</b>`,
      `${plain(part.head)} of ${part.share} of the prompts: ${missing(p.quantile) ? "failed" : p.quantile.toPrecision(3)}`,
      missing(p.bound) ? "no bound" : `of new ones at most ${p.bound.toPrecision(3)}`,
      p.n ? `${p.beyond} of ${p.n} beyond the limit${p.holds ? "; the promise holds" : ""}` : "not tested",
    ].join("<br>");
    const points = line.points.map((p) => ({ x: p.bytes, y: at(p.quantile), high: at(p.bound), hollow: !p.holds, text: said(p) }));
    const made = P.series(points, line);
    made.marker.size = line.points.map((p) => (p.holds ? 12 : 8));
    return made;
  }

  function panel(box, { part, lines }) {
    box.append(el("h3", {}, part.title));
    const settings = {
      ...P.frame(P.WIDE, { title: { text: "bytes of the cache, % of the full one", standoff: 6 }, rangemode: "tozero" },
        P.logAxis(`${part.head} of ${part.share} of prompts`)),
      shapes: [P.level(part.limit, { color: "#000", width: 2 })],
    };
    P.chart(box, `${part.head} against bytes: ${part.title}`, lines.map((line) => trace(line, part)), settings);
    box.append(P.key(lines.map((line) => [line, line.method])));
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
