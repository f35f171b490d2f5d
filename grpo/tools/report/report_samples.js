"use strict";
// The samples of the page: steps, groups, and the completions of a group.

// What the page says of a completion's end. One that was shown was not sampled.
const ENDS = { stop: "complete", length: "truncated", shown: "the right answer, which was shown" };

const parsed = new Map();

/** Return the steps of a run that are here: step -> { count, groups }; parsed on first use. */
function samplesOf(number) {
  if (!parsed.has(number)) parsed.set(number, JSON.parse($(`samples-${number}`).textContent));
  return parsed.get(number);
}

const stepNumber = () => RUNS[state.run].kept[state.step];
const stepNow = () => samplesOf(state.run)[stepNumber()];
const groupNow = () => stepNow()?.groups[state.group];

/** Change what is shown, and show it; with `focus`, scroll to the completion. */
function go(changes, focus = false) {
  Object.assign(state, changes);
  state.step = clamp(state.step, RUNS[state.run].kept.length);
  if (DATA.live && stepNumber() != null && !stepNow())
    return loadStep(state.run, stepNumber()).then(() => go({}, focus));
  state.group = nearestGroup(clamp(state.group, stepNow()?.groups.length ?? 0));
  state.row = clamp(state.row, groupNow() ? orderOf(groupNow()).length : 0);
  showStep();
  writeLink();
  if (focus) focusRow();
}

/** Scroll to the completion that is selected. */
function focusRow() {
  const row = document.querySelector(".row.here");
  row?.scrollIntoView({ block: "nearest" });
  row?.focus({ preventScroll: true });
}

/** Show the kept step that is nearest to `step`. */
function goToStep(step, run = state.run) {
  const kept = RUNS[run].kept;
  if (!kept.length || step == null) return;
  const near = kept.reduce(
    (best, one, i) => (Math.abs(one - step) < Math.abs(kept[best] - step) ? i : best),
    0,
  );
  go({ run, step: near, group: 0, row: 0 });
  $("samples").scrollIntoView();
}

/** Return the place of the kept step with the most varied groups, of which there is most to see.

    Of several such steps it is the one whose rewards vary most. */
function richestStep(run) {
  const { step = [], "groups/class/varied": varied = [], group_std: std = [] } = run.metrics;
  const richness = run.kept.map((one) => {
    const at = step.indexOf(one);
    return (varied[at] ?? 0) + Math.min(0.999, std[at] ?? 0);
  });
  return Math.max(0, richness.indexOf(Math.max(...richness)));
}

function chooseRun(number) {
  go({ run: number, step: richestStep(RUNS[number]), group: 0, row: 0 });
  drawCharts();
  showTables();
}

function showStep() {
  const run = RUNS[state.run];
  const step = stepNumber();
  for (const button of document.querySelectorAll("#runs button"))
    button.setAttribute("aria-pressed", Number(button.dataset.run) === state.run);
  $("kept").textContent = aboutKept(run);

  Object.assign($("slider"), {
    max: Math.max(0, run.kept.length - 1),
    value: state.step,
    disabled: run.kept.length < 2,
  });

  // The figures of this step.
  const at = run.metrics.step?.indexOf(step) ?? -1;
  const say = (name, head, digits) => {
    const value = run.metrics[name]?.[at];
    return value == null ? null : `${head} ${fixed(value, digits)}`;
  };
  $("step").replaceChildren(
    el("b", {}, step == null ? "no step" : `Step ${step}`),
    ` of ${run.made}`,
    el(
      "span",
      { class: "aside" },
      [say("reward", "reward", 3), say("level", "level", 0), say("temperature", "T", 2)]
        .filter(Boolean)
        .join(" · "),
    ),
  );
  $("slider").setAttribute("aria-valuetext", `step ${step}`);

  const there = stepNow();
  const missing = there ? there.count - there.groups.length : 0;
  const note =
    `${missing} of the step's ${there?.count} groups were left out ` +
    (DATA.live
      ? "because the step is large; the search finds them."
      : "to limit the size of this file.");
  showFilter();
  $("groups").replaceChildren(
    ...(there?.groups ?? []).map((group, place) => (matches(group) ? card(group, place) : "")),
    missing ? el("p", { class: "aside" }, note) : "",
  );
  showGroup();
  drawMark();
}

