"""The probe's log-probabilities, as the model itself, the rollout and the update compute them.

Shapes: T tokens of a completion, N tokens of all completions, P prompts, R rows, E hidden size, V
vocabulary.
"""

from typing import Any

import torch
from torch import Tensor, nn

from data.errors import UserError
from grpo.model.context import text_config
from grpo.model.distance import constant_factor, has_low_precision, logprobs_of
from grpo.model.packed_attention import Packing
from grpo.model.probe import ROLLOUT, Probe
from grpo.model.runner import Runner
from grpo.model.unsupported import CAPPED, CAPS, cause_of, refusal, unsupported_mechanism


def own_logprobs(policy: Runner, probe: Probe) -> list[Tensor]:
    """Return the unmodified model's log-probabilities for each completion (T + 1, V).

    The first row predicts the completion's first token, and the last one what follows its end.
    Sets the policy's `logit_scale`. Raises UserError if the model cannot be run on token ids, if
    its logits are not finite, or if they are capped.
    """
    model = policy.causal
    seen: dict[str, Any] = {}
    logprobs = []

    def see_hidden(module: nn.Module, inputs: Any, output: Any) -> None:
        seen["hidden"] = getattr(output, "last_hidden_state", None)

    def see_head(module: nn.Module, inputs: Any, output: Any) -> None:
        seen["input"] = inputs[0]
        seen["output"] = output

    hooks = []
    try:
        hooks.append(policy.inner.register_forward_hook(see_hidden))
        hooks.append(policy.head.register_forward_hook(see_head))

        for c in range(len(probe.completions)):
            tokens = torch.tensor([probe.sequence(c)], device=policy.device)
            logits = model(input_ids=tokens, use_cache=False).logits
            logprobs.append(logprobs_of(logits[0, len(probe.prompts[c // 2]) - 1 :]))
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        raise refusal(policy, f"it cannot be run on token ids alone ({cause_of(error)})") from error
    finally:
        for hook in hooks:
            hook.remove()

    if any(each.isnan().any() for each in logprobs):
        raise UserError(
            f"--model {policy.name}: its logits are not finite: the weights are damaged; give "
            "those of an earlier checkpoint, or a fresh copy"
        )

    config = text_config(model.config)
    if any(getattr(config, name, None) for name in CAPS):
        raise refusal(policy, CAPPED)

    # Some models scale the hidden state before the head, or the logits after it.
    if seen.get("hidden") is not None and "input" in seen:
        before = constant_factor(seen["input"], seen["hidden"], has_low_precision(model))
        after = constant_factor(logits, seen["output"], has_low_precision(model))
        if before is None or after is None:
            raise refusal(policy, unsupported_mechanism(policy, probe) or CAPPED)
        policy.logit_scale = before * after
    return logprobs


def rollout_logprobs(policy: Runner, probe: Probe, expected: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Return log-probabilities (N, V) as the rollout computes them, and the expected ones.

    `expected` is the result of `own_logprobs`. The steps are those of ROLLOUT.
    """
    hidden_PE, cache = policy.prefill(probe.prompts)
    cache.allocate(len(probe.prompts), max(map(len, probe.completions)) + 2)

    # Both completions of a prompt begin with the same token, so the first of each pair will do.
    found = [hidden_PE]
    wanted = [expected[0][0], expected[2][0]]

    for step in ROLLOUT:
        if step is not ROLLOUT[0]:
            cache.reorder(
                torch.tensor(step.sources, device=policy.device),
                torch.tensor(step.filled, device=policy.device),
            )

        tokens_RT = torch.zeros(len(step.rows), step.length, dtype=torch.long)
        for row, (c, filled, accepted) in enumerate(zip(step.rows, step.filled, step.accepted)):
            right = probe.completions[c][filled : filled + accepted]
            tokens_RT[row, :accepted] = torch.tensor(right)
            wanted += expected[c][filled + 1 : filled + 1 + accepted]

        hidden_RTE = policy.extend(tokens_RT.to(policy.device), cache)
        found += [hidden_RTE[row, :accepted] for row, accepted in enumerate(step.accepted)]

    return logprobs_of(policy.logits(torch.cat(found))), torch.stack(wanted)


def update_logprobs(policy: Runner, probe: Probe, expected: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Return log-probabilities (N, V) as the update computes them, and the expected ones.

    `expected` is the result of `own_logprobs`. All sequences are packed into one micro-batch.
    """
    packing = policy.pack(probe.prompts, probe.completions)
    hidden_NE = packing.of_tokens(policy.predict(packing))
    return logprobs_of(policy.head(hidden_NE)), torch.cat([each[:-1] for each in expected])


def attends_once(policy: Runner, probe: Probe) -> bool:
    """Return whether each layer calls our attention exactly once, and the model has no convolution.

    A layer with a state of another kind (recurrent, or of a convolution) fails this test. While its
    weights are small, the comparison of log-probabilities can miss it.
    """
    packing = _NotingPacking(probe.prompts, probe.completions, policy.device)
    policy.predict(packing)

    modules = list(policy.inner.modules())
    numbers = (getattr(module, "layer_idx", None) for module in modules)
    layers = {number for number in numbers if isinstance(number, int)}
    has_convolution = any(isinstance(module, nn.Conv1d) for module in modules)
    return sorted(packing.layers) == sorted(layers) and not has_convolution


class _NotingPacking(Packing):
    """Notes in `layers` which layers call it."""

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self.layers: list[int] = []

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        self.layers.append(layer)
        return super().attend(layer, query, key, value, scale)
