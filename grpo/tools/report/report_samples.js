"use strict";
// The completions of the page: steps, groups, single words, and the search.

const CONTEXT = 6; // words shown at each end of a long run of right words
const MOST_TARGET = 60; // words of a target that is shown in full
const MOST_WORDS = 600; // words shown at once
const MOST_FINDS = 40; // matches listed
const TINTS = { alignment: "Alignment", logprob: "Log-prob", advantage: "Advantage" };

const parsed = new Map();

/** Return the kept steps of a run: step -> { count, groups }; parsed on first use. */
function samplesOf(number) {
  if (!parsed.has(number)) parsed.set(number, JSON.parse($(`samples-${number}`).textContent));
  return parsed.get(number);
}

const stepNow = () => samplesOf(state.run)[RUNS[state.run].kept[state.step]];
const groupNow = () => stepNow()?.groups[state.group];
const orderOf = (group) => group.rows.reward.map((_, i) => i).sort((a, b) => group.rows.reward[b] - group.rows.reward[a] || a - b);
const clamp = (value, count) => Math.max(0, Math.min(count - 1, value));

function go(changes, focus = false) {
  Object.assign(state, changes);
  state.step = clamp(state.step, RUNS[state.run].kept.length);
  state.group = clamp(state.group, stepNow()?.groups.length ?? 0);
  state.row = clamp(state.row, groupNow()?.rows.reward.length ?? 0);
  showStep();
  if (focus) document.querySelector(".row.here")?.scrollIntoView({ block: "nearest" });
}

function goToStep(step) {
  const kept = RUNS[state.run].kept;
  if (!kept.length) return;
  const near = kept.reduce((best, one, i) => (Math.abs(one - step) < Math.abs(kept[best] - step) ? i : best), 0);
  go({ step: near, group: 0, row: 0 });
  $("samples").scrollIntoView();
}

function chooseRun(number) {
  go({ run: number, step: 0, group: 0, row: 0 });
  drawCharts();
  showTables();
}

function showStep() {
  const run = RUNS[state.run], step = run.kept[state.step], at = run.metrics.step?.indexOf(step) ?? -1;
  document.querySelectorAll("#runs button").forEach((button) => button.setAttribute("aria-pressed", Number(button.dataset.run) === state.run));
  const left = run.stored - run.kept.length;
  $("kept").textContent = !run.stored ? `${run.name}: no rollouts are stored.` : left
    ? `This file has the completions of ${run.kept.length} of ${run.stored} steps (${run.kept.join(", ")}): the first, the last, those with a decision or a warning, and evenly spaced ones between them. The other ${left} were left out to limit its size; python -m grpo.inspect ${run.path} shows them, and --megabytes keeps more.`
    : `This file has the completions of all ${run.stored} steps.`;
  Object.assign($("slider"), { max: Math.max(0, run.kept.length - 1), value: state.step, disabled: run.kept.length < 2 });
  const say = (name, head, digits) => (run.metrics[name]?.[at] == null ? null : `${head} ${run.metrics[name][at].toFixed(digits)}`);
  $("step").replaceChildren(el("b", {}, step == null ? "no step" : `Step ${step}`), ` of ${run.made}`,
    el("span", { class: "aside" }, [say("reward", "reward", 3), say("level", "level", 0), say("temperature", "T", 2)].filter(Boolean).join(" · ")));
  $("slider").setAttribute("aria-valuetext", `step ${step}`);
  const there = stepNow(), missing = there ? there.count - there.groups.length : 0;
  $("groups").replaceChildren(...(there?.groups ?? []).map(card), missing ? el("p", { class: "aside" }, `${missing} of the step's ${there.count} groups were left out to limit the size of this file.`) : "");
  showGroup();
  drawMark();
}

function drawMark() {
  for (const spec of CHARTS) if (spec.mark && spec.listens) Plotly.relayout(spec.plot, { shapes: layoutOf(spec, []).shapes });
}