/** Return which steps of a run have completions in this file. */
function aboutKept(run) {
  if (!run.stored) return `${run.name}: no rollouts are stored.`;
  if (DATA.live) return `The completions of all ${run.stored} steps so far.`;
  const left = run.stored - run.kept.length;
  if (!left) return `This file has the completions of all ${run.stored} steps.`;
  return (
    `This file has the completions of ${run.kept.length} of ${run.stored} steps: the first, the ` +
    "last, those with a decision or a warning, and evenly spaced ones between them. The other " +
    `${left} were left out to limit its size; python -m grpo.inspect ${run.path} shows them, and ` +
    "--megabytes keeps more."
  );
}

/** Return the card of a group: its outcome, its rewards, its trap. */
function card(group, place) {
  const [sign, number] = CLASSES[group.class] ?? ["?", 5];
  // A task may have rewards outside [0, 1].
  const low = Math.min(0, ...group.rows.reward);
  const high = Math.max(1, ...group.rows.reward);
  const bar = (i) =>
    el("i", {
      style: {
        height: `${8 + (92 * (group.rows.reward[i] - low)) / (high - low)}%`,
        background: `var(--c${number})`,
      },
    });
  return el(
    "button",
    {
      class: "card",
      "aria-pressed": place === state.group,
      onclick: () => go({ group: place, row: 0 }),
      title: DATA.classes[group.class] ?? "the rewards vary",
    },
    el(
      "span",
      { class: "class" },
      el("i", { style: { background: `var(--c${number})` } }, sign),
      group.class,
      el("small", {}, `#${group.group}`),
    ),
    el("span", { class: "bars", "aria-hidden": "true" }, byReward(group).map(bar)),
    el(
      "span",
      { class: "paid" },
      fixed(group.reward, 3),
      el("small", {}, ` ± ${fixed(group.reward_std, 3)}`),
    ),
    group.trap && el("span", { class: "trap" }, `trap: ${group.trap}`),
  );
}

function showGroup() {
  showTints();
  const group = groupNow();
  if (!group || !matches(group)) return $("group").replaceChildren();
  const actions = { keep: "trained on", skip: "skipped", resample: "sampled again" };
  const order = orderOf(group);
  const most = Math.max(1e-9, ...group.rows.advantage.map((value) => Math.abs(value ?? 0)));
  const facts = [
    group.class,
    actions[group.action] ?? group.action,
    group.attempt ? `try ${group.attempt + 1}` : "",
    `level ${group.level}`,
    `T ${fixed(group.temperature, 2)}`,
    `${group.distinct} distinct of ${group.rows.reward.length}`,
    order.length < group.rows.reward.length ? `${order.length} shown` : "",
    group.trap ? `trap: ${group.trap}` : "",
  ];
  $("group").replaceChildren(
    el(
      "h3",
      {},
      `Group ${group.group}`,
      el("span", { class: "aside" }, facts.filter(Boolean).join(" · ")),
    ),
    promptOf(group),
    group.target ? targetOf(group) : "",
    elsewhere(group),
    legendOfTint(group, most),
    ...order.map((sample, place) => rowOf(group, sample, place, most, order)),
  );
}

/** Return the prompt: as the model saw it, with its template, if the run has a tokenizer. */
function promptOf(group) {
  const [before, after] = group.around ?? ["", ""];
  const title = group.around ? "Prompt, as the model saw it" : "Prompt";
  const template = (text) => text && el("span", { class: "template" }, text);
  const details = el(
    "details",
    { id: "prompt", open: state.promptOpen },
    el("summary", {}, title),
    el("pre", {}, template(before), marked(group.prompt, state.query), template(after)),
  );
  details.addEventListener("toggle", () => (state.promptOpen = details.open));
  return details;
}

function targetOf(group) {
  const words = fillWords(el("p", { class: "words" }), group, null, wordsOnly(group.target));
  return el("details", { open: true }, el("summary", {}, "Target"), words);
}

