"""The policy: a causal language model, its tokenizer, its LoRA adapter where it has one, and its
reference.

Everything the trainer asks of a model goes through five calls: in the rollout `prefill` (prompts,
once each) and `extend` (tokens that follow them); in the update `predict` (prompts and completions
at once); in both `head` (hidden states to logits); and `reference` (the same model as it was at
the start).

Shapes: P prompts, R completions (rows), T tokens, M tokens of all completions, H hidden size, V
vocabulary.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel

from grpo.model.check import Path as ModelPath
from grpo.model.check import choose_path
from grpo.model.encoding import plain_tokens, prompt_tokens, target_length
from grpo.model.endings import end_of_turn, name_of
from grpo.model.fallback import FallbackCache
from grpo.model.llama import FastLlama, checkpoint_layers
from grpo.model.matmul import linear
from grpo.model.memory import prompts_at_once, shape_of, update_tokens
from grpo.model.packed_attention import Packing, PlainPacking
from grpo.model.prefix_cache import PrefixCache
from grpo.model.prompts import PromptFormat, check_format
from tasks.base import Problem, UserError

# prompts and targets whose tokens are kept: a step asks for them again to draw, to fit its budget,
# and to learn
REMEMBERED = 512


class Policy:
    """A model to be trained or sampled. `model` is the `transformers` or `peft` model, always in
    eval mode.

    `stops` are the token ids that end a completion, `end` the one of them that ends a right
    answer; `context` the most tokens of prompt and completion together. `frozen` is the reference,
    where it is a model of its own; `has_rough_gradients`: see `model.matmul`. `notes` are warnings
    for the user. `held` are the bytes of memory that are not for caches and activations: the
    weights, and what a trainer adds.
    """

    def __init__(
        self,
        model,
        tokenizer,
        *,
        name: str,
        frozen=None,
        has_rough_gradients: bool = False,
        note: str = "",
    ):
        self.model, self.tokenizer, self.name = model.eval(), tokenizer, name
        self._length = lru_cache(REMEMBERED)(partial(target_length, tokenizer))
        self.use(PromptFormat())
        self.is_forgetful, self.has_rough_gradients = False, has_rough_gradients
        self.is_lora = isinstance(model, PeftModel)
        self.path: ModelPath = "plain"
        self.fast_model: FastLlama | None = None
        self.logit_scale = 1.0  # what the model multiplies its output layer's logits by
        self._frozen = (
            None if frozen is None else Policy(frozen.requires_grad_(False), tokenizer, name=name)
        )
        self.stops, self.end, differs = _stop_ids(model, tokenizer)
        self.notes = [text for text in (note, differs and f"--model {name}: {differs}") if text]
        self.context = getattr(self.causal.config, "max_position_embeddings", 1 << 30)
        self.held = self.weight_bytes = sum(
            p.numel() * p.element_size()
            for p in (*model.parameters(), *(frozen.parameters() if frozen else ()))
        )
        self.decoder_cache: dict[str, Any] = {}  # what the rollout keeps for this policy
        choose_path(self)

    @property
    def is_plain(self) -> bool:
        """Whether prompts cannot be shared: see `model.fallback`."""
        return self.path == "plain"

    @property
    def causal(self):
        """The model without its adapters' wrapper."""
        return self.model.get_base_model() if self.is_lora else self.model

    @property
    def inner(self):
        """The model without its output layer."""
        base = self.causal.base_model
        return base if base is not self.causal else self.causal.model

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        """What is trained."""
        return [p for p in self.model.parameters() if p.requires_grad]

    def use(self, format: PromptFormat):
        """Put problems to the model in this `format` from now on. Raises UserError where its chat
        template cannot express it.
        """
        check_format(self.tokenizer, format)
        self.format = format
        self._encoded = lru_cache(REMEMBERED)(
            partial(prompt_tokens, self.tokenizer, arguments=format.arguments)
        )

    def encode(self, problem: Problem | str) -> tuple[int, ...]:
        """Return the token ids of all that the model is sent of `problem` (see `PromptFormat`), up
        to where the answer begins.

        A string is a prompt without a problem, for which no examples can be drawn.
        """
        return self._encoded(self.format.turns(problem), self.tokenizer.chat_template)

    def shots(self, problem: Problem) -> tuple[str, ...]:
        """Return the keys of the examples that the prompt of `problem` shows."""
        return tuple(example.key for example in self.format.shots(problem))

    def target_length(self, target: str) -> int:
        """Return how many tokens the answer `target` takes, its end token included."""
        return self._length(target)

    def target_tokens(self, target: str) -> tuple[int, ...]:
        """Return the token ids of the answer `target`, without the end token."""
        return tuple(plain_tokens(self.tokenizer, [target])[0])

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text that a completion's `tokens` write.

        Only an end token that stands last is left out. Any other control token is shown by its
        name, e.g. "<|pad|>", so that whoever scores the text sees what was written.
        """
        written = tokens[:-1] if len(tokens) and tokens[-1] in self.stops else tokens
        return self.tokenizer.decode(written, skip_special_tokens=False)

    def prefill(
        self, prompts: Sequence[tuple[int, ...]]
    ) -> tuple[torch.Tensor, PrefixCache | FallbackCache]:
        """Run the model on each prompt once; return the hidden state of its last token (P, H), and
        its keys and values.
        """
        lengths = torch.tensor([len(prompt) for prompt in prompts])
        tokens = torch.zeros(len(prompts), int(lengths.max()), dtype=torch.long)
        for row, prompt in enumerate(prompts):
            tokens[row, : len(prompt)] = torch.tensor(prompt)
        lengths, tokens = lengths.to(self.device), tokens.to(self.device)
        if self.fast_model:
            self.fast_model.refresh()
        if self.is_plain:
            shared, hidden = FallbackCache(lengths, tokens), self._hidden(tokens)
        else:
            shared = PrefixCache(lengths, tokens.shape[1])
            positions = torch.arange(tokens.shape[1], device=self.device)[None].expand_as(tokens)
            hidden = self._hidden(tokens, position_ids=positions, shared=shared)
        return hidden[torch.arange(len(prompts), device=self.device), lengths - 1], shared

    def extend(self, tokens_RT: torch.Tensor, shared: PrefixCache | FallbackCache) -> torch.Tensor:
        """Run the model on the tokens that come next in each row after its prompt; return hidden
        states (R, T, H).
        """
        if self.is_plain:
            whole_RS, places_RT = shared.sequences(tokens_RT)
            hidden = self._hidden(whole_RS)
            return hidden.gather(1, places_RT[:, :, None].expand(-1, -1, hidden.shape[2]))
        positions = (shared.lengths_P + shared.filled_R)[:, None] + torch.arange(
            tokens_RT.shape[1], device=self.device
        )
        positions = positions.clamp(
            max=self.context - 1
        )  # drafts may reach beyond the budget; there they never count
        return self._hidden(tokens_RT, position_ids=positions, shared=shared)

    def pack(
        self, prompts: Sequence[tuple[int, ...]], completions: Sequence[tuple[int, ...]]
    ) -> Packing | PlainPacking:
        """Return `completions` (as many to each of the prompts) as `predict` wants them."""
        return (PlainPacking if self.is_plain else Packing)(prompts, completions, self.device)

    def predict(self, packing: Packing | PlainPacking) -> torch.Tensor:
        """Return the hidden states that predict each token of the completions, one after the other
        (M, H).
        """
        if self.fast_model and self.fast_model.is_adapted:
            self.fast_model.refresh()
        if not self.is_plain:
            hidden_1NH = self._hidden(
                packing.tokens_N[None], position_ids=packing.positions_N[None], shared=packing
            )
            return hidden_1NH[0].index_select(0, packing.predictors_M)
        last_PH, shared = self.prefill(packing.prompts)
        hidden_RTH = self.extend(packing.tokens_RT, shared)
        before_RTH = torch.cat(
            [
                last_PH.repeat_interleave(len(hidden_RTH) // len(last_PH), 0)[:, None],
                hidden_RTH[:, :-1],
            ],
            1,
        )
        return before_RTH[packing.mask_RT]

    def _hidden(self, tokens, **arguments) -> torch.Tensor:
        """Return the last hidden states (B, T, H), scaled so that `head` gives the
        model's logits.
        """
        if self.fast_model:
            return self.fast_model(tokens, **arguments)
        hidden = self.inner(input_ids=tokens, use_cache=False, **arguments).last_hidden_state
        return hidden if self.logit_scale == 1.0 else self.logit_scale * hidden

    @property
    def head(self) -> torch.nn.Module:
        """The output layer, from hidden states (..., H) to logits (..., V)."""
        return self.causal.get_output_embeddings()

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return what `head` makes of hidden states, without a gradient."""
        head = self.head
        return (
            linear(hidden, head.weight, head.bias)
            if type(head) is torch.nn.Linear
            else head(hidden)
        )

    def forget_activations(self):
        """Compute activations again in the backward pass: a third more time in the update, for a
        fraction of its memory.
        """
        if self.fast_model:
            self.fast_model.is_forgetful = True
        elif not self.is_forgetful:
            checkpoint_layers(self.model)
        self.is_forgetful = True

    @property
    def tokens_at_once(self) -> int:
        """How many tokens of an update fit into the GPU's memory beside what is held; 4,096 on a
        CPU.
        """
        return (
            update_tokens(self._shape, self._memory, self.held)
            if self.device.type == "cuda"
            else 4096
        )

    def prompts_at_once(self, completions: int, prompt: int, room: int) -> int:
        """Return for how many prompts of so many tokens, with `completions` of up to `room`
        tokens, a rollout has memory; on a CPU any number.
        """
        if self.device.type != "cuda":
            return 1 << 30
        return prompts_at_once(
            self._shape, self._memory, self.held, completions=completions, prompt=prompt, room=room
        )

    @property
    def _shape(self):
        return shape_of(
            self.causal.config,
            next(self.model.parameters()).element_size(),
            self.fast_model is not None,
        )

    @property
    def _memory(self) -> float:
        """Bytes of the GPU that this process may have."""
        return torch.cuda.get_device_properties(
            self.device
        ).total_memory * torch.cuda.get_per_process_memory_fraction(self.device)

    @contextmanager
    def reference(self) -> Iterator["Policy"]:
        """Within this context the policy that is yielded is the reference: the frozen one, or this
        one with the adapter switched off.
        """
        with torch.no_grad():
            if self._frozen is not None:
                yield self._frozen
            elif self.is_lora and self.fast_model:
                self.fast_model.is_adapted = False
                try:
                    yield self
                finally:
                    self.fast_model.is_adapted = True
            else:
                assert self.is_lora, "no reference is held when beta is 0"
                with self.model.disable_adapter():
                    yield self

    def saved_tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors that `save` writes, by their names in the model: those of the
        adapter, or all.
        """
        tensors = self.model.state_dict()
        if not self.is_lora:
            return tensors
        trained = {name for name, weight in self.model.named_parameters() if weight.requires_grad}
        return {name: tensor for name, tensor in tensors.items() if name in trained}

    def save(self, folder: Path, tensors: Mapping[str, torch.Tensor] | None = None):
        """Write the model (or the adapter) and the tokenizer in Hugging Face layout.

        With `tensors`, earlier copies of the `saved_tensors`, those are written: the model may be
        training meanwhile.
        """
        save_model(self.model, folder, tensors)
        self.tokenizer.save_pretrained(folder)


def save_model(model, folder: Path, tensors: Mapping[str, torch.Tensor] | None = None):
    """Write a model, or the adapter of one that has an adapter; given `tensors`, earlier copies of
    its own, those.
    """
    # Embeddings are never trained beside an adapter; without being told, `peft` asks the hub.
    options = {"save_embedding_layers": False} if isinstance(model, PeftModel) else {}
    model.save_pretrained(folder, state_dict=None if tensors is None else dict(tensors), **options)


def _stop_ids(model, tokenizer) -> tuple[tuple[int, ...], int, str]:
    """Return the token ids that end a completion, the one that ends a right answer, and a warning
    ("": none).

    They are the end tokens of the generation config (one or several), the tokenizer's own, and the
    chat template's.
    """
    ids = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    named = {ids} if isinstance(ids, int) else set(ids or [])
    own, shown = tokenizer.eos_token_id, end_of_turn(tokenizer)
    named |= {own} - {None}
    stops = tuple(sorted(named | {shown} - {None}))
    if not stops:
        raise UserError(
            "the model names no end token (eos_token_id in generation_config.json); add one"
        )

    end = next(token for token in (shown, own, stops[0]) if token is not None)
    if shown is None or shown in named:
        return stops, end, ""
    others = ", ".join(name_of(tokenizer, token) for token in sorted(named))
    return (
        stops,
        end,
        f"its chat template ends an answer with {name_of(tokenizer, shown)}, its files name "
        f"{others or 'no end token'}; a completion ends at any of them",
    )
