"use strict";
// The page of a run: helpers, head, theme, keyboard. The other scripts come before this file.
// Data comes from the JSON blocks of the page, and enters the document as text, never as markup.

const DATA = JSON.parse(document.getElementById("data").textContent);
const RUNS = DATA.runs;
const MANY = RUNS.length > 1;
const state = { run: 0, step: 0, group: 0, row: 0, tint: "alignment", query: "" };

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

// The chart library interprets some tags in its texts.
const plain = (text) => String(text).replaceAll("<", "‹");
const signed = (value, digits = 2) => (value < 0 ? "−" : "+") + Math.abs(value).toFixed(digits);
const faint = (hex, alpha) =>
  `rgba(${[1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16)).join(",")},${alpha})`;

// ---------------------------------------------------------------- head

function showHead() {
  const [run] = RUNS;
  const figure = (name, value) =>
    el("div", { class: "figure" }, el("dt", {}, name), el("dd", {}, value));
  const badge = (one) =>
    one.control &&
    el(
      "p",
      { class: "control" },
      el("strong", {}, `CONTROL RUN: ${one.control}`),
      " A control experiment: its rewards carry no information, so it must not learn.",
    );
  if (!MANY) {
    $("top").append(
      badge(run) || "",
      el(
        "div",
        { class: "hero" },
        el("div", {}, el("p", { class: "kicker" }, run.path), el("h1", {}, run.name)),
        ...run.heldout
          .slice(0, 1)
          .map((held) =>
            el(
              "div",
              { class: "heldout" },
              el("p", { class: "kicker" }, `held-out ${held.what}`),
              scores(held),
            ),
          ),
      ),
      el(
        "dl",
        { class: "figures" },
        run.headline.map(([name, value]) => figure(name, value)),
      ),
    );
    if (run.heldout.length > 1)
      $("top").append(
        el(
          "div",
          { class: "also" },
          run.heldout
            .slice(1)
            .map((held) => el("p", {}, `${held.what} (${held.how}): `, held.scores.join(" → "))),
        ),
      );
    return;
  }
  $("top").append(
    el("p", { class: "kicker" }, `${RUNS.length} runs`),
    el("h1", {}, RUNS.map((one) => one.name).join(", ")),
  );
  const names = RUNS[0].headline.map(([name]) => name);
  $("top").append(
    el(
      "div",
      { class: "scroll" },
      el(
        "table",
        {},
        el(
          "thead",
          {},
          el(
            "tr",
            {},
            ["run", "held-out", ...names].map((name) => el("th", {}, name)),
          ),
        ),
        el(
          "tbody",
          {},
          RUNS.map((one, number) =>
            el(
              "tr",
              {},
              el(
                "th",
                {},
                swatch(colour(number), "solid"),
                " ",
                one.name,
                one.control && el("span", { class: "control small" }, `CONTROL ${one.control}`),
              ),
              el(
                "td",
                { class: "two" },
                one.heldout.length ? one.heldout[0].scores.join(" → ") : "–",
              ),
              one.headline.map(([, value]) => el("td", {}, value)),
            ),
          ),
        ),
      ),
    ),
  );
  document.documentElement.classList.add("many");
  $("runs").hidden = false;
  $("runs").append(
    ...RUNS.map((one, number) =>
      el(
        "button",
        { "data-run": number, onclick: () => chooseRun(number) },
        swatch(colour(number), "solid"),
        one.name,
      ),
    ),
  );
}

function scores(held) {
  const part = (text, what) => {
    const [, mean, range] = text.match(/^(\S+) (.*)$/);
    return el("div", { class: "score" }, el("b", {}, mean), el("small", {}, `${range} ${what}`));
  };
  const [first, last] = held.scores;
  return el(
    "div",
    { class: "scores" },
    part(first, last ? "before" : ""),
    last && el("span", { class: "arrow" }, "→"),
    last && part(last, "after"),
    el("p", { class: "aside" }, `exact ${held.exact}; ${held.how}; 95 % interval`),
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

// ---------------------------------------------------------------- configuration, theme, keyboard

function showTables() {
  const run = RUNS[state.run];
  const table = (title, rows) =>
    el(
      "details",
      { open: matchMedia("(min-width: 700px)").matches },
      el("summary", {}, title),
      el(
        "dl",
        { class: "table" },
        rows.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))),
      ),
    );
  $("tables").replaceChildren(
    table(`Facts${MANY ? ` of ${run.name}` : ""}`, run.facts),
    table(`Settings${MANY ? ` of ${run.name}` : ""}`, run.config),
  );
}

const dark = () =>
  (document.documentElement.dataset.theme ??
    (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";

function themeChanged() {
  $("theme").replaceChildren(dark() ? "☀" : "☾", el("span", {}, dark() ? " light" : " dark"));
  drawCharts();
  document
    .querySelectorAll("#runs svg line, tbody svg line")
    .forEach((line, i) => line.setAttribute("stroke", colour(i % RUNS.length)));
}

function toggleTheme() {
  document.documentElement.dataset.theme = dark() ? "light" : "dark";
  themeChanged();
}

function chooseTint(tint) {
  state.tint = tint;
  $("tints").replaceChildren(
    ...Object.entries(TINTS).map(([name, label]) =>
      el("button", { "aria-pressed": name === tint, onclick: () => chooseTint(name) }, label),
    ),
  );
  showGroup();
}

function inSight() {
  const box = $("samples").getBoundingClientRect();
  return box.top < 0.7 * innerHeight && box.bottom > 0.3 * innerHeight;
}

const KEYS = {
  ArrowLeft: () => go({ step: state.step - 1, group: 0, row: 0 }),
  ArrowRight: () => go({ step: state.step + 1, group: 0, row: 0 }),
  ArrowUp: () => inSight() && (go({ group: state.group - 1, row: 0 }), true),
  ArrowDown: () => inSight() && (go({ group: state.group + 1, row: 0 }), true),
  j: () => go({ row: state.row + 1 }, true),
  k: () => go({ row: state.row - 1 }, true),
  t: toggleTheme,
  "?": () => $("help").showModal(),
  "/": () => {
    $("search").focus();
    $("search").scrollIntoView({ block: "nearest" });
  },
  1: () => chooseTint("alignment"),
  2: () => chooseTint("logprob"),
  3: () => chooseTint("advantage"),
};

document.addEventListener("keydown", (event) => {
  const typing = event.target === $("search");
  const sliding = event.target === $("slider") && event.key.startsWith("Arrow");
  if (typing && event.key === "Escape") $("search").blur();
  if (typing && event.key === "Enter") goToFind(found + 1);
  if (
    typing ||
    sliding ||
    event.ctrlKey ||
    event.metaKey ||
    event.altKey ||
    $("help").open ||
    !(event.key in KEYS)
  )
    return;
  if (KEYS[event.key]() !== false) event.preventDefault();
});
$("slider").addEventListener("input", () =>
  go({ step: Number($("slider").value), group: 0, row: 0 }),
);
$("back").addEventListener("click", KEYS.ArrowLeft);
$("on").addEventListener("click", KEYS.ArrowRight);
$("theme").addEventListener("click", toggleTheme);
$("help-open").addEventListener("click", KEYS["?"]);
$("search").addEventListener("input", () => search($("search").value));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", themeChanged);

showHead();
makeCharts();
chooseTint("alignment");
go({});
showTables();
requestAnimationFrame(() => {
  themeChanged();
  document.documentElement.dataset.ready = "yes";
});
