"use strict";
// Reads the data, says what must be known first, and starts filters and sections.
(() => {
  const { el, several } = kvexp;
  const { runs, sections } = JSON.parse(document.getElementById("data").textContent);
  const distinct = (values) => [...new Set(values)];
  const page = { runs, state: null };

  function notices() {
    const numerics = distinct(runs.map((run) => run.numerics));
    const commits = distinct(runs.map((run) => run.commit || "unknown"));
    const found = [];
    if (numerics.length > 1) {
      found.push(`These runs were computed with NUMERICS ${numerics.join(" and ")}: numbers of different NUMERICS are not comparable, and have tables and charts of their own, the newest first.`);
    }
    if (commits.length > 1) found.push(`These runs were made by ${commits.length} commits of kvexp: ${commits.join(", ")}.`);
    const open = ["partial", "failed"].map((status) => [status, runs.filter((run) => run.status === status).length]);
    const unfinished = open.filter(([, count]) => count).map(([status, count]) => `${count} ${status}`);
    if (unfinished.length) found.push(`Not finished: ${unfinished.join(", ")}. The reasons are in the last section.`);
    return found.map((text) => el("p", { class: "notice" }, text));
  }

  const count = (of, word) => several(distinct(runs.map((run) => run[of])).length, word);
  document.getElementById("summary").textContent =
    `${several(runs.length, "run")}: ${count("model", "model")}, ${count("task", "task")}, ${count("method", "method")}.`;
  document.getElementById("notices").append(...notices());

  const draws = [];
  const changed = () => {
    const shown = kvexp.filters.pass(page.state, runs);
    for (const draw of draws) draw(shown);
  };
  page.state = kvexp.filters.start(document.getElementById("filters"), runs, changed);
  for (const [name, data] of Object.entries(sections)) {
    draws.push(kvexp.parts.get(name)(document.querySelector(`#${name} .body`), data, page));
  }
  changed();
})();
