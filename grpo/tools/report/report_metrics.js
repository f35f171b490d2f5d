"use strict";
// Which charts the page has, and which metrics they show.

// The classes of groups: sign and number of the colour.
const CLASSES = {
  varied: ["≠", 0],
  solved: ["✓", 2],
  identical: ["=", 1],
  tied: ["≈", 4],
  failed: ["✕", 3],
};

// `lines` maps a metric to its label. `stack`, `traps` and `timeline` show the selected run only.
const CHARTS = [
  {
    title: "Reward",
    note: "mean over the completions of a step; band: ± the standard deviation within a group",
    lines: { reward: "reward" },
    band: "group_std",
    wide: true,
    mark: true,
  },
  {
    title: "Held-out score",
    note: "problems from documents that are never trained on, by level; bars: 95 % interval",
    evals: true,
    wide: true,
  },
  {
    title: "Timeline",
    note: "checkpoints, evaluations, decisions of the curriculum, warnings",
    timeline: true,
    full: true,
    mark: true,
  },
  {
    title: "Groups by class",
    note: "number of groups; only varied groups have a gradient",
    stack: Object.fromEntries(Object.keys(CLASSES).map((name) => [`groups/class/${name}`, name])),
  },
  {
    title: "Score and exact answers",
    note: "mean over the completions of a step",
    lines: { value: "score", exact: "share exact" },
  },
  { title: "Traps", note: "share of completions that follow a cheap strategy", traps: true },
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
  { title: "Level", note: "level of the curriculum", lines: { level: "level" }, shape: "hv" },
  { title: "Temperature", note: "sampling temperature", lines: { temperature: "temperature" } },
  { title: "Entropy", note: "of the policy, in nats per token", lines: { entropy: "entropy" } },
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
    small: true,
  },
  { title: "Gradient norm", note: "before clipping", lines: { grad_norm: "norm" } },
  {
    title: "Completion length",
    note: "mean number of tokens",
    lines: { "completions/mean_length": "mean" },
  },
  {
    title: "Truncated",
    note: "share of completions that reached the token budget",
    lines: { "completions/clipped_ratio": "truncated" },
  },
  {
    title: "Throughput",
    note: "sampled tokens per second of the whole step",
    lines: { tokens_per_second: "tokens/s" },
  },
  {
    title: "Step time (s)",
    note: "by phase",
    stack: { "time/rollout": "rollout", "time/score": "score", "time/update": "update" },
  },
];
