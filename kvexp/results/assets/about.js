"use strict";
// Who made the numbers, and which are missing. Filters change nothing here.
kvexp.section("about", (root, data) => {
  const { el, missing } = kvexp;
  const table = (heads, rows, wide) => kvexp.scroll(heads.join(", "),
    el("table", {},
      el("thead", {}, el("tr", {}, heads.map((text) => el("th", { scope: "col" }, text)))),
      el("tbody", {}, rows.map((row) => el("tr", {}, row.map((value, i) => {
        const kind = heads[i] === "status" ? String(value) : heads[i] === wide ? "wide" : "";
        return el("td", { class: kind }, missing(value) ? "-" : String(value));
      }))))));
  root.append(table(data.heads, data.made, null));
  if (data.problems.length) {
    root.append(el("h3", {}, `Runs that are not finished (${data.problems.length})`), table(data.problem_heads, data.problems, "note"));
  }
  return () => {};
});
