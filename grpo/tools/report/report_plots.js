"use strict";
// How the charts are laid out, linked with each other, and controlled.

/** Return the steps at which the level of a run changes: [{ step, level }, ...], from its first. */
function levelsOf(run) {
  const { level = [], step = [] } = run.metrics;
  return level
    .map((one, i) => ({ level: one, step: step[i] }))
    .filter((one, i) => one.level != null && one.level !== level[i - 1]);
}

/** Return the marks of a chart: changes of level, bands of levels, and the step that is shown. */
function marksOf(spec) {
  const run = RUNS[state.run];
  const vertical = { yref: "paper", y0: 0, y1: 1 };
  const lineAt = (x, color, dash) => ({
    type: "line",
    x0: x,
    x1: x,
    ...vertical,
    line: { color, width: 1, dash },
  });
  const shapes = [];
  const annotations = [];
  const perRun = spec.lines ? RUNS : [run]; // the other charts show the selected run only
  for (const one of spec.mark ? perRun : []) {
    const levels = levelsOf(one);
    const color = MANY ? colour(RUNS.indexOf(one)) : css("--soft");
    shapes.push(...levels.slice(1).map(({ step }) => lineAt(placeOf(one, step), color, "dash")));
    if (one !== run || levels.length < 2) continue;
    if (!MANY) shapes.push(...bandsOf(one, levels, vertical));
    if (!spec.timeline) annotations.push(...levels.map((level) => nameOf(one, level)));
  }

  const here = run.kept[state.step];
  if (spec.mark && here != null) shapes.push(lineAt(placeOf(run, here), css("--ink"), "dot"));
  return { shapes, annotations };
}

/** Return a faint ground behind every other level. */
const bandsOf = (run, levels, vertical) =>
  levels
    .map(({ step }, i) => ({
      type: "rect",
      x0: placeOf(run, step),
      x1: placeOf(run, levels[i + 1]?.step ?? run.metrics.step.at(-1)),
      ...vertical,
      fillcolor: faint(css("--c6"), 0.1),
      line: { width: 0 },
      layer: "below",
    }))
    .filter((_, i) => i % 2);

/** Return the name of a level, above the place where it begins. */
const nameOf = (run, { level, step }) => ({
  x: placeOf(run, step),
  y: 1,
  yref: "paper",
  xanchor: "left",
  yanchor: "bottom",
  text: `level ${level}`,
  showarrow: false,
  font: { size: 11, color: css("--soft") },
});

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
  const [low, high] = state.range ?? extent();
  const isLog = state.log && !spec.stack && !spec.timeline;
  const font = { color: css("--ink"), family: css("--sans"), size: 12 };
  return {
    height: spec.timeline ? 60 + 28 * traces.length : 220,
    margin: { l: 44, r: 14, t: spec.mark && !spec.timeline ? 18 : 8, b: 34 },
    showlegend: false,
    hovermode: spec.timeline ? "closest" : "x unified",
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    dragmode: touch ? false : "zoom",
    font: { family: css("--sans"), color: ink, size: 12 },
    hoverlabel: { bgcolor: css("--card"), bordercolor: css("--line"), font },
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
    ...marksOf(spec),
  };
}

/** Return whether all values of a chart are so small that they are written with an exponent. */
const isSmall = (traces) =>
  traces.every(({ y }) => y.every((value) => !(Math.abs(value) >= 1e-3))) &&
  traces.some(({ y }) => y.some((value) => Math.abs(value) > 0));

/** Return the range of the x-axis that shows everything. */
function extent() {
  const last = Math.max(1, ...RUNS.map((run) => xsOf(run).at(-1) ?? 0));
  return [-0.02 * last, 1.02 * last];
}

/** Return a sentence that says what a chart shows, for those who cannot see it. */
function described(spec, traces) {
  const said = traces
    .filter((trace) => trace.name && trace.hoverinfo !== "skip")
    .map((trace) => {
      if (spec.timeline) return `${trace.x.length} ${trace.name}`;
      const y = trace.y.filter((value) => value != null);
      if (!y.length) return `${trace.name}: no values`;
      const [low, high] = [Math.min(...y), Math.max(...y)];
      return (
        `${trace.name}: from ${brief(y[0])} to ${brief(y.at(-1))}, ` +
        `lowest ${brief(low)}, highest ${brief(high)}`
      );
    });
  return `${spec.title}, ${spec.note || "by step"}. ${said.join("; ")}.`;
}

const tidy = (text) => text.toLowerCase().replace(/[^a-z0-9]+/g, "-");

function makeCharts() {
  addOtherCharts();
  for (const [section, note] of Object.entries(SECTIONS)) {
    const specs = CHARTS.filter((spec) => spec.section === section && !spec.plot);
    const shown = specs.filter((spec) => RUNS.some((run) => tracesOf(spec, run)[0].length));
    if (!shown.length) continue;
    let grid = document.querySelector(`#${tidy(section)} .charts`);
    if (!grid) {
      grid = el("div", { class: "charts" });
      const head = [el("h2", {}, section), el("p", { class: "aside" }, note)];
      $("charts").append(el("section", { id: tidy(section) }, head, grid));
    }
    grid.append(...shown.map(figureOf));
  }
  showEvents();
  showHints();
}

