"use strict";
// The search in the completions of a run.

const MOST_FINDS = 40; // matches listed

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

let finds = [];
let found = -1;

/** Search the prompts and completions of the run, and list the matches. */
function search(query) {
  state.query = query.trim().toLowerCase().replace(/\s+/g, " ");
  finds = [];
  found = -1;

  const isLong = state.query.length > 1;
  if (isLong)
    RUNS[state.run].kept.forEach((step, place) =>
      samplesOf(state.run)[step]?.groups.forEach((group, number) =>
        searchGroup(group, { step: place, group: number }, `step ${step} · group ${group.group}`),
      ),
    );

  $("found").replaceChildren(...(isLong ? listOfFinds() : []));
  showGroup();
}

/** Add the matches in a group to `finds`; `at` is where the group is, `said` says it in words. */
function searchGroup(group, at, said) {
  const order = byReward(group);
  if (group.prompt.toLowerCase().includes(state.query))
    finds.push({ ...at, row: 0, said: `${said} · prompt`, text: group.prompt, inPrompt: true });

  group.texts.forEach((text, i) => {
    if (!text.words.toLowerCase().includes(state.query)) return;
    const row = order.findIndex((sample) => group.rows.text[sample] === i);
    finds.push({ ...at, row, said: `${said} · completion ${order[row]}`, text: text.words });
  });
}

/** Return how many matches there are, and a button for each of the first ones. */
function listOfFinds() {
  const snippet = (text) => {
    const at = text.toLowerCase().indexOf(state.query);
    return `${at > 40 ? "… " : ""}${text.slice(Math.max(0, at - 40), at + 60)}`;
  };
  const matches = finds.length === 1 ? "match" : "matches";
  const limit = finds.length > MOST_FINDS ? `; the first ${MOST_FINDS}:` : "";
  const buttons = finds
    .slice(0, MOST_FINDS)
    .map((find, i) =>
      el(
        "button",
        { class: "find", onclick: () => goToFind(i) },
        el("b", {}, find.said),
        " ",
        snippet(find.text),
      ),
    );
  return [el("p", { class: "aside" }, `${finds.length || "No"} ${matches}${limit}`), ...buttons];
}

/** Show match `number`, counted on from the first one again after the last. */
function goToFind(number) {
  if (!finds.length) return;
  found = number % finds.length;
  const { step, group, row, inPrompt } = finds[found];
  if (inPrompt) state.promptOpen = true;
  state.filter = { ...NO_FILTER };
  go({ step, group, row }, !inPrompt);
  if (inPrompt) $("prompt").scrollIntoView({ block: "center" });
  document
    .querySelectorAll(".find")
    .forEach((button, i) => button.classList.toggle("here", i === found));
}
