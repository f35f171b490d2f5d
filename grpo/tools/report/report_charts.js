"use strict";
// How the charts of the page are drawn; report_metrics.js lists them.

const DASHES = ["solid", "dash", "dot", "dashdot", "longdash", "longdashdot"];
const DASH_PIXELS = {
  solid: "",
  dash: "6 3",
  dot: "2 2",
  dashdot: "6 3 2 3",
  longdash: "10 3",
  longdashdot: "10 3 2 3",
};
/** Return the traces of a chart and the entries of its legend.

    There are no traces if the run has no such metrics. */
function tracesOf(spec, run = RUNS[state.run]) {
  if (spec.lines) return linesOf(spec);
  if (spec.stack) return stackOf(spec, run);
  if (spec.traps) return trapsOf(spec, run);
  if (spec.evals) return evaluationsOf(spec);
  return [spec.timeline ? timelineOf(run) : [], []];
}

/** Return a trace of the chart library: the values `y` of the run `one`, by step. */
const traceOf = (spec, one, y, name, stroke, dash, more = {}) => ({
  x: one.metrics.step,
  y,
  name: plain(name),
  mode: y.length < 4 ? "lines+markers" : "lines",
  connectgaps: true,
  line: { color: stroke, dash, width: 2, shape: spec.shape || "linear" },
  ...more,
});

/** Lines of metrics. Runs differ by colour and metrics by dash; metrics of one run by both. */
function linesOf(spec) {
  const traces = [];
  const legend = [];
  const names = Object.keys(spec.lines);
  RUNS.forEach((one, number) =>
    names.forEach((name, place) => {
      const y = one.metrics[name];
      const stroke = colour(MANY ? number : place);
      const dash = DASHES[place];
      const label = spec.lines[name];
      if (!y) return;

      const width = spec.band && one.metrics[spec.band];
      if (width) traces.push(...bandOf(spec, one, y, width, stroke));
      const ofRun = names.length > 1 ? `${one.name} ${label}` : one.name;
      traces.push(traceOf(spec, one, y, MANY ? ofRun : label, stroke, dash));
      if (names.length > 1 && (!MANY || !legend.some(([known]) => known === label)))
        legend.push([label, MANY ? css("--ink") : stroke, dash]);
    }),
  );
  return [traces, legend];
}

