"use strict";
// The live page asks its own server for what is new in the runs, and for completions.

const EVERY = 2000; // milliseconds between two questions
const loading = new Map();
let version = "";

/** Return what the server answers, as JSON. */
async function ask(what) {
  const answer = await fetch(what, { cache: "no-store" });
  const value = await answer.json();
  if (value.error) throw new Error(value.error);
  return value;
}

/** Fetch the completions of a step, once. */
function loadStep(run, step) {
  const name = `samples?run=${run}&step=${step}`;
  if (!loading.has(name))
    loading.set(
      name,
      ask(name)
        .then((value) => (samplesOf(run)[step] = value))
        .catch((error) => {
          samplesOf(run)[step] = { count: 0, groups: [] };
          say(error.message);
        }),
    );
  return loading.get(name);
}

/** Fetch a step, and the group of it that it may have been sent without because it is large. */
async function loadGroup(run, step, number) {
  await loadStep(run, step);
  const { count, groups } = samplesOf(run)[step];
  if (number >= count || groups.some((one) => one.group === number)) return;
  try {
    groups.push(await ask(`group?run=${run}&step=${step}&group=${number}`));
    groups.sort((a, b) => a.group - b.group);
  } catch (error) {
    say(error.message);
  }
}

let isAsking = false;

/** Ask for matches until as many as are listed are here, or all steps were searched. One question
    is asked at a time, so that the server has little to do. */
async function askForFinds() {
  if (isAsking) return;
  isAsking = true;
  const isHungry = ({ query, run, finds, listed, after, error }) =>
    query.length > 1 && !error && finds.length < listed && after < lastStep(run);
  while (isHungry(hunt)) {
    const { query, run, after } = hunt;
    const asked = hunt;
    const question = { run, after, until: lastStep(run), query };
    try {
      const { finds, searched } = await ask(`search?${new URLSearchParams(question)}`);
      asked.finds.push(...finds);
      asked.after = searched;
    } catch (error) {
      asked.error = error.message;
    }
    showFinds();
  }
  isAsking = false;
}

function say(text, isFresh = false) {
  $("live").hidden = false;
  $("live").classList.toggle("fresh", isFresh);
  $("live").textContent = text;
}

/** Take what is new in the runs, and stay where the reader is, or at the last step. */
function update(runs) {
  const before = RUNS[state.run];
  const wasLast = state.step >= before.kept.length - 1;
  const step = stepNumber();
  RUNS.splice(0, RUNS.length, ...runs);

  const { kept } = RUNS[state.run];
  showHead();
  showRunButtons();
  makeCharts();
  drawCharts();
  showTables();
  if (wasLast) go({ step: kept.length - 1, group: 0, row: 0 });
  else state.step = Math.max(0, kept.indexOf(step));
  searchOn();
}

async function follow() {
  try {
    const answer = await ask(`data?since=${encodeURIComponent(version)}`);
    if (answer.runs) {
      if (version) update(answer.runs);
      version = answer.version;
    }
    const last = RUNS[0].metrics.step?.at(-1) ?? 0;
    say(`live · step ${last} · ${new Date().toLocaleTimeString()}`, true);
  } catch (error) {
    say(`not live: ${error.message}`);
  }
  setTimeout(follow, EVERY);
}