function card(group, place) {
  const [sign, number] = CLASSES[group.class] ?? ["?", 5];
  const low = Math.min(0, ...group.rows.reward), high = Math.max(1, ...group.rows.reward); // a task may have rewards outside [0, 1]
  return el("button", { class: "card", "aria-pressed": place === state.group, onclick: () => go({ group: place, row: 0 }), title: DATA.classes[group.class] ?? "the rewards vary" },
    el("span", { class: "class" }, el("i", { style: { background: `var(--c${number})` } }, sign), group.class, el("small", {}, `#${group.group}`)),
    el("span", { class: "bars", "aria-hidden": "true" }, orderOf(group).map((i) => el("i", { style: { height: `${8 + 92 * (group.rows.reward[i] - low) / (high - low)}%`, background: `var(--c${number})` } }))),
    el("span", { class: "paid" }, group.reward.toFixed(3), el("small", {}, ` ± ${group.reward_std.toFixed(3)}`)), group.trap && el("span", { class: "trap" }, `trap: ${group.trap}`));
}

function showGroup() {
  const group = groupNow();
  if (!group) return $("group").replaceChildren();
  const done = { keep: "trained on", skip: "skipped", resample: "sampled again" }[group.action] ?? group.action;
  const order = orderOf(group), most = Math.max(1e-9, ...group.rows.advantage.map((value) => Math.abs(value ?? 0)));
  $("group").replaceChildren(
    el("h3", {}, `Group ${group.group}`, el("span", { class: "aside" }, [group.class, done, group.attempt ? `try ${group.attempt + 1}` : "", `level ${group.level}`, `T ${group.temperature.toFixed(2)}`, `${group.distinct} distinct of ${order.length}`, group.trap ? `trap: ${group.trap}` : ""].filter(Boolean).join(" · "))),
    el("details", {}, el("summary", {}, "Prompt"), el("pre", {}, group.prompt)),
    el("details", { open: true }, el("summary", {}, "Target"), fillWords(el("p", { class: "words" }), group, null, wordsOnly(group.target))),
    legendOfTint(group, most), ...order.map((sample, place) => rowOf(group, sample, place, most, order)));
}

function rowOf(group, sample, place, most, order) {
  const { text, reward, value, exact, tokens, finish, advantage } = Object.fromEntries(Object.entries(group.rows).map(([name, column]) => [name, column[sample]]));
  const stored = group.texts[text], twin = order.slice(0, place).find((other) => group.rows.text[other] === text);
  const share = advantage == null ? 0 : Math.abs(advantage) / most;
  const pay = el("div", { class: "pay" }, el("b", {}, reward.toFixed(3)),
    el("span", { class: "lean", title: "advantage" }, el("i", { class: advantage < 0 ? "less" : "more", style: { width: `${50 * share}%` } })),
    el("small", {}, advantage == null ? "no advantage" : `${signed(advantage)} advantage`));
  const whole = () => {
    const said = [`score ${value.toFixed(3)}`, exact ? "✓ exact" : stored.divergence || "right to the end", `${tokens} tokens, ${finish === "stop" ? "complete" : "truncated"}`];
    const parts = Object.entries(stored.parts).map(([name, part]) => el("span", {}, el("b", {}, name), ` ${part}`));
    return [el("p", { class: "meta" }, el("b", {}, `Completion ${sample}`), ` · ${said.join(" · ")}`), fillWords(el("div", { class: "words" }), group, sample, columnsOf(stored.ops)),
      parts.length ? el("details", { class: "parts" }, el("summary", {}, "parts of the score"), el("p", {}, parts)) : null];
  };
  const what = el("div", { class: "what" });
  if (twin == null || group.rows.credits) what.append(...whole().filter(Boolean));
  else what.append(el("p", { class: "meta" }, el("b", {}, `Completion ${sample}`), el("button", { class: "fold", onclick: () => what.replaceChildren(...whole().filter(Boolean)) }, `same text as completion ${twin}`)));
  return el("article", { class: `row${place === state.row ? " here" : ""}${twin == null ? "" : " twin"}`, onclick: () => markRow(place) }, pay, what);
}

