"use strict";
// The page of a run. Data is read from the JSON blocks of the page; whatever comes from it enters the document as text, never as markup.

const DATA = JSON.parse(document.getElementById("data").textContent);
const RUNS = DATA.runs, MANY = RUNS.length > 1;
const DASHES = ["solid", "dash", "dot", "dashdot", "longdash", "longdashdot"];
const DASH_PIXELS = { solid: "", dash: "6 3", dot: "2 2", dashdot: "6 3 2 3", longdash: "10 3", longdashdot: "10 3 2 3" };
const CLASSES = { // name: sign, colour, pattern of its area
  varied: ["≠", 0, ""], solved: ["✓", 2, "."], identical: ["=", 1, "x"], tied: ["≈", 4, "/"], failed: ["✕", 3, "\\"] };
const CONTEXT = 6; // right words shown at each end of a run of them
const MOST_WORDS = 600; // shown at once
const MOST_FINDS = 40; // listed
const TINTS = { alignment: "Alignment", logprob: "Log-prob", advantage: "Advantage" };
const state = { run: 0, step: 0, group: 0, row: 0, tint: "alignment", query: "" };

const $ = (id) => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";

/** Return an element: attributes, listeners ("onclick"), style as an object, children as nodes or text. */
function el(tag, attributes = {}, ...children) {
  const node = tag === "svg" || tag === "line" ? document.createElementNS(SVG, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [key, text] of Object.entries(value)) node.style.setProperty(key, text);
    else if (value !== false && value != null) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat().filter((child) => child != null));
  return node;
}

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const colour = (number) => css(`--c${number % 7}`);
const plain = (text) => String(text).replaceAll("<", "‹"); // the chart library reads a few tags in its texts
const signed = (value, digits = 2) => (value < 0 ? "−" : "+") + Math.abs(value).toFixed(digits);
const faint = (hex, alpha) => `rgba(${[1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16)).join(",")},${alpha})`;

// ---------------------------------------------------------------- head

function showHead() {
  const [run] = RUNS;
  const figure = (name, value) => el("div", { class: "figure" }, el("dt", {}, name), el("dd", {}, value));
  const badge = (one) => one.control && el("p", { class: "control" }, el("strong", {}, `CONTROL RUN: ${one.control}`), " The rewards carry no information; it must not learn.");
  if (!MANY) {
    $("top").append(el("p", { class: "kicker" }, run.path), el("h1", {}, run.name), badge(run) || "",
      ...run.heldout.slice(0, 1).map((held) => el("div", { class: "heldout" }, el("span", { class: "kicker" }, `held-out ${held.what}`), scores(held))),
      el("dl", { class: "figures" }, run.headline.map(([name, value]) => figure(name, value))));
    if (run.heldout.length > 1) $("top").append(el("div", { class: "also" }, run.heldout.slice(1).map((held) => el("p", {}, `${held.what} (${held.how}): `, held.scores.join(" → ")))));
    return;
  }
  $("top").append(el("p", { class: "kicker" }, `${RUNS.length} runs over each other`), el("h1", {}, RUNS.map((one) => one.name).join(", ")));
  const names = RUNS[0].headline.map(([name]) => name);
  $("top").append(el("div", { class: "scroll" }, el("table", {},
    el("thead", {}, el("tr", {}, ["run", "held-out", ...names].map((name) => el("th", {}, name)))),
    el("tbody", {}, RUNS.map((one, number) => el("tr", {},
      el("th", {}, swatch(colour(number), "solid"), " ", one.name, one.control && el("span", { class: "control small" }, `CONTROL ${one.control}`)),
      el("td", {}, one.heldout.length ? one.heldout[0].scores.join(" → ") : "–"), one.headline.map(([, value]) => el("td", {}, value))))))));
  $("runs").hidden = false;
  $("runs").append(...RUNS.map((one, number) => el("button", { "data-run": number, onclick: () => chooseRun(number) }, swatch(colour(number), "solid"), one.name)));
}

function scores(held) {
  const part = (text, what) => {
    const [, mean, range] = text.match(/^(\S+) (.*)$/);
    return el("div", { class: "score" }, el("b", {}, mean), el("small", {}, `${range} ${what}`));
  };
  const [first, last] = held.scores;
  return el("div", { class: "scores" }, part(first, last ? "before" : ""), last && el("span", { class: "arrow" }, "→"), last && part(last, "after"),
    el("p", { class: "aside" }, `exact ${held.exact}; ${held.how}; 95 % interval`));
}

