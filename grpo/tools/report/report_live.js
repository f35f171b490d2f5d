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
