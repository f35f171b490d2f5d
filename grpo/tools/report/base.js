"use strict";
// The data of the page, and helpers for all other scripts. Data comes from the JSON blocks of the
// page, and enters the document as text, never as markup.

const DATA = JSON.parse(document.getElementById("data").textContent);
const RUNS = DATA.runs;
const MANY = RUNS.length > 1;
const NO_FILTER = { outcome: "", trap: "", low: "", high: "", truncated: false };
const state = {
  run: 0,
  step: 0, // a place in the run's list of kept steps
  group: 0,
  row: 0, // a place in the order of the completions that are shown
  tint: "alignment",
  query: "",
  filter: { ...NO_FILTER },
  promptOpen: false,
  axis: "step",
  smoothing: 0,
  log: false,
  range: null, // of the x-axis, after zooming
};

// The outcomes of groups: sign and number of the colour.
const CLASSES = {
  varied: ["≠", 0],
  solved: ["✓", 2],
  identical: ["=", 1],
  tied: ["≈", 4],
  failed: ["✕", 3],
};

const $ = (id) => document.getElementById(id);

/** Return an element: attributes, listeners ("onclick"), style as an object, and its children,
    which are nodes or text. */
function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "style") Object.assign(node.style, value);
    else if (value != null && (value !== false || name.startsWith("aria-")))
      node.setAttribute(name, value);
  }
  node.append(...children.flat(Infinity).filter((child) => child != null));
  return node;
}

const button = (attributes, ...children) => el("button", attributes, ...children);
const aside = (...children) => el("p", { class: "aside" }, ...children);

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const colour = (number) => css(`--c${number % 7}`);
const clamp = (value, count) => Math.max(0, Math.min(count - 1, value));
const signed = (value) => (value < 0 ? "−" : "+") + Math.abs(value).toFixed(3);
const faint = (hex, alpha) =>
  `rgba(${[1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16)).join(",")},${alpha})`;

// The chart library interprets some tags in its texts.
const plain = (text) => String(text).replaceAll("<", "‹");

/** Save a file that the page has made. */
function download(name, content, type) {
  const url = URL.createObjectURL(new Blob([content], { type }));
  el("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}

/** Return a scrolling table, which the keyboard can reach. */
function table(label, heads, rows) {
  const row = ([first, ...others]) =>
    el("tr", {}, el("th", { scope: "row" }, first), others.map((cell) => el("td", {}, cell)));
  const head = heads.map((name) => el(name === "" ? "td" : "th", {}, name));
  return el(
    "div",
    { class: "scroll", tabindex: 0, role: "region", "aria-label": label },
    el("table", {}, el("thead", {}, el("tr", {}, head)), el("tbody", {}, rows.map(row))),
  );
}

/** Return a piece of a line in a colour (a number, or a name of the style sheet) and a dash. */
const swatch = (number, dash = "solid") => {
  const name = typeof number === "number" ? `--c${number % 7}` : number;
  const style = { solid: "solid", dot: "dotted" }[dash] ?? "dashed";
  return el("i", { class: "swatch", style: { borderTop: `3px ${style} var(${name})` } });
};
