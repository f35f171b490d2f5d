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

const $ = (id) => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";

/** Return an element: attributes, listeners ("onclick"), style as an object, and its children,
    which are nodes or text. */
function el(tag, attributes = {}, ...children) {
  const node =
    tag === "svg" || tag === "line"
      ? document.createElementNS(SVG, tag)
      : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "style")
      for (const [key, text] of Object.entries(value)) node.style.setProperty(key, text);
    else if (value != null && (value !== false || name.startsWith("aria-")))
      node.setAttribute(name, value);
  }
  node.append(...children.flat().filter((child) => child != null));
  return node;
}

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const colour = (number) => css(`--c${number % 7}`);
const clamp = (value, count) => Math.max(0, Math.min(count - 1, value));

// The chart library interprets some tags in its texts.
const plain = (text) => String(text).replaceAll("<", "‹");
const signed = (value, digits = 3) => (value < 0 ? "−" : "+") + fixed(Math.abs(value), digits);
const faint = (hex, alpha) =>
  `rgba(${[1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16)).join(",")},${alpha})`;

/** Return a number with so many decimals, rounded as Python rounds: halves to the even digit. */
function fixed(value, digits) {
  const MORE = 25; // decimals that tell a half from what is close to one
  const exact = Math.abs(value).toFixed(digits + MORE);
  const cut = exact.slice(0, -MORE);
  const isHalf = exact.slice(-MORE) === "5".padEnd(MORE, "0");
  if (isHalf && Number(cut.replace(/\.$/, "").at(-1)) % 2 === 0)
    return (value < 0 ? "-" : "") + cut.replace(/\.$/, "");
  return value.toFixed(digits);
}

/** Return a value of a metric for a table or a sentence: four significant digits. */
function brief(value) {
  if (value == null) return "–";
  if (typeof value === "boolean") return value ? "1" : "0";
  if (Number.isInteger(value)) return value.toLocaleString("en");
  return Math.abs(value) < 1e-3 || Math.abs(value) >= 1e5
    ? value.toExponential(2)
    : String(Number(value.toPrecision(4)));
}

/** Save a file that the page has made. */
function download(name, content, type) {
  const url = URL.createObjectURL(new Blob([content], { type }));
  el("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}

/** Return a scrolling table, which the keyboard can reach. */
function table(label, heads, rows) {
  const cells = (row) =>
    row.map((cell, i) => (i ? el("td", {}, cell) : el("th", { scope: "row" }, cell)));
  return el(
    "div",
    { class: "scroll", tabindex: 0, role: "region", "aria-label": label },
    el(
      "table",
      {},
      el(
        "thead",
        {},
        el(
          "tr",
          {},
          heads.map((name) =>
            el(name === "" ? "td" : "th", { scope: name === "" ? null : "col" }, name),
          ),
        ),
      ),
      el(
        "tbody",
        {},
        rows.map((row) => el("tr", {}, cells(row))),
      ),
    ),
  );
}

function swatch(stroke, dash) {
  return el(
    "svg",
    { class: "swatch", width: 22, height: 8, "aria-hidden": "true" },
    el("line", {
      x1: 0,
      y1: 4,
      x2: 22,
      y2: 4,
      stroke,
      "stroke-width": 3,
      "stroke-dasharray": DASH_PIXELS[dash],
    }),
  );
}
