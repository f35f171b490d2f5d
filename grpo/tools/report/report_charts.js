"use strict";
// What the charts of the page draw: the traces of the chart library.

const DASHES = ["solid", "dash", "dot", "dashdot", "longdash", "longdashdot"];
const DASH_PIXELS = {
  solid: "",
  dash: "6 3",
  dot: "2 2",
  dashdot: "6 3 2 3",
  longdash: "10 3",
  longdashdot: "10 3 2 3",
};
const MOST_PREFIXED = 6; // lines of a chart of metrics whose names begin alike

// What the x-axis can be: its title, and the values of a run.
const AXES = {
  step: ["step", (run) => run.metrics.step],
  tokens: ["sampled tokens", (run) => run.metrics.num_tokens],
  time: ["minutes of training", (run) => run.minutes],
};

const xsOf = (run) => AXES[state.axis][1](run) ?? [];

/** Return where a step lies on the x-axis; before the first step it is 0. */
function placeOf(run, step) {
  if (state.axis === "step") return step;
  const at = (run.metrics.step ?? []).findLastIndex((one) => one <= step);
  return at < 0 ? 0 : xsOf(run)[at];
}

/** Return the traces of a chart and the entries of its legend.

    There are no traces if the run has no such metrics. */
function tracesOf(spec, run = RUNS[state.run]) {
  if (spec.lines) return linesOf(spec);
  if (spec.stack) return stackOf(spec, run);
  if (spec.prefix) return prefixedOf(spec, run);
  if (spec.evals) return evaluationsOf(spec);
  return [spec.timeline ? timelineOf(run) : [], []];
}

/** Return whether a value has no neighbour, so that a line alone would not show it. */
const isLonely = (y, i) => y[i] != null && y[i - 1] == null && y[i + 1] == null;

/** Return a trace of the chart library: the values `y` of the run `one`. A gap stays a gap, and a
    value between two gaps is a point. */
function traceOf(spec, one, y, name, stroke, dash, more = {}) {
  const isPoint = y.map((_, i) => y.length < 4 || isLonely(y, i));
  return {
    x: xsOf(one),
    y,
    customdata: one.metrics.step,
    name: plain(name),
    mode: isPoint.includes(true) ? "lines+markers" : "lines",
    marker: {
      size: isPoint.map((is) => (is ? 6 : 0)),
      color: stroke,
      line: { width: 0 },
      opacity: 1,
    },
    connectgaps: false,
    line: { color: stroke, dash, width: 2, shape: spec.shape || "linear" },
    ...more,
  };
}

/** Return the exponential moving average of values; a gap stays a gap. */
function smooth(y) {
  let mean = null;
  return y.map((value) => {
    if (value == null) return null;
    mean = mean == null ? value : state.smoothing * mean + (1 - state.smoothing) * value;
    return mean;
  });
}

/** Return the trace of a metric, and beneath it a faint one of the values before smoothing. */
function curve(spec, one, y, name, stroke, dash) {
  if (!state.smoothing || spec.shape) return [traceOf(spec, one, y, name, stroke, dash)];
  const raw = traceOf(spec, one, y, "", faint(stroke, 0.3), "solid", {
    mode: "lines",
    line: { color: faint(stroke, 0.3), width: 1 },
    hoverinfo: "skip",
  });
  return [raw, traceOf(spec, one, smooth(y), name, stroke, dash)];
}

/** Lines of metrics. Runs differ by colour and metrics by dash; metrics of one run by both. */
function linesOf(spec) {
  const traces = [];
  const legend = [];
  const names = Object.keys(spec.lines).filter((name) => RUNS.some((one) => one.metrics[name]));
  RUNS.forEach((one, number) =>
    names.forEach((name, place) => {
      const y = one.metrics[name];
      const stroke = colour(MANY ? number : place);
      const dash = DASHES[place];
      const label = spec.lines[name];
      if (!y) return;

      const width = spec.band && one.metrics[spec.band];
      if (width && !state.smoothing) traces.push(...bandOf(spec, one, y, width, stroke));
      const ofRun = names.length > 1 ? `${one.name} ${label}` : one.name;
      traces.push(...curve(spec, one, y, MANY ? ofRun : label, stroke, dash));
      if (names.length > 1 && (!MANY || !legend.some(([known]) => known === label)))
        legend.push([label, MANY ? css("--ink") : stroke, dash]);
    }),
  );
  return [traces, legend];
}

/** Return the two borders of a band around the values `y`, of which the second one is filled.

    It ends where the reward's range ends. */
function bandOf(spec, one, y, width, stroke) {
  const [low, high] = one.range ?? [-Infinity, Infinity];
  return [1, -1].map((sign) => {
    const border = y.map((value, i) =>
      value == null ? null : Math.min(high, Math.max(low, value + sign * (width[i] ?? 0))),
    );
    return traceOf(spec, one, border, "", stroke, "solid", {
      mode: "lines",
      line: { width: 0 },
      fill: sign < 0 ? "tonexty" : "none",
      fillcolor: faint(stroke, 0.16),
      hoverinfo: "skip",
    });
  });
}