function markRow(place) {
  state.row = place;
  document.querySelectorAll(".row").forEach((row, i) => row.classList.toggle("here", i === place));
}

const wordsOnly = (text) => text.split(" ").filter(Boolean).map((_, i) => ({ kind: "=", i, j: i }));

/** Return the columns of an alignment from its run lengths: kind, place in the target (i), place in the text (j). */
function columnsOf(ops) {
  const columns = [];
  let i = 0, j = 0;
  for (const [, count, kind] of ops.matchAll(/(\d+)([=x+-])/g))
    for (let n = 0; n < Number(count); n++) columns.push({ kind, i: kind === "+" ? null : i++, j: kind === "-" ? null : j++ });
  return columns;
}

/** Put words into a box, the first MOST_WORDS of them; `sample` is null for the target itself. */
function fillWords(box, group, sample, columns) {
  const now = columns.slice(0, MOST_WORDS), later = columns.slice(MOST_WORDS), stored = sample == null ? null : group.texts[group.rows.text[sample]];
  const view = { target: group.target.split(" "), words: (stored ? stored.words : group.target).split(" "), stored, credits: group.rows.credits?.[sample],
    advantage: sample == null ? null : group.rows.advantage[sample], most: Math.max(1e-9, ...group.rows.advantage.map((value) => Math.abs(value ?? 0)), ...(group.rows.credits ?? []).flat().map(Math.abs)) };
  view.hits = hitsIn(view.words, state.query);
  for (let at = 0; at < now.length;) {
    let end = at;
    while (end < now.length && now[end].kind === "=" && !view.hits.has(now[end].j)) end++;
    if (end - at > (sample == null ? MOST_TARGET : 3 * CONTEXT)) {
      const hidden = now.slice(at + CONTEXT, end - CONTEXT);
      box.append(...now.slice(at, at + CONTEXT).map((column) => word(view, column)));
      const fold = el("button", { class: "fold", onclick: () => fold.replaceWith(...hidden.map((column) => word(view, column))) }, sample == null ? `… ${hidden.length} words …` : `… ${hidden.length} right …`);
      box.append(fold, " ", ...now.slice(end - CONTEXT, end).map((column) => word(view, column)));
      at = end;
    } else for (end = Math.max(end, at + 1); at < end; at++) box.append(word(view, now[at]));
  }
  if (!now.length) box.append(el("em", {}, "(no words)"));
  if (later.length) {
    const more = el("button", { class: "fold", onclick: () => { more.remove(); fillWords(box, group, sample, later); } }, `show ${Math.min(MOST_WORDS, later.length)} of ${later.length.toLocaleString("en")} more words`);
    box.append(more);
  }
  return box;
}

function word(view, { kind, i, j }) {
  const wanted = i == null ? null : view.target[i], written = j == null ? null : view.words[j];
  const node = el("span", { class: j != null && view.hits.has(j) ? "w hit" : "w" });
  if (kind === "x" || kind === "-") node.append(el("del", { title: "target" }, wanted));
  if (written != null) node.append(kind === "=" ? el("bdi", {}, written) : el("ins", { title: kind === "+" ? "too many" : `instead of ${wanted}` }, written));
  const last = node.lastChild, logprob = view.stored?.logprobs?.[j], worth = view.credits?.[j] ?? view.advantage;
  if (j != null && state.tint === "logprob" && logprob != null) {
    last.title = `probability ${Math.exp(logprob / 100).toPrecision(2)}, log-prob ${(logprob / 100).toFixed(2)}`;
    last.style.background = tintOf("--c1", bin(logprob / 100) / 4);
  } else if (j != null && state.tint === "advantage" && worth != null) {
    last.title = `advantage ${signed(worth, 3)}`;
    last.style.background = tintOf(worth < 0 ? "--c1" : "--c0", Math.abs(worth) / view.most);
  }
  return el("span", {}, node, " ");
}

