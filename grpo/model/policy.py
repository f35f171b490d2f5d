"""The policy: a causal language model, its tokenizer, its LoRA adapter if it has one, and the
reference.

The trainer uses a model through these calls:

- rollout: `prefill` runs the prompts, each once; `extend` runs the tokens that follow them;
- update: `pack` arranges prompts and completions; `predict` runs them all at once;
- both: `head` and `logits` turn hidden states into logits;
- KL: `reference` gives the model as it was at the start.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor

from data.errors import UserError
from grpo.model.check import choose_path
from grpo.model.context import context_of
from grpo.model.encoding import (
    Tokenizer,
    plain_tokens,
    prompt_tokens,
    target_length,
    text_of,
)
from grpo.model.endings import end_of_turn, name_of
from grpo.model.fallback import FallbackCache
from grpo.model.gradient_checkpointing import checkpoint_layers
from grpo.model.interfaces import Model, RolloutCache, SharedAttention
from grpo.model.llama import FastLlama
from grpo.model.matmul import linear_no_grad
from grpo.model.memory import DeviceMemory, Shape, prompts_at_once, shape_of, update_tokens
from grpo.model.packed_attention import Packing, PaddedBatch
from grpo.model.prefill import prefill
from grpo.model.prefix_cache import PrefixCache
from grpo.model.prompts import PromptFormat, check_format, opened_reasoning
from grpo.model.runner import ForwardPath
from grpo.model.save import save_model
from tasks.base import Problem

# The number of prompts, and of targets, whose tokens are kept. A step asks for the same ones to
# sample, to check its budget, and to learn.
CACHED_ENCODINGS = 512

CPU_TOKENS_AT_ONCE = 4096

# The most tokens that the reasoning tag at the end of a prompt takes, with the blanks after it.
TAG_TOKENS = 16


class Policy:
    """A model to be trained or sampled.

    - `model`: the `transformers` or `peft` model, always in eval mode.
    - `stops`: the token ids that end a completion; `end`: the one that ends a right answer.
    - `context`: the largest number of tokens of prompt and completion together.
    - `low_precision_backward`: see `model.matmul`.
    - `notes`: warnings for the user.
    - `reserved_bytes`: memory that is not free for caches and activations: the weights, and what a
      trainer adds.
    - `decoder_cache`: what the rollout keeps for this policy.

    `frozen` is the reference if that is a separate model. `path`, `fast_model` and `logit_scale`
    are set by `choose_path`; `logit_scale` is the factor by which the model multiplies the logits
    of its output layer. Raises UserError for a model that is not supported (see `model.check`).
    """

    def __init__(
        self,
        model: Model,
        tokenizer: Tokenizer,
        *,
        name: str,
        frozen: Model = None,
        low_precision_backward: bool = False,
    ):
        self.model = model.eval()
        self.tokenizer = tokenizer
        self.name = name
        self.is_lora = isinstance(model, PeftModel)
        self.low_precision_backward = low_precision_backward
        self.gradient_checkpointing = False
        self.decoder_cache: dict[str, Any] = {}

        self._target_length = lru_cache(CACHED_ENCODINGS)(partial(target_length, tokenizer))
        self.use(PromptFormat())

        self._frozen: Policy | None = None
        if frozen is not None:
            self._frozen = Policy(frozen.requires_grad_(False), tokenizer, name=name)

        self.stops, self.end, warning = _stop_ids(model, tokenizer)
        self.notes = [f"--model {name}: {warning}"] if warning else []
        self.context, _ = context_of(self.causal.config, supports_windows=True)

        self.vocabulary: int = len(model.get_input_embeddings().weight)
        weights = [*model.parameters(), *(frozen.parameters() if frozen else ())]
        self.weight_bytes: int = sum(p.numel() * p.element_size() for p in weights)
        self.reserved_bytes = self.weight_bytes

        self.path: ForwardPath = "plain"
        self.fast_model: FastLlama | None = None
        self.logit_scale = 1.0
        choose_path(self)

        self.context, reason = context_of(self.causal.config, supports_windows=self.is_plain)
        if reason:
            self.notes.append(
                f"--model {name}: {reason}; prompt and completion may have {self.context:,} tokens "
                "together, and longer ones are not supported"
            )

    @property
    def is_plain(self) -> bool:
        """Whether completions cannot share their prompts: see `model.fallback`."""
        return self.path == "plain"

    @property
    def causal(self) -> Model:
        """The model without its adapters' wrapper."""
        return self.model.get_base_model() if self.is_lora else self.model

    @property
    def inner(self) -> Model:
        """The model without its output layer."""
        base = self.causal.base_model
        return base if base is not self.causal else self.causal.model

    @property
    def head(self) -> torch.nn.Module:
        """The output layer, from hidden states (..., E) to logits (..., V)."""
        return self.causal.get_output_embeddings()

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        return self.model.device

    @property
    def dtype(self) -> torch.dtype:
        """The precision of the hidden states."""
        return self.causal.dtype

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        """The parameters that are trained."""
        return [p for p in self.model.parameters() if p.requires_grad]

    # Text and tokens

    def use(self, format: PromptFormat) -> None:
        """Put problems to the model in this `format` from now on.

        Raises UserError if its chat template cannot express it.
        """
        check_format(self.tokenizer, format)
        self.format = format
        self._prompt_tokens = lru_cache(CACHED_ENCODINGS)(
            partial(prompt_tokens, self.tokenizer, arguments=format.arguments)
        )

    def encode(self, problem: Problem | str) -> tuple[int, ...]:
        """Return the token ids of the whole prompt of `problem`, up to where the answer begins.

        A string is a prompt without a problem, for which no examples can be drawn.
        """
        turns, template = self.format.turns(problem), self.tokenizer.chat_template
        try:
            tokens = self._prompt_tokens(turns, template)
        except UserError as error:
            whose = problem.title if isinstance(problem, Problem) else "the prompt"
            raise UserError(f"{whose}: {error}") from error
        if not tokens:
            raise UserError(f"--model {self.name}: its chat template makes an empty prompt")
        if max(tokens) >= self.vocabulary:
            raise UserError(
                f"--model {self.name}: its tokenizer has token {max(tokens):,}, the model only "
                f"{self.vocabulary:,} tokens; give a directory whose files belong together"
            )
        return tokens

    def opened(self, problem: Problem) -> str:
        """Return the reasoning tag that the prompt of `problem` ends with, e.g. "<think>\\n"; "" if
        it does not.
        """
        return opened_reasoning(text_of(self.tokenizer, self.encode(problem)[-TAG_TOKENS:]))

    def shots(self, problem: Problem) -> tuple[str, ...]:
        """Return the keys of the examples that the prompt of `problem` shows."""
        return tuple(example.key for example in self.format.shots(problem))

    def target_length(self, target: str) -> int:
        """Return how many tokens the answer `target` takes, its end token included."""
        return self._target_length(target)

    def target_tokens(self, target: str) -> tuple[int, ...]:
        """Return the token ids of the answer `target`, without the end token."""
        return tuple(plain_tokens(self.tokenizer, [target])[0])

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text that a completion's `tokens` write.

        An end token in the last place is left out. Any other control token is shown by its name,
        e.g. "<|pad|>", so that whoever scores the text sees what was written.
        """
        written = tokens[:-1] if len(tokens) and tokens[-1] in self.stops else tokens
        return text_of(self.tokenizer, written)

    # The forward pass of the rollout

    def prefill(self, prompts: Sequence[tuple[int, ...]]) -> tuple[Tensor, RolloutCache]:
        """Run the model on each prompt once, see `model.prefill`.

        Returns the hidden state of each prompt's last token (P, E), and the cache to `extend`.
        """
        return prefill(self, prompts)

    def extend(self, tokens_RT: Tensor, cache: RolloutCache) -> Tensor:
        """Run the model on the next tokens of each row; return their hidden states (R, T, E)."""
        if isinstance(cache, FallbackCache):
            whole_RX, indices_RT = cache.append(tokens_RT)
            # Drafts may reach beyond the context; there they are never accepted.
            hidden_RXE = self.hidden_states(whole_RX[:, : self.context])
            indices_RT = indices_RT.clamp(max=hidden_RXE.shape[1] - 1)
            return hidden_RXE.gather(1, indices_RT[:, :, None].expand(-1, -1, hidden_RXE.shape[2]))

        assert isinstance(cache, PrefixCache) and cache.filled_R is not None
        offsets_T = torch.arange(tokens_RT.shape[1], device=self.device)
        positions_RT = (cache.lengths_P + cache.filled_R)[:, None] + offsets_T
        # As above, for drafts beyond the context.
        positions_RT = positions_RT.clamp(max=self.context - 1)
        return self.hidden_states(tokens_RT, position_ids=positions_RT, shared=cache)

    # The forward pass of the update

    def pack(
        self, prompts: Sequence[tuple[int, ...]], completions: Sequence[tuple[int, ...]]
    ) -> Packing | PaddedBatch:
        """Return the micro-batch that `predict` takes.

        Each prompt has equally many completions, in order. On a CPU these share their beginnings.
        """
        if self.is_plain:
            return PaddedBatch(prompts, completions, self.device)
        is_cpu = self.device.type == "cpu"
        return Packing(prompts, completions, self.device, shares_beginnings=is_cpu)

    def predict(self, packing: Packing | PaddedBatch) -> Tensor:
        """Return the hidden states that predict the completions' tokens (U, E).

        U counts what is `distinct` in the packing; its `of_tokens` gives the values of all tokens.
        """
        if self.fast_model and self.fast_model.use_lora:
            self.fast_model.refresh()

        if isinstance(packing, Packing):
            hidden_1NE = self.hidden_states(
                packing.tokens_N[None], position_ids=packing.positions_N[None], shared=packing
            )
            return hidden_1NE[0].index_select(0, packing.predictors_U)

        # The prompt's last token predicts the first token, and each token the next.
        last_PE, cache = self.prefill(packing.prompts)
        hidden_RTE = self.extend(packing.tokens_RT, cache)
        rows = len(hidden_RTE) // len(last_PE)
        last_R1E = last_PE.repeat_interleave(rows, 0)[:, None]
        before_RTE = torch.cat([last_R1E, hidden_RTE[:, :-1]], 1)
        return before_RTE[packing.mask_RT]

    def hidden_states(
        self,
        tokens_BT: Tensor,
        position_ids: Tensor | None = None,
        shared: SharedAttention | None = None,
    ) -> Tensor:
        """Return the last hidden states (B, T, E), scaled so that `head` gives the model's logits.

        On the plain path there are no `position_ids`, and no `shared` attention.
        """
        if self.fast_model:
            assert position_ids is not None and shared is not None
            return self.fast_model(tokens_BT, position_ids, shared)

        arguments = {} if shared is None else {"position_ids": position_ids, "shared": shared}
        output = self.inner(input_ids=tokens_BT, use_cache=False, **arguments)
        hidden = output.last_hidden_state
        return hidden if self.logit_scale == 1.0 else self.logit_scale * hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits (..., V) of hidden states (..., E). They have no gradient."""
        head = self.head
        if type(head) is torch.nn.Linear:
            return linear_no_grad(hidden, head.weight, head.bias)
        return head(hidden)

    # Memory

    def enable_gradient_checkpointing(self) -> None:
        """Compute activations again in the backward pass.

        That takes a third more time in the update, for a fraction of its memory.
        """
        if self.fast_model:
            self.fast_model.gradient_checkpointing = True
        elif not self.gradient_checkpointing:
            checkpoint_layers(self.model)
        self.gradient_checkpointing = True

    def free_decoder(self) -> bool:
        """Free the decoder's GPU memory, which the next rollout takes again, and unused memory.

        Returns whether there is a decoder.
        """
        step = self.decoder_cache.get("cuda")  # None if there is none, or none yet
        if step is not None:
            step.free()
        torch.cuda.empty_cache()
        return step is not None

    @property
    def tokens_at_once(self) -> int:
        """How many tokens of an update fit into the GPU's free memory; a constant on a CPU."""
        if self.device.type != "cuda":
            return CPU_TOKENS_AT_ONCE
        return update_tokens(
            self._shape, self._memory, gradient_checkpointing=self.gradient_checkpointing
        )

    def prompts_at_once(self, completions: int, prompt: int, room: int) -> int:
        """Return for how many prompts a rollout has memory; on a CPU, any number.

        A prompt has `prompt` tokens, and `completions` of up to `room` tokens each.
        """
        if self.device.type != "cuda":
            return 1 << 30
        return prompts_at_once(
            self._shape, self._memory, completions=completions, prompt=prompt, room=room
        )

    @property
    def _shape(self) -> Shape:
        return shape_of(
            self.causal.config,
            next(self.model.parameters()).element_size(),
            self.fast_model is not None,
        )

    @property
    def _memory(self) -> DeviceMemory:
        """The GPU's memory that this process may use."""
        total = torch.cuda.get_device_properties(self.device).total_memory
        share = torch.cuda.get_per_process_memory_fraction(self.device)
        return DeviceMemory(total * share, self.reserved_bytes)

    # The reference, and files

    @contextmanager
    def reference(self) -> Iterator["Policy"]:
        """Within this context, the policy that is yielded is the reference, without gradients.

        It is the frozen model, or this one with the adapter switched off.
        """
        with torch.no_grad():
            if self._frozen is not None:
                yield self._frozen
            elif self.is_lora and self.fast_model:
                self.fast_model.use_lora = False
                try:
                    yield self
                finally:
                    self.fast_model.use_lora = True
            else:
                assert self.is_lora, "there is no reference when beta is 0"
                with self.model.disable_adapter():
                    yield self

    def saved_tensors(self) -> dict[str, Tensor]:
        """Return the tensors that `save` writes, by name: the adapter's, or all."""
        tensors = self.model.state_dict()
        if not self.is_lora:
            return tensors
        trained = {name for name, weight in self.model.named_parameters() if weight.requires_grad}
        return {name: tensor for name, tensor in tensors.items() if name in trained}

    def save(self, folder: Path, tensors: Mapping[str, Tensor] | None = None) -> None:
        """Write the model (or the adapter) and the tokenizer in Hugging Face layout.

        `tensors`, if given, are earlier copies of the `saved_tensors`. They are written instead,
        because training may continue meanwhile.
        """
        save_model(self.model, folder, tensors)
        self.tokenizer.save_pretrained(folder)


def _stop_ids(model: Model, tokenizer: Tokenizer) -> tuple[tuple[int, ...], int, str]:
    """Return the token ids that end a completion, the one that ends a right answer, and a warning.

    The end tokens are those of the generation config (one or several), of the tokenizer and of the
    chat template. The warning is "" unless the template's is missing among the others. Raises
    UserError if there is none at all.
    """
    ids = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    declared: set[int] = {ids} if isinstance(ids, int) else set(ids or [])
    own = tokenizer.eos_token_id
    if own is not None:
        declared.add(own)

    from_template = end_of_turn(tokenizer)
    shown = set() if from_template is None else {from_template}
    stops = tuple(sorted(declared | shown))
    if not stops:
        raise UserError(
            "the model has no end token (eos_token_id in generation_config.json); add one"
        )

    end = next(token for token in (from_template, own, stops[0]) if token is not None)
    if from_template is None or from_template in declared:
        return stops, end, ""

    others = ", ".join(name_of(tokenizer, token) for token in sorted(declared))
    warning = (
        f"its chat template ends an answer with {name_of(tokenizer, from_template)}, but its files "
        f"name {others or 'no end token'}; a completion ends at any of them"
    )
    return stops, end, warning
