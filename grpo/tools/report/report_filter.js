"use strict";
// Which groups and completions are shown, and the address of what is shown.

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
    (!truncated || group.rows.finish[sample] === "length")
  );
}

/** Return the completions of a group that pass the filter, highest reward first. */
const orderOf = (group) => byReward(group).filter((sample) => passes(group, sample));

/** Return whether a group passes the filter, and has a completion that does. */
function matches(group) {
  const { outcome, trap } = state.filter;
  return (
    (!outcome || group.class === outcome) &&
    (!trap ||
      (trap === "any" ? group.trap : group.texts.some((text) => text.parts.trap === trap))) &&
    group.rows.reward.some((_, sample) => passes(group, sample))
  );
}

/** Return the group at `place`, or the nearest one after or before it that passes the filter. */
function nearestGroup(place, direction = 1) {
  const groups = stepNow()?.groups ?? [];
  for (let at = place; at >= 0 && at < groups.length; at += direction)
    if (matches(groups[at])) return at;
  const other = groups.findIndex(matches);
  return other < 0 ? place : direction > 0 ? groups.findLastIndex(matches) : other;
}

function makeFilter() {
  const change = (name, value) => {
    state.filter = { ...state.filter, [name]: value };
    go({ row: 0 });
  };
  const select = (name, label) =>
    el(
      "label",
      {},
      `${label} `,
      el("select", { id: name, onchange: (event) => change(name, event.target.value) }),
    );
  const number = (name, label) =>
    el(
      "label",
      {},
      `${label} `,
      el("input", {
        id: name,
        type: "number",
        step: "any",
        oninput: (event) => change(name, event.target.value),
      }),
    );
  const truncated = el("input", {
    id: "truncated",
    type: "checkbox",
    onchange: (event) => change("truncated", event.target.checked),
  });
  $("filter").append(
    select("outcome", "outcome"),
    select("trap", "trap"),
    number("low", "reward from"),
    number("high", "to"),
    el("label", {}, truncated, " truncated"),
    el("output", { id: "passed" }),
  );
}

/** Offer the outcomes and traps of the step, and say how many groups pass. */
function showFilter() {
  const groups = stepNow()?.groups ?? [];
  const outcomes = [...new Set(groups.map((group) => group.class)), state.filter.outcome];
  const traps = groups.flatMap((group) => group.texts.map((text) => text.parts.trap));
  const options = (id, first, names) =>
    $(id).replaceChildren(
      ...Object.entries(first).map(([value, text]) => el("option", { value }, text)),
      ...[...new Set(names)].filter(Boolean).map((name) => el("option", { value: name }, name)),
    );
  options("outcome", { "": "all" }, outcomes);
  const known = state.filter.trap === "any" ? "" : state.filter.trap;
  options("trap", { "": "all", any: "a common trap" }, [...traps, known]);
  $("outcome").value = state.filter.outcome;
  $("trap").value = state.filter.trap;
  const passed = groups.filter(matches).length;
  $("passed").textContent = passed < groups.length ? `${passed} of ${groups.length} groups` : "";
}

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
  return showPlace({
    run: Math.max(0, run),
    step: Number(place.get("step")),
    group: Number(place.get("group") ?? 0),
    completion: place.has("completion") ? Number(place.get("completion")) : null,
  });
}

/** Show a completion, and then call `atEnd`; return whether its step is here.

    `completion` is null for the first one that is shown. */
function showPlace({ run, step, group, completion }, atEnd = focusRow) {
  const at = RUNS[run].kept.indexOf(step);
  if (at < 0) return false;

  const show = () => {
    const { groups } = samplesOf(run)[step];
    const place = Math.max(
      0,
      groups.findIndex((one) => one.group === group),
    );
    const order = groups.length ? byReward(groups[place]) : [];
    state.filter = { ...NO_FILTER };
    go({ run, step: at, group: place, row: Math.max(0, order.indexOf(completion)) });
    atEnd();
  };
  if (DATA.live) loadGroup(run, step, group).then(show);
  else show();
  return true;
}
