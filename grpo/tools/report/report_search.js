"use strict";
// The search in the completions of a run. A text matches if it contains the query, in upper or
// lower case alike: the prompt of each group, and each distinct text of its completions. The server
// of a live page searches by the same rule (search.py).

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

// What is searched for: in which run, the matches so far, the last step that was searched, how many
// matches are listed, which one was opened, and what went wrong.
let hunt = newHunt("");

function newHunt(query) {
  return { query, run: state.run, finds: [], after: 0, listed: MORE, opened: -1, error: "" };
}

const lastStep = (run) => RUNS[run].kept.at(-1) ?? 0;

/** Search the prompts and completions of the run, and list the matches. */
function search(text) {
  state.query = text.trim().toLowerCase().replace(/\s+/g, " ");
  hunt = newHunt(state.query);
  searchOn();
  showGroup();
}

/** Search the steps that have not been searched, and list the matches. */
function searchOn() {
  if (hunt.query.length > 1) {
    if (DATA.live) askForFinds();
    else searchPage();
  }
  showFinds();
}

/** Search the completions that the page holds. */
function searchPage() {
  const steps = samplesOf(hunt.run);
  for (const step of RUNS[hunt.run].kept)
    for (const group of steps[step].groups) hunt.finds.push(...findsIn(group, step));
  hunt.after = lastStep(hunt.run);
}

/** Return the matches in a group: its prompt, and its distinct texts. */
function findsIn(group, step) {
  const find = (completion, text) => ({ step, group: group.group, completion, text });
  const found = [];
  if (group.prompt.toLowerCase().includes(hunt.query)) found.push(find(null, group.prompt));
  group.texts.forEach(({ words }, i) => {
    if (words.toLowerCase().includes(hunt.query))
      found.push(find(group.rows.text.indexOf(i), words));
  });
  return found.map((one) => ({ ...one, text: excerpt(one.text) }));
}

function excerpt(text) {
  const at = text.toLowerCase().indexOf(hunt.query);
  return `${at > 40 ? "… " : ""}${text.slice(Math.max(0, at - 40), at + 60)}`;
}

/** List the first matches, and say how many there are and which steps were searched. */
function showFinds() {
  if (hunt.query.length < 2) return $("found").replaceChildren();
  const { finds, listed, after, error } = hunt;
  const isWhole = after >= lastStep(hunt.run);
  const isWaiting = !isWhole && !error && finds.length < listed;
  const said = [
    `${finds.length || (isWaiting ? "no" : "No")} ${finds.length === 1 ? "match" : "matches"}`,
    isWhole ? "" : ` in the steps up to ${after} of ${lastStep(hunt.run)}`,
    finds.length > listed ? `; the first ${listed}:` : "",
    isWaiting ? ", searching …" : "",
    error && `; the search ended: ${error}`,
  ].join("");

  const button = (find, i) => {
    const where = find.completion == null ? "prompt" : `completion ${find.completion}`;
    return el(
      "button",
      { class: i === hunt.opened ? "find here" : "find", onclick: () => goToFind(i) },
      el("b", {}, `step ${find.step} · group ${find.group} · ${where}`),
      " ",
      find.text,
    );
  };
  const more = el("button", { id: "more-finds", onclick: showMoreFinds }, "Show more");
  const hasMore = finds.length > listed || (!isWhole && !isWaiting && !error);
  $("found").replaceChildren(
    el("p", { class: "aside" }, said),
    ...finds.slice(0, listed).map(button),
    hasMore ? more : "",
  );
}

function showMoreFinds() {
  hunt.listed += MORE;
  if (DATA.live) searchOn();
  else showFinds();
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
