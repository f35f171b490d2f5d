"use strict";
// The words of a completion or a target: their alignment, and their colours.

const TINTS = { alignment: "Alignment", logprob: "Log-prob", advantage: "Advantage" };
const CONTEXT = 6; // words shown at each end of a long run of right words
const MOST_TARGET = 60; // words of a target that is shown in full
const MOST_WORDS = 600; // words shown at once

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
    answer: stored?.answer ?? [0, 0],
    stored,
    credits: group.rows.credits?.[sample],
    advantage: sample == null ? null : group.rows.advantage[sample],
    most: Math.max(
      1e-9,
      ...group.rows.advantage.map((value) => Math.abs(value ?? 0)),
      ...(group.rows.credits ?? []).flat().map(Math.abs),
    ),
  };
  view.hits = hitsIn(view.words, state.query);

  // Long runs of right words are folded, except at their ends.
  for (let at = 0; at < now.length;) {
    let end = at;
    while (end < now.length && now[end].kind === "=" && !view.hits.has(now[end].j)) end++;
    const isAligned = sample != null && group.view === "alignment";
    if (end - at > (isAligned ? 3 * CONTEXT : MOST_TARGET) && (isAligned || sample == null)) {
      const hidden = now.slice(at + CONTEXT, end - CONTEXT);
      box.append(...now.slice(at, at + CONTEXT).map((column) => word(view, column)));
      const fold = el(
        "button",
        {
          class: "fold",
          onclick: () => fold.replaceWith(...hidden.map((column) => word(view, column))),
        },
        sample == null ? `… ${hidden.length} words …` : `… ${hidden.length} right …`,
      );
      box.append(fold, " ", ...now.slice(end - CONTEXT, end).map((column) => word(view, column)));
      at = end;
    } else {
      for (end = Math.max(end, at + 1); at < end; at++) box.append(word(view, now[at]));
    }
  }

  if (!now.length) box.append(el("em", {}, "(no words)"));
  if (later.length) {
    const count = Math.min(MOST_WORDS, later.length);
    const more = el(
      "button",
      {
        class: "fold",
        onclick: () => {
          more.remove();
          fillWords(box, group, sample, later);
        },
      },
      `show ${count} of ${later.length.toLocaleString("en")} more words`,
    );
    box.append(more);
  }
  return box;
}

/** Return a word of an alignment: what was wanted, what was written, and the colour of the tint. */
function word(view, { kind, i, j }) {
  const wanted = i == null ? null : view.target[i];
  const written = j == null ? null : view.words[j];
  const node = el("span", { class: j != null && view.hits.has(j) ? "w hit" : "w" });
  if (kind === "x" || kind === "-") node.append(el("del", { title: "target" }, wanted));
  if (written != null)
    node.append(
      kind === "="
        ? el("bdi", {}, written)
        : el("ins", { title: kind === "+" ? "too many" : `instead of ${wanted}` }, written),
    );

  const last = node.lastChild;
  const hundredths = view.stored?.logprobs?.[j];
  const worth = view.credits?.[j] ?? view.advantage;
  if (j != null && state.tint === "logprob" && hundredths != null) {
    const logprob = hundredths / 100;
    const probability = Math.exp(logprob).toPrecision(2);
    last.title = `probability ${probability}, log-prob ${logprob.toFixed(2)}`;
    last.style.background = tintOf("--c1", bin(logprob) / 4);
  } else if (j != null && state.tint === "advantage" && worth != null) {
    last.title = `advantage ${signed(worth, 3)}`;
    last.style.background = tintOf(worth < 0 ? "--c1" : "--c0", Math.abs(worth) / view.most);
  }
  if (j >= view.answer[0] && j < view.answer[1] && last) {
    last.classList.add("answer");
    last.title ||= "the answer that was read";
  }
  return el("span", {}, view.breaks.has(j) ? el("br") : "", node, " ");
}

/** Return the digits of the right number, each marked as right or wrong in the answer.

    Under a wrong sign none is right, as in the task's reward. */
function digitsOf(group, { parts }) {
  const right = parts.digits_right;
  const hasRightSign = parts.sign !== false;
  const digits = group.target.replace(/^-/, "");
  if (typeof right !== "string" || right.length !== digits.length) return null;
  const sign = group.target.startsWith("-") ? "−" : "";
  const mark = (digit, i) =>
    right[i] === "1" && hasRightSign
      ? el("span", { class: "digit" }, digit)
      : el("span", { class: "digit wrong" }, digit);
  const shown = [...digits].map(mark);
  const note = hasRightSign ? null : el("small", {}, " the sign is wrong, so no digit counts");
  return el("p", { class: "digits" }, "wanted ", sign, ...shown, note);
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

/** Return what the colours of words mean; `most` is the largest advantage of the group. */
function legendOfTint(group, most) {
  const tinted = (text, name, share) =>
    el("span", { class: "tinted", style: { background: tintOf(name, share) } }, text);
  const texts = {
    plain: ["There is no target to compare with: the words are shown as they were written."],
    digits: [
      "Of the wanted number: ",
      el("span", { class: "digit" }, "right"),
      " ",
      el("span", { class: "digit wrong" }, "wrong"),
      " digits.",
    ],
    reasoning: ["The ", el("bdi", { class: "answer" }, "answer"), " that was read is marked."],
  };
  const said = {
    alignment: texts[group.view] ?? [
      "right ",
      el("del", {}, "missing"),
      " ",
      el("ins", {}, "too many"),
      " ",
      el("span", { class: "w" }, el("del", {}, "target"), el("ins", {}, "written")),
      " instead",
    ],
    logprob: group.texts.some((text) => text.logprobs)
      ? [
          "probability of a word: ",
          ...["above 0.9", "above 0.5", "above 0.1", "above 0.01", "less"].map((text, i) =>
            tinted(text, "--c1", i / 4),
          ),
        ]
      : ["There are no log-probabilities of words: the run has no checkpoint with a tokenizer."],
    advantage: group.rows.advantage.some((value) => value != null)
      ? [
          "advantage: ",
          tinted(signed(-most), "--c1", 1),
          tinted("0", "--c1", 0),
          tinted(signed(most), "--c0", 1),
        ]
      : ["There are no advantages: the group was not trained on."],
  }[state.tint];
  return el("p", { class: "key", "data-tint": state.tint }, said);
}

/** Show what the colours of words can mean, and which of it they do. */
function showTints() {
  const label = (name) =>
    name === "alignment" && groupNow() && groupNow().view !== "alignment" ? "Text" : TINTS[name];
  $("tints").replaceChildren(
    ...Object.keys(TINTS).map((name) =>
      el(
        "button",
        { "aria-pressed": name === state.tint, onclick: () => chooseTint(name) },
        label(name),
      ),
    ),
  );
}

function chooseTint(tint) {
  state.tint = tint;
  showGroup();
}
