"use strict";
// Heat-maps, one per run; colors that the color-blind can tell apart: orange is lost, blue is found.
kvexp.section("needle", (root, data, page) => {
  const { el, plain, missing } = kvexp;
  const P = kvexp.panels;
  const MOST = 24;
  const COLORS = [[0, "#b35806"], [0.25, "#f1a340"], [0.5, "#f7f7f7"], [0.75, "#67a9cf"], [1, "#1f5f99"]];
  const READABLE = 130; // cells that still hold a number
  const body = el("div");
  const stops = COLORS.map(([at, color]) => `${color} ${100 * at}%`).join(", ");
  const scale = el("span", { class: "scale" });
  scale.style.background = `linear-gradient(90deg, ${stops})`;
  root.append(el("p", { class: "small" }, "0 ", scale, " 100 %"), body);

  function panel(grid, run) {
    const { lengths, depths, cells } = data[run.hash];
    const metric = page.state.metric in cells ? page.state.metric : Object.keys(cells)[0];
    const values = cells[metric];
    const box = el("div", { class: "panel" }, el("h3", {}, run.full ? "full cache" : kvexp.name(run)),
      el("p", { class: "small" }, `${run.panel}, ${metric}${run.status === "done" ? "" : `, ${run.status}`}`));
    grid.append(box);
    const shown = lengths.length * depths.length <= READABLE;
    const texts = values.map((row) => row.map((value) => (shown && !missing(value) ? value.toFixed(0) : "")));
    const trace = {
      type: "heatmap", x: lengths.map(plain), y: depths.map(plain), z: values, zmin: 0, zmax: 100, colorscale: COLORS,
      showscale: false, xgap: 1, ygap: 1, text: texts, texttemplate: "%{text}", hoverongaps: false,
      hovertemplate: "length %{x}, depth %{y} %: %{z:.1f} %<extra></extra>",
    };
    const axis = (title) => ({ type: "category", title: { text: title, standoff: 4 }, fixedrange: true, showgrid: false, ticks: "outside" });
    const layout = {
      margin: { l: depths.some((depth) => String(depth).includes("(")) ? 92 : 52, r: 8, t: 28, b: 48 }, paper_bgcolor: "#fff", plot_bgcolor: "#c8c8c8",
      font: { color: "#1a1a1a", size: 12, family: "system-ui, sans-serif" },
      xaxis: axis("length (tokens)"), yaxis: { ...axis("depth (%)"), autorange: "reversed" },
    };
    P.chart(box, `${metric} by length and depth: ${kvexp.name(run)}`, [trace], layout,
      150 + Math.min(12, depths.length) * 24);
  }

  return (shown) => {
    const grid = P.fresh(body, "small-panels");
    const runs = shown.filter((run) => run.hash in data);
    if (!runs.length) body.append(el("p", { class: "small" }, "None of the runs shown is a needle run."));
    for (const run of P.cap(body, runs, MOST)) panel(grid, run);
  };
});