function swatch(stroke, dash) {
  return el("svg", { class: "swatch", width: 22, height: 8, "aria-hidden": "true" },
    el("line", { x1: 0, y1: 4, x2: 22, y2: 4, stroke, "stroke-width": 3, "stroke-dasharray": DASH_PIXELS[dash] }));
}

// ---------------------------------------------------------------- curves

const CHARTS = [ // lines: metric -> label; `stack`, `traps`, `timeline` show the chosen run only
  { title: "Reward", note: "mean of a step's completions; the band is the spread within a group (mean standard deviation)", lines: { reward: "reward" }, band: "group_std", wide: true, mark: true },
  { title: "Held-out score", note: "fresh problems of documents never trained on, by level; bars: 95 % interval", evals: true, wide: true },
  { title: "Timeline", note: "what happened when", timeline: true, full: true, mark: true },
  { title: "Groups by class", note: "groups of a step; only varied ones carry a gradient", stack: Object.fromEntries(Object.keys(CLASSES).map((name) => [`groups/class/${name}`, name])) },
  { title: "Score and exact answers", note: "of the training completions", lines: { value: "score", exact: "share exact" } },
  { title: "Traps", note: "share of completions in a cheap strategy", traps: true },
  { title: "Spread within groups", note: "standard deviation of the reward; share of groups without any", lines: { group_std: "spread", frac_reward_zero_std: "share without" } },
  { title: "Different texts in a group", note: "mean number of distinct completions", lines: { distinct_completions: "distinct" } },
  { title: "Level", note: "of the curriculum", lines: { level: "level" }, shape: "hv" },
  { title: "Temperature", note: "of sampling", lines: { temperature: "temperature" } },
  { title: "Entropy", note: "of the policy, nats a token", lines: { entropy: "entropy" } },
  { title: "KL to the reference", note: "nats a token", lines: { kl: "KL" } },
  { title: "Clipped ratios", note: "share of tokens beyond the clip range", lines: { "clip_ratio/low": "low", "clip_ratio/high": "high" } },
  { title: "Parity", note: "trainer against sampler: largest difference of a log-probability", lines: { "parity/max_abs_logprob_diff": "largest difference" }, log: true },
  { title: "Gradient norm", note: "before clipping", lines: { grad_norm: "norm" } },
  { title: "Completion length", note: "tokens", lines: { "completions/mean_length": "mean" } },
  { title: "Cut by the budget", note: "share of completions without an end token", lines: { "completions/clipped_ratio": "cut" } },
  { title: "Speed", note: "tokens sampled and learned from, a second", lines: { tokens_per_second: "tokens/s" } },
  { title: "Seconds of a step", note: "where the time goes", stack: { "time/rollout": "rollout", "time/score": "score", "time/update": "update" } },
];

