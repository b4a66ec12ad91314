"use strict";
// The terminal's tables.
kvexp.section("verdicts", (root, data) => {
  const { el } = kvexp;
  const tables = data.tables.map((block) => {
    const table = kvexp.table(block);
    return { ...table, box: el("div", {}, el("h3", {}, block.title), table.node) };
  });
  const notes = data.notes.map((line) => el("li", {}, line));
  root.append(...tables.map(({ box }) => box),
    el("details", { class: "small" }, el("summary", {}, `Notes to these tables (${notes.length})`), el("ul", { class: "small" }, notes)));

  return (shown) => {
    const kept = new Set(shown.map((run) => run.hash));
    for (const { box, show } of tables) box.hidden = !show(kept);
  };
});
