"use strict";
// One panel per model and task: heading, plotly chart, legend, and what has no place in the chart.
kvexp.panels = (() => {
  const { el, svg, plain, fixed, missing, name } = kvexp;
  const MOST = 12; // panels of one section
  const MARK = "#c00000";
  const MARGIN = { l: 52, r: 34, t: 10, b: 44 };
  const WIDE = { ...MARGIN, l: 60, r: 20 }; // where the numbers of the y axis are long
  const LEAST = 1e-6; // on a log axis, which cannot hold 0; nats: what float32 cannot tell from 0
  const PATHS = {
    circle: "M4 0A4 4 0 1 0 -4 0A4 4 0 1 0 4 0Z",
    square: "M-3.5-3.5H3.5V3.5H-3.5Z",
    diamond: "M0-4.5L4.5 0L0 4.5L-4.5 0Z",
    "triangle-up": "M0-4.5L4.5 3.5H-4.5Z",
    "triangle-down": "M0 4.5L4.5-3.5H-4.5Z",
    "triangle-left": "M-4.5 0L3.5-4.5V4.5Z",
    "triangle-right": "M4.5 0L-3.5-4.5V4.5Z",
    cross: "M-1.5-4.5H1.5V-1.5H4.5V1.5H1.5V4.5H-1.5V1.5H-4.5V-1.5H-1.5Z",
    x: "M-4.5-2.5L-2.5-4.5L0-2L2.5-4.5L4.5-2.5L2 0L4.5 2.5L2.5 4.5L0 2L-2.5 4.5L-4.5 2.5L-2 0Z",
    star: "M0-5L1.3-1.6L4.8-1.5L2 .7L3 4.2L0 2.2L-3 4.2L-2 .7L-4.8-1.5L-1.3-1.6Z",
    hexagon: "M0-4.5L4-2.2V2.2L0 4.5L-4 2.2V-2.2Z",
    pentagon: "M0-4.5L4.3-1.4L2.6 3.6H-2.6L-4.3-1.4Z",
  };
  const DASH = { solid: "", dot: "2 3", dashdot: "7 3 2 3" };

  /** A line with its marker, as the chart draws it. */
  function swatch({ color, symbol, dash }) {
    const dashes = dash in DASH ? DASH[dash] : dash.replace(/px/g, "").replace(/,/g, " ");
    return svg("svg", { width: 30, height: 12, viewBox: "-15 -6 30 12", "aria-hidden": "true" },
      svg("path", { d: "M-15 0H15", stroke: color, "stroke-width": 2, "stroke-dasharray": dashes, fill: "none" }),
      symbol ? svg("path", { d: PATHS[symbol], fill: color }) : null);
  }

  /** The metric a run is shown in: the one chosen, else its task's first. */
  const metric = (run, state) => state.metric || run.headline;

  /** [percent, low, high, mean] of the shown metric, or null where the run has no percentage of its baseline. */
  function quality(run, state) {
    const found = run.of[metric(run, state)];
    return found && !missing(found[0]) ? found : null;
  }

  function byTask(runs) {
    const groups = new Map();
    for (const run of runs) {
      const key = run.panel; // model, task and NUMERICS
      groups.set(key, [...(groups.get(key) ?? []), run]);
    }
    return [...groups.values()];
  }

  function lines(runs) {
    const found = new Map();
    for (const run of runs) {
      const key = JSON.stringify([run.method, run.line]);
      found.set(key, [...(found.get(key) ?? []), run]);
    }
    return [...found.values()];
  }

  const APART = 7; // pixels between points side by side: their bars, and most of their markers, do not touch

  /** Run -> its place on the x axis: those of (nearly) one x stand side by side, lines in their order, about that x. */
  function beside(groups, x, range, pixels) {
    const unit = (range[1] - range[0]) / Math.max(pixels - MARGIN.l - MARGIN.r, 100);
    const points = groups.flatMap((runs, line) => runs.map((run) => ({ run, line, x: x(run) }))).sort((a, b) => a.x - b.x);
    const clusters = [];
    for (const point of points) {
      const last = clusters[clusters.length - 1];
      if (last && point.x - last[0].x < unit * APART) last.push(point);
      else clusters.push([point]);
    }
    const gaps = clusters.slice(1).map((each, i) => each[0].x - clusters[i][0].x);
    const most = Math.max(...clusters.map((each) => each.length));
    const step = Math.min(unit * APART, (0.8 * Math.min(...gaps, Infinity)) / most);
    const places = new Map();
    for (const cluster of clusters) {
      cluster.sort((a, b) => a.line - b.line);
      const moved = cluster.map(({ x: own }, i) => own + (i - (cluster.length - 1) / 2) * step);
      const back = Math.max(0, range[0] - Math.min(...moved)); // all of them stay inside the axes, and apart
      cluster.forEach(({ run }, i) => places.set(run, moved[i] + back));
    }
    return places;
  }

  /** One trace of points {x, y, low, high, hollow, text} in their order, with intervals where low and high are known. */
  function series(points, { color, symbol, dash }) {
    const reach = (from, to) => (missing(from) || missing(to) ? 0 : Math.max(0, to - from));
    return {
      type: "scatter", mode: "lines+markers", showlegend: false, hoverinfo: "text", cliponaxis: false,
      x: points.map((p) => p.x), y: points.map((p) => p.y), text: points.map((p) => p.text), line: { color, dash, width: 2 },
      error_y: {
        type: "data", symmetric: false, thickness: 1, width: 2, color,
        array: points.map((p) => reach(p.y, p.high)), arrayminus: points.map((p) => reach(p.low, p.y)),
      },
      marker: { color: points.map((p) => (p.hollow ? "#ffffff" : color)), symbol, size: 8, line: { color, width: 1.5 } },
    };
  }

  /** The trace of runs at their places; hollow where a run is not finished or has too few examples. */
  function trace(runs, places, state, more = "") {
    const at = [...runs].sort((a, b) => places.get(a) - places.get(b));
    const points = at.map((run) => {
      const found = quality(run, state);
      const [y, low, high] = found;
      return { x: places.get(run), y, low, high, hollow: run.status !== "done" || run.few, text: said(run, found, state, more) };
    });
    return { ...series(points, at[0]), name: plain(`${at[0].method} ${at[0].line}`) };
  }

  function said(run, [percent, low, high, mean], state, more) {
    const interval = run.few ? " (too few examples)" : missing(low) ? "" : ` (${fixed(low, 1)}..${fixed(high, 1)})`;
    return [
      `<b>${plain(name(run))}</b>`,
      `${plain(metric(run, state))} ${fixed(mean, 2)}: ${fixed(percent, 1)} % of full${interval}`,
      `99 %: ${plain(run.verdict99)}; n ${run.n}, paired ${run.paired ?? "-"}`,
      ...(run.status === "done" ? [] : [plain(run.status)]),
      ...(more ? [plain(more(run))] : []),
    ].join("<br>");
  }

  /** The look of every chart; x, y: what its axes have of their own. */
  function frame(margin, x, y) {
    const axis = { gridcolor: "#e8e8e8", zeroline: false, linecolor: "#8a8a8a", ticks: "outside", fixedrange: true };
    return {
      margin, paper_bgcolor: "#fff", plot_bgcolor: "#fff", hovermode: "closest",
      font: { color: "#1a1a1a", size: 12, family: "system-ui, sans-serif" },
      hoverlabel: { bgcolor: "#fff", bordercolor: "#1a1a1a", font: { color: "#1a1a1a" }, align: "left" },
      xaxis: { ...axis, ...x }, yaxis: { ...axis, ...y },
    };
  }

  /** Of `frame`, an axis by powers of ten; what it shows has to be at least LEAST. */
  const logAxis = (title) => ({ type: "log", dtick: "D2", tickformat: "~g", title: { text: plain(title), standoff: 4 } });

  /** A line across the chart at y. */
  const level = (y, line, layer = "below") => ({ type: "line", xref: "paper", x0: 0, x1: 1, y0: y, y1: y, line, layer });

  /** Axes, the full cache's level in black and the 99 % mark in red. */
  function layout(traces, xTitle, yTitle, range) {
    const tops = traces.flatMap((t) => t.y.map((y, i) => y + (t.error_y ? t.error_y.array[i] : 0)));
    return {
      ...frame(MARGIN, { title: { text: plain(xTitle), standoff: 6 }, range, rangemode: "tozero" },
        { title: { text: plain(yTitle), standoff: 4 }, range: [0, Math.max(104, ...tops) * 1.02] }),
      shapes: [level(100, { color: "#000", width: 2 }, "between"), level(99, { color: MARK, width: 1.4, dash: "dash" }, "between")],
      annotations: [{
        xref: "paper", x: 1, xanchor: "left", y: 99, yanchor: "top", text: "99 %", showarrow: false,
        font: { color: MARK, size: 11 },
      }],
    };
  }

  /** Puts a chart into the page, as wide as its panel; height: in pixels, where it is not every chart's. */
  function chart(parent, label, traces, settings, height = null) {
    const node = el("div", { class: "chart", role: "img", "aria-label": label });
    if (height !== null) node.style.height = `${height}px`;
    parent.append(node);
    Plotly.newPlot(node, traces, settings, {
      responsive: true, displaylogo: false, plotlyServerURL: "", modeBarButtons: [["toImage"]],
    });
    return node;
  }

  /** Entries [look, words] below a chart. */
  const key = (entries) => el("div", { class: "legend" }, entries.map(([look, words]) => el("span", {}, swatch(look), words)));

  const linesOf = (groups) => groups.map((runs) => [runs[0], `${runs[0].method} ${runs[0].line}`]);
  const MARKS = [[{ color: "#000", dash: "solid" }, "full cache"], [{ color: MARK, dash: "5 3" }, "99 % of full"]];
  const legend = (groups) => key([...MARKS, ...linesOf(groups)]);

  /** Words in place of a chart. */
  function empty(box, words) {
    box.classList.add("wordy");
    box.append(el("p", { class: "small" }, words));
  }

  /** Runs without a place in a chart, each with the reason. */
  function left(runs, why) {
    if (!runs.length) return null;
    const entries = runs.map((run) => el("li", {}, `${name(run)} (${run.hash.slice(0, 6)}): ${why(run)}`));
    return el("details", { class: "small" },
      el("summary", {}, `${kvexp.several(runs.length, "run")} not drawn`), el("ul", { class: "small" }, entries));
  }

  /** Empties a section and gives it a grid; the charts that were in it are forgotten by plotly too. */
  function fresh(root, kind = "") {
    for (const old of root.querySelectorAll(".js-plotly-plot")) Plotly.purge(old);
    const grid = el("div", { class: `grid ${kind}` });
    root.replaceChildren(grid);
    return grid;
  }

  /** All boxes stand in the grid before the first is filled: a chart takes the width that its box has by then. */
  function fill(grid, groups, draw) {
    const boxes = groups.map(() => el("div", { class: "panel" }));
    grid.append(...boxes);
    groups.forEach((group, i) => draw(boxes[i], group));
  }

  /** The first panels, and a word on the rest. */
  function cap(root, panels, most = MOST) {
    if (panels.length > most) {
      root.prepend(el("p", { class: "notice" }, `${most} of ${panels.length} panels are drawn: choose a model, task or method above.`));
    }
    return panels.slice(0, most);
  }

  /** Those panels of `shown` that hold more than the full cache, and a word on the others. */
  function compared(root, shown) {
    const panels = byTask(shown);
    const found = panels.filter((runs) => runs.some((run) => !run.full));
    const alone = panels.length - found.length;
    if (alone) {
      const words = `Not drawn: ${kvexp.several(alone, "panel")} with nothing to compare, where only the full cache was run.`;
      root.append(el("p", { class: "small" }, words));
    }
    return cap(root, found);
  }

  return {
    WIDE, LEAST, swatch, metric, quality, byTask, lines, beside, series, trace, frame, logAxis, level, layout, chart, key,
    linesOf, legend, empty, left, fresh, fill, cap, compared,
  };
})();