/** Return the traces of a chart and the entries of its legend; no traces where no run has the figures. */
function tracesOf(spec) {
  const run = RUNS[state.run], traces = [], legend = [];
  const line = (one, y, name, stroke, dash, more = {}) => traces.push({ x: one.metrics.step, y, name: plain(name), mode: y.length < 4 ? "lines+markers" : "lines", connectgaps: true,
    line: { color: stroke, dash, width: 2, shape: spec.shape || "linear" }, ...more });
  if (spec.lines) {
    const names = Object.keys(spec.lines);
    RUNS.forEach((one, number) => names.forEach((name, place) => {
      const y = one.metrics[name], stroke = colour(MANY ? number : place), dash = DASHES[place];
      if (!y) return;
      const spread = spec.band && one.metrics[spec.band];
      if (spread) for (const sign of [1, -1]) line(one, y.map((value, i) => value + sign * spread[i]), "", stroke, "solid",
        { line: { width: 0 }, fill: sign < 0 ? "tonexty" : "none", fillcolor: faint(stroke, 0.16), hoverinfo: "skip" });
      line(one, y, MANY ? `${one.name}${names.length > 1 ? ` ${spec.lines[name]}` : ""}` : spec.lines[name], stroke, dash);
      if (names.length > 1 && (!MANY || !legend.some(([label]) => label === spec.lines[name]))) legend.push([spec.lines[name], MANY ? css("--ink") : stroke, dash]);
    }));
  } else if (spec.stack) {
    Object.entries(spec.stack).forEach(([name, label], place) => {
      const y = run.metrics[name];
      if (!y || !y.some((value) => value)) return;
      const [, number, shape] = CLASSES[label] || ["", place, ["", "/", "."][place]];
      line(run, y.map((value) => value || 0), label, colour(number), "solid",
        { stackgroup: "all", line: { color: colour(number), width: 1 }, fillpattern: { shape, fgcolor: css("--card"), bgcolor: colour(number), size: 6, solidity: 0.22 } });
      legend.push([label, colour(number), "solid"]);
    });
  } else if (spec.traps) {
    const peak = (name) => Math.max(...run.metrics[name].map((value) => value || 0));
    const names = Object.keys(run.metrics).filter((name) => name.startsWith("traps/")).sort((a, b) => peak(b) - peak(a)).slice(0, 6);
    names.forEach((name, place) => {
      line(run, run.metrics[name].map((value) => value || 0), name.slice(6), colour(place), DASHES[place]);
      legend.push([name.slice(6), colour(place), DASHES[place]]);
    });
  } else if (spec.evals) {
    const levels = [...new Set(RUNS.flatMap((one) => one.evals.map((point) => point.level)))].sort((a, b) => a - b);
    RUNS.forEach((one, number) => levels.forEach((level, place) => {
      for (const [purpose, symbol] of [["report", "circle"], ["promotion", "diamond-open"]]) {
        const points = one.evals.filter((point) => point.purpose === purpose && point.level === level), stroke = colour(MANY ? number : place);
        if (!points.length) continue;
        const label = `${level}${purpose === "report" ? "" : " (look for promotion)"}`, dash = DASHES[place % DASHES.length];
        const bars = { type: "data", symmetric: false, array: points.map((point) => point.ci_high - point.mean), arrayminus: points.map((point) => point.mean - point.ci_low), color: stroke, thickness: 1.5, width: 4 };
        line(one, points.map((point) => point.mean), MANY ? `${one.name}, ${label}` : `level ${label}`, stroke, purpose === "report" ? dash : "dot",
          { x: points.map((point) => point.step), mode: "lines+markers", marker: { symbol, size: 8, color: stroke }, error_y: bars });
        if (!MANY || !legend.some(([known]) => known === `level ${label}`)) legend.push([`level ${label}`, MANY ? css("--ink") : stroke, dash]);
      }
    }));
  } else if (spec.timeline) {
    const mark = (what, symbol, number, events) => events.length && traces.push({ x: events.map(([step]) => step), y: events.map(() => what), name: what, text: events.map(([, text]) => plain(text)),
      hoverinfo: "x+text", mode: "markers", marker: { symbol, size: 11, color: colour(number) } });
    mark("checkpoints", "square", 2, run.checkpoints.map((step) => [step, `checkpoint of step ${step}`]));
    mark("evaluations", "circle", 0, run.evals.filter((point) => point.purpose === "report").map((point) => [point.step, `level ${point.level}: ${point.mean.toFixed(3)}`]));
    mark("decisions", "triangle-up", 4, run.decisions.map((one) => [one.step, `${one.kind}: level ${one.from} → ${one.to}, ${one.why}`]));
    mark("warnings", "x", 1, run.warnings.map((one) => [one.step, one.why]));
  }
  return [traces, legend];
}

