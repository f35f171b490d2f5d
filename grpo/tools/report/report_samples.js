"use strict";
// The samples of the page: steps, groups, and the completions of a group.

const TINTS = { alignment: "Alignment", logprob: "Log-prob", advantage: "Advantage" };

const parsed = new Map();

/** Return the kept steps of a run: step -> { count, groups }; parsed on first use. */
function samplesOf(number) {
  if (!parsed.has(number)) parsed.set(number, JSON.parse($(`samples-${number}`).textContent));
  return parsed.get(number);
}

const stepNow = () => samplesOf(state.run)[RUNS[state.run].kept[state.step]];
const groupNow = () => stepNow()?.groups[state.group];
const orderOf = (group) =>
  group.rows.reward
    .map((_, i) => i)
    .sort((a, b) => group.rows.reward[b] - group.rows.reward[a] || a - b);
const clamp = (value, count) => Math.max(0, Math.min(count - 1, value));

/** Change what is shown, and show it; with `focus`, scroll to the completion. */
function go(changes, focus = false) {
  Object.assign(state, changes);
  state.step = clamp(state.step, RUNS[state.run].kept.length);
  state.group = clamp(state.group, stepNow()?.groups.length ?? 0);
  state.row = clamp(state.row, groupNow()?.rows.reward.length ?? 0);
  showStep();
  if (focus) document.querySelector(".row.here")?.scrollIntoView({ block: "nearest" });
}

/** Show the kept step that is nearest to `step`. */
function goToStep(step) {
  const kept = RUNS[state.run].kept;
  if (!kept.length) return;
  const near = kept.reduce(
    (best, one, i) => (Math.abs(one - step) < Math.abs(kept[best] - step) ? i : best),
    0,
  );
  go({ step: near, group: 0, row: 0 });
  $("samples").scrollIntoView();
}

function chooseRun(number) {
  go({ run: number, step: 0, group: 0, row: 0 });
  drawCharts();
  showTables();
}

function showStep() {
  const run = RUNS[state.run];
  const step = run.kept[state.step];
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
  const say = (name, head, digits) =>
    run.metrics[name]?.[at] == null ? null : `${head} ${run.metrics[name][at].toFixed(digits)}`;
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
    "to limit the size of this file.";
  $("groups").replaceChildren(
    ...(there?.groups ?? []).map(card),
    missing ? el("p", { class: "aside" }, note) : "",
  );
  showGroup();
  drawMark();
}

/** Return which steps of a run have completions in this file. */
function aboutKept(run) {
  if (!run.stored) return `${run.name}: no rollouts are stored.`;
  const left = run.stored - run.kept.length;
  if (!left) return `This file has the completions of all ${run.stored} steps.`;
  return (
    `This file has the completions of ${run.kept.length} of ${run.stored} steps ` +
    `(${run.kept.join(", ")}): the first, the last, those with a decision or a warning, and ` +
    `evenly spaced ones between them. The other ${left} were left out to limit its size; ` +
    `python -m grpo.inspect ${run.path} shows them, and --megabytes keeps more.`
  );
}

/** Mark the step that is shown in the charts. */
function drawMark() {
  for (const spec of CHARTS)
    if (spec.mark && spec.listens)
      Plotly.relayout(spec.plot, { shapes: layoutOf(spec, []).shapes });
}

/** Return the card of a group: its class, its rewards, its trap. */
function card(group, place) {
  const [sign, number] = CLASSES[group.class] ?? ["?", 5];
  // A task may have rewards outside [0, 1].
  const low = Math.min(0, ...group.rows.reward);
  const high = Math.max(1, ...group.rows.reward);
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
    el(
      "span",
      { class: "bars", "aria-hidden": "true" },
      orderOf(group).map((i) =>
        el("i", {
          style: {
            height: `${8 + (92 * (group.rows.reward[i] - low)) / (high - low)}%`,
            background: `var(--c${number})`,
          },
        }),
      ),
    ),
    el(
      "span",
      { class: "paid" },
      group.reward.toFixed(3),
      el("small", {}, ` ± ${group.reward_std.toFixed(3)}`),
    ),
    group.trap && el("span", { class: "trap" }, `trap: ${group.trap}`),
  );
}

function showGroup() {
  const group = groupNow();
  if (!group) return $("group").replaceChildren();
  const actions = { keep: "trained on", skip: "skipped", resample: "sampled again" };
  const done = actions[group.action] ?? group.action;
  const order = orderOf(group);
  const most = Math.max(1e-9, ...group.rows.advantage.map((value) => Math.abs(value ?? 0)));
  $("group").replaceChildren(
    el(
      "h3",
      {},
      `Group ${group.group}`,
      el(
        "span",
        { class: "aside" },
        [
          group.class,
          done,
          group.attempt ? `try ${group.attempt + 1}` : "",
          `level ${group.level}`,
          `T ${group.temperature.toFixed(2)}`,
          `${group.distinct} distinct of ${order.length}`,
          group.trap ? `trap: ${group.trap}` : "",
        ]
          .filter(Boolean)
          .join(" · "),
      ),
    ),
    el("details", {}, el("summary", {}, "Prompt"), el("pre", {}, group.prompt)),
    el(
      "details",
      { open: true },
      el("summary", {}, "Target"),
      fillWords(el("p", { class: "words" }), group, null, wordsOnly(group.target)),
    ),
    legendOfTint(group, most),
    ...order.map((sample, place) => rowOf(group, sample, place, most, order)),
  );
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
    el("b", {}, reward.toFixed(3)),
    el(
      "span",
      { class: "lean", title: "advantage" },
      el("i", { class: advantage < 0 ? "less" : "more", style: { width: `${50 * share}%` } }),
    ),
    el("small", {}, advantage == null ? "no advantage" : `${signed(advantage)} advantage`),
  );

  // A text that an earlier completion has is shown only when it is asked for.
  const whole = () => {
    const said = [
      `score ${value.toFixed(3)}`,
      exact ? "✓ exact" : stored.divergence || "right to the end",
      `${tokens} tokens, ${finish === "stop" ? "complete" : "truncated"}`,
    ];
    const parts = Object.entries(stored.parts).map(([name, part]) =>
      el("span", {}, el("b", {}, name), ` ${part}`),
    );
    return [
      el("p", { class: "meta" }, el("b", {}, `Completion ${sample}`), ` · ${said.join(" · ")}`),
      fillWords(el("div", { class: "words" }), group, sample, columnsOf(stored.ops)),
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
      onclick: () => markRow(place),
    },
    pay,
    what,
  );
}

function markRow(place) {
  state.row = place;
  document.querySelectorAll(".row").forEach((row, i) => row.classList.toggle("here", i === place));
}