const bin = (logprob) => [-0.105, -0.693, -2.303, -4.605].filter((edge) => logprob < edge).length; // probabilities 0.9, 0.5, 0.1, 0.01
const tintOf = (name, share) => `color-mix(in srgb, var(${name}) ${Math.round(55 * share)}%, transparent)`;

function legendOfTint(group, most) {
  const tinted = (text, name, share) => el("span", { class: "tinted", style: { background: tintOf(name, share) } }, text);
  const said = { alignment: ["right ", el("del", {}, "missing"), " ", el("ins", {}, "too many"), " ", el("span", { class: "w" }, el("del", {}, "target"), el("ins", {}, "written")), " instead"],
    logprob: group.texts.some((text) => text.logprobs) ? ["probability of a word: ", ...["above 0.9", "above 0.5", "above 0.1", "above 0.01", "less"].map((text, i) => tinted(text, "--c1", i / 4))] : ["There are no log-probabilities of words: the run has no checkpoint with a tokenizer."],
    advantage: group.rows.advantage.some((value) => value != null) ? ["advantage: ", tinted(signed(-most), "--c1", 1), tinted("0", "--c1", 0), tinted(signed(most), "--c0", 1)] : ["There are no advantages: the group was not trained on."] }[state.tint];
  return el("p", { class: "key", "data-tint": state.tint }, said);
}

// ---------------------------------------------------------------- search

/** Return the numbers of the words in which `query` occurs. */
function hitsIn(words, query) {
  const hits = new Set();
  if (query.length < 2) return hits;
  const text = words.join(" ").toLowerCase(), starts = [];
  words.reduce((at, one) => (starts.push(at), at + one.length + 1), 0);
  for (let at = text.indexOf(query), j = 0; at >= 0; at = text.indexOf(query, at + query.length))
    for (; j < words.length && starts[j] < at + query.length; j++) if (starts[j] + words[j].length > at) hits.add(j);
  return hits;
}

let finds = [], found = -1;

function search(query) {
  state.query = query.trim().toLowerCase().replace(/\s+/g, " ");
  [finds, found] = [[], -1];
  if (state.query.length > 1) RUNS[state.run].kept.forEach((step, place) => samplesOf(state.run)[step].groups.forEach((group, number) => {
    const order = orderOf(group);
    if (group.prompt.toLowerCase().includes(state.query)) finds.push({ step: place, group: number, row: 0, said: `step ${step} · group ${group.group} · prompt`, text: group.prompt });
    group.texts.forEach((text, i) => {
      if (!text.words.toLowerCase().includes(state.query)) return;
      const row = order.findIndex((sample) => group.rows.text[sample] === i);
      finds.push({ step: place, group: number, row, said: `step ${step} · group ${group.group} · completion ${order[row]}`, text: text.words });
    });
  }));
  const snippet = (text) => { const at = text.toLowerCase().indexOf(state.query); return `${at > 40 ? "… " : ""}${text.slice(Math.max(0, at - 40), at + 60)}`; };
  $("found").replaceChildren(...(state.query.length < 2 ? [] : [el("p", { class: "aside" }, `${finds.length || "No"} match${finds.length === 1 ? "" : "es"}${finds.length > MOST_FINDS ? `; the first ${MOST_FINDS}:` : ""}`),
    ...finds.slice(0, MOST_FINDS).map((find, i) => el("button", { class: "find", onclick: () => goToFind(i) }, el("b", {}, find.said), " ", snippet(find.text)))]));
  showGroup();
}

function goToFind(number) {
  if (!finds.length) return;
  found = number % finds.length;
  const { step, group, row } = finds[found];
  go({ step, group, row }, true);
  document.querySelectorAll(".find").forEach((button, i) => button.classList.toggle("here", i === found));
}