function layoutOf(spec, traces) {
  const ink = css("--soft"), touch = matchMedia("(pointer: coarse)").matches;
  const axis = { color: ink, gridcolor: css("--line"), zerolinecolor: css("--line"), linecolor: css("--line"), tickfont: { size: 11 }, automargin: true, fixedrange: touch };
  const run = RUNS[state.run], here = run.kept[state.step];
  return {
    height: spec.timeline ? 60 + 28 * traces.length : 220, margin: { l: 44, r: 14, t: 8, b: 34 }, showlegend: false, hovermode: spec.timeline ? "closest" : "x unified",
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", dragmode: touch ? false : "zoom", font: { family: css("--sans"), color: ink, size: 12 },
    hoverlabel: { bgcolor: css("--card"), bordercolor: css("--line"), font: { color: css("--ink"), family: css("--sans"), size: 12 } },
    xaxis: { ...axis, title: { text: "step", font: { size: 11 }, standoff: 4 }, showgrid: false, range: spec.timeline ? [-1, run.metrics.step.at(-1) + 1] : undefined },
    yaxis: { ...axis, fixedrange: true, type: spec.log ? "log" : spec.timeline ? "category" : "linear", rangemode: spec.log ? undefined : "tozero", exponentformat: "power", nticks: 6 },
    shapes: spec.mark && here != null ? [{ type: "line", x0: here, x1: here, yref: "paper", y0: 0, y1: 1, line: { color: ink, width: 1, dash: "dot" } }] : [],
  };
}

function makeCharts() {
  const grid = el("div", { class: "charts" });
  for (const spec of CHARTS) {
    if (!tracesOf(spec)[0].length && !(MANY && (spec.stack || spec.traps))) continue;
    spec.plot = el("div", { class: "plot" });
    spec.legend = el("div", { class: "legend" });
    const single = MANY && (spec.stack || spec.traps || spec.timeline);
    spec.whose = el("span", { class: "whose" }, single ? RUNS[0].name : "");
    grid.append(el("figure", { class: spec.full ? "full" : spec.wide ? "wide" : "" }, el("figcaption", {}, el("h3", {}, spec.title, spec.whose), el("p", {}, spec.note)), spec.legend, spec.plot));
  }
  $("curves").append(grid);
  const events = RUNS.flatMap((run) => [...run.decisions.map((one) => [one.step, `${one.kind}, level ${one.from} → ${one.to}: ${one.why}`, run]), ...run.warnings.map((one) => [one.step, `warning: ${one.why}`, run])]);
  if (events.length) $("curves").append(el("details", {}, el("summary", {}, `${events.length} decision${events.length > 1 ? "s" : ""} and warnings in words`),
    el("ul", {}, events.sort((a, b) => a[0] - b[0]).map(([step, text, run]) => el("li", {}, el("b", {}, `step ${step}`), ` ${MANY ? `${run.name}, ` : ""}${text}`)))));
  const thinned = RUNS.filter((run) => run.drawn < run.made).map((run) => `${run.name}: ${run.drawn.toLocaleString("en")} of ${run.made.toLocaleString("en")} steps are drawn.`);
  $("drawn").textContent = ["Drag over a curve to zoom, double-click to go back; a click goes to the texts of that step.", ...thinned].join(" ");
}

function drawChart(spec) {
  const [traces, legend] = tracesOf(spec);
  Plotly.react(spec.plot, traces, layoutOf(spec, traces), { displayModeBar: false, responsive: true });
  spec.legend.replaceChildren(...legend.map(([label, stroke, dash]) => el("span", {}, swatch(stroke, dash), label)));
  if (spec.whose.textContent) spec.whose.textContent = RUNS[state.run].name;
  if (!spec.listens) spec.plot.on("plotly_click", (event) => goToStep(event.points[0].x));
  spec.listens = true;
}

const drawCharts = (specs = CHARTS) => specs.filter((spec) => spec.plot).forEach(drawChart);

// ---------------------------------------------------------------- samples

const parsed = new Map();

/** Return the kept steps of a run: step -> { count, groups }; read when first asked for. */
function samplesOf(number) {
  if (!parsed.has(number)) parsed.set(number, JSON.parse($(`samples-${number}`).textContent));
  return parsed.get(number);
}

const stepNow = () => samplesOf(state.run)[RUNS[state.run].kept[state.step]];
const groupNow = () => stepNow()?.groups[state.group];
const orderOf = (group) => group.rows.reward.map((_, i) => i).sort((a, b) => group.rows.reward[b] - group.rows.reward[a] || a - b);
const clamp = (value, count) => Math.max(0, Math.min(count - 1, value));

function go(changes, focus = false) {
  Object.assign(state, changes);
  state.step = clamp(state.step, RUNS[state.run].kept.length);
  state.group = clamp(state.group, stepNow()?.groups.length ?? 0);
  state.row = clamp(state.row, groupNow()?.rows.reward.length ?? 0);
  showStep();
  if (focus) document.querySelector(".row.here")?.scrollIntoView({ block: "nearest" });
}

