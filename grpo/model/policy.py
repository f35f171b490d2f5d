"""The policy: a causal language model, its tokenizer, its adapter and reference, and its memory.

Its `forward` and `decoder` are how an update and a rollout run the model. They are the plain ones
until `grpo.model.load` puts those of `grpo.fast` in their place.
"""

import math
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint

from grpo.data.errors import UserError
from grpo.model.check import NO_CONTEXT_LIMIT, Model, WholeHead, check_model, context_of
from grpo.model.prompts import (
    Encodings,
    PromptFormat,
    Tokenizer,
    check_arguments,
    end_of_turn,
    plain_tokens,
    prompt_tokens,
    text_of,
)
from grpo.model.rows import PlainRows
from grpo.tasks.base import Problem

# What an update runs at once: a `PaddedBatch`, or a `grpo.fast.packing.Packing`.
Batch = Any

# The number of prompts, and of other texts, whose tokens are kept for the rest of a step; and of
# words, which recur in later steps.
CACHED_ENCODINGS = 1024
CACHED_WORDS = 100_000

CPU_TOKENS_AT_ONCE = 4096

# A reasoning tag at the end of a prompt.
TAG = re.compile(r"<think(?:ing)?>\s*\Z", re.IGNORECASE)


class Policy:
    """A model to be trained or sampled.

    `model` is the `transformers` or `peft` model, always in eval mode, and `frozen` the reference,
    if that is a separate model. Raises UserError for a model that is not supported (see
    `grpo.model.check`).
    """

    def __init__(
        self, model: Model, tokenizer: Tokenizer, *, name: str, frozen: "Policy | None" = None
    ):
        self.model = model.eval()
        self.tokenizer = tokenizer
        self.name = name
        self.frozen = frozen
        self.is_lora = isinstance(model, PeftModel)

        self._texts = Encodings(partial(plain_tokens, tokenizer), CACHED_ENCODINGS)
        # Of words of a text, each with the white space before it.
        self.words = Encodings(partial(_word_tokens, tokenizer), CACHED_WORDS)
        self.use(PromptFormat())

        # The token ids that end a completion, and the one that ends a right answer.
        self.stops, self.end = _stop_ids(model, tokenizer)
        self.vocabulary: int = len(model.get_input_embeddings().weight)

        self.notes: list[str] = []  # warnings for the user
        self.events: list[str] = []  # lines for the console, such as that memory ran out
        self.context = NO_CONTEXT_LIMIT  # the most tokens of prompt and completion together
        self.limit_context(*context_of(self.causal.config))

        # Memory that is not free for caches and activations: the weights, and what a trainer adds.
        weights = [*model.parameters(), *(frozen.model.parameters() if frozen else ())]
        self.weight_bytes: int = sum(p.numel() * p.element_size() for p in weights)
        self.reserved_bytes = self.weight_bytes
        self.rollout_tokens = math.inf  # the most at a time, after memory ran out
        self.gradient_checkpointing = False

        # How the model is run. `grpo.fast` has the paths "fast" and "shared", `rows` has "cached".
        self.path = "plain"
        self.rows: Any = PlainRows
        self.whole_head: WholeHead | None = None
        self.forward = PlainForward(self)
        self.decoder: Any = None  # None: `grpo.rollout.generate.PlainDecoder`
        self.kernels: Any = None  # `grpo.fast.update_kernels` on a GPU
        # A context in which the products of matrices in a backward pass may round.
        self.gradient_products: Callable[[], AbstractContextManager[None]] = nullcontext
        # What an update runs: this policy, or one that is divided among the ranks, whose weights
        # are gathered while `run` calls a function of them (`grpo.learn.shard`).
        self.learner = self
        self.run: Callable[..., Any] = operator.call
        self.probe: Any = check_model(self)  # until `grpo.fast` has compared its paths with it

    def limit_context(self, context: int, reason: str) -> None:
        """Support no more than so many tokens; a `reason` is noted unless it is ""."""
        if reason and context < self.context:
            self.notes.append(
                f"--model {self.name}: {reason}; prompt and completion may have {context:,} tokens "
                "together, and longer ones are not supported"
            )
        self.context = min(context, self.context)

    def take_events(self) -> list[str]:
        """Return the `events` since the last call."""
        taken, self.events = self.events, []
        return taken

    @property
    def lora_rank(self) -> int:
        """The rank of the adapter; 0 if there is none."""
        return self.model.peft_config[self.model.active_adapter].r if self.is_lora else 0

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
    def head(self) -> Callable[[Tensor], Tensor]:
        """From hidden states (..., E) to logits (..., V): in most models, the output layer."""
        return self.whole_head or self.causal.get_output_embeddings()

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
        """Use this `format` from now on. Raises UserError if the template cannot express it."""
        check_arguments(self.tokenizer.chat_template, format.arguments)
        self.format = format
        encode = partial(prompt_tokens, self.tokenizer, arguments=format.arguments)
        self._prompts = Encodings(encode, CACHED_ENCODINGS)

    def prepare(self, problems: Sequence[Problem]) -> None:
        """Encode prompts and right answers of `problems` together, for the calls that follow."""
        template = self.tokenizer.chat_template
        with suppress(UserError):  # `encode` raises it again, and says whose it is
            self._prompts((self.format.turns(problem), template) for problem in problems)
        texts = ((each.begun, _from_the_first_word(each), each.target) for each in problems)
        self._texts(chain.from_iterable(texts))

    def encode(self, problem: Problem | str) -> tuple[int, ...]:
        """Return the token ids of the prompt, up to where the answer begins.

        A string is a prompt without a problem, which shows no examples.
        """
        turns = self.format.turns(problem)
        try:
            (tokens,) = self._prompts([(turns, self.tokenizer.chat_template)])
        except UserError as error:
            whose = problem.title if isinstance(problem, Problem) else "the prompt"
            raise UserError(f"{whose}: {error}") from error
        if max(tokens) >= self.vocabulary:
            raise UserError(
                f"--model {self.name}: its tokenizer has token {max(tokens):,}, the model only "
                f"{self.vocabulary:,} tokens; give a directory whose files belong together"
            )
        begun = problem.begun if isinstance(problem, Problem) else ""
        return tokens + self.target_tokens(begun) if begun else tokens

    def opened(self, problem: Problem) -> str:
        """Return the reasoning tag that ends the prompt, e.g. "<think>\\n"; "" if there is none."""
        found = TAG.search(text_of(self.tokenizer, self.encode(problem)[-16:]))
        return found[0] if found else ""

    def shots(self, problem: Problem) -> tuple[str, ...]:
        """Return the keys of the examples that the prompt of `problem` shows."""
        return tuple(example.key for example in self.format.shots(problem))

    def target_tokens(self, target: str) -> tuple[int, ...]:
        """Return the token ids of the answer `target`, without the end token."""
        return self._texts([target])[0]

    def answer_tokens(self, problem: Problem) -> tuple[int, ...]:
        """Return the token ids of the right answer to `problem`, or of its window."""
        begun = self.target_tokens(problem.begun) if problem.begun else ()
        whole = self.target_tokens(_from_the_first_word(problem))
        rest = whole[len(begun) :]
        if whole[: len(begun)] != begun:  # a token would be of both, as a phrase or "word "
            rest = self.target_tokens(f" {problem.target}")
        return rest if problem.goes_on else (*rest, self.end)

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text that a completion's `tokens` write, without the end token."""
        written = tokens[:-1] if len(tokens) and tokens[-1] in self.stops else tokens
        return text_of(self.tokenizer, written)

    # The forward pass

    def hidden_states(self, tokens_BT: Tensor) -> Tensor:
        """Return the last hidden states (B, T, E) of tokens that are padded on the right."""
        return self.inner(input_ids=tokens_BT, use_cache=False).last_hidden_state

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits (..., V) of hidden states (..., E). They have no gradient."""
        head = self.head
        if type(head) is torch.nn.Linear:
            return linear_no_grad(hidden, head.weight, head.bias)
        return head(hidden)

    # Memory

    def enable_gradient_checkpointing(self) -> None:
        """Take more time for the backward pass, and a fraction of the memory."""
        if not self.gradient_checkpointing:
            self.learner.forward.checkpoint_gradients()
        self.gradient_checkpointing = True

    def free_decoder(self) -> None:
        """Free unused GPU memory, and the decoder's, which the next rollout takes again."""
        self.forward.forget()
        if self.decoder is not None:
            self.decoder.free()
        torch.cuda.empty_cache()

    @property
    def tokens_at_once(self) -> int:
        """How many tokens of an update fit into the GPU's free memory; a constant on a CPU."""
        if self.device.type != "cuda":
            return CPU_TOKENS_AT_ONCE
        shape, (total, left) = self._shape, self._memory
        token_bytes = shape.activations(self.path == "fast", self.gradient_checkpointing)
        work = BUSY_WORK * (1 if self.learner is self else GATHERING)
        return update_tokens(shape, total, left, token_bytes, work)

    def prompts_at_once(self, completions: int, prompt: int, room: int) -> int:
        """Return for how many prompts of `prompt` tokens, with `completions` of `room` tokens each,
        a rollout has memory; on a CPU, any number.
        """
        if self.device.type != "cuda":
            return 1 << 30
        prompt_bytes = self._shape.cache * (prompt + completions * room)
        _, left = self._memory
        return max(1, int(CACHE_SHARE * left / prompt_bytes))

    @property
    def tokens_to_keep(self) -> float:
        """How many tokens may keep their keys and values from one pass to the next."""
        left = self._memory[1] if self.device.type == "cuda" else CPU_MEMORY
        return KEPT_SHARE * left / self._shape.cache

    @property
    def free_share(self) -> float:
        """The share of the GPU's memory that is left beside what is reserved."""
        total, left = self._memory
        return left / total

    @property
    def _shape(self) -> "Shape":
        return shape_of(self.causal.config, next(self.model.parameters()).element_size())

    @property
    def _memory(self) -> tuple[float, float]:
        """The bytes of the GPU's memory that this process may use, and that are left of it."""
        share = torch.cuda.get_per_process_memory_fraction(self.device)
        total = share * torch.cuda.get_device_properties(self.device).total_memory
        return total, max(0.0, total - self.reserved_bytes)

    # The reference, and files

    @contextmanager
    def reference(self) -> Iterator["Policy"]:
        """Yield the reference: the frozen model, or this one with the adapter switched off."""
        assert self.frozen or self.is_lora, "there is no reference when beta is 0"
        learner = self.learner
        with torch.no_grad(), nullcontext() if self.frozen else learner.forward.without_adapter():
            yield self.frozen or learner

    def saved_tensors(self) -> dict[str, Tensor]:
        """Return the tensors that `save` writes, by name: the adapter's, or all."""
        tensors = self.model.state_dict()
        if not self.is_lora:
            return tensors
        trained = {name for name, weight in self.model.named_parameters() if weight.requires_grad}
        return {name: tensor for name, tensor in tensors.items() if name in trained}

    def save(self, folder: Path, tensors: Mapping[str, Tensor] | None = None) -> None:
        """Write the model (or the adapter) and the tokenizer in Hugging Face layout.

        `tensors`, if given, are earlier copies of the `saved_tensors`: training may go on.
        """
        save_model(self.model, folder, tensors)
        self.tokenizer.save_pretrained(folder)


