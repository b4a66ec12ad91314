"use strict";
// The terminal's tables, sorted by the column one chooses.

kvexp.section("verdicts", (root, data, page) => {
  const { el } = kvexp;
  const VERDICTS = /^(pass|fail|equivalent|worse|undecided|void|baseline|partial|failed|refused)(?= |$)/;
  const tables = data.tables.map(make);
  const notes = data.notes.map((line) => el("li", {}, line));
  root.append(...tables.map((table) => table.node),
    el("details", { class: "small" }, el("summary", {}, `Notes to these tables (${notes.length})`), el("ul", { class: "small" }, notes)));

  function make(table) {
    const rows = table.rows.map(([hash, ...cells], number) => {
      const each = cells.map((text, i) => {
        const verdict = VERDICTS.exec(text)?.[1] ?? "";
        const words = i === 0 || (!table.right[i] && !verdict); // names and settings fold, numbers do not
        return el("td", { class: `${table.right[i] ? "right" : ""} ${verdict}`.trim() }, words ? el("span", { class: "name" }, text) : text);
      });
      return { hash, sort: table.sort[number], node: el("tr", { title: hash }, each) };
    });
    const body = el("tbody", {}, rows.map((row) => row.node));
    const heads = table.heads.map((text, i) =>
      el("th", { class: table.right[i] ? "right" : "", scope: "col" }, el("button", { type: "button", click: () => sort(i) }, text)));

    function sort(column) {
      const down = heads[column].getAttribute("aria-sort") === "ascending";
      for (const head of heads) head.removeAttribute("aria-sort");
      heads[column].setAttribute("aria-sort", down ? "descending" : "ascending");
      const keyed = rows.map((row) => [row.sort[column], row.node]);
      keyed.sort(([a], [b]) => compare(a, b) * (down && a !== null && b !== null ? -1 : 1));
      body.append(...keyed.map(([, node]) => node));
    }

    const node = el("div", {}, el("h3", {}, table.title),
      kvexp.scroll(`verdicts: ${table.title}`, el("table", { class: "verdicts" }, el("thead", {}, el("tr", {}, heads)), body)));
    return { node, rows };
  }

  /** By number, then by text; what has neither comes last. */
  function compare(a, b) {
    if (a === null || b === null) return (a === null) - (b === null);
    if (typeof a !== typeof b) return typeof a === "number" ? -1 : 1;
    return a < b ? -1 : a > b ? 1 : 0;
  }

  return (shown) => {
    const kept = new Set(shown.map((run) => run.hash));
    for (const { node, rows } of tables) {
      for (const row of rows) row.node.hidden = !kept.has(row.hash);
      node.hidden = rows.every((row) => row.node.hidden);
    }
  };
});