/** Return the box of a chart: its title, its legend, the plot, and the table of its data. */
function figureOf(spec) {
  const height = spec.timeline ? "90px" : "220px";
  spec.plot = el("div", {
    class: "plot",
    role: "img",
    "aria-label": `${spec.title}, ${spec.note}`,
    style: { "min-height": height },
  });
  spec.legend = el("div", { class: "legend" });
  spec.whose = el("span", { class: "whose" });
  const saved = () =>
    Plotly.downloadImage(spec.plot, {
      format: "svg",
      width: 900,
      height: 400,
      filename: `${RUNS[state.run].name}-${tidy(spec.title)}`,
    });
  const data = el("details", { class: "data" }, el("summary", {}, "Data"));
  data.addEventListener("toggle", () => data.open && showData(spec, data));
  return el(
    "figure",
    { class: spec.full ? "full" : spec.wide ? "wide" : "" },
    el(
      "figcaption",
      {},
      el("h3", { class: spec.raw ? "raw" : "" }, spec.title, spec.whose),
      el("p", {}, spec.note),
    ),
    spec.legend,
    spec.plot,
    el(
      "div",
      { class: "tools" },
      data,
      el("button", { onclick: saved, "aria-label": `save ${spec.title} as a picture` }, "Picture"),
    ),
  );
}

function drawChart(spec) {
  spec.isStale = false;
  const [traces, legend] = tracesOf(spec);
  Plotly.react(spec.plot, traces, layoutOf(spec, traces), {
    displayModeBar: false,
    responsive: true,
  });
  spec.plot.setAttribute("aria-label", described(spec, traces));
  scaleWithPage(spec.plot);
  spec.legend.replaceChildren(
    ...legend.map(([label, stroke, dash]) => el("span", {}, swatch(stroke, dash), label)),
  );
  const isOfOne = MANY && (spec.stack || spec.prefix || spec.timeline);
  spec.whose.textContent = isOfOne ? RUNS[state.run].name : "";
  if (!spec.listens) listen(spec);
}

/** Let the drawing shrink with its box, which is narrower on paper than on the screen. */
function scaleWithPage(plot) {
  for (const svg of plot.querySelectorAll(".main-svg"))
    svg.setAttribute("viewBox", `0 0 ${svg.getAttribute("width")} ${svg.getAttribute("height")}`);
}

/** Link a chart with the samples and with the other charts. */
function listen(spec) {
  spec.listens = true;
  spec.cross = el("div", { class: "cross", hidden: true });
  spec.plot.append(spec.cross);
  spec.plot.on("plotly_click", (event) => goToStep(event.points[0].customdata));
  spec.plot.on("plotly_hover", (event) => showCross(event.points[0].x, spec));
  spec.plot.on("plotly_afterplot", () => scaleWithPage(spec.plot));
  spec.plot.on("plotly_unhover", () => showCross(null));
  spec.plot.on("plotly_relayout", (change) => {
    const zoomed = change["xaxis.range[0]"] != null;
    if (zoomed) state.range = [change["xaxis.range[0]"], change["xaxis.range[1]"]];
    else if (change["xaxis.autorange"]) state.range = null;
    else return;
    drawCharts();
    $("unzoom").hidden = !state.range;
  });
}

/** Show a line at the same place in all charts but the one under the pointer. */
function showCross(x, own) {
  for (const spec of CHARTS.filter((one) => one.cross)) {
    const { xaxis, _size: size } = spec.plot._fullLayout;
    const at = x == null ? NaN : xaxis.l2p(x);
    spec.cross.hidden = spec === own || !(at >= 0 && at <= size.w);
    spec.cross.style.left = `${size.l + at}px`;
    spec.cross.style.top = `${size.t}px`;
    spec.cross.style.height = `${size.h}px`;
  }
}

// Charts are drawn when they come near the window: a long run has dozens.
const NEAR = "600px";
const watcher = new IntersectionObserver(
  (entries) =>
    entries.filter((one) => one.isIntersecting).forEach(({ target }) => drawStale(target)),
  { rootMargin: NEAR },
);

const drawStale = (plot) => {
  const spec = CHARTS.find((one) => one.plot === plot);
  if (spec.isStale) drawChart(spec);
};

/** Draw all charts anew: those near the window now, the others when they come near. */
function drawCharts() {
  for (const spec of CHARTS.filter((one) => one.plot)) {
    spec.isStale = true;
    watcher.unobserve(spec.plot); // so that the watcher looks at it again
    watcher.observe(spec.plot);
  }
}

/** Draw what is not yet drawn, for paper. */
const drawAll = () => CHARTS.filter((spec) => spec.isStale).forEach(drawChart);
addEventListener("beforeprint", drawAll);

/** Mark the step that is shown in the charts. */
function drawMark() {
  for (const spec of CHARTS)
    if (spec.mark && spec.listens) Plotly.relayout(spec.plot, { shapes: marksOf(spec).shapes });
}

function showEvents() {
  const events = RUNS.flatMap((run) => [
    ...run.decisions.map((one) => [
      one.step,
      `${one.kind}, level ${one.from} → ${one.to}: ${one.why}`,
      run,
    ]),
    ...run.warnings.map((one) => [one.step, `warning: ${one.why}`, run]),
  ]).sort((a, b) => a[0] - b[0]);
  const items = events.map(([step, text, run]) =>
    el("li", {}, el("b", {}, `step ${step}`), ` ${MANY ? `${run.name}, ` : ""}${text}`),
  );
  $("events").hidden = !events.length;
  $("events").replaceChildren(
    el("summary", {}, `All decisions and warnings (${events.length})`),
    el("ul", {}, items),
  );
}

function showHints() {
  const thinned = RUNS.filter((run) => run.drawn < run.made).map((run) => {
    const [drawn, made] = [run.drawn, run.made].map((count) => count.toLocaleString("en"));
    return `${run.name}: ${drawn} of ${made} steps are drawn.`;
  });
  const touch = matchMedia("(pointer: coarse)").matches;
  $("drawn").textContent = [
    touch
      ? "Tap a point to see the completions of that step."
      : "Drag over a chart to zoom all of them in, double-click to zoom out. " +
        "Click a point to see the completions of that step.",
    ...thinned,
  ].join(" ");
}
