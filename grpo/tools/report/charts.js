"use strict";
// The charts: which metrics they show, and how they are drawn, linked and controlled.

const DASHES = ["solid", "dash", "dot", "dashdot", "longdash", "longdashdot"];
const MOST_PREFIXED = 6; // lines of a chart of metrics whose names begin alike

// `lines` maps a metric to its label. `stack`, `prefix` and `timeline` show the selected run only;
// `prefix` has a line for each metric whose name begins so.
const SECTIONS = {
  Learning: {
    note:
      "Does it learn, and at which level? Dashed vertical lines mark a change of level, the " +
      "dotted one the step shown under Samples.",
    charts: [
      {
        title: "Reward",
        note: "mean over the completions of a step; band: ± the standard deviation within a group",
        lines: { reward: "reward" },
        band: "group_std",
        size: "wide",
      },
      {
        title: "Held-out score",
        note: "problems that are never trained on, by level; bars: 95 % interval",
        evals: true,
        size: "wide",
      },
      {
        title: "Timeline",
        note: "checkpoints, evaluations, decisions of the curriculum, warnings",
        timeline: true,
        size: "full",
      },
      {
        title: "Score and exact answers",
        note: "mean over the completions of a step; of windows, and what whole answers would score",
        lines: {
          value: "score",
          exact: "share exact",
          "windows/expected": "score of whole answers, expected",
        },
      },
      {
        title: "Components of the reward",
        note: "mean over the completions of a step, before weights",
        prefix: "reward/",
      },
      { title: "Level", note: "level of the curriculum", lines: { level: "level" }, shape: "hv" },
    ],
  },
  Signal: {
    note: "How much of what was sampled could teach anything?",
    charts: [
      {
        title: "Outcomes of groups",
        note: "number of groups; only varied groups have a gradient",
        stack: Object.fromEntries(
          Object.keys(CLASSES).map((name) => [`groups/class/${name}`, name]),
        ),
      },
      {
        title: "Wasted tokens",
        note: "sampled tokens in groups that taught nothing",
        lines: { wasted_tokens: "of the step" },
      },
      {
        title: "Reward within groups",
        note: "standard deviation; share of groups where it is zero",
        lines: { group_std: "standard deviation", frac_reward_zero_std: "share with zero" },
      },
      {
        title: "Distinct completions",
        note: "mean number of distinct texts in a group",
        lines: { distinct_completions: "distinct" },
      },
      {
        title: "Traps",
        note: "share of completions that follow a cheap strategy; the six most frequent",
        prefix: "traps/",
        missing: 0,
      },
      {
        title: "Truncated",
        note: "share of completions that reached the token budget",
        lines: { "completions/clipped_ratio": "truncated" },
      },
      {
        title: "Completion length",
        note: "mean number of tokens",
        lines: { "completions/mean_length": "mean" },
      },
    ],
  },
  Optimisation: {
    note: "What the updates did. A gap is a step without an update.",
    charts: [
      { title: "Loss", note: "its sign says little about learning", lines: { loss: "loss" } },
      { title: "Learning rate", note: "of the update", lines: { learning_rate: "rate" } },
      { title: "Gradient norm", note: "before clipping", lines: { grad_norm: "norm" } },
      {
        title: "Entropy",
        note: "of the policy, in nats per token",
        lines: { entropy: "entropy" },
      },
      { title: "KL to the reference", note: "in nats per token", lines: { kl: "KL" } },
      {
        title: "Clipped ratios",
        note: "share of tokens whose ratio was clipped",
        lines: { "clip_ratio/low_mean": "low", "clip_ratio/high_mean": "high" },
      },
      {
        title: "Parity",
        note: "largest difference of a log-probability between trainer and sampler",
        lines: { "sampling/sampling_logp_difference/max": "largest difference" },
      },
    ],
  },
  System: {
    note: "Where time and memory go.",
    charts: [
      {
        title: "Throughput",
        note: "sampled tokens per second of the whole step",
        lines: { tokens_per_second: "tokens/s" },
      },
      {
        title: "Step time (s)",
        note: "by phase",
        stack: {
          "time/problems": "problems",
          "time/engine": "engine",
          "time/rollout": "rollout",
          "time/score": "score",
          "time/update": "update",
        },
      },
      { title: "Memory (GB)", note: "peak on the device", lines: { memory_gb: "memory" } },
    ],
  },
  Other: { note: "Metrics of this run that the page knows no more about.", charts: [] },
};
const MARKED = ["Learning", "Signal"]; // the sections that mark levels and the step that is shown
const CHARTS = [];

