"use strict";
// The bar of filters: model, task, metric and methods, for all sections at once.
kvexp.filters = (() => {
  const { el, choice } = kvexp;
  const MANY = 6; // panels: beyond that the page begins with one model
  const distinct = (values) => [...new Set(values)];

  function start(bar, runs, changed) {
    const models = distinct(runs.map((run) => run.model));
    const tasks = distinct(runs.map((run) => run.task));
    const metrics = distinct(runs.flatMap((run) => Object.keys(run.of)));
    const methods = distinct(runs.filter((run) => !run.full).map((run) => run.method));
    const crowded = distinct(runs.map((run) => JSON.stringify([run.model, run.task]))).length > MANY;
    const first = (runs.find((run) => run.n > 0) ?? runs[0])?.model; // never one without anything to show
    const state = { model: crowded ? first : "", task: "", metric: "", hidden: new Set() };

    const set = (name) => (value) => {
      state[name] = value;
      changed();
    };
    const all = (word, values) => [["", word], ...values.map((value) => [value, value])];
    const boxes = methods.map((method) => chip(method, runs, state, changed));
    const every = (checked) => () => {
      for (const box of boxes) box.querySelector("input").checked = checked;
      state.hidden = new Set(checked ? [] : methods);
      changed();
    };
    bar.addEventListener("submit", (event) => event.preventDefault());
    bar.append(
      choice("Model", all("all models", models), state.model, set("model")),
      choice("Task", all("all tasks", tasks), state.task, set("task")),
      choice("Metric", all("each task's first", metrics), "", set("metric")),
      el("fieldset", { class: "chips", "aria-label": "Methods" }, boxes,
        el("button", { type: "button", click: every(true) }, "all"),
        el("button", { type: "button", click: every(false) }, "none")),
    );
    return state;
  }

  function chip(method, runs, state, changed) {
    const toggle = (event) => {
      if (event.target.checked) state.hidden.delete(method);
      else state.hidden.add(method);
      changed();
    };
    const sample = { ...runs.find((run) => run.method === method), dash: "solid" };
    const box = el("input", { type: "checkbox", checked: true, value: method, change: toggle });
    return el("label", { class: "chip" }, box, kvexp.panels.swatch(sample), el("span", {}, method));
  }

  /** The runs that pass; the full cache is no method to hide. */
  function pass(state, runs) {
    const same = (wanted, found) => wanted === "" || wanted === found;
    return runs.filter(
      (run) => same(state.model, run.model) && same(state.task, run.task) && (run.full || !state.hidden.has(run.method)),
    );
  }

  return { start, pass };
})();
