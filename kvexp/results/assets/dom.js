"use strict";
// Elements from data. Strings become text nodes or attribute values here, and nowhere markup.
const kvexp = (() => {
  const parts = new Map(); // section -> what makes its draw function
  const SVG = "http://www.w3.org/2000/svg";

  function fill(node, attributes, children) {
    for (const [name, value] of Object.entries(attributes)) {
      if (value === null || value === undefined || value === false) continue;
      if (typeof value === "function") node.addEventListener(name, value);
      else node.setAttribute(name, value === true ? "" : String(value));
    }
    node.append(...children.flat().filter((child) => child !== null && child !== undefined));
    return node;
  }

  /** An element; a function among the attributes listens to the event of that name. */
  const el = (tag, attributes = {}, ...children) => fill(document.createElement(tag), attributes, children);
  const svg = (tag, attributes = {}, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);

  /** For plotly, which reads a little HTML in the text it shows. */
  const plain = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");

  /** A select with a label; options: [value, text] or {group, options}. */
  function choice(label, options, value, changed, kind = "") {
    const option = ([key, text]) => el("option", { value: key, selected: key === value }, text);
    const made = options.map((each) =>
      each.group ? el("optgroup", { label: each.group }, each.options.map(option)) : option(each),
    );
    const select = el("select", { change: () => changed(select.value) }, made);
    return el("label", { class: `field ${kind}` }, label, select);
  }

  /** A table in a frame of its own that scrolls; where columns are out of sight it says so, and its edge is shaded. */
  function scroll(label, table) {
    const frame = el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": label }, table);
    const node = el("div", { class: "scroller" }, el("p", { class: "small hint" }, "Scroll sideways for more columns \u2192"), frame);
    const look = () => {
      const hidden = frame.scrollWidth - frame.clientWidth;
      node.classList.toggle("wider", hidden > 1);
      node.classList.toggle("more", hidden - frame.scrollLeft > 1);
    };
    frame.addEventListener("scroll", look, { passive: true });
    const watch = new ResizeObserver(look);
    watch.observe(frame);
    watch.observe(table);
    return node;
  }

  const missing = (value) => value === null || value === undefined;
  const fixed = (value, digits) => (missing(value) ? "-" : value.toFixed(digits));
  const several = (count, word) => `${count} ${word}${count === 1 ? "" : "s"}`;
  const name = (run) => [run.method, missing(run.kv_ratio) ? "" : run.kv_ratio, run.line].filter((x) => x !== "").join(" ");
  const section = (key, start) => parts.set(key, start);
  return { el, svg, plain, choice, scroll, missing, fixed, several, name, section, parts };
})();
