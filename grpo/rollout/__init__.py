"""Completions sampled from the policy. Shape letters are those of `grpo.model`."""