/** Metrics on top of each other. */
function stackOf(spec, run) {
  const traces = [];
  const legend = [];
  Object.entries(spec.stack).forEach(([name, label], place) => {
    const y = run.metrics[name];
    if (!y || !y.some((value) => value)) return;

    const [sign, number] = CLASSES[label] ?? ["", place];
    const values = y.map((value) => value || 0);
    const area = {
      stackgroup: "all",
      mode: "lines",
      line: { color: css("--card"), width: 1 },
      fillcolor: faint(colour(number), 0.8),
    };
    traces.push(traceOf(spec, run, values, label, colour(number), "solid", area));
    legend.push([`${sign} ${label}`.trim(), colour(number), "solid"]);
  });
  return [traces, legend];
}

/** The metrics whose names begin alike: those with the highest peaks. */
function prefixedOf(spec, run) {
  const traces = [];
  const legend = [];
  const peak = (name) => Math.max(...run.metrics[name].map((value) => value || 0));
  const names = Object.keys(run.metrics)
    .filter((name) => name.startsWith(spec.prefix))
    .sort((a, b) => peak(b) - peak(a))
    .slice(0, MOST_PREFIXED);
  names.forEach((name, place) => {
    const label = name.slice(spec.prefix.length);
    const values = run.metrics[name].map((value) => value ?? spec.missing ?? null);
    traces.push(...curve(spec, run, values, label, colour(place), DASHES[place]));
    legend.push([label, colour(place), DASHES[place]]);
  });
  return [traces, legend];
}

/** Held-out means with their intervals, by level. */
function evaluationsOf(spec) {
  const traces = [];
  const legend = [];
  const levels = [...new Set(RUNS.flatMap((one) => one.evals.map((point) => point.level)))]
    .filter((level) => level != null)
    .sort((a, b) => a - b);
  RUNS.forEach((one, number) =>
    levels.forEach((level, place) => {
      const stroke = colour(MANY ? number : place);
      const dash = DASHES[place % DASHES.length];
      for (const [purpose, symbol] of [
        ["report", "circle"],
        ["promotion", "diamond-open"],
      ]) {
        const points = one.evals.filter(
          (point) => point.purpose === purpose && point.level === level && point.mean != null,
        );
        if (!points.length) continue;

        const isReport = purpose === "report";
        const label = `${level}${isReport ? "" : " (validation check)"}`;
        const name = MANY ? `${one.name}, ${label}` : `level ${label}`;
        const means = points.map((point) => point.mean);
        traces.push(
          traceOf(spec, one, means, name, stroke, isReport ? dash : "dot", {
            x: points.map((point) => placeOf(one, point.step)),
            customdata: points.map((point) => point.step),
            connectgaps: true,
            mode: "lines+markers",
            marker: { symbol, size: 8, color: stroke },
            error_y: intervalsOf(points, stroke),
          }),
        );
        if (!MANY || !legend.some(([known]) => known === `level ${label}`))
          legend.push([`level ${label}`, MANY ? css("--ink") : stroke, isReport ? dash : "dot"]);
      }
    }),
  );
  return [traces, legend];
}

/** Return the bars of the 95 % intervals for the chart library. */
const intervalsOf = (points, stroke) => ({
  type: "data",
  symmetric: false,
  array: points.map((point) => point.ci_high - point.mean),
  arrayminus: points.map((point) => point.mean - point.ci_low),
  color: stroke,
  thickness: 1.5,
  width: 4,
});

/** Return the events of a run by kind: [kind, symbol, colour, [[step, text], ...]]. */
function eventsOf(run) {
  const reports = run.evals.filter((point) => point.purpose === "report" && point.mean != null);
  return [
    [
      "checkpoints",
      "square",
      2,
      run.checkpoints.map((step) => [step, `checkpoint of step ${step}`]),
    ],
    [
      "evaluations",
      "circle",
      0,
      reports.map((point) => [point.step, `level ${point.level}: ${fixed(point.mean, 3)}`]),
    ],
    [
      "decisions",
      "triangle-up",
      4,
      run.decisions.map((one) => [
        one.step,
        `${one.kind}: level ${one.from} → ${one.to}, ${one.why}`,
      ]),
    ],
    ["warnings", "x", 1, run.warnings.map((one) => [one.step, one.why])],
  ].filter(([, , , events]) => events.length);
}

/** Return a row of marks for each kind of event that the run has. */
function timelineOf(run) {
  return eventsOf(run).map(([what, symbol, number, events]) => ({
    x: events.map(([step]) => placeOf(run, step)),
    y: events.map(() => what),
    customdata: events.map(([step]) => step),
    name: what,
    text: events.map(([step, text]) => plain(`step ${step}: ${text}`)),
    hoverinfo: "text",
    mode: "markers",
    cliponaxis: false,
    marker: { symbol, size: 11, color: colour(number) },
  }));
}
