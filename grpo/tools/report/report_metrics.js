"use strict";
// Which charts the page has, and which metrics they show.

// The outcomes of groups: sign and number of the colour.
const CLASSES = {
  varied: ["≠", 0],
  solved: ["✓", 2],
  identical: ["=", 1],
  tied: ["≈", 4],
  failed: ["✕", 3],
  masked: ["…", 5],
};

const SECTIONS = {
  Learning:
    "Does it learn, and at which level? Dashed vertical lines mark a change of level, the dotted " +
    "one the step shown under Samples.",
  Signal: "How much of what was sampled could teach anything?",
  Optimisation: "What the updates did. A gap is a step without an update.",
  System: "Where time and memory go.",
  Other: "Metrics of this run that the page knows no more about.",
};

// `lines` maps a metric to its label. `stack`, `prefix` and `timeline` show the selected run only;
// `prefix` has a line for each metric whose name begins so.
const CHARTS = [
  {
    section: "Learning",
    title: "Reward",
    note: "mean over the completions of a step; band: ± the standard deviation within a group",
    lines: { reward: "reward" },
    band: "group_std",
    wide: true,
    mark: true,
  },
  {
    section: "Learning",
    title: "Held-out score",
    note: "problems that are never trained on, by level; bars: 95 % interval",
    evals: true,
    wide: true,
  },
  {
    section: "Learning",
    title: "Timeline",
    note: "checkpoints, evaluations, decisions of the curriculum, warnings",
    timeline: true,
    full: true,
    mark: true,
  },
  {
    section: "Learning",
    title: "Score and exact answers",
    note: "mean over the completions of a step",
    lines: { value: "score", exact: "share exact" },
    mark: true,
  },
  {
    section: "Learning",
    title: "Components of the reward",
    note: "mean over the completions of a step, before weights",
    prefix: "reward/",
    mark: true,
  },
  {
    section: "Learning",
    title: "Level",
    note: "level of the curriculum",
    lines: { level: "level" },
    shape: "hv",
  },
  {
    section: "Signal",
    title: "Outcomes of groups",
    note: "number of groups; only varied groups have a gradient",
    stack: Object.fromEntries(Object.keys(CLASSES).map((name) => [`groups/class/${name}`, name])),
    mark: true,
  },
  {
    section: "Signal",
    title: "Wasted tokens",
    note: "sampled tokens in groups that taught nothing",
    lines: { wasted_tokens: "of the step" },
    mark: true,
  },
  {
    section: "Signal",
    title: "Reward within groups",
    note: "standard deviation; share of groups where it is zero",
    lines: { group_std: "standard deviation", frac_reward_zero_std: "share with zero" },
    mark: true,
  },
  {
    section: "Signal",
    title: "Distinct completions",
    note: "mean number of distinct texts in a group",
    lines: { distinct_completions: "distinct" },
  },
  {
    section: "Signal",
    title: "Traps",
    note: "share of completions that follow a cheap strategy; the six most frequent",
    prefix: "traps/",
    missing: 0,
  },
  {
    section: "Signal",
    title: "Truncated",
    note: "share of completions that reached the token budget",
    lines: { "completions/clipped_ratio": "truncated", "completions/masked_ratio": "left out" },
  },
  {
    section: "Signal",
    title: "Completion length",
    note: "mean number of tokens",
    lines: { "completions/mean_length": "mean" },
  },
  {
    section: "Signal",
    title: "Temperature",
    note: "sampling temperature",
    lines: { temperature: "temperature" },
  },
  {
    section: "Optimisation",
    title: "Loss",
    note: "of the update; its sign says little about learning",
    lines: { loss: "loss" },
  },
  {
    section: "Optimisation",
    title: "Learning rate",
    note: "of the update",
    lines: { learning_rate: "rate" },
  },
  {
    section: "Optimisation",
    title: "Gradient norm",
    note: "before clipping",
    lines: { grad_norm: "norm" },
  },
  {
    section: "Optimisation",
    title: "Entropy",
    note: "of the policy, in nats per token",
    lines: { entropy: "entropy" },
  },
  {
    section: "Optimisation",
    title: "KL to the reference",
    note: "in nats per token",
    lines: { kl: "KL" },
  },
  {
    section: "Optimisation",
    title: "Clipped ratios",
    note: "share of tokens whose ratio was clipped",
    lines: { "clip_ratio/low_mean": "low", "clip_ratio/high_mean": "high" },
  },
  {
    section: "Optimisation",
    title: "Parity",
    note: "largest difference of a log-probability between trainer and sampler",
    lines: { "sampling/sampling_logp_difference/max": "largest difference" },
  },
  {
    section: "System",
    title: "Throughput",
    note: "sampled tokens per second of the whole step",
    lines: { tokens_per_second: "tokens/s" },
  },
  {
    section: "System",
    title: "Step time (s)",
    note: "by phase",
    stack: {
      "time/rollout": "rollout",
      "time/score": "score",
      "time/update": "update",
      "time/wait": "wait",
    },
  },
  {
    section: "System",
    title: "Memory (GB)",
    note: "peak on the device",
    lines: { memory_gb: "memory" },
  },
];

// Metrics that are axes, totals, or parts of a chart under another name.
const NOT_DRAWN = [
  "step",
  "num_tokens",
  "step_time",
  "wasted_tokens_total",
  "reward_std",
  "groups/count",
];

/** Add a chart for every metric that no other chart shows. */
function addOtherCharts() {
  const known = new Set(NOT_DRAWN);
  const prefixes = CHARTS.map((spec) => spec.prefix).filter(Boolean);
  for (const spec of CHARTS)
    for (const name of [...Object.keys(spec.lines ?? spec.stack ?? {}), spec.band]) known.add(name);
  for (const name of new Set(RUNS.flatMap((run) => Object.keys(run.metrics))))
    if (!known.has(name) && !prefixes.some((prefix) => name.startsWith(prefix)))
      CHARTS.push({ section: "Other", title: name, note: "", lines: { [name]: name }, raw: true });
}
