"use strict";
// The words of a completion or a target: their alignment, and their colours.

const CONTEXT = 6; // words shown at each end of a long run of right words
const MOST_TARGET = 60; // words of a target that is shown in full
const MOST_WORDS = 600; // words shown at once

const wordsOnly = (text) =>
  text
    .split(" ")
    .filter(Boolean)
    .map((_, i) => ({ kind: "=", i, j: i }));

/** Return the columns of an alignment from its run lengths, e.g. "3=1x".

    A column has its kind, its place in the target (i) and its place in the text (j). */
function columnsOf(ops) {
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
    if (end - at > (sample == null ? MOST_TARGET : 3 * CONTEXT)) {
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
  return el("span", {}, node, " ");
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
  const said = {
    alignment: [
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
