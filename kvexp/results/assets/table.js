"use strict";
// A printed table (kvexp.results.blocks), sorted by the column one chooses.
kvexp.table = (() => {
  const { el } = kvexp;
  const VERDICTS = /^(pass|fail|equivalent|worse|undecided|void|baseline|partial|failed|refused)(?= |$)/;

  /** By number, then by text; what has neither comes last. */
  function compare(a, b) {
    if (a === null || b === null) return (a === null) - (b === null);
    if (typeof a !== typeof b) return typeof a === "number" ? -1 : 1;
    return a < b ? -1 : a > b ? 1 : 0;
  }

  /** Its element, and show(hashes): shows the rows of these runs and says whether there are any. */
  return (table) => {
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

    function show(hashes) {
      for (const row of rows) row.node.hidden = !hashes.has(row.hash);
      return rows.some((row) => !row.node.hidden);
    }

    const node = kvexp.scroll(table.title, el("table", { class: "verdicts" }, el("thead", {}, el("tr", {}, heads)), body));
    return { node, show };
  };
})();
