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
  const LEAST = 1e-6; // nats: what float32 cannot tell from 0, and a log axis cannot hold
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
      `${plain(found.verdict_kl)} (epsilon ${found.epsilon}); same likeliest token ${fixed(100 * found.top1, 1)} %`,
      `${found.n} examples, ${found.tokens} tokens`,
    ].join("<br>");
  }

  /** One line of a method and setting, its runs by x. */
  function curve(runs, x) {
    const at = [...runs].sort((a, b) => x(a, own(a)) - x(b, own(b)));
    const kl = at.map((run) => Math.max(own(run).kl, LEAST));
    const reach = (to, i) => (missing(to) ? 0 : Math.abs(Math.max(to, LEAST) - kl[i]));
    const { color, symbol, dash } = at[0];
    return {
      type: "scatter", mode: "lines+markers", showlegend: false, hoverinfo: "text", text: at.map(said),
      x: at.map((run) => x(run, own(run))), y: kl, line: { color, dash, width: 2 },
      error_y: {
        type: "data", symmetric: false, thickness: 1, width: 2, color,
        array: at.map((run, i) => reach(own(run).kl_high, i)), arrayminus: at.map((run, i) => reach(own(run).kl_low, i)),
      },
      marker: { color: at.map((run) => (missing(own(run).kl_low) ? "#ffffff" : color)), symbol, size: 8, line: { color, width: 1.5 } },
    };
  }

  /** One run's KL at each place of the text. */
  function along(run) {
    const found = own(run);
    const { color, dash } = run;
    const kl = found.along.map((value) => Math.max(value, LEAST));
    return {
      type: "scatter", mode: "lines", showlegend: false, hoverinfo: "text", x: found.position, y: kl,
      text: kl.map((value, i) => `<b>${plain(name(run))}</b><br>token ${found.position[i]}: KL ${value.toPrecision(3)}`),
      line: { color, dash, width: 0.8 + 1.6 * (missing(run.kv_ratio) ? 0.5 : run.kv_ratio) },
    };
  }

  function layout(runs, title) {
    const { model, task } = runs[0];
    const marks = data.marks.find((each) => each.model === model && each.task === task)?.changes ?? [];
    const levels = [...new Set(runs.map((run) => own(run).epsilon))].map((value) => [`epsilon ${value}`, value, "#000", "dash"]);
    levels.push(...marks.filter(([, kl]) => kl > LEAST).map(([change, kl]) => [change, kl, "#8a8a8a", "dot"]));
    const kl = { type: "log", dtick: 1, exponentformat: "power", title: { text: "KL, nats per token", standoff: 4 } };
    return {
      ...P.frame(P.WIDE, { title: { text: plain(title), standoff: 6 }, rangemode: "tozero" }, kl),
      shapes: levels.map(([, y, color, dash]) => ({
        type: "line", xref: "paper", x0: 0, x1: 1, y0: y, y1: y, line: { color, dash, width: 1.2 }, layer: "below",
      })),
      annotations: levels.map(([text, y, color]) => ({
        xref: "paper", x: 0, xanchor: "left", y: Math.log10(y), yanchor: "bottom", text: plain(text), showarrow: false,
        font: { color, size: 10 },
      })),
    };
  }

  function panel(box, runs) {
    box.append(el("h3", {}, runs[0].panel));
    const [title, x] = AXES[chosen.axis];
    const measured = runs.filter(own);
    const here = x === null ? measured : measured.filter((run) => !missing(x(run, own(run))));
    if (!here.length) {
      box.classList.add("wordy");
      box.append(el("p", { class: "small" }, `Nothing to draw: no run shown here has a divergence along ${TEXTS[chosen.text]} and a place on this axis.`));
      return;
    }
    const groups = P.lines(here);
    const traces = x === null ? here.map(along) : groups.map((group) => curve(group, x));
    P.chart(box, `KL divergence against ${title}: ${runs[0].panel}`, traces, layout(here, title));
    box.append(el("div", { class: "legend" },
      groups.map((group) => el("span", {}, P.swatch(group[0]), `${group[0].method} ${group[0].line}`))));
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
