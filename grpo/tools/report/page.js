"use strict";
// The head of the page, its settings, the search, theme and keyboard; and its start.
// The other scripts come before this file.

// ---- the head, which begins with the verdict

function showHead() {
  $("top").replaceChildren(...(MANY ? headOfRuns() : headOfRun(RUNS[0])));
}

const badge = (outcome) => el("span", { class: "badge", "data-tone": outcome.tone }, outcome.title);
const kicker = (text) => el("p", { class: "kicker" }, text);
const figures = (named) =>
  el(
    "dl",
    { class: "figures" },
    named.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))),
  );

/** Return the head of a single run: the verdict, what it rests on, and what was run. */
function headOfRun(run) {
  const { outcome } = run;
  const [main, ...others] = run.heldout;
  const said = [
    kicker(run.path),
    el("h1", {}, run.name),
    el("p", { class: "verdict" }, badge(outcome), el("span", {}, outcome.text)),
    outcome.why.map((line) => el("p", {}, line)),
  ];
  const copy = () => navigator.clipboard?.writeText(outcome.next);
  return [
    run.control &&
      el(
        "p",
        { class: "control" },
        el("strong", {}, `CONTROL RUN: ${run.control}`),
        " A control experiment: its rewards carry no information, so it must not learn.",
      ),
    el("div", { class: "hero" }, el("div", { class: "said" }, said), main && scores(main, outcome)),
    figures(outcome.figures.map(([name, text, step]) => [name, linked(text, step, 0)])),
    outcome.next &&
      el(
        "p",
        { class: "next" },
        "Next: ",
        el("code", {}, outcome.next),
        button({ onclick: copy }, "Copy"),
      ),
    ...others.map(({ what, how, scores }) => aside(`${what} (${how}): ${scores.join(" → ")}`)),
    figures(run.headline),
  ].filter(Boolean);
}

/** Return a text, which leads to the completions of a step if there is one. */
const linked = (text, step, run) =>
  step == null ? text : button({ class: "link", onclick: () => goToStep(step, run) }, text);

/** Return a score before and after training, in the colour of the verdict. */
function scores(held, { tone }) {
  const part = (text, what) => {
    const [, mean, range] = text.match(/^(\S+) (.*)$/);
    return el("div", { class: "score" }, el("b", {}, mean), el("small", {}, `${range} ${what}`));
  };
  const [first, last] = held.scores;
  const about = [held.exact && `exact ${held.exact}`, held.how, "95 % interval"];
  return el(
    "div",
    { class: "scores", "data-tone": tone },
    kicker(`held-out ${held.what}`),
    part(first, last ? "before" : ""),
    last && el("span", { class: "arrow" }, "→"),
    last && part(last, "after"),
    aside(about.filter(Boolean).join("; ")),
  );
}

/** Return the head of several runs: a column for each, and what they differ in. */
function headOfRuns() {
  const facts = [...new Set(RUNS.flatMap((one) => one.outcome.figures.map(([name]) => name)))];
  const heads = RUNS.map((one, number) => {
    const control = one.control && el("span", { class: "control" }, `CONTROL ${one.control}`);
    return el("span", {}, swatch(number), one.name, control);
  });
  const fact = (name, one, number) => {
    const [, text, step] = one.outcome.figures.find(([known]) => known === name) ?? [];
    return text == null ? "–" : linked(text, step, number);
  };
  const rows = [
    ["verdict", ...RUNS.map((one) => badge(one.outcome))],
    ["why", ...RUNS.map((one) => one.outcome.why.join("; ") || "–")],
    ["held-out", ...RUNS.map((one) => one.heldout[0]?.scores.join(" → ") ?? "–")],
    ...facts.map((name) => [name, ...RUNS.map((one, number) => fact(name, one, number))]),
    ...RUNS[0].headline.map(([name], i) => [name, ...RUNS.map((one) => one.headline[i][1])]),
  ];
  return [
    kicker(`${RUNS.length} runs`),
    el("h1", {}, RUNS.map((one) => one.name).join(", ")),
    table("runs", ["", ...heads], rows),
    el("h2", {}, "What differs between the runs"),
    differences(),
  ];
}

/** Return a table of the settings that are not the same in all runs, the most unusual first. */
function differences() {
  const values = RUNS.map((one) => new Map([...one.config, ...one.facts]));
  const isChanged = (name) => RUNS.some((one) => one.changed.includes(name));
  const names = [...new Set(values.flatMap((one) => [...one.keys()]))]
    .filter((name) => new Set(values.map((one) => one.get(name))).size > 1)
    .filter((name) => !["name", "started"].includes(name))
    .sort((a, b) => isChanged(b) - isChanged(a));
  if (!names.length) return aside("The runs have the same settings.");
  const rows = names.map((name) => [name, ...values.map((one) => one.get(name) ?? "–")]);
  return table("settings that differ", ["setting", ...RUNS.map((one) => one.name)], rows);
}

function showRunButtons() {
  document.documentElement.classList.toggle("many", MANY);
  $("runs").hidden = !MANY;
  const choose = (number) => {
    go({ run: number, step: richestStep(RUNS[number]), group: 0, row: 0 });
    drawCharts();
    showTables();
  };
  const chip = (one, number) =>
    button({ "data-run": number, onclick: () => choose(number) }, swatch(number), one.name);
  $("runs").replaceChildren(...RUNS.map(chip));
}

