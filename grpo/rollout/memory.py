"""How many prompts a rollout answers at a time, and half of that after it ran out of memory.

The samples stay the same, up to rounding, which depends on the size of the batch.
"""

from grpo.model.policy import Policy


class RolloutMemory:
    """Says for how many prompts at a time a rollout has memory, and learns when it had too little.

    The policy estimates it from its own sizes. It cannot know what other programs on the same GPU
    will take. `most_tokens` is the room for completions, in tokens, that later batches may have.
    """

    def __init__(self, policy: Policy):
        self.policy = policy
        self.most_tokens = float("inf")
        self.notes: list[str] = []  # lines for the console

    def prompts(self, completions: int, prompt: int, room: int) -> int:
        """Return how many prompts a batch may have.

        A prompt has `prompt` tokens, and `completions` of up to `room` tokens each.
        """
        at_once = self.policy.prompts_at_once(completions, prompt, room)
        return max(1, int(min(at_once, self.most_tokens / (completions * room))))

    def halve(self, prompts: int, completions: int, room: int) -> None:
        """Free the decoder's memory; later batches have half the room of this one, which failed."""
        self.policy.free_decoder()
        self.most_tokens = prompts * completions * room / 2
        self.notes.append(
            f"out of memory: rollouts of at most {max(1, prompts // 2) * completions} completions "
            f"of {room} tokens at a time from now on"
        )

    def take_notes(self) -> list[str]:
        """Return the notes since the last call."""
        notes, self.notes = self.notes, []
        return notes


def rollout_memory(policy: Policy) -> RolloutMemory:
    """Return the memory of the rollouts of `policy`, which is kept with it."""
    if "memory" not in policy.decoder_cache:
        policy.decoder_cache["memory"] = RolloutMemory(policy)
    return policy.decoder_cache["memory"]
