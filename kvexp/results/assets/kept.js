"use strict";
// One example of one run: every token shaded by how many heads hold it; its layers stand in its title.
kvexp.section("kept", (root, data, page) => {
  const { el, choice } = kvexp;
  const known = new Map(page.runs.map((run) => [run.hash, run]));
  let run = null;
  let place = 0; // of the example
  let time = 0;
  let shown = [];
  const controls = el("div", { class: "row" });
  const body = el("div");
  if (data.cut) root.append(el("p", { class: "small" }, "Some texts are left out: the page would be too large."));
  root.append(controls, body);

  const when = (at) => (at.step === 0 ? "at the end of the prompt" : `after ${at.step} new tokens`);

  function token(text, at, number) {
    const start = text.prompt;
    const part = number < start ? "" : number < start + text.question ? " question" : " answer";
    if (number >= at.read) return el("span", { class: `later${part}`, title: `position ${number}: not read yet` }, text.tokens[number]);
    const heads = text.heads.reduce((sum, each) => sum + each, 0);
    const layers = at.kept.map((counts) => counts[number]);
    const kept = layers.reduce((sum, each) => sum + each, 0);
    const told = layers.map((count, layer) => `layer ${layer}: ${count} of ${text.heads[layer]}`);
    const title = [`position ${number}: held by ${kept} of ${heads} heads`, ...told].join("\n");
    const node = el("span", { class: (kept === 0 ? "none" : kept === heads ? "all" : "some") + part, title }, text.tokens[number]);
    if (kept) node.style.backgroundColor = `rgba(0, 158, 115, ${(0.55 * kept) / heads})`;
    return node;
  }

  function draw() {
    const texts = data.texts[run.hash];
    const text = texts[place];
    const at = text.times[Math.min(time, text.times.length - 1)];
    controls.replaceChildren(
      choice("Run", shown.map((each) => [each.hash, `${each.model} / ${each.task}: ${kvexp.name(each)} (${each.hash.slice(0, 6)})`]), run.hash, (hash) => {
        run = known.get(hash);
        place = Math.min(place, data.texts[hash].length - 1);
        draw();
      }, "long"),
      choice("Example", texts.map((each, number) => [String(number), each.example]), String(place), (number) => { place = Number(number); draw(); }),
      choice("When", text.times.map((each, number) => [String(number), when(each)]), String(Math.min(time, text.times.length - 1)), (number) => { time = Number(number); draw(); }));
    const whole = text.tokens.map((_, number) => token(text, at, number));
    const said = "Dotted: the question read after the eviction (blue) and the answer (orange); in italics what was not read yet.";
    body.replaceChildren(el("p", { class: "small" }, said), el("div", { class: "text kept", dir: "auto", tabindex: 0 }, whole));
  }

  return (runs) => {
    shown = runs.filter((each) => each.hash in data.texts);
    if (!shown.length) {
      controls.replaceChildren();
      body.replaceChildren(el("p", { class: "small" }, "None of the runs shown was diagnosed."));
      return;
    }
    if (!shown.includes(run)) { run = shown[0]; place = 0; }
    draw();
  };
});