/** Return the two borders of a band around the values `y`, of which the second one is filled. */
function bandOf(spec, one, y, width, stroke) {
  return [1, -1].map((sign) => {
    const border = y.map((value, i) => value + sign * width[i]);
    return traceOf(spec, one, border, "", stroke, "solid", {
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
      line: { color: css("--card"), width: 1 },
      fillcolor: faint(colour(number), 0.8),
    };
    traces.push(traceOf(spec, run, values, label, colour(number), "solid", area));
    legend.push([`${sign} ${label}`.trim(), colour(number), "solid"]);
  });
  return [traces, legend];
}

/** The six most frequent traps. */
function trapsOf(spec, run) {
  const traces = [];
  const legend = [];
  const peak = (name) => Math.max(...run.metrics[name].map((value) => value || 0));
  const names = Object.keys(run.metrics)
    .filter((name) => name.startsWith("traps/"))
    .sort((a, b) => peak(b) - peak(a))
    .slice(0, 6);
  names.forEach((name, place) => {
    const trap = name.slice("traps/".length);
    const values = run.metrics[name].map((value) => value || 0);
    traces.push(traceOf(spec, run, values, trap, colour(place), DASHES[place]));
    legend.push([trap, colour(place), DASHES[place]]);
  });
  return [traces, legend];
}

/** Held-out means with their intervals, by level. */
function evaluationsOf(spec) {
  const traces = [];
  const legend = [];
  const levels = [...new Set(RUNS.flatMap((one) => one.evals.map((point) => point.level)))].sort(
    (a, b) => a - b,
  );
  RUNS.forEach((one, number) =>
    levels.forEach((level, place) => {
      const stroke = colour(MANY ? number : place);
      const dash = DASHES[place % DASHES.length];
      for (const [purpose, symbol] of [
        ["report", "circle"],
        ["promotion", "diamond-open"],
      ]) {
        const points = one.evals.filter(
          (point) => point.purpose === purpose && point.level === level,
        );
        if (!points.length) continue;

        const isReport = purpose === "report";
        const label = `${level}${isReport ? "" : " (validation check)"}`;
        const name = MANY ? `${one.name}, ${label}` : `level ${label}`;
        const means = points.map((point) => point.mean);
        traces.push(
          traceOf(spec, one, means, name, stroke, isReport ? dash : "dot", {
            x: points.map((point) => point.step),
            mode: "lines+markers",
            marker: { symbol, size: 8, color: stroke },
            error_y: intervalsOf(points, stroke),
          }),
        );
        if (!MANY || !legend.some(([known]) => known === `level ${label}`))
          legend.push([`level ${label}`, MANY ? css("--ink") : stroke, dash]);
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

/** Return a row of marks for each kind of event that the run has. */
function timelineOf(run) {
  const reports = run.evals.filter((point) => point.purpose === "report");
  const rows = [
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
      reports.map((point) => [point.step, `level ${point.level}: ${point.mean.toFixed(3)}`]),
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
  ];
  return rows
    .filter(([, , , events]) => events.length)
    .map(([what, symbol, number, events]) => ({
      x: events.map(([step]) => step),
      y: events.map(() => what),
      name: what,
      text: events.map(([, text]) => plain(text)),
      hoverinfo: "x+text",
      mode: "markers",
      cliponaxis: false,
      marker: { symbol, size: 11, color: colour(number) },
    }));
}

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
  const run = RUNS[state.run];
  const here = run.kept[state.step];
  const last = run.metrics.step?.at(-1) ?? 1;
  return {
    height: spec.timeline ? 60 + 28 * traces.length : 220,
    margin: { l: 44, r: 14, t: 8, b: 34 },
    showlegend: false,
    hovermode: spec.timeline ? "closest" : "x unified",
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    dragmode: touch ? false : "zoom",
    font: { family: css("--sans"), color: ink, size: 12 },
    hoverlabel: {
      bgcolor: css("--card"),
      bordercolor: css("--line"),
      font: { color: css("--ink"), family: css("--sans"), size: 12 },
    },
    xaxis: {
      ...axis,
      title: { text: "step", font: { size: 11 }, standoff: 4 },
      showgrid: false,
      zeroline: false,
      range: spec.timeline ? [-0.02 * last, 1.02 * last] : undefined,
    },
    yaxis: {
      ...axis,
      fixedrange: true,
      type: spec.timeline ? "category" : "linear",
      rangemode: "tozero",
      exponentformat: spec.small ? "power" : "SI",
      nticks: 6,
    },
    shapes:
      spec.mark && here != null
        ? [
            {
              type: "line",
              x0: here,
              x1: here,
              yref: "paper",
              y0: 0,
              y1: 1,
              line: { color: ink, width: 1, dash: "dot" },
            },
          ]
        : [],
  };
}

function makeCharts() {
  const grid = el("div", { class: "charts" });
  for (const spec of CHARTS) {
    if (!RUNS.some((run) => tracesOf(spec, run)[0].length)) continue;
    spec.plot = el("div", { class: "plot" });
    spec.legend = el("div", { class: "legend" });
    const single = MANY && (spec.stack || spec.traps || spec.timeline);
    spec.whose = el("span", { class: "whose" }, single ? RUNS[0].name : "");
    grid.append(
      el(
        "figure",
        { class: spec.full ? "full" : spec.wide ? "wide" : "" },
        el("figcaption", {}, el("h3", {}, spec.title, spec.whose), el("p", {}, spec.note)),
        spec.legend,
        spec.plot,
      ),
    );
  }
  $("curves").append(grid);
  const events = RUNS.flatMap((run) => [
    ...run.decisions.map((one) => [
      one.step,
      `${one.kind}, level ${one.from} → ${one.to}: ${one.why}`,
      run,
    ]),
    ...run.warnings.map((one) => [one.step, `warning: ${one.why}`, run]),
  ]);
  if (events.length)
    $("curves").append(
      el(
        "details",
        {},
        el("summary", {}, `All decisions and warnings (${events.length})`),
        el(
          "ul",
          {},
          events
            .sort((a, b) => a[0] - b[0])
            .map(([step, text, run]) =>
              el("li", {}, el("b", {}, `step ${step}`), ` ${MANY ? `${run.name}, ` : ""}${text}`),
            ),
        ),
      ),
    );

  const thinned = RUNS.filter((run) => run.drawn < run.made).map((run) => {
    const [drawn, made] = [run.drawn, run.made].map((count) => count.toLocaleString("en"));
    return `${run.name}: ${drawn} of ${made} steps are shown.`;
  });
  $("drawn").textContent = [
    "Drag over a chart to zoom in, double-click to zoom out.",
    "Click a point to see the completions of that step.",
    ...thinned,
  ].join(" ");
}

function drawChart(spec) {
  const [traces, legend] = tracesOf(spec);
  Plotly.react(spec.plot, traces, layoutOf(spec, traces), {
    displayModeBar: false,
    responsive: true,
  });
  spec.legend.replaceChildren(
    ...legend.map(([label, stroke, dash]) => el("span", {}, swatch(stroke, dash), label)),
  );
  if (spec.whose.textContent) spec.whose.textContent = RUNS[state.run].name;
  if (!spec.listens) spec.plot.on("plotly_click", (event) => goToStep(event.points[0].x));
  spec.listens = true;
}

const drawCharts = (specs = CHARTS) => specs.filter((spec) => spec.plot).forEach(drawChart);