function goToStep(step) {
  const kept = RUNS[state.run].kept;
  if (!kept.length) return;
  const near = kept.reduce((best, one, i) => (Math.abs(one - step) < Math.abs(kept[best] - step) ? i : best), 0);
  go({ step: near, group: 0, row: 0 });
  $("samples").scrollIntoView();
}

function chooseRun(number) {
  go({ run: number, step: 0, group: 0, row: 0 });
  drawCharts();
  showTables();
}

function showStep() {
  const run = RUNS[state.run], step = run.kept[state.step], at = run.metrics.step?.indexOf(step) ?? -1;
  document.querySelectorAll("#runs button").forEach((button) => button.setAttribute("aria-pressed", Number(button.dataset.run) === state.run));
  const left = run.stored - run.kept.length;
  $("kept").textContent = !run.stored ? `${run.name}: no rollouts are stored.` : left
    ? `The texts of ${run.kept.length} of ${run.stored} steps are in this file (${run.kept.join(", ")}): the first, the last, those with a decision or a warning, and between them evenly. Those of the other ${left} were left out for its size; python -m grpo.inspect ${run.path} shows them, and --megabytes keeps more.`
    : `The texts of all ${run.stored} steps are in this file.`;
  Object.assign($("slider"), { max: Math.max(0, run.kept.length - 1), value: state.step, disabled: run.kept.length < 2 });
  const say = (name, head, digits) => (run.metrics[name]?.[at] == null ? null : `${head} ${run.metrics[name][at].toFixed(digits)}`);
  $("step").replaceChildren(el("b", {}, step == null ? "no step" : `Step ${step}`), ` of ${run.made}`,
    el("span", { class: "aside" }, [say("reward", "reward", 3), say("level", "level", 0), say("temperature", "T", 2)].filter(Boolean).join(" · ")));
  $("slider").setAttribute("aria-valuetext", `step ${step}`);
  const there = stepNow(), missing = there ? there.count - there.groups.length : 0;
  $("groups").replaceChildren(...(there?.groups ?? []).map(card), missing ? el("p", { class: "aside" }, `${missing} of the step's ${there.count} groups were left out for the size of this file.`) : "");
  showGroup();
  drawMark();
}

function drawMark() {
  for (const spec of CHARTS) if (spec.mark && spec.listens) Plotly.relayout(spec.plot, { shapes: layoutOf(spec, []).shapes });
}

function card(group, place) {
  const [sign, number] = CLASSES[group.class] ?? ["?", 5];
  return el("button", { class: "card", "aria-pressed": place === state.group, onclick: () => go({ group: place, row: 0 }), title: DATA.classes[group.class] ?? "rewards differ" },
    el("span", { class: "class" }, el("i", { style: { background: `var(--c${number})` } }, sign), group.class, el("small", {}, `#${group.group}`)),
    el("span", { class: "bars", "aria-hidden": "true" }, orderOf(group).map((i) => el("i", { style: { height: `${8 + 92 * Math.max(0, Math.min(1, group.rows.reward[i]))}%`, background: `var(--c${number})` } }))),
    el("span", { class: "paid" }, group.reward.toFixed(3), el("small", {}, ` ± ${group.reward_std.toFixed(3)}`)), group.trap && el("span", { class: "trap" }, `trap: ${group.trap}`));
}

function showGroup() {
  const group = groupNow();
  if (!group) return $("group").replaceChildren();
  const done = { keep: "learned from", skip: "skipped", resample: "drawn again" }[group.action] ?? group.action;
  const order = orderOf(group), most = Math.max(1e-9, ...group.rows.advantage.map((value) => Math.abs(value ?? 0)));
  $("group").replaceChildren(
    el("h3", {}, `Group ${group.group}`, el("span", { class: "aside" }, [group.class, done, group.attempt ? `try ${group.attempt + 1}` : "", `level ${group.level}`, `T ${group.temperature.toFixed(2)}`, `${group.distinct} different of ${order.length}`, group.trap ? `trap: ${group.trap}` : ""].filter(Boolean).join(" · "))),
    el("details", {}, el("summary", {}, "Prompt"), el("pre", {}, group.prompt)),
    el("details", { open: true }, el("summary", {}, "Target"), fillWords(el("p", { class: "words" }), group, null, wordsOnly(group.target))),
    legendOfTint(group, most), ...order.map((sample, place) => rowOf(group, sample, place, most, order)));
}