/** Return the places where the same problem was sampled: other steps, other tries, other runs. */
function elsewhere(group) {
  const details = el(
    "details",
    { id: "elsewhere" },
    el("summary", {}, "This problem in other steps and runs"),
  );
  const list = () => {
    const places = RUNS.flatMap((run, number) =>
      run.kept.flatMap((step, place) =>
        (samplesOf(number)[step]?.groups ?? [])
          .map((one, at) => ({ one, run: number, step: place, group: at }))
          .filter(({ one }) => one.key === group.key && one !== group),
      ),
    );
    const button = ({ one, ...place }) =>
      el(
        "button",
        { class: "find", onclick: () => go({ ...place, row: 0 }) },
        el(
          "b",
          {},
          `${MANY ? `${RUNS[place.run].name} · ` : ""}step ${RUNS[place.run].kept[place.step]}`,
        ),
        ` · group ${one.group}: ${one.class}, reward ${fixed(one.reward, 3)}`,
      );
    const none = "It was not sampled again in the steps that are kept here.";
    details.append(
      places.length
        ? el("div", { class: "places" }, places.map(button))
        : el("p", { class: "aside" }, none),
    );
  };
  details.addEventListener("toggle", () => details.open && details.children.length < 2 && list());
  return details;
}

/** Return a completion of a group; `most` is the largest advantage of the group. */
function rowOf(group, sample, place, most, order) {
  const { text, reward, value, exact, tokens, finish, advantage } = Object.fromEntries(
    Object.entries(group.rows).map(([name, column]) => [name, column[sample]]),
  );
  const stored = group.texts[text];
  const twin = order.slice(0, place).find((other) => group.rows.text[other] === text);

  // The reward, and a bar for the advantage.
  const share = advantage == null ? 0 : Math.abs(advantage) / most;
  const pay = el(
    "div",
    { class: "pay" },
    el("b", {}, fixed(reward, 3)),
    el(
      "span",
      { class: "lean", title: "advantage" },
      el("i", { class: advantage < 0 ? "less" : "more", style: { width: `${50 * share}%` } }),
    ),
    el("small", {}, advantage == null ? "no advantage" : `${signed(advantage)} advantage`),
  );

  // A text that an earlier completion has is shown only when it is asked for.
  const whole = () => {
    const toTheEnd = group.view === "alignment" && "right to the end";
    const said = [
      `score ${fixed(value, 3)}`,
      exact ? "✓ exact" : stored.divergence || toTheEnd,
      `${tokens} tokens, ${ENDS[finish]}`,
    ].filter(Boolean);
    const parts = Object.entries(stored.parts).map(([name, part]) =>
      el("span", {}, el("b", {}, name), ` ${part}`),
    );
    return [
      el("p", { class: "formula" }, stored.formula),
      el("p", { class: "meta" }, el("b", {}, `Completion ${sample}`), ` · ${said.join(" · ")}`),
      fillWords(el("div", { class: "words" }), group, sample, columnsOf(group, stored)),
      group.view === "digits" ? digitsOf(group, stored) : null,
      parts.length
        ? el(
            "details",
            { class: "parts" },
            el("summary", {}, "parts of the score"),
            el("p", {}, parts),
          )
        : null,
    ];
  };
  const what = el("div", { class: "what" });
  const showWhole = () => what.replaceChildren(...whole().filter(Boolean));
  if (twin == null || group.rows.credits) {
    showWhole();
  } else {
    const same = `same text as completion ${twin}`;
    const fold = el("button", { class: "fold", onclick: showWhole }, same);
    what.append(el("p", { class: "meta" }, el("b", {}, `Completion ${sample}`), fold));
  }

  return el(
    "article",
    {
      class: `row${place === state.row ? " here" : ""}${twin == null ? "" : " twin"}`,
      tabindex: -1,
      "aria-label": `completion ${sample}`,
      onclick: () => markRow(place),
    },
    pay,
    what,
  );
}

function markRow(place) {
  state.row = place;
  document.querySelectorAll(".row").forEach((row, i) => row.classList.toggle("here", i === place));
  writeLink();
}