/** Show the settings of the selected run: first those that are not at their default. */
function showTables() {
  const run = RUNS[state.run];
  const of = MANY ? ` of ${run.name}` : "";
  const listed = (title, rows, open) =>
    el("details", { open }, el("summary", {}, `${title} (${rows.length})`), figures(rows));
  const isChanged = ([name]) => run.changed.includes(name);
  const others = run.config.filter((row) => !isChanged(row));
  $("tables").replaceChildren(
    listed(`Settings${of} that are not at their default`, run.config.filter(isChanged), true),
    listed(`Other settings${of}`, others, false),
    listed(`Facts${of}`, run.facts, false),
  );
}

// ---- the search in the completions of a run. A text matches if it contains the query, in upper or
// lower case alike: the prompt of each group, and each distinct text of its completions.

const MORE = 40; // matches listed at first, and added by "Show more"

/** Return the numbers of the words in which `query` occurs. */
function hitsIn(words, query) {
  const hits = new Set();
  if (query.length < 2) return hits;
  const text = words.join(" ").toLowerCase();
  const starts = [];
  words.reduce((at, one) => (starts.push(at), at + one.length + 1), 0);
  for (let at = text.indexOf(query), j = 0; at >= 0; at = text.indexOf(query, at + query.length))
    for (; j < words.length && starts[j] < at + query.length; j++)
      if (starts[j] + words[j].length > at) hits.add(j);
  return hits;
}

// The matches, in which run they are, how many are listed, and which one was opened.
let hunt = { run: 0, finds: [], listed: MORE, opened: -1 };

/** Search the prompts and completions of the run, and list the matches. */
function search(text) {
  state.query = text.trim().toLowerCase().replace(/\s+/g, " ");
  hunt = { run: state.run, finds: [], listed: MORE, opened: -1 };
  if (state.query.length > 1) hunt.finds = RUNS[state.run].kept.flatMap(findsIn);
  showFinds();
  showGroup();
}

/** Return the matches in the completions of a step. */
function findsIn(step) {
  const found = (text) => text.toLowerCase().indexOf(state.query);
  const excerpt = (text) => {
    const at = found(text);
    return `${at > 40 ? "… " : ""}${text.slice(Math.max(0, at - 40), at + 60)}`;
  };
  return samplesOf(state.run)[step].flatMap(({ group, prompt, texts, rows }) =>
    [[null, prompt], ...texts.map(({ words }, i) => [rows.text.indexOf(i), words])]
      .filter(([, text]) => found(text) >= 0)
      .map(([completion, text]) => ({ step, group, completion, text: excerpt(text) })),
  );
}

/** List the first matches, and say how many there are. */
function showFinds() {
  const { finds, listed } = hunt;
  if (state.query.length < 2) return $("found").replaceChildren();
  const said = `${finds.length || "No"} ${finds.length === 1 ? "match" : "matches"}`;
  const first = finds.length > listed ? `; the first ${listed}:` : "";
  const item = (find, i) => {
    const where = find.completion == null ? "prompt" : `completion ${find.completion}`;
    const name = el("b", {}, `step ${find.step} · group ${find.group} · ${where}`);
    const style = i === hunt.opened ? "find here" : "find";
    return button({ class: style, onclick: () => goToFind(i) }, name, " ", find.text);
  };
  const showMore = () => {
    hunt.listed += MORE;
    showFinds();
  };
  const more = first ? button({ id: "more-finds", onclick: showMore }, "Show more") : "";
  $("found").replaceChildren(aside(said + first), ...finds.slice(0, listed).map(item), more);
}

/** Show match `number`, counted on from the first one again after the last. */
function goToFind(number) {
  const { finds, run } = hunt;
  if (!finds.length) return;
  hunt.opened = number % finds.length;
  hunt.listed = Math.max(hunt.listed, hunt.opened + 1);
  const find = finds[hunt.opened];
  const isPrompt = find.completion == null;
  if (isPrompt) state.promptOpen = true;
  showPlace({ ...find, run }, () =>
    isPrompt ? $("prompt").scrollIntoView({ block: "center" }) : focusRow(),
  );
  showFinds();
}

// ---- theme and keyboard

const systemIsDark = matchMedia("(prefers-color-scheme: dark)");

function setTheme(isDark) {
  document.documentElement.dataset.theme = isDark ? "dark" : "light";
  $("theme").textContent = isDark ? "☀" : "☾";
  drawCharts();
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
  t: () => setTheme(document.documentElement.dataset.theme !== "dark"),
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
  const isTyping = isField && event.target.type !== "range";
  const isSliding = isField && event.key.startsWith("Arrow");
  if (isTyping && event.key === "Escape") event.target.blur();
  if (event.target === $("search") && event.key === "Enter") goToFind(hunt.opened + 1);
  const isCommand = event.ctrlKey || event.metaKey || event.altKey;
  if (isTyping || isSliding || isCommand || !(event.key in KEYS)) return;
  if (KEYS[event.key]() !== false) event.preventDefault();
});
$("slider").addEventListener("input", () =>
  go({ step: Number($("slider").value), group: 0, row: 0 }),
);
$("back").addEventListener("click", KEYS.ArrowLeft);
$("on").addEventListener("click", KEYS.ArrowRight);
$("theme").addEventListener("click", KEYS.t);
$("search").addEventListener("input", () => search($("search").value));
systemIsDark.addEventListener("change", ({ matches }) => setTheme(matches));
addEventListener("hashchange", readLink);

// ---- the start

showHead();
showRunButtons();
makeControls();
makeFilter();
makeCharts();
showTables();
if (!readLink()) go({ step: richestStep(RUNS[0]) });
// The page of a run in progress is written again and again; a reader of samples is not disturbed.
if (DATA.reload) setInterval(() => inSight() || location.reload(), 1000 * DATA.reload);
setTheme(systemIsDark.matches);
requestAnimationFrame(() => (document.documentElement.dataset.ready = "yes"));