function rowOf(group, sample, place, most, order) {
  const { text, reward, value, exact, tokens, finish, advantage } = Object.fromEntries(Object.entries(group.rows).map(([name, column]) => [name, column[sample]]));
  const stored = group.texts[text], twin = order.slice(0, place).find((other) => group.rows.text[other] === text);
  const lean = advantage == null ? null : 50 * Math.abs(advantage) / most;
  const words = el("div", { class: "words" });
  if (twin == null || state.tint === "advantage") fillWords(words, group, sample, columnsOf(stored.ops));
  else words.append(el("button", { class: "fold", onclick: () => { words.replaceChildren(); fillWords(words, group, sample, columnsOf(stored.ops)); } }, `same text as completion ${twin}`));
  const parts = Object.entries(stored.parts).map(([name, part]) => el("span", {}, el("b", {}, name), ` ${part}`));
  return el("article", { class: place === state.row ? "row here" : "row", onclick: () => markRow(place) },
    el("div", { class: "pay" }, el("b", {}, reward.toFixed(3)), el("span", { class: "lean", title: "advantage" }, lean == null ? null : el("i", { class: advantage < 0 ? "less" : "more", style: { width: `${lean}%` } })),
      el("small", {}, advantage == null ? "no advantage" : `${signed(advantage)} advantage`)),
    el("div", { class: "what" },
      el("p", { class: "meta" }, el("b", {}, `Completion ${sample}`), ` · score ${value.toFixed(3)} · ${exact ? "✓ exact" : stored.divergence || "right to the end"} · ${tokens} tokens, ${finish === "stop" ? "ended" : "cut by the budget"}`),
      words, parts.length ? el("details", { class: "parts" }, el("summary", {}, "parts of the score"), el("p", {}, parts)) : null));
}

function markRow(place) {
  state.row = place;
  document.querySelectorAll(".row").forEach((row, i) => row.classList.toggle("here", i === place));
}

const wordsOnly = (text) => text.split(" ").filter(Boolean).map((_, i) => ({ kind: "=", i, j: i }));

/** Return the columns of an alignment from its run lengths: kind, place in the target (i), place in the text (j). */
function columnsOf(ops) {
  const columns = [];
  let i = 0, j = 0;
  for (const [, count, kind] of ops.matchAll(/(\d+)([=x+-])/g))
    for (let n = 0; n < Number(count); n++) columns.push({ kind, i: kind === "+" ? null : i++, j: kind === "-" ? null : j++ });
  return columns;
}

/** Put words into a box, the first MOST_WORDS of them; `sample` is null for the target itself. */
function fillWords(box, group, sample, columns) {
  const now = columns.slice(0, MOST_WORDS), later = columns.slice(MOST_WORDS), stored = sample == null ? null : group.texts[group.rows.text[sample]];
  const view = { target: group.target.split(" "), words: (stored ? stored.words : group.target).split(" "), stored, credits: group.rows.credits?.[sample],
    advantage: sample == null ? null : group.rows.advantage[sample], most: Math.max(1e-9, ...group.rows.advantage.map((value) => Math.abs(value ?? 0)), ...(group.rows.credits ?? []).flat().map(Math.abs)) };
  view.hits = hitsIn(view.words, state.query);
  for (let at = 0; at < now.length;) {
    let end = at;
    while (end < now.length && now[end].kind === "=" && !view.hits.has(now[end].j)) end++;
    if (end - at > 3 * CONTEXT) {
      const hidden = now.slice(at + CONTEXT, end - CONTEXT);
      box.append(...now.slice(at, at + CONTEXT).map((column) => word(view, column)));
      const fold = el("button", { class: "fold", onclick: () => fold.replaceWith(...hidden.map((column) => word(view, column))) }, sample == null ? `… ${hidden.length} words …` : `… ${hidden.length} right …`);
      box.append(fold, " ", ...now.slice(end - CONTEXT, end).map((column) => word(view, column)));
      at = end;
    } else for (end = Math.max(end, at + 1); at < end; at++) box.append(word(view, now[at]));
  }
  if (!now.length) box.append(el("em", {}, "(no words)"));
  if (later.length) {
    const more = el("button", { class: "fold", onclick: () => { more.remove(); fillWords(box, group, sample, later); } }, `show ${Math.min(MOST_WORDS, later.length)} of ${later.length.toLocaleString("en")} more words`);
    box.append(more);
  }
  return box;
}

