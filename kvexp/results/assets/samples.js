"use strict";
// One example of one run beside the full cache's text.
kvexp.section("samples", (root, data, page) => {
  const { el, choice, missing, fixed } = kvexp;
  const known = new Map(page.runs.map((run) => [run.hash, run]));
  let run = null;
  let example = null;
  let shown = [];
  const controls = el("div", { class: "row" });
  const body = el("div");
  const less = data.per_run < data.asked ? ` (fewer than the ${data.asked} asked for: the page would be too large)` : "";
  root.append(
    el("p", { class: "small" }, `Up to ${data.per_run} examples of each run${less}: half are the first in order, half lost most `
      + `against the full cache in the first metric, so they are the worst by choice. Texts end after ${data.longest} letters.`),
    controls, body);

  const list = (hash) => [...(data.chosen[hash]?.first ?? []), ...(data.chosen[hash]?.lost ?? [])];

  function label(each) {
    return `${each.model} / ${each.task}: ${kvexp.name(each)} (${each.hash.slice(0, 6)})`;
  }

  function bar() {
    const names = list(run.hash);
    const { first, lost } = data.chosen[run.hash];
    const options = (group) => group.map((name) => [name, name]);
    const groups = [{ group: "first in order", options: options(first) }];
    if (lost.length) groups.push({ group: "lost most against full", options: options(lost) });
    const step = (by) => () => pick(names[names.indexOf(example) + by]);
    const button = (text, by) => el("button", { type: "button", click: step(by), disabled: missing(names[names.indexOf(example) + by]) }, text);
    controls.replaceChildren(
      choice("Run", shown.map((each) => [each.hash, label(each)]), run.hash, (hash) => {
        run = known.get(hash);
        pick(list(hash).includes(example) ? example : list(hash)[0]);
      }, "long"),
      choice("Example", groups, example, pick),
      button("previous", -1), button("next", 1));
  }

  function text(parts, tag, cut) {
    const nodes = parts.map(([same, word]) => (same ? word : el(tag, { class: "word" }, word)));
    return el("div", { class: "text", dir: "auto", tabindex: 0 }, nodes.length ? nodes : el("em", {}, "(nothing)"), cut ? el("em", {}, " [cut here]") : null);
  }

  const quoted = (word) => `'${word.replaceAll("'", "'\\''")}'`; // for a shell

  function ended(row) {
    if (missing(row?.finish_reason)) return "";
    return row.finish_reason === "stop" ? `ended at ${JSON.stringify(row.stop_reason)}` : "ended by max_new_tokens";
  }

  function side(title, row, parts, tag) {
    const scores = Object.entries(row?.metrics ?? {}).filter(([, value]) => !missing(value));
    const said = scores.map(([name, value]) => `${name} ${fixed(value, 2)}`).join(", ");
    const skipped = row?.skipped ? el("p", { class: "notice" }, `skipped: ${row.skipped}`) : null;
    const long = (row?.output?.length ?? 0) > data.longest;
    return el("div", { class: "side" }, el("h3", {}, title), el("p", { class: "small" }, [said, ended(row)].filter(Boolean).join("; ")), skipped, text(parts, tag, long));
  }

  function pick(name) {
    example = name;
    bar();
    const ours = data.texts[run.hash][example];
    const base = data.texts[run.baseline]?.[example];
    const kept = (row) => (row?.output ?? "").slice(0, data.longest);
    const [left, right] = base ? kvexp.diff(kept(base), kept(ours)) : [[], kvexp.words(kept(ours)).map((word) => [true, word])];
    const changed = [...left, ...right].some(([same]) => !same);
    const verdict = !base ? "The full cache's text of this example is not here." : changed ? "" : "Identical, word for word.";
    const reference = base?.reference ?? ours.reference;
    const sides = [side(kvexp.name(run), ours, right, "ins")];
    if (base) sides.unshift(side("full cache", base, left, "del"));
    if (!missing(reference)) {
      const words = [[true, reference.slice(0, data.longest)]];
      sides.push(el("div", { class: "side" }, el("h3", {}, "reference"), el("p", { class: "small" }, "what the task counts as right"), text(words, "ins", reference.length > data.longest)));
    }
    const command = el("code", {}, `kvexp diagnose prompt ${data.outputs}/${run.hash} ${quoted(example)}`);
    body.replaceChildren(
      el("p", { class: "small" }, `${ours.prompt ?? "?"} prompt tokens, ${ours.new ?? "?"} new. ${verdict} The prompt as it was sent: `, command), el("div", { class: "sides" }, sides));
  }

  return (runs) => {
    shown = runs.filter((each) => !each.full && list(each.hash).length);
    if (!shown.length) {
      controls.replaceChildren();
      body.replaceChildren(el("p", { class: "small" }, "No run shown but the full cache has written a text (or --samples is 0)."));
      return;
    }
    if (!shown.includes(run)) run = shown[0];
    pick(list(run.hash).includes(example) ? example : list(run.hash)[0]);
  };
});