def save_model(model: Model, folder: Path, tensors: Mapping[str, Tensor] | None = None) -> None:
    """Write a model, or only its adapter if it has one; `tensors`, if given, replace its own."""
    # `peft` writes sets in an order that changes from process to process.
    for config in getattr(model, "peft_config", {}).values():
        for name in ("target_modules", "exclude_modules"):
            if isinstance(getattr(config, name), set):
                setattr(config, name, sorted(getattr(config, name)))

    # Embeddings are never trained with an adapter. Without this option `peft` asks the hub.
    options = {"save_embedding_layers": False} if isinstance(model, PeftModel) else {}
    model.save_pretrained(folder, state_dict=None if tensors is None else dict(tensors), **options)


class PlainForward:
    """How an update runs the model: by its own forward pass over whole sequences.

    They are padded on the right: causal attention alone is right for them in every architecture,
    and no state is kept between two passes.
    """

    def __init__(self, policy: Policy):
        self.policy = policy

    def pack(
        self, prompts: Sequence[tuple[int, ...]], completions: Sequence[tuple[int, ...]]
    ) -> Batch:
        """Return the micro-batch that `predict` takes: equally many completions for each prompt."""
        return PaddedBatch(prompts, completions, self.policy.device)

    def predict(self, batch: Any) -> Tensor:
        """Return the hidden states that predict the distinct tokens of the completions (U, E)."""
        hidden_RXE = self.policy.hidden_states(batch.tokens_RX)
        return hidden_RXE.flatten(0, 1).index_select(0, batch.predictors_M)

    def keeping(self) -> AbstractContextManager[None]:
        """Within this context, in which no weight changes, `predict` may keep what it reads."""
        return nullcontext()

    def forget(self) -> None:
        """Forget what was kept, because memory is short."""

    def checkpoint_gradients(self) -> None:
        """From now on, compute activations again in the backward pass (arXiv:1604.06174).

        `transformers` does it in training mode alone.
        """
        for layer in decoder_layers(self.policy.model):
            # Assigning a callable to a module's `forward` replaces it for this one module.
            layer.forward = partial(_recomputed, layer.forward)

    @contextmanager
    def without_adapter(self) -> Iterator[None]:
        """Within this context, the model runs without its adapter.

        Not by `disable_adapter`, which freezes its weights meanwhile: FSDP would keep them so.
        """
        modules = self.policy.model.modules()
        adapted = [module for module in modules if hasattr(module, "_disable_adapters")]
        for module in adapted:
            module._disable_adapters = True
        try:
            yield
        finally:
            for module in adapted:
                module._disable_adapters = False


