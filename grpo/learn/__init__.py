"""How groups of scored completions change the policy. Shape letters are those of `grpo.model`."""
