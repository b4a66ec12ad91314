"use strict";
// The terminal's tables, sorted by the column one chooses.

/** What a cell sorts by: a number in its unit, else text; a dash is null and always comes last. */
kvexp.sortKey = (cell) => {
  const UNITS = { B: 1, KiB: 2 ** 10, MiB: 2 ** 20, GiB: 2 ** 30, TiB: 2 ** 40, us: 1e-6, ms: 1e-3, s: 1, k: 1e3, M: 1e6, G: 1e9 };
  if (cell === "-" || cell === "") return null;
  const found = /^>?(-?\d+(?:\.\d+)?(?:e[-+]?\d+)?) ?(B|KiB|MiB|GiB|TiB|us|ms|s|k|M|G)?(?=$|\.\.|-| \/)/.exec(cell);
  return found ? Number(found[1]) * (UNITS[found[2]] ?? 1) * (cell.startsWith(">") ? 1.001 : 1) : cell;
};

kvexp.section("verdicts", (root, data, page) => {
  const { el } = kvexp;
  const VERDICTS = /^(pass|fail|equivalent|worse|undecided|void|baseline|partial|failed|refused)(?= |$)/;
  const tables = data.tables.map(make);
  const notes = data.notes.map((line) => el("li", {}, line));
  root.append(...tables.map((table) => table.node),
    el("details", { class: "small" }, el("summary", {}, `Notes to these tables (${notes.length})`), el("ul", { class: "small" }, notes)));

  function make(table) {
    const rows = table.rows.map(([hash, ...cells]) => {
      const each = cells.map((text, i) => {
        const verdict = VERDICTS.exec(text)?.[1] ?? "";
        const words = i === 0 || (!table.right[i] && !verdict); // names and settings fold, numbers do not
        return el("td", { class: `${table.right[i] ? "right" : ""} ${verdict}`.trim() }, words ? el("span", { class: "name" }, text) : text);
      });
      return { hash, cells, node: el("tr", { title: hash }, each) };
    });
    const body = el("tbody", {}, rows.map((row) => row.node));
    const heads = table.heads.map((text, i) =>
      el("th", { class: table.right[i] ? "right" : "", scope: "col" }, el("button", { type: "button", click: () => sort(i) }, text)));

    function sort(column) {
      const down = heads[column].getAttribute("aria-sort") === "ascending";
      for (const head of heads) head.removeAttribute("aria-sort");
      heads[column].setAttribute("aria-sort", down ? "descending" : "ascending");
      const keyed = rows.map((row) => [kvexp.sortKey(row.cells[column]), row.node]);
      keyed.sort(([a], [b]) => compare(a, b) * (down && a !== null && b !== null ? -1 : 1));
      body.append(...keyed.map(([, node]) => node));
    }

    const node = el("div", {}, el("h3", {}, table.title),
      kvexp.scroll(`verdicts: ${table.title}`, el("table", { class: "verdicts" }, el("thead", {}, el("tr", {}, heads)), body)));
    return { node, rows };
  }

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