// Metrics that are axes, totals, or parts of a chart under another name.
const NOT_DRAWN = [
  "step",
  "num_tokens",
  "step_time",
  "wasted_tokens_total",
  "reward_std",
  "groups/count",
];

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

// ---- what a chart draws: the traces of the chart library. The label of a trace in the legend is
// its `meta`.

/** Return the traces of a chart; [] if the run has no such metrics. */
function tracesOf(spec, run = RUNS[state.run]) {
  if (spec.lines) return linesOf(spec);
  if (spec.stack) return stackOf(spec, run);
  if (spec.prefix) return prefixedOf(spec, run);
  return spec.evals ? evaluationsOf(spec) : timelineOf(run);
}

/** Return a trace: the values `y` of a run. A gap stays a gap, and a value between two gaps is a
    point. */
function traceOf(spec, run, y, name, stroke, dash, more = {}) {
  const isPoint = (value, i) => y.length < 4 || (y[i - 1] == null && y[i + 1] == null);
  const sizes = y.map((value, i) => (isPoint(value, i) ? 6 : 0));
  return {
    x: xsOf(run),
    y,
    customdata: run.metrics.step,
    name: plain(name),
    mode: sizes.includes(6) ? "lines+markers" : "lines",
    marker: { size: sizes, color: stroke, opacity: 1 },
    line: { color: stroke, dash, width: 2, shape: spec.shape ?? "linear" },
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
function curve(spec, run, y, name, stroke, dash, meta) {
  if (!state.smoothing || spec.shape) return [traceOf(spec, run, y, name, stroke, dash, { meta })];
  const line = { color: faint(stroke, 0.3), width: 1 };
  const raw = { mode: "lines", line, hoverinfo: "skip" };
  return [
    traceOf(spec, run, y, "", stroke, "solid", raw),
    traceOf(spec, run, smooth(y), name, stroke, dash, { meta }),
  ];
}

/** Lines of metrics. Runs differ by colour and metrics by dash; metrics of one run by both. */
function linesOf(spec) {
  const names = Object.keys(spec.lines).filter((name) => RUNS.some((run) => run.metrics[name]));
  return RUNS.flatMap((run, number) =>
    names.flatMap((name, place) => {
      const y = run.metrics[name];
      if (!y) return [];
      const stroke = colour(MANY ? number : place);
      const width = spec.band && run.metrics[spec.band];
      const label = names.length > 1 ? spec.lines[name] : "";
      const named = MANY ? `${run.name} ${label}` : spec.lines[name];
      return [
        ...(width && !state.smoothing ? bandOf(spec, run, y, width, stroke) : []),
        ...curve(spec, run, y, named.trim(), stroke, DASHES[place], label),
      ];
    }),
  );
}

/** Return the two borders of a band around the values `y`, of which the second one is filled.
    It ends where the reward's range ends, if that is known. */
const bandOf = (spec, run, y, width, stroke) =>
  [1, -1].map((sign) => {
    const [low, high] = run.range ?? [-Infinity, Infinity];
    const border = y.map((value, i) =>
      value == null ? null : Math.min(high, Math.max(low, value + sign * (width[i] ?? 0))),
    );
    return traceOf(spec, run, border, "", stroke, "solid", {
      mode: "lines",
      line: { width: 0 },
      fill: sign < 0 ? "tonexty" : "none",
      fillcolor: faint(stroke, 0.16),
      hoverinfo: "skip",
    });
  });

/** Metrics on top of each other. */
const stackOf = (spec, run) =>
  Object.entries(spec.stack).flatMap(([name, label], place) => {
    const y = run.metrics[name];
    if (!y?.some((value) => value)) return [];
    const [sign, number] = CLASSES[label] ?? ["", place];
    const area = {
      stackgroup: "all",
      mode: "lines",
      line: { color: colour(number), width: 1 },
      fillcolor: faint(colour(number), 0.8),
      meta: `${sign} ${label}`.trim(),
    };
    const values = y.map((value) => value ?? 0);
    return [traceOf(spec, run, values, label, colour(number), "solid", area)];
  });

/** The metrics whose names begin alike: those with the highest peaks. */
function prefixedOf(spec, run) {
  const peak = (name) => Math.max(...run.metrics[name].map((value) => value ?? 0));
  return Object.keys(run.metrics)
    .filter((name) => name.startsWith(spec.prefix))
    .sort((a, b) => peak(b) - peak(a))
    .slice(0, MOST_PREFIXED)
    .flatMap((name, place) => {
      const label = name.slice(spec.prefix.length);
      const values = run.metrics[name].map((value) => value ?? spec.missing ?? null);
      return curve(spec, run, values, label, colour(place), DASHES[place], label);
    });
}

/** Held-out means with their intervals, by level; those of validation as open diamonds. */
function evaluationsOf(spec) {
  const levels = [...new Set(RUNS.flatMap((run) => run.evals.map((point) => point.level)))]
    .filter((level) => level != null)
    .sort((a, b) => a - b);
  const trace = (run, number, level, place, isReport) => {
    const purpose = isReport ? "report" : "promotion";
    const points = run.evals.filter(
      (point) => point.purpose === purpose && point.level === level && point.mean != null,
    );
    if (!points.length) return [];
    const stroke = colour(MANY ? number : place);
    const label = `level ${level}${isReport ? "" : " (validation check)"}`;
    const means = points.map((point) => point.mean);
    const dash = isReport ? DASHES[place % DASHES.length] : "dot";
    return [
      traceOf(spec, run, means, MANY ? `${run.name}, ${label}` : label, stroke, dash, {
        x: points.map((point) => placeOf(run, point.step)),
        customdata: points.map((point) => point.step),
        mode: "lines+markers",
        marker: { symbol: isReport ? "circle" : "diamond-open", size: 8, color: stroke },
        error_y: {
          type: "data",
          symmetric: false,
          array: points.map((point) => point.ci_high - point.mean),
          arrayminus: points.map((point) => point.mean - point.ci_low),
          color: stroke,
          thickness: 1.5,
        },
        meta: label,
      }),
    ];
  };
  return RUNS.flatMap((run, number) =>
    levels.flatMap((level, place) =>
      [true, false].flatMap((isReport) => trace(run, number, level, place, isReport)),
    ),
  );
}

/** Return a row of marks for each kind of event that the run has. */
function timelineOf(run) {
  const reports = run.evals.filter((point) => point.purpose === "report" && point.mean != null);
  const decision = (one) => `${one.kind}: level ${one.from} → ${one.to}, ${one.why}`;
  const kinds = [
    ["checkpoints", "square", 2, run.checkpoints.map((step) => [step, "checkpoint"])],
    [
      "evaluations",
      "circle",
      0,
      reports.map((point) => [point.step, `level ${point.level}: ${point.mean.toFixed(3)}`]),
    ],
    ["decisions", "triangle-up", 4, run.decisions.map((one) => [one.step, decision(one)])],
    ["warnings", "x", 1, run.warnings.map((one) => [one.step, one.why])],
  ];
  return kinds
    .filter(([, , , events]) => events.length)
    .map(([what, symbol, number, events]) => ({
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

// ---- how it is drawn

/** Return the steps at which the level of a run changes: [{ step, level }, ...], from its first. */
function levelsOf(run) {
  const { level = [], step = [] } = run.metrics;
  return level
    .map((one, i) => ({ level: one, step: step[i] }))
    .filter((one, i) => one.level != null && one.level !== level[i - 1]);
}

/** Return the marks of a chart: changes of level and the step that is shown. */
function marksOf(spec) {
  const run = RUNS[state.run];
  const levels = levelsOf(run);
  const vertical = { yref: "paper", y0: 0, y1: 1 };
  const lineAt = (x, color, dash) => ({
    type: "line",
    x0: x,
    x1: x,
    ...vertical,
    line: { color, width: 1, dash },
  });
  const shapes = levels
    .slice(1)
    .map(({ step }) => lineAt(placeOf(run, step), css("--soft"), "dash"));

  const here = run.kept[state.step];
  if (here != null) shapes.push(lineAt(placeOf(run, here), css("--ink"), "dot"));
  const names = levels.map(({ level, step }) => ({
    x: placeOf(run, step),
    y: 1,
    yref: "paper",
    xanchor: "left",
    yanchor: "bottom",
    text: `level ${level}`,
    showarrow: false,
    font: { size: 11, color: css("--soft") },
  }));
  return { shapes, annotations: levels.length > 1 && !spec.timeline ? names : [] };
}

/** Return whether all values of a chart are so small that they are written with an exponent. */
const isSmall = (traces) =>
  traces.every(({ y }) => y.every((value) => !(Math.abs(value) >= 1e-3))) &&
  traces.some(({ y }) => y.some((value) => Math.abs(value) > 0));

// The camera covers a part of its chart, so it is shown only under the pointer.
const canHover = matchMedia("(hover: hover)").matches && "hover";

/** Return the layout of a chart for the chart library. */
function layoutOf(spec, traces) {
  const ink = css("--soft");
  const touch = matchMedia("(pointer: coarse)").matches;
  const axis = {
    color: ink,
    gridcolor: css("--line"),
    zerolinecolor: css("--line"),
    linecolor: css("--line"),
    tickfont: { size: 11 },
    automargin: true,
    fixedrange: touch,
  };
  const [name] = AXES[state.axis];
  const isStep = state.axis === "step";
  const last = Math.max(1, ...RUNS.map((run) => xsOf(run).at(-1) ?? 0));
  const [low, high] = state.range ?? [-0.02 * last, 1.02 * last];
  const isLog = state.log && !spec.stack && !spec.timeline;
  const font = { color: css("--ink"), family: css("--sans"), size: 12 };
  return {
    height: spec.timeline ? 60 + 28 * traces.length : 220,
    margin: { l: 44, r: 14, t: spec.timeline ? 8 : 18, b: 34 },
    showlegend: false,
    hovermode: spec.timeline ? "closest" : "x unified",
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    dragmode: touch ? false : "zoom",
    font: { ...font, color: ink },
    hoverlabel: { bgcolor: css("--card"), bordercolor: css("--line"), font },
    modebar: { bgcolor: "rgba(0,0,0,0)", color: ink },
    xaxis: {
      ...axis,
      title: { text: name, font: { size: 11 }, standoff: 4 },
      showgrid: false,
      zeroline: false,
      range: [low, high],
      // No ticks between two steps.
      dtick: isStep && high - low < 10 ? 1 : undefined,
      tickformat: isStep ? ",d" : undefined,
      unifiedhovertitle: { text: isStep ? "step %{x:,d}" : `%{x:,.4~g} ${name}` },
    },
    yaxis: {
      ...axis,
      fixedrange: true,
      type: spec.timeline ? "category" : isLog ? "log" : "linear",
      rangemode: isLog ? "normal" : "tozero",
      exponentformat: isSmall(traces) ? "power" : "SI",
      hoverformat: isSmall(traces) ? ".2e" : ".4~g",
      nticks: 6,
    },
    ...(MARKED.includes(spec.section) ? marksOf(spec) : {}),
  };
}

/** Return a sentence that says what a chart shows, for those who cannot see it. */
function inWords(spec, traces) {
  const brief = (value) => String(Number(value.toPrecision(4)));
  const said = traces
    .filter((trace) => trace.name)
    .map(({ name, x, y }) => {
      if (spec.timeline) return `${x.length} ${name}`;
      const known = y.filter((value) => value != null).map(Number);
      if (!known.length) return `${name}: no values`;
      return (
        `${name}: from ${brief(known[0])} to ${brief(known.at(-1))}, ` +
        `lowest ${brief(Math.min(...known))}, highest ${brief(Math.max(...known))}`
      );
    });
  return `${spec.title}, ${spec.note || "by step"}. ${said.join("; ")}.`;
}

/** Make the charts of all metrics that the runs have. */
function makeCharts() {
  addOtherCharts();
  for (const [section, { note, charts }] of Object.entries(SECTIONS)) {
    const added = charts
      .filter((spec) => RUNS.some((run) => tracesOf(spec, run).length))
      .map((spec) => figureOf(Object.assign(spec, { section })));
    if (!added.length) continue;
    const grid = el("div", { class: "charts" }, added);
    const id = section.toLowerCase();
    $("charts").append(el("section", { id }, el("h2", {}, section), aside(note), grid));
  }
  showEvents();
  $("drawn").textContent = matchMedia("(pointer: coarse)").matches
    ? "Tap a point to see the completions of that step."
    : "Drag over a chart to zoom all of them in, double-click to zoom out. " +
      "Click a point to see the completions of that step.";
}

/** Add a chart for every metric that no other chart shows. */
function addOtherCharts() {
  const specs = Object.values(SECTIONS).flatMap(({ charts }) => charts);
  const prefixes = specs.map((spec) => spec.prefix).filter(Boolean);
  const known = new Set(NOT_DRAWN);
  for (const spec of specs)
    for (const name of [...Object.keys(spec.lines ?? spec.stack ?? {}), spec.band]) known.add(name);
  for (const name of new Set(RUNS.flatMap((run) => Object.keys(run.metrics))))
    if (!known.has(name) && !prefixes.some((prefix) => name.startsWith(prefix)))
      SECTIONS.Other.charts.push({ title: name, note: "", lines: { [name]: name }, size: "raw" });
}

/** Return the box of a chart: its title, its legend, and the plot. */
function figureOf(spec) {
  spec.plot = el("div", {
    class: "plot",
    role: "img",
    style: { minHeight: spec.timeline ? "90px" : "220px" },
  });
  spec.legend = el("div", { class: "legend" });
  spec.whose = el("span", { class: "whose" });
  CHARTS.push(spec);
  return el(
    "figure",
    { class: spec.size },
    el("figcaption", {}, el("h3", {}, spec.title, spec.whose), el("p", {}, spec.note)),
    spec.legend,
    spec.plot,
  );
}

function drawChart(spec) {
  spec.isStale = false;
  const traces = tracesOf(spec);
  Plotly.react(spec.plot, traces, layoutOf(spec, traces), {
    responsive: true,
    displaylogo: false,
    displayModeBar: canHover,
    modeBarButtons: [["toImage"]],
    toImageButtonOptions: { format: "svg", width: 900, height: 400, filename: spec.title },
  });
  spec.plot.setAttribute("aria-label", inWords(spec, traces));

  // Runs differ by colour, so the legend of several runs tells the dashes alone.
  const isOfOne = MANY && (spec.stack || spec.prefix || spec.timeline);
  const entries = new Map(traces.filter((one) => one.meta).map((one) => [one.meta, one.line]));
  const strokes = [0, 1, 2, 3, 4, 5, 6].map(colour);
  const legend = [...entries].map(([label, { color, dash }]) => {
    const number = MANY && !isOfOne ? "--ink" : strokes.indexOf(color);
    return el("span", {}, swatch(number, dash), label);
  });
  spec.legend.replaceChildren(...legend);
  spec.whose.textContent = isOfOne ? RUNS[state.run].name : "";
  if (!spec.listens) listen(spec);
}

/** Link a chart with the samples and with the other charts. */
function listen(spec) {
  spec.listens = true;
  spec.plot.on("plotly_click", (event) => goToStep(event.points[0].customdata));
  spec.plot.on("plotly_relayout", (change) => {
    const zoomed = change["xaxis.range[0]"] != null;
    if (zoomed) zoom([change["xaxis.range[0]"], change["xaxis.range[1]"]]);
    else if (change["xaxis.autorange"]) zoom(null);
  });
}

function zoom(range) {
  state.range = range;
  $("unzoom").hidden = !range;
  drawCharts();
}

// Charts are drawn when they come near the window: a long run has dozens.
const watcher = new IntersectionObserver(
  (entries) => {
    for (const { target } of entries.filter((one) => one.isIntersecting)) {
      const spec = CHARTS.find((one) => one.plot === target);
      if (spec.isStale) drawChart(spec);
    }
  },
  { rootMargin: "600px" },
);

/** Draw all charts anew: those near the window now, the others when they come near. */
function drawCharts() {
  for (const spec of CHARTS) {
    spec.isStale = true;
    watcher.unobserve(spec.plot); // so that the watcher looks at it again
    watcher.observe(spec.plot);
  }
}

/** Draw what is not yet drawn. */
const drawAll = () => CHARTS.filter((spec) => spec.isStale).forEach(drawChart);

/** Mark the step that is shown in the charts. */
function drawMark() {
  for (const spec of CHARTS)
    if (MARKED.includes(spec.section) && spec.listens)
      Plotly.relayout(spec.plot, { shapes: marksOf(spec).shapes });
}

function showEvents() {
  const events = RUNS.flatMap((run) => [
    ...run.decisions.map((one) => {
      const what = `${one.kind}, level ${one.from} → ${one.to}: ${one.why}`;
      return [one.step, what, run];
    }),
    ...run.warnings.map((one) => [one.step, `warning: ${one.why}`, run]),
  ]).sort((a, b) => a[0] - b[0]);
  const items = events.map(([step, text, run]) =>
    el("li", {}, el("b", {}, `step ${step}`), ` ${MANY ? `${run.name}, ` : ""}${text}`),
  );
  $("events").hidden = !events.length;
  const title = `All decisions and warnings (${events.length})`;
  $("events").replaceChildren(el("summary", {}, title), el("ul", {}, items));
}

// ---- controls and exports

/** Return a field of a CSV file. A text that a spreadsheet would run as a formula is quoted. */
function csvField(value) {
  if (value == null) return "";
  const text = typeof value === "string" && /^[=+\-@\t\r]/.test(value) ? `'${value}` : `${value}`;
  return /[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}

/** Return the metrics of all runs as CSV: a line for each step. */
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

/** Return a field with its label; it sets what it is named after in the state of the charts. */
function control(label, tag, attributes, read, ...children) {
  const onchange = ({ target }) => {
    state[attributes.id] = read(target);
    zoom(attributes.id === "axis" ? null : state.range);
  };
  return el("label", {}, `${label} `, el(tag, { ...attributes, oninput: onchange }, ...children));
}

function makeControls() {
  const names = Object.keys(AXES).map((name) => el("option", { value: name }, name));
  const slider = { id: "smoothing", type: "range", min: 0, max: 0.95, step: 0.05, value: 0 };
  const name = RUNS.map((run) => run.name).join("-");
  const csv = () => download(`${name}.csv`, metricsAsCsv(), "text/csv");
  $("controls").append(
    control("x-axis", "select", { id: "axis" }, ({ value }) => value, names),
    control("smoothing", "input", slider, ({ value }) => Number(value)),
    control("log scale", "input", { id: "log", type: "checkbox" }, ({ checked }) => checked),
    button({ id: "unzoom", hidden: true, onclick: () => zoom(null) }, "Whole run"),
    el("span", { class: "gap" }),
    button({ onclick: csv, "aria-label": "save the metrics as CSV" }, "CSV"),
  );
}