function word(view, { kind, i, j }) {
  const wanted = i == null ? null : view.target[i], written = j == null ? null : view.words[j];
  const node = el("span", { class: j != null && view.hits.has(j) ? "w hit" : "w" });
  if (kind === "x" || kind === "-") node.append(el("del", { title: "wanted" }, wanted));
  if (written != null) node.append(kind === "=" ? el("bdi", {}, written) : el("ins", { title: kind === "+" ? "too many" : `in the place of ${wanted}` }, written));
  const last = node.lastChild, logprob = view.stored?.logprobs?.[j], worth = view.credits?.[j] ?? view.advantage;
  if (j != null && state.tint === "logprob" && logprob != null) {
    last.title = `probability ${Math.exp(logprob / 100).toPrecision(2)}, log-prob ${(logprob / 100).toFixed(2)}`;
    last.style.background = tintOf("--c1", bin(logprob / 100) / 4);
  } else if (j != null && state.tint === "advantage" && worth != null) {
    last.title = `advantage ${signed(worth, 3)}`;
    last.style.background = tintOf(worth < 0 ? "--c1" : "--c0", Math.abs(worth) / view.most);
  }
  return el("span", {}, node, " ");
}

const bin = (logprob) => [-0.105, -0.693, -2.303, -4.605].filter((edge) => logprob < edge).length; // probabilities 0.9, 0.5, 0.1, 0.01
const tintOf = (name, share) => `color-mix(in srgb, var(${name}) ${Math.round(55 * share)}%, transparent)`;

function legendOfTint(group, most) {
  const tinted = (text, name, share) => el("span", { class: "tinted", style: { background: tintOf(name, share) } }, text);
  const said = { alignment: ["right ", el("del", {}, "missing"), " ", el("ins", {}, "too many"), " ", el("span", { class: "w" }, el("del", {}, "wanted"), el("ins", {}, "written")), " in its place"],
    logprob: group.texts.some((text) => text.logprobs) ? ["probability of a word: ", ...["> 0.9", "0.5", "0.1", "0.01", "less"].map((text, i) => tinted(text, "--c1", i / 4))] : ["No log-probabilities by word: the run has no checkpoint with a tokenizer."],
    advantage: group.rows.advantage.some((value) => value != null) ? ["advantage: ", tinted(signed(-most), "--c1", 1), tinted("0", "--c1", 0), tinted(signed(most), "--c0", 1)] : ["No advantage: nothing was learned from this group."] }[state.tint];
  return el("p", { class: "key", "data-tint": state.tint }, said);
}

// ---------------------------------------------------------------- search

/** Return the numbers of the words in which `query` occurs. */
function hitsIn(words, query) {
  const hits = new Set();
  if (query.length < 2) return hits;
  const text = words.join(" ").toLowerCase(), starts = [];
  words.reduce((at, one) => (starts.push(at), at + one.length + 1), 0);
  for (let at = text.indexOf(query), j = 0; at >= 0; at = text.indexOf(query, at + query.length))
    for (; j < words.length && starts[j] < at + query.length; j++) if (starts[j] + words[j].length > at) hits.add(j);
  return hits;
}

let finds = [], found = -1;

function search(query) {
  state.query = query.trim().toLowerCase().replace(/\s+/g, " ");
  [finds, found] = [[], -1];
  if (state.query.length > 1) RUNS[state.run].kept.forEach((step, place) => samplesOf(state.run)[step].groups.forEach((group, number) => {
    const order = orderOf(group);
    if (group.prompt.toLowerCase().includes(state.query)) finds.push({ step: place, group: number, row: 0, said: `step ${step} · group ${group.group} · prompt`, text: group.prompt });
    group.texts.forEach((text, i) => {
      if (!text.words.toLowerCase().includes(state.query)) return;
      const row = order.findIndex((sample) => group.rows.text[sample] === i);
      finds.push({ step: place, group: number, row, said: `step ${step} · group ${group.group} · completion ${order[row]}`, text: text.words });
    });
  }));
  const snippet = (text) => { const at = text.toLowerCase().indexOf(state.query); return `${at > 40 ? "… " : ""}${text.slice(Math.max(0, at - 40), at + 60)}`; };
  $("found").replaceChildren(...(state.query.length < 2 ? [] : [el("p", { class: "aside" }, `${finds.length || "No"} find${finds.length === 1 ? "" : "s"}${finds.length > MOST_FINDS ? `; the first ${MOST_FINDS}:` : ""}`),
    ...finds.slice(0, MOST_FINDS).map((find, i) => el("button", { class: "find", onclick: () => goToFind(i) }, el("b", {}, find.said), " ", snippet(find.text)))]));
  showGroup();
}

