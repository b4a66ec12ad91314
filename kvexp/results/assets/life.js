"use strict";
// The life of a context: for each kind of run its tables, and a chart of each side of a table.
kvexp.section("life", (root, data) => {
  const { el, plain, missing, fixed } = kvexp;
  const P = kvexp.panels;
  const parts = data.map((part) => {
    const grid = el("div");
    const tables = part.blocks.map((block) => {
      const table = kvexp.table(block);
      return { ...table, box: el("details", { open: true }, el("summary", {}, block.title), table.node) };
    });
    const none = el("p", { class: "small" }, "None of the runs shown is of this kind.");
    root.append(el("h3", {}, part.title), grid, ...tables.map(({ box }) => box), none,
      el("details", { class: "small" }, el("summary", {}, part.command), el("p", { class: "small" }, part.legend)));
    return { part, grid, tables, none };
  });

  function trace(line, side, number, places, bars) {
    const at = (y) => (side.log && !missing(y) ? Math.max(y, P.LEAST) : y);
    const points = line.points.filter(([, , values]) => !missing(values[number][0])).map(([place, , values]) => {
      const [y, low, high] = values[number];
      const interval = missing(low) ? "" : ` (${fixed(low, 1)}..${fixed(high, 1)})`;
      const text = `<b>${plain(line.label)}</b><br>${plain(places[place])}: ${side.log ? y.toPrecision(3) : fixed(y, 1)}${interval}`;
      return { x: place, y: at(y), low: at(low), high: at(high), hollow: bars && missing(low), text };
    });
    return P.series(points, line);
  }

  function layout(block, side) {
    const y = side.log ? P.logAxis(side.title) : { rangemode: "tozero", title: { text: plain(side.title), standoff: 4 } };
    return {
      ...P.frame(P.WIDE, {
        title: { text: plain(block.x), standoff: 6 }, range: [-0.4, block.places.length - 0.6],
        tickvals: block.places.map((_, place) => place), ticktext: block.places.map(plain),
      }, y),
      shapes: missing(side.level) ? [] : [P.level(side.level, { color: "#000", width: 2 })],
    };
  }

  function panel(box, { block, lines, side, number }) {
    box.append(el("h3", {}, block.title));
    const here = lines.filter((line) => line.points.some(([, , values]) => !missing(values[number][0])));
    if (!here.length) {
      P.empty(box, `Nothing to draw: no run shown here has a value of "${side.title}".`);
      return;
    }
    const bars = here.some((line) => line.points.some(([, , values]) => !missing(values[number][1])));
    const traces = here.map((line) => trace(line, side, number, block.places, bars));
    P.chart(box, `${side.title} against ${block.x}: ${block.title}`, traces, layout(block, side));
    box.append(P.key(here.map((line) => [line, line.label])));
  }

  return (shown) => {
    const kept = new Set(shown.map((run) => run.hash));
    for (const { part, grid, tables, none } of parts) {
      const blocks = part.blocks.filter((block) => block.rows.some(([hash]) => kept.has(hash)));
      const panels = blocks.flatMap((block) => {
        const lines = block.lines.map((line) => ({ ...line, points: line.points.filter(([, hash]) => kept.has(hash)) }));
        const drawn = lines.filter((line) => line.points.length);
        return drawn.length ? block.sides.map((side, number) => ({ block, lines: drawn, side, number })) : [];
      });
      const inside = P.fresh(grid);
      P.fill(inside, P.cap(grid, panels), panel);
      for (const { box, show } of tables) box.hidden = !show(kept);
      none.hidden = blocks.length > 0;
    }
  };
});
