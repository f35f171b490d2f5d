"use strict";
// The head of the page, which begins with the verdict, and its end: the settings.

function showHead() {
  $("top").replaceChildren(...(MANY ? headOfRuns() : headOfRun(RUNS[0])));
}

const badge = (outcome) => el("span", { class: "badge", "data-tone": outcome.tone }, outcome.title);

const controlBanner = (run) =>
  run.control &&
  el(
    "p",
    { class: "control" },
    el("strong", {}, `CONTROL RUN: ${run.control}`),
    " A control experiment: its rewards carry no information, so it must not learn.",
  );

/** Return the head of a single run: the verdict, what it rests on, and what was run. */
function headOfRun(run) {
  const { outcome } = run;
  const [main, ...others] = run.heldout;
  return [
    controlBanner(run),
    el(
      "div",
      { class: "hero" },
      el(
        "div",
        { class: "said" },
        el("p", { class: "kicker" }, run.path),
        el("h1", {}, run.name),
        el("p", { class: "verdict" }, badge(outcome), el("span", {}, outcome.text)),
        outcome.why.map((line) => el("p", { class: "why" }, line)),
      ),
      main &&
        el(
          "div",
          { class: "heldout" },
          el("p", { class: "kicker" }, `held-out ${main.what}`),
          scores(main, outcome.tone),
        ),
    ),
    outcomeOf(run, 0),
    outcome.next && nextCommand(outcome.next),
    others.length
      ? el(
          "div",
          { class: "also" },
          others.map((held) =>
            el("p", {}, `${held.what} (${held.how}): ${held.scores.join(" → ")}`),
          ),
        )
      : null,
    el(
      "dl",
      { class: "figures" },
      run.headline.map(([name, value]) => figure(name, value)),
    ),
  ].filter(Boolean);
}

const figure = (name, ...value) =>
  el("div", { class: "figure" }, el("dt", {}, name), el("dd", {}, value));

/** Return the figures of a verdict. A step in them leads to its completions. */
const outcomeOf = (run, number) => {
  const { figures } = run.outcome;
  return el(
    "dl",
    { class: "figures outcome", style: { "--columns": columnsFor(figures.length) } },
    figures.map(([name, text, step]) => figure(name, linked(text, step, number))),
  );
};

/** Return the number of columns, of those that fit a wide page, that leaves the fewest gaps. */
function columnsFor(count) {
  const gaps = (columns) => (columns - (count % columns)) % columns;
  return [4, 3, 5].reduce((best, columns) => (gaps(columns) < gaps(best) ? columns : best));
}

/** Return a text, which leads to the completions of a step if there is one. */
const linked = (text, step, run) =>
  step == null ? text : el("button", { class: "link", onclick: () => goToStep(step, run) }, text);

function nextCommand(command) {
  const copy = el("button", { onclick: () => navigator.clipboard?.writeText(command) }, "Copy");
  return el("p", { class: "next" }, el("span", {}, "Next: "), el("code", {}, command), copy);
}

/** Return the head of several runs: a column for each, and what they differ in. */
function headOfRuns() {
  const facts = [...new Set(RUNS.flatMap((one) => one.outcome.figures.map(([name]) => name)))];
  const heads = RUNS.map((one, number) =>
    el(
      "span",
      {},
      swatch(colour(number), "solid"),
      one.name,
      one.control && el("span", { class: "control small" }, `CONTROL ${one.control}`),
    ),
  );
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
    el("p", { class: "kicker" }, `${RUNS.length} runs`),
    el("h1", {}, RUNS.map((one) => one.name).join(", ")),
    table("runs", ["", ...heads], rows),
    el("h2", { class: "differ" }, "What differs between the runs"),
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
  if (!names.length) return el("p", { class: "aside" }, "The runs have the same settings.");
  return table(
    "settings that differ",
    ["setting", ...RUNS.map((one) => one.name)],
    names.map((name) => [name, ...values.map((one) => one.get(name) ?? "–")]),
  );
}

function showRunButtons() {
  document.documentElement.classList.toggle("many", MANY);
  $("runs").hidden = !MANY;
  $("runs").replaceChildren(
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

/** Return a score before and after training, in the colour of the verdict. */
function scores(held, tone) {
  const part = (text, what) => {
    const [, mean, range] = text.match(/^(\S+) (.*)$/);
    return el("div", { class: "score" }, el("b", {}, mean), el("small", {}, `${range} ${what}`));
  };
  const [first, last] = held.scores;
  return el(
    "div",
    { class: "scores", "data-tone": tone },
    part(first, last ? "before" : ""),
    last && el("span", { class: "arrow" }, "→"),
    last && part(last, "after"),
    el(
      "p",
      { class: "aside" },
      [held.exact && `exact ${held.exact}`, held.how, "95 % interval"].filter(Boolean).join("; "),
    ),
  );
}

/** Show the settings of the selected run: first those that are not at their default. */
function showTables() {
  const run = RUNS[state.run];
  const of = MANY ? ` of ${run.name}` : "";
  const listed = (title, rows, open) =>
    el(
      "details",
      { open },
      el("summary", {}, `${title} (${rows.length})`),
      el(
        "dl",
        { class: "table" },
        rows.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))),
      ),
    );
  const isChanged = ([name]) => run.changed.includes(name);
  $("tables").replaceChildren(
    listed(`Settings${of} that are not at their default`, run.config.filter(isChanged), true),
    listed(
      `Other settings${of}`,
      run.config.filter((row) => !isChanged(row)),
      false,
    ),
    listed(`Facts${of}`, run.facts, matchMedia("(min-width: 700px)").matches),
  );
}
