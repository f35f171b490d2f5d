"use strict";
// The data behind the charts: as tables in the page, and as files.

const MOST_ROWS = 200; // of a table in the page

/** Show the values of a chart as a table, at most MOST_ROWS evenly spaced steps. */
function showData(spec, box) {
  const run = RUNS[state.run];
  const [traces] = tracesOf(spec);
  const named = traces.filter((trace) => trace.name && trace.hoverinfo !== "skip");
  let content;
  if (spec.timeline) {
    const rows = eventsOf(run).flatMap(([kind, , , events]) =>
      events.map(([step, text]) => [step, kind, text]),
    );
    rows.sort((a, b) => a[0] - b[0]);
    content = table(spec.title, ["step", "kind", "what"], rows);
  } else if (spec.evals) {
    const rows = RUNS.flatMap((one) =>
      one.evals
        .filter((point) => point.mean != null)
        .map((point) => [
          point.step,
          one.name,
          point.level,
          point.purpose,
          fixed(point.mean, 3),
          `${fixed(point.ci_low, 3)} to ${fixed(point.ci_high, 3)}`,
        ]),
    );
    content = table(spec.title, ["step", "run", "level", "purpose", "mean", "95 % interval"], rows);
  } else {
    const steps = [...new Set(named.flatMap((trace) => trace.customdata))].sort((a, b) => a - b);
    const every = Math.ceil(steps.length / MOST_ROWS);
    const at = named.map((trace) => new Map(trace.customdata.map((step, i) => [step, trace.y[i]])));
    const rows = steps
      .filter((_, i) => i % every === 0)
      .map((step) => [step, ...at.map((values) => brief(values.get(step)))]);
    content = table(spec.title, ["step", ...named.map((trace) => trace.name)], rows);
  }
  box.replaceChildren(box.firstElementChild, content);
}

/** Return a field of a CSV file. A text that a spreadsheet would run as a formula is quoted. */
function csvField(value) {
  if (value == null) return "";
  const text = typeof value === "string" && /^[=+\-@\t\r]/.test(value) ? `'${value}` : `${value}`;
  return /[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}

/** Return the metrics of all runs as CSV: a line for each step that is drawn. */
function metricsAsCsv() {
  const names = [...new Set(RUNS.flatMap((run) => Object.keys(run.metrics)))];
  const lines = RUNS.flatMap((run) =>
    (run.metrics.step ?? []).map((_, i) => [
      run.name,
      ...names.map((name) => run.metrics[name]?.[i]),
    ]),
  );
  return [["run", ...names], ...lines].map((row) => row.map(csvField).join(",")).join("\n") + "\n";
}

/** Return metrics, evaluations, decisions and warnings of all runs as JSON. */
function runsAsJson() {
  const KEPT = ["name", "metrics", "evals", "decisions", "warnings", "config", "facts", "outcome"];
  const kept = RUNS.map((run) => Object.fromEntries(KEPT.map((key) => [key, run[key]])));
  return JSON.stringify(kept, null, 1);
}

function makeControls() {
  const changed = () => drawCharts();
  const axis = el(
    "select",
    {
      id: "axis",
      onchange: (event) => {
        state.axis = event.target.value;
        state.range = null;
        $("unzoom").hidden = true;
        changed();
      },
    },
    Object.keys(AXES).map((name) => el("option", { value: name }, name)),
  );
  const smoothing = el("input", {
    id: "smoothing",
    type: "range",
    min: 0,
    max: 0.95,
    step: 0.05,
    value: 0,
    oninput: (event) => {
      state.smoothing = Number(event.target.value);
      changed();
    },
  });
  const log = el("input", {
    id: "log",
    type: "checkbox",
    onchange: (event) => {
      state.log = event.target.checked;
      changed();
    },
  });
  const unzoom = el(
    "button",
    {
      id: "unzoom",
      hidden: true,
      onclick: () => {
        state.range = null;
        unzoom.hidden = true;
        changed();
      },
    },
    "Whole run",
  );
  const name = RUNS.map((run) => run.name).join("-");
  const csv = () => download(`${name}.csv`, metricsAsCsv(), "text/csv");
  const json = () => download(`${name}.json`, runsAsJson(), "application/json");
  $("controls").append(
    el("label", {}, "x-axis ", axis),
    el("label", {}, "smoothing ", smoothing),
    el("label", {}, log, " log scale"),
    unzoom,
    el("span", { class: "gap" }),
    el("button", { id: "csv", onclick: csv, "aria-label": "save the metrics as CSV" }, "CSV"),
    el("button", { id: "json", onclick: json, "aria-label": "save the data as JSON" }, "JSON"),
  );
}