class PaddedBatch:
    """A micro-batch of whole sequences (R, X), padded on the right.

    `predictors_M` are the places in the flattened rows that predict the completions' tokens. In a
    `Packing` several tokens (M, ...) may be one (U, ...).
    """

    def __init__(
        self,
        prompts: Sequence[tuple[int, ...]],
        completions: Sequence[Sequence[int]],
        device: torch.device,
    ):
        group_size = len(completions) // len(prompts)
        rows, predictors = [], []
        for r, completion in enumerate(completions):
            prompt = prompts[r // group_size]
            row = [*prompt, *completion][:-1]  # the last token predicts nothing
            rows.append(torch.tensor(row))
            predictors.append(torch.arange(len(prompt) - 1, len(row)))

        tokens_RX = pad_sequence(rows, batch_first=True)
        predictors = [each + r * tokens_RX.shape[1] for r, each in enumerate(predictors)]
        self.tokens_RX = to_device(tokens_RX, device)
        self.predictors_M = to_device(torch.cat(predictors), device)

    def distinct(self, values_M: Tensor) -> Tensor:
        """Return the values of the distinct tokens, from those of all tokens."""
        return values_M

    def of_tokens(self, values_U: Tensor) -> Tensor:
        """Return the values of all tokens, from those of the distinct tokens."""
        return values_U


def decoder_layers(model: Model) -> nn.ModuleList:
    """Return the layers of a model: the longest module list."""
    return max((each for each in model.modules() if isinstance(each, nn.ModuleList)), key=len)


def _recomputed(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call `forward`, whose activations are computed again in the backward pass."""
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)


def _word_tokens(tokenizer: Tokenizer, words: Sequence[str]) -> list[list[int]]:
    """Return the token ids of each of the `words`, which are encoded after a line end: many
    tokenizers add a space to a text.
    """
    line_end, *encoded = plain_tokens(tokenizer, ["\n", *("\n" + word for word in words)])
    return [tokens[len(line_end) :] for tokens in encoded]


def _from_the_first_word(problem: Problem) -> str:
    """Return the right answer to `problem`, with what comes before a window."""
    return f"{problem.begun} {problem.target}".lstrip(" ")


def _stop_ids(model: Model, tokenizer: Tokenizer) -> tuple[tuple[int, ...], int]:
    """Return the token ids that end a completion, and the one that ends a right answer."""
    declared = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    several = declared if isinstance(declared, list) else [declared]
    ends = [end_of_turn(tokenizer), tokenizer.eos_token_id, *several]
    tokens = range(len(model.get_input_embeddings().weight))  # no other can be written
    ends = [token for token in ends if token in tokens]
    if not ends:
        raise UserError(
            "the model has no end token (eos_token_id in generation_config.json); add one"
        )
    return tuple(sorted(set(ends))), ends[0]


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return `tensor` on the device; the host does not wait for a GPU."""
    if torch.device(device).type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def flat_indices(lengths: Sequence[int], longest: int, device: torch.device) -> Tensor:
    """Return the indices (N,) of all tokens in a flattened grid of rows, padded on the right."""
    is_token = torch.arange(longest) < torch.tensor(lengths)[:, None]
    return to_device(is_token.flatten().nonzero()[:, 0], device)


# PyTorch multiplies float32 matrices by MKL, which takes about twice as long as oneDNN on AMD's
# CPUs with AVX-512. Only Linux tells who made the CPU.
_cpu = Path("/proc/cpuinfo")
_prefers_onednn = (
    torch.backends.mkldnn.is_available()
    and torch.backends.cpu.get_cpu_capability() == "AVX512"
    and _cpu.exists()
    and "AuthenticAMD" in _cpu.read_text("utf-8")
)


def linear_no_grad(x_NI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """Return `F.linear` by the faster library. The result has no gradient."""
    if _prefers_onednn and not x_NI.is_cuda and x_NI.dtype == torch.float32:
        return torch.ops.mkldnn._linear_pointwise(x_NI, weight_OI, bias_O, "none", [], "")
    return functional.linear(x_NI, weight_OI, bias_O)


# Memory on a GPU

# Keys and values may take this share of the memory that weights and optimizer leave.
CACHE_SHARE = 0.45
KEPT_SHARE = 0.1  # and what is kept from one pass to the next, this share
CPU_MEMORY = 1e10  # bytes, assumed of any host

# Tokens times parameters that keep a GPU busy for as long as the host takes to start a micro-batch
# (0.1 to 0.2 s): 4,000 tokens of Llama-3.2-3B, or 100,000 of SmolLM2-135M.
BUSY_WORK = 1.15e13
GATHERING = 4  # times as many where each micro-batch gathers all layers from other GPUs


@dataclass(frozen=True)
class Shape:
    """A model's sizes, as far as memory depends on them."""

    layers: int
    width: int  # E
    inner: int  # F
    keys: int  # K * D: numbers of a token's keys in a layer, and as many of its values
    number: int  # bytes of a number

    @property
    def parameters(self) -> int:
        """The number of weights in the layers, assuming that queries are as wide as the model."""
        attention = self.width * (2 * self.width + 2 * self.keys)
        return self.layers * (attention + 3 * self.width * self.inner)

    @property
    def cache(self) -> int:
        """Bytes of a token's keys and values."""
        return 2 * self.layers * self.keys * self.number

    def activations(self, is_fast: bool, gradient_checkpointing: bool = False) -> int:
        """Return the bytes of a token's activations, kept until the backward pass."""
        # What the operations of `grpo.fast.llama` save, or a rough count.
        fast = 6 * self.width + 2 * self.keys + 2 * self.inner
        layer = fast if is_fast else 16 * self.width + 5 * self.inner
        if not gradient_checkpointing:
            return self.layers * layer * self.number

        # The inputs of all layers, and in the backward pass one layer's and its MLP's gradients.
        return (self.layers * self.width + layer + 4 * self.inner) * self.number


def shape_of(config: Any, number: int) -> Shape:
    """Return the shape of a `transformers` configuration, whose numbers take `number` bytes.

    Sizes that it does not name, or that differ between layers, are guessed.
    """
    config = config.get_text_config(decoder=True)

    def size(name: str, guess: int) -> int:
        with suppress(AttributeError, RuntimeError):  # the latter: it differs between layers
            value = getattr(config, name)
            return value if isinstance(value, int) and value else guess
        return guess

    width, heads = size("hidden_size", 4096), size("num_attention_heads", 1)
    return Shape(
        layers=size("num_hidden_layers", 32),
        width=width,
        inner=size("intermediate_size", 4 * width),
        keys=size("num_key_value_heads", heads) * size("head_dim", width // heads),
        number=number,
    )


def update_tokens(
    shape: Shape, total: float, left: float, token_bytes: int, work: float = BUSY_WORK
) -> int:
    """Return how many tokens a micro-batch may have on a GPU, of `token_bytes` each.

    Their activations may take a sixth of its `total` memory, or a third of what is `left` of it; to
    keep the GPU busy (with `work`), as much as keys and values.
    """
    usual = min(total / 6, left / 3)
    for_busy_gpu = min(CACHE_SHARE * left, work / shape.parameters * token_bytes)
    tokens = int(max(usual, for_busy_gpu) / token_bytes)
    return max(256, min(65_536, tokens))
