"use strict";
// The theme and the keyboard of the page, and its start. The other scripts come before this file.

const dark = () =>
  (document.documentElement.dataset.theme ??
    (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";

function themeChanged() {
  $("theme").replaceChildren(dark() ? "☀" : "☾", el("span", {}, dark() ? " light" : " dark"));
  drawCharts();
  document
    .querySelectorAll("#runs svg line, #top thead svg line")
    .forEach((line, i) => line.setAttribute("stroke", colour(i % RUNS.length)));
}

function toggleTheme() {
  document.documentElement.dataset.theme = dark() ? "light" : "dark";
  themeChanged();
}

function inSight() {
  const box = $("samples").getBoundingClientRect();
  return box.top < 0.7 * innerHeight && box.bottom > 0.3 * innerHeight;
}

const KEYS = {
  ArrowLeft: () => go({ step: state.step - 1, group: 0, row: 0 }),
  ArrowRight: () => go({ step: state.step + 1, group: 0, row: 0 }),
  ArrowUp: () =>
    inSight() && (go({ group: nearestGroup(Math.max(0, state.group - 1), -1), row: 0 }), true),
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
  const isField = event.target.matches?.("input:not([type=checkbox]), select");
  const typing = isField && event.target.type !== "range";
  const sliding = isField && event.key.startsWith("Arrow");
  if (typing && event.key === "Escape") event.target.blur();
  if (event.target === $("search") && event.key === "Enter") goToFind(hunt.opened + 1);
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

addEventListener("hashchange", readLink);

showHead();
showRunButtons();
makeControls();
makeFilter();
makeCharts();
showTables();
if (!readLink()) {
  const [run] = RUNS;
  go({ step: DATA.live ? run.kept.length - 1 : richestStep(run) });
}
if (DATA.live) follow();
requestAnimationFrame(() => {
  themeChanged();
  document.documentElement.dataset.ready = "yes";
});
