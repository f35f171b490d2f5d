"use strict";
// The samples: which steps, groups and completions are shown, their filter, and their words.

const TINTS = { alignment: "Alignment", logprob: "Log-prob", advantage: "Advantage" };
const CONTEXT = 6; // words shown at each end of a long run of right words
const MOST_TARGET = 60; // words of a target that is shown in full
const MOST_WORDS = 600; // words shown at once

const parsed = new Map();

/** Return the steps of a run that are here: step -> groups; parsed on first use. */
function samplesOf(number) {
  if (!parsed.has(number)) parsed.set(number, JSON.parse($(`samples-${number}`).textContent));
  return parsed.get(number);
}

const stepNumber = () => RUNS[state.run].kept[state.step];
const stepNow = () => samplesOf(state.run)[stepNumber()];
const groupNow = () => stepNow()?.[state.group];

/** Change what is shown, and show it; with `focus`, scroll to the completion. */
function go(changes, focus = false) {
  Object.assign(state, changes);
  state.step = clamp(state.step, RUNS[state.run].kept.length);
  state.group = nearestGroup(clamp(state.group, stepNow()?.length ?? 0));
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
  const distances = kept.map((one) => Math.abs(one - step));
  go({ run, step: distances.indexOf(Math.min(...distances)), group: 0, row: 0 });
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

// ---- the filter

const byReward = (group) =>
  group.rows.reward
    .map((_, i) => i)
    .sort((a, b) => group.rows.reward[b] - group.rows.reward[a] || a - b);

/** Return whether a completion passes the filter. */
function passes(group, sample) {
  const { low, high, truncated } = state.filter;
  const reward = group.rows.reward[sample];
  return (
    (low === "" || reward >= Number(low)) &&
    (high === "" || reward <= Number(high)) &&
    (!truncated || group.rows.ending[sample] === "truncated")
  );
}

/** Return the completions of a group that pass the filter, highest reward first. */
const orderOf = (group) => byReward(group).filter((sample) => passes(group, sample));

/** Return whether a group passes the filter, and has a completion that does. */
function matches(group) {
  const { outcome, trap } = state.filter;
  const isIn = ({ parts }) => parts.trap === trap;
  const hasTrap = trap === "any" ? group.trap : group.texts.some(isIn);
  return (!outcome || group.class === outcome) && (!trap || hasTrap) && orderOf(group).length > 0;
}

/** Return the group at `place`, or the nearest one after or before it that passes the filter. */
function nearestGroup(place, direction = 1) {
  const groups = stepNow() ?? [];
  for (let at = place; at >= 0 && at < groups.length; at += direction)
    if (matches(groups[at])) return at;
  const other = groups.findIndex(matches);
  return other < 0 ? place : direction > 0 ? groups.findLastIndex(matches) : other;
}

function makeFilter() {
  const field = (id, label, tag, attributes = {}) => {
    const oninput = ({ target }) => {
      const value = target.type === "checkbox" ? target.checked : target.value;
      state.filter = { ...state.filter, [id]: value };
      go({ row: 0 });
    };
    return el("label", {}, `${label} `, el(tag, { id, ...attributes, oninput }));
  };
  $("filter").append(
    field("outcome", "outcome", "select"),
    field("trap", "trap", "select"),
    field("low", "reward from", "input", { type: "number", step: "any" }),
    field("high", "to", "input", { type: "number", step: "any" }),
    field("truncated", "truncated", "input", { type: "checkbox" }),
    el("output", { id: "passed" }),
  );
}

/** Offer the outcomes and traps of the step, and say how many groups pass. */
function showFilter() {
  const groups = stepNow() ?? [];
  const offer = (id, first, names) => {
    const others = new Set([...names, state.filter[id]].filter((name) => name && !first[name]));
    const options = [...Object.entries(first), ...[...others].map((name) => [name, name])];
    $(id).replaceChildren(...options.map(([value, text]) => el("option", { value }, text)));
    $(id).value = state.filter[id];
  };
  const traps = groups.flatMap((group) => group.texts.map((text) => text.parts.trap));
  offer("outcome", { "": "all" }, groups.map((group) => group.class));
  offer("trap", { "": "all", any: "a common trap" }, traps);
  const passed = groups.filter(matches).length;
  $("passed").textContent = passed < groups.length ? `${passed} of ${groups.length} groups` : "";
}

// ---- the address of what is shown

/** Write the address of what is shown: #run=NAME&step=12&group=3&completion=10. */
function writeLink() {
  const group = groupNow();
  if (!group) return;
  const place = new URLSearchParams({
    run: RUNS[state.run].name,
    step: stepNumber(),
    group: group.group,
    completion: orderOf(group)[state.row] ?? 0,
  });
  history.replaceState(null, "", `#${place}`);
}

/** Show what the address says; return whether it says anything that is here. */
function readLink() {
  const place = new URLSearchParams(location.hash.slice(1));
  if (!place.has("step")) return false;
  const run = RUNS.findIndex((one) => one.name === place.get("run"));
  const [step, group] = [place.get("step"), place.get("group") ?? 0].map(Number);
  return showPlace({ run: Math.max(0, run), step, group, completion: place.get("completion") });
}

/** Show a completion, and then call `atEnd`; return whether its step is here.

    `completion` is null for the first one that is shown. */
function showPlace({ run, step, group, completion }, atEnd = focusRow) {
  const at = RUNS[run].kept.indexOf(step);
  if (at < 0) return false;

  const groups = samplesOf(run)[step];
  const found = groups.findIndex((one) => one.group === group);
  const place = Math.max(0, found);
  const row = completion == null ? 0 : byReward(groups[place]).indexOf(Number(completion));
  state.filter = { ...NO_FILTER };
  go({ run, step: at, group: place, row: Math.max(0, row) });
  atEnd();
  return true;
}

// ---- a step and its groups

function showStep() {
  const run = RUNS[state.run];
  const step = stepNumber();
  for (const one of document.querySelectorAll("#runs button"))
    one.setAttribute("aria-pressed", Number(one.dataset.run) === state.run);
  $("kept").textContent = aboutKept(run);
  $("slider").max = Math.max(0, run.kept.length - 1);
  $("slider").value = state.step;
  $("slider").disabled = run.kept.length < 2;
  $("slider").setAttribute("aria-valuetext", `step ${step}`);

  // The figures of this step.
  const at = run.metrics.step?.indexOf(step) ?? -1;
  const say = (name, head, digits) => {
    const value = run.metrics[name]?.[at];
    return value == null ? [] : `${head} ${value.toFixed(digits)}`;
  };
  const said = [say("reward", "reward", 3), say("level", "level", 0)];
  $("step").replaceChildren(
    el("b", {}, step == null ? "no step" : `Step ${step}`),
    ` of ${run.made}`,
    el("span", { class: "aside" }, said.flat().join(" · ")),
  );

  const groups = stepNow() ?? [];
  const cards = groups.flatMap((group, place) => (matches(group) ? card(group, place) : []));
  showFilter();
  $("groups").replaceChildren(...cards);
  showGroup();
  drawMark();
}

/** Return which steps of a run have completions in this file. */
function aboutKept(run) {
  if (!run.stored) return `${run.name}: no rollouts are stored.`;
  if (run.stored === run.kept.length)
    return `This file has the completions of all ${run.stored} steps.`;
  return (
    `This file has the completions of ${run.kept.length} of ${run.stored} steps: the first, the ` +
    "last, those with a decision or a warning, and evenly spaced ones. --megabytes keeps more; " +
    `${run.inspect} step N shows the others.`
  );
}

/** Return the card of a group: its outcome, its rewards, its trap. */
function card(group, place) {
  const [sign, number] = CLASSES[group.class] ?? ["?", 5];
  const background = `var(--c${number})`;
  // A task may have rewards outside [0, 1].
  const low = Math.min(0, ...group.rows.reward);
  const high = Math.max(1, ...group.rows.reward);
  const bars = byReward(group).map((i) => {
    const share = (group.rows.reward[i] - low) / (high - low);
    return el("i", { style: { height: `${8 + 92 * share}%`, background } });
  });
  const spread = ` ± ${group.reward_std.toFixed(3)}`;
  return button(
    {
      class: "card",
      "aria-pressed": place === state.group,
      onclick: () => go({ group: place, row: 0 }),
      title: DATA.classes[group.class] ?? "the rewards vary",
    },
    el(
      "span",
      { class: "class" },
      el("i", { style: { background } }, sign),
      group.class,
      el("small", {}, `#${group.group}`),
    ),
    el("span", { class: "bars", "aria-hidden": "true" }, bars),
    el("span", {}, group.reward.toFixed(3), el("small", {}, spread)),
    group.trap && el("small", {}, `trap: ${group.trap}`),
  );
}

function showGroup() {
  showTints();
  const group = groupNow();
  if (!group || !matches(group)) return $("group").replaceChildren();
  const order = orderOf(group);
  const count = group.rows.reward.length;
  const facts = [
    group.class,
    { keep: "trained on", skip: "skipped" }[group.action] ?? group.action,
    `level ${group.level}`,
    `T ${group.temperature.toFixed(2)}`,
    `${group.distinct} distinct of ${count}`,
    order.length < count ? `${order.length} shown` : "",
    group.trap ? `trap: ${group.trap}` : "",
  ];
  const said = el("span", { class: "aside" }, facts.filter(Boolean).join(" · "));
  $("group").replaceChildren(
    el("h3", {}, `Group ${group.group}`, said),
    promptOf(group),
    group.target ? targetOf(group) : "",
    ...group.row.map(([name, text]) => el("p", { class: "aside" }, `${name}: ${text}`)),
    legendOfTint(group),
    ...order.map((sample, place) => rowOf(group, sample, place, order)),
  );
}

/** Return the prompt: as the model saw it, with its template, if the run has a tokenizer. */
function promptOf(group) {
  const [before, after] = group.around ?? ["", ""];
  const template = (text) => text && el("span", { class: "template" }, text);
  const details = el(
    "details",
    { id: "prompt", open: state.promptOpen },
    el("summary", {}, group.around ? "Prompt, as the model saw it" : "Prompt"),
    el("pre", {}, template(before), marked(group.prompt, state.query), template(after)),
  );
  details.addEventListener("toggle", () => (state.promptOpen = details.open));
  return details;
}

function targetOf(group) {
  const words = fillWords(el("p", { class: "words" }), group, null, wordsOnly(group.target));
  return el("details", { open: true }, el("summary", {}, "Target"), words);
}

/** Return the largest advantage of a group, of its words if they have their own. */
const largest = ({ rows }) =>
  Math.max(1e-9, ...rows.advantage.map(Math.abs), ...(rows.credits ?? []).flat().map(Math.abs));

/** Return a completion of a group; `order` holds the completions that are shown. */
function rowOf(group, sample, place, order) {
  const { text, reward, value, exact, tokens, ending, advantage } = Object.fromEntries(
    Object.entries(group.rows).map(([name, column]) => [name, column[sample]]),
  );
  const stored = group.texts[text];
  const twin = order.slice(0, place).find((other) => group.rows.text[other] === text);

  // The reward, and a bar for the advantage.
  const most = Math.max(1e-9, ...group.rows.advantage.map(Math.abs));
  const width = `${(50 * Math.abs(advantage ?? 0)) / most}%`;
  const bar = el("i", { class: advantage < 0 ? "less" : "more", style: { width } });
  const pay = el(
    "div",
    { class: "pay" },
    el("b", {}, reward.toFixed(3)),
    el("span", { class: "lean", title: "advantage" }, bar),
    el("small", {}, advantage == null ? "no advantage" : `${signed(advantage)} advantage`),
  );

  // A text that an earlier completion has is shown only when it is asked for.
  const what = el("div", { class: "what" });
  const name = el("b", {}, `Completion ${sample}`);
  const showWhole = () => {
    const toTheEnd = group.view === "alignment" && "right to the end";
    const said = [
      `score ${value.toFixed(3)}`,
      exact ? "✓ exact" : stored.divergence || toTheEnd,
      `${tokens} tokens, ${ending}`,
    ];
    const parts = Object.entries(stored.parts).map(([part, worth]) =>
      el("span", {}, el("b", {}, part), ` ${worth}`),
    );
    const summary = el("summary", {}, "parts of the score");
    what.replaceChildren(
      el("p", { class: "formula" }, stored.formula),
      el("p", { class: "meta" }, name, ` · ${said.filter(Boolean).join(" · ")}`),
      fillWords(el("div", { class: "words" }), group, sample, columnsOf(group, stored)),
      parts.length ? el("details", { class: "parts" }, summary, el("p", {}, parts)) : "",
    );
  };
  if (twin == null || group.rows.credits) {
    showWhole();
  } else {
    const same = `same text as completion ${twin}`;
    const fold = button({ class: "fold", onclick: showWhole }, same);
    what.append(el("p", { class: "meta" }, name, fold));
  }

  const classes = ["row", place === state.row && "here", twin != null && "twin"];
  const attributes = { class: classes.filter(Boolean).join(" "), tabindex: -1 };
  attributes["aria-label"] = `completion ${sample}`;
  attributes.onclick = () => {
    state.row = place;
    const rows = document.querySelectorAll(".row");
    rows.forEach((row, i) => row.classList.toggle("here", i === place));
    writeLink();
  };
  return el("article", attributes, pay, what);
}

// ---- words: their alignment, and their colours

const wordsOnly = (text) =>
  text
    .split(" ")
    .filter(Boolean)
    .map((_, i) => ({ kind: "=", i, j: i }));

/** Return the columns of a text: of its alignment, from run lengths such as "3=1x", or its words.

    A column has its kind, its place in the target (i) and its place in the text (j). */
function columnsOf(group, { words, ops }) {
  if (group.view !== "alignment") return wordsOnly(words);
  const columns = [];
  let i = 0;
  let j = 0;
  for (const [, count, kind] of ops.matchAll(/(\d+)([=x+-])/g))
    for (let n = 0; n < Number(count); n++)
      columns.push({ kind, i: kind === "+" ? null : i++, j: kind === "-" ? null : j++ });
  return columns;
}

/** Put words into a box, the first MOST_WORDS of them; `sample` is null for the target itself. */
function fillWords(box, group, sample, columns) {
  const now = columns.slice(0, MOST_WORDS);
  const later = columns.slice(MOST_WORDS);
  const stored = sample == null ? null : group.texts[group.rows.text[sample]];
  const view = {
    target: group.target.split(" "),
    words: (stored ? stored.words : group.target).split(" "),
    breaks: new Set(stored?.breaks),
    logprobs: stored?.logprobs,
    credits: group.rows.credits?.[sample],
    advantage: sample == null ? null : group.rows.advantage[sample],
    most: largest(group),
  };
  view.hits = hitsIn(view.words, state.query);
  const draw = (some) => some.map((column) => word(view, column));

  // Long runs of right words are folded, except at their ends.
  const isAligned = sample != null && group.view === "alignment";
  const most = isAligned ? 3 * CONTEXT : sample == null ? MOST_TARGET : Infinity;
  for (let at = 0; at < now.length; ) {
    let end = at;
    while (end < now.length && now[end].kind === "=" && !view.hits.has(now[end].j)) end++;
    if (end - at > most) {
      const hidden = now.slice(at + CONTEXT, end - CONTEXT);
      const said = `… ${hidden.length} ${isAligned ? "right" : "words"} …`;
      const unfold = ({ currentTarget }) => currentTarget.replaceWith(...draw(hidden));
      box.append(...draw(now.slice(at, at + CONTEXT)));
      box.append(button({ class: "fold", onclick: unfold }, said), " ");
      box.append(...draw(now.slice(end - CONTEXT, end)));
    } else {
      end = Math.max(end, at + 1);
      box.append(...draw(now.slice(at, end)));
    }
    at = end;
  }

  if (!now.length) box.append(el("em", {}, "(no words)"));
  if (later.length) {
    const count = Math.min(MOST_WORDS, later.length);
    const onclick = ({ currentTarget }) => {
      currentTarget.remove();
      fillWords(box, group, sample, later);
    };
    box.append(button({ class: "fold", onclick }, `show ${count} of ${later.length} more words`));
  }
  return box;
}

/** Return a word of an alignment: what was wanted, what was written, and the colour of the tint. */
function word(view, { kind, i, j }) {
  const wanted = i == null ? null : view.target[i];
  const written = j == null ? null : view.words[j];
  const node = el("span", { class: j != null && view.hits.has(j) ? "w hit" : "w" });
  if (kind === "x" || kind === "-") node.append(el("del", { title: "target" }, wanted));
  if (written != null && kind === "=") node.append(el("bdi", {}, written));
  else if (written != null)
    node.append(el("ins", { title: kind === "+" ? "too many" : `instead of ${wanted}` }, written));

  const last = node.lastChild;
  const hundredths = view.logprobs?.[j];
  const worth = view.credits?.[j] ?? view.advantage;
  if (j != null && state.tint === "logprob" && hundredths != null) {
    const logprob = hundredths / 100;
    const probability = Math.exp(logprob).toPrecision(2);
    last.title = `probability ${probability}, log-prob ${logprob.toFixed(2)}`;
    last.style.background = tintOf("--c1", bin(logprob) / 4);
  } else if (j != null && state.tint === "advantage" && worth != null) {
    last.title = `advantage ${signed(worth)}`;
    last.style.background = tintOf(worth < 0 ? "--c1" : "--c0", Math.abs(worth) / view.most);
  }
  return el("span", {}, view.breaks.has(j) ? el("br") : "", node, " ");
}

/** Return a text whose parts that match `query` are marked. */
function marked(text, query) {
  if (query.length < 2) return [text];
  const pieces = [];
  const lower = text.toLowerCase();
  let from = 0;
  for (let at = lower.indexOf(query); at >= 0; at = lower.indexOf(query, from)) {
    pieces.push(text.slice(from, at), el("mark", {}, text.slice(at, at + query.length)));
    from = at + query.length;
  }
  return [...pieces, text.slice(from)];
}

// Logarithms of the probabilities 0.9, 0.5, 0.1 and 0.01.
const EDGES = [-0.105, -0.693, -2.303, -4.605];
const bin = (logprob) => EDGES.filter((edge) => logprob < edge).length;
const tintOf = (name, share) =>
  `color-mix(in srgb, var(${name}) ${Math.round(55 * share)}%, transparent)`;

/** Return what the colours of words mean. */
function legendOfTint(group) {
  const tinted = (text, name, share) =>
    el("span", { class: "tinted", style: { background: tintOf(name, share) } }, text);
  const said = () => {
    if (state.tint === "logprob") {
      if (!group.texts.some((text) => text.logprobs))
        return ["No log-probabilities of words: the run has no checkpoint with a tokenizer."];
      const names = ["above 0.9", "above 0.5", "above 0.1", "above 0.01", "less"];
      return ["probability of a word: ", ...names.map((text, i) => tinted(text, "--c1", i / 4))];
    }
    if (state.tint === "advantage") {
      if (group.rows.advantage.every((value) => value == null))
        return ["There are no advantages: the group was not trained on."];
      const most = largest(group);
      const ends = [tinted(signed(-most), "--c1", 1), tinted(signed(most), "--c0", 1)];
      return ["advantage: ", ends[0], tinted("0", "--c1", 0), ends[1]];
    }
    const texts = {
      plain: ["The words are shown as they were written."],
      alignment: [
        "right ",
        el("del", {}, "missing"),
        " ",
        el("ins", {}, "too many"),
        " ",
        el("span", { class: "w" }, el("del", {}, "target"), el("ins", {}, "written")),
        " instead",
      ],
    };
    return texts[group.view];
  };
  return el("p", { class: "key" }, said());
}

/** Show what the colours of words can mean, and which of it they do. */
function showTints() {
  const isText = groupNow() && groupNow().view !== "alignment";
  const tint = ([name, label]) => {
    const attributes = { "aria-pressed": name === state.tint, onclick: () => chooseTint(name) };
    return button(attributes, name === "alignment" && isText ? "Text" : label);
  };
  $("tints").replaceChildren(...Object.entries(TINTS).map(tint));
}

function chooseTint(tint) {
  state.tint = tint;
  showGroup();
}