function goToFind(number) {
  if (!finds.length) return;
  found = number % finds.length;
  const { step, group, row } = finds[found];
  go({ step, group, row }, true);
  document.querySelectorAll(".find").forEach((button, i) => button.classList.toggle("here", i === found));
}

// ---------------------------------------------------------------- configuration, theme, keyboard

function showTables() {
  const run = RUNS[state.run];
  const table = (title, rows) => el("details", { open: matchMedia("(min-width: 700px)").matches }, el("summary", {}, title), el("dl", { class: "table" }, rows.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value)))));
  $("tables").replaceChildren(table(`Facts${MANY ? ` of ${run.name}` : ""}`, run.facts), table(`Settings${MANY ? ` of ${run.name}` : ""}`, run.config));
}

const dark = () => (document.documentElement.dataset.theme ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";

function themeChanged() {
  $("theme").textContent = dark() ? "☀ light" : "☾ dark";
  drawCharts();
  document.querySelectorAll("#runs svg line, tbody svg line").forEach((line, i) => line.setAttribute("stroke", colour(i % RUNS.length)));
}

function toggleTheme() {
  document.documentElement.dataset.theme = dark() ? "light" : "dark";
  themeChanged();
}

function chooseTint(tint) {
  state.tint = tint;
  $("tints").replaceChildren(...Object.entries(TINTS).map(([name, label]) => el("button", { "aria-pressed": name === tint, onclick: () => chooseTint(name) }, label)));
  showGroup();
}

function inSight() {
  const box = $("samples").getBoundingClientRect();
  return box.top < 0.7 * innerHeight && box.bottom > 0.3 * innerHeight;
}

const KEYS = {
  ArrowLeft: () => go({ step: state.step - 1, group: 0, row: 0 }), ArrowRight: () => go({ step: state.step + 1, group: 0, row: 0 }),
  ArrowUp: () => inSight() && (go({ group: state.group - 1, row: 0 }), true), ArrowDown: () => inSight() && (go({ group: state.group + 1, row: 0 }), true),
  j: () => go({ row: state.row + 1 }, true), k: () => go({ row: state.row - 1 }, true), t: toggleTheme, "?": () => $("help").showModal(),
  "/": () => { $("search").focus(); $("search").scrollIntoView({ block: "nearest" }); },
  1: () => chooseTint("alignment"), 2: () => chooseTint("logprob"), 3: () => chooseTint("advantage"),
};

document.addEventListener("keydown", (event) => {
  const typing = event.target === $("search"), sliding = event.target === $("slider") && event.key.startsWith("Arrow");
  if (typing && event.key === "Escape") $("search").blur();
  if (typing && event.key === "Enter") goToFind(found + 1);
  if (typing || sliding || event.ctrlKey || event.metaKey || event.altKey || $("help").open || !(event.key in KEYS)) return;
  if (KEYS[event.key]() !== false) event.preventDefault();
});
$("slider").addEventListener("input", () => go({ step: Number($("slider").value), group: 0, row: 0 }));
$("back").addEventListener("click", KEYS.ArrowLeft);
$("on").addEventListener("click", KEYS.ArrowRight);
$("theme").addEventListener("click", toggleTheme);
$("help-open").addEventListener("click", KEYS["?"]);
$("search").addEventListener("input", () => search($("search").value));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", themeChanged);

showHead();
makeCharts();
chooseTint("alignment");
go({});
showTables();
requestAnimationFrame(() => { themeChanged(); document.documentElement.dataset.ready = "yes"; });
