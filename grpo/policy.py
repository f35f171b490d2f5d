"""The policy: a causal language model, its tokenizer, its LoRA adapter where it has one, and its reference.

Everything the trainer asks of a model goes through five calls: in the rollout `prefill` (prompts, once each) and `extend` (tokens that
follow them); in the update `predict` (prompts and completions at once); in both `head` (hidden states to logits); and
`reference` (the same model as it was at the start).

Shapes: P prompts, R completions (rows), T tokens, M tokens of all completions, H hidden size, V vocabulary.
"""
import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, lru_cache, partial
from pathlib import Path

import torch
from huggingface_hub.utils import logging as hub_logging
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig
from transformers.utils import is_bitsandbytes_available
from transformers.utils import logging as transformers_logging

from grpo.learn.lean import LeanModel, agrees, checkpoint_layers, lean_model, relative_difference
from grpo.learn.packing import Packing, PlainPacking
from grpo.learn.precision import has_fast_products
from grpo.rollout.cache import NAME, SharedPrompt
from grpo.rollout.fused import FusedModel, fused_model
from grpo.rollout.plain import PlainPrompt
from tasks.base import UserError

STRANGERS = {"trust_remote_code": False, "use_safetensors": True}  # a model's files are data: none of them is executed or unpickled
QUANTISED = {"none": None, "int8": dict(load_in_8bit=True),
             "nf4": dict(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)}  # as bitsandbytes is asked for them
LORA_VARIANTS = {"lora": {}, "rslora": {"use_rslora": True}, "dora": {"use_dora": True}}
BUILTIN = Path(__file__).resolve().parent.parent / "data" / "base_model"
REMEMBERED = 512  # prompts and targets whose tokens are kept: a step asks for them again to draw, to fit its budget, and to learn


class Policy:
    """A model to be trained or sampled. `model` is the `transformers` or `peft` model, always in eval mode.

    `stops` are the token ids that end a completion; `context` the most tokens of prompt and completion together. `frozen` is the
    reference, where it is a model of its own; `has_rough_gradients`: see `learn.precision`.
    """

    def __init__(self, model, tokenizer, *, name: str, frozen=None, has_rough_gradients: bool = False):
        self.model, self.tokenizer, self.name = model.eval(), tokenizer, name
        self._encoded, self._length = (lru_cache(REMEMBERED)(partial(tokens, tokenizer)) for tokens in (_prompt_tokens, _target_length))
        self.is_forgetful, self.has_rough_gradients = False, has_rough_gradients
        self.is_lora = isinstance(model, PeftModel)
        self.is_plain = self._causal.config._attn_implementation != NAME  # cannot share prompts: see rollout.plain
        self.lean = None if self.is_plain else _agreeing_lean_model(self._causal)
        self._frozen = None if frozen is None else Policy(frozen.requires_grad_(False), tokenizer, name=name)
        self.stops = _stop_ids(model, tokenizer)
        self.context = getattr(self._causal.config, "max_position_embeddings", 1 << 30)

    @cached_property
    def fused(self) -> FusedModel | None:
        """The fast decode step, where device and model have one."""
        return fused_model(self)

    @property
    def _causal(self):
        return self.model.get_base_model() if self.is_lora else self.model

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        """What is trained."""
        return [p for p in self.model.parameters() if p.requires_grad]

    def encode(self, prompt: str) -> tuple[int, ...]:
        """Return the token ids of `prompt` as the user's turn, up to where the answer begins."""
        return self._encoded(prompt, self.tokenizer.chat_template)

    def target_length(self, target: str) -> int:
        """Return how many tokens the answer `target` takes, its end token included."""
        return self._length(target)

    def decode(self, tokens) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=True)

    def prefill(self, prompts: Sequence[tuple[int, ...]]) -> tuple[torch.Tensor, SharedPrompt | PlainPrompt]:
        """Run the model on each prompt once; return the hidden state of its last token (P, H), and its keys and values."""
        lengths = torch.tensor([len(prompt) for prompt in prompts])
        tokens = torch.zeros(len(prompts), int(lengths.max()), dtype=torch.long)
        for row, prompt in enumerate(prompts):
            tokens[row, :len(prompt)] = torch.tensor(prompt)
        lengths, tokens = lengths.to(self.device), tokens.to(self.device)
        if self.lean:
            self.lean.refresh()
        if self.is_plain:
            shared, hidden = PlainPrompt(lengths, tokens), self._hidden(tokens)
        else:
            shared = SharedPrompt(lengths, tokens.shape[1])
            positions = torch.arange(tokens.shape[1], device=self.device)[None].expand_as(tokens)
            hidden = self._hidden(tokens, position_ids=positions, shared=shared)
        return hidden[torch.arange(len(prompts), device=self.device), lengths - 1], shared

    def extend(self, tokens_RT: torch.Tensor, shared: SharedPrompt | PlainPrompt) -> torch.Tensor:
        """Run the model on the tokens that come next in each row after its prompt; return hidden states (R, T, H)."""
        if self.is_plain:
            whole_RS, places_RT = shared.sequences(tokens_RT)
            hidden = self._hidden(whole_RS)
            return hidden.gather(1, places_RT[:, :, None].expand(-1, -1, hidden.shape[2]))
        positions = (shared.lengths_P + shared.filled_R)[:, None] + torch.arange(tokens_RT.shape[1], device=self.device)
        positions = positions.clamp(max=self.context - 1)  # drafts may reach beyond the budget; there they never count
        return self._hidden(tokens_RT, position_ids=positions, shared=shared)

    def pack(self, prompts: Sequence[tuple[int, ...]], completions: Sequence[tuple[int, ...]]) -> Packing | PlainPacking:
        """Return `completions` (as many to each of the prompts) as `predict` wants them."""
        return (PlainPacking if self.is_plain else Packing)(prompts, completions, self.device)

    def predict(self, packing: Packing | PlainPacking) -> torch.Tensor:
        """Return the hidden states that predict each token of the completions, one after the other (M, H)."""
        if self.lean and self.lean.is_adapted:
            self.lean.refresh()
        if not self.is_plain:
            hidden_1NH = self._hidden(packing.tokens_N[None], position_ids=packing.positions_N[None], shared=packing)
            return hidden_1NH[0].index_select(0, packing.predictors_M)
        last_PH, shared = self.prefill(packing.prompts)
        hidden_RTH = self.extend(packing.tokens_RT, shared)
        before_RTH = torch.cat([last_PH.repeat_interleave(len(hidden_RTH) // len(last_PH), 0)[:, None], hidden_RTH[:, :-1]], 1)
        return before_RTH[packing.mask_RT]

    def _hidden(self, tokens, **arguments) -> torch.Tensor:
        if self.lean:
            return self.lean(tokens, **arguments)
        return self._causal.base_model(input_ids=tokens, use_cache=False, **arguments).last_hidden_state

    @property
    def head(self) -> torch.nn.Module:
        """The output layer, from hidden states (..., H) to logits (..., V)."""
        return self._causal.get_output_embeddings()

    def forget_activations(self):
        """Compute activations again in the backward pass: a third more time in the update, for a fraction of its memory."""
        if self.lean:
            self.lean.is_forgetful = True
        elif not self.is_forgetful:
            checkpoint_layers(self.model)
        self.is_forgetful = True

    @property
    def tokens_at_once(self) -> int:
        """How many tokens of an update fit into a sixth of the GPU's memory (of what this process may have), by a rough count of the activations; 4,096 on a CPU."""
        if self.device.type != "cuda":
            return 4096
        memory = torch.cuda.get_device_properties(self.device).total_memory * torch.cuda.get_per_process_memory_fraction(self.device)
        config = self._causal.config
        width, layers = config.hidden_size, config.num_hidden_layers
        inner, number = getattr(config, "intermediate_size", 4 * width), next(self.model.parameters()).element_size()
        each = layers * (8 * width + 3 * inner if self.lean else 16 * width + 5 * inner) * number
        return max(256, min(65_536, int(memory) // 6 // each))

    @contextmanager
    def reference(self) -> Iterator["Policy"]:
        """Within this context the policy that is yielded is the reference: this one with the adapter switched off, or the frozen one."""
        with torch.no_grad():
            if self.is_lora and self.lean:
                self.lean.is_adapted = False
                try:
                    yield self
                finally:
                    self.lean.is_adapted = True
            elif self.is_lora:
                with self.model.disable_adapter():
                    yield self
            else:
                assert self._frozen is not None, "no reference is held when beta is 0"
                yield self._frozen

    def save(self, folder: Path):
        """Write the model (or the adapter) and the tokenizer in Hugging Face layout."""
        self.model.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)


def _prompt_tokens(tokenizer, prompt: str, template: str | None) -> tuple[int, ...]:
    if template is None:
        return tuple(tokenizer(prompt + "\n").input_ids)
    text = tokenizer.apply_chat_template([{"role": "user", "content": prompt}], chat_template=template, tokenize=False, add_generation_prompt=True)
    return tuple(tokenizer(text, add_special_tokens=False).input_ids)


def _target_length(tokenizer, target: str) -> int:
    return len(tokenizer(target, add_special_tokens=False).input_ids) + 1


def load_policy(spec: str, *, device: str = "auto", dtype: str = "auto", lora_rank: int = 0, lora_alpha: float = 32.0, lora_variant: str = "lora",
                quantise: str = "none", weights: Path | None = None, keep_reference: bool = False, seed: int = 0) -> Policy:
    """Return the policy `spec`: "builtin", a directory in Hugging Face layout, or a hub id.

    `weights` is a checkpoint to go on from: an adapter on top of `spec`, or a whole model instead of it.
    `dtype` auto is float32 on a CPU, with gradients by bfloat16 products where it has units for them, and bfloat16 on a GPU, but for
    "builtin" without LoRA. `lora_variant` is one of LORA_VARIANTS, `quantise` of QUANTISED (under LoRA). Raises UserError when it cannot be loaded.
    """
    transformers_logging.set_verbosity_error()
    hub_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    device = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise UserError(f"--device {device}: torch sees no GPU here; give --device cpu")
    if device == "cuda":
        device = f"cuda:{torch.cuda.current_device()}"  # of several ranks each has its own
    has_adapter = weights is not None and (weights / "adapter_config.json").exists()
    is_large = lora_rank or has_adapter or spec != "builtin"
    wanted = "bfloat16" if is_large and device.startswith("cuda") else "float32"
    torch_dtype = getattr(torch, wanted if dtype == "auto" else dtype)
    source = str(weights) if weights is not None and not has_adapter else _resolve(spec)
    # full fine-tuning goes on from the checkpoint, but its reference is the model it started from
    if quantise != "none" and not device.startswith("cuda"):
        raise UserError(f"--quantise {quantise}: for a GPU only (on a CPU bitsandbytes has no gradients through its layers)")
    model = _load_model(source, device, torch_dtype, quantise)
    _check_head(model, spec)
    tokenizer = _load_tokenizer(source)
    if has_adapter:
        model = PeftModel.from_pretrained(model, weights, is_trainable=True, use_safetensors=True)
    elif lora_rank:
        torch.manual_seed(seed)  # the adapter's first matrices are random
        adapter = LoraConfig(r=lora_rank, lora_alpha=lora_alpha, target_modules="all-linear", task_type="CAUSAL_LM", **LORA_VARIANTS[lora_variant])
        try:
            model = get_peft_model(model, adapter)
        except ValueError as error:
            raise UserError(f"--lora-rank {lora_rank}: {str(error).splitlines()[0]}; give --lora-rank 0") from error
    frozen = None
    if keep_reference and not (lora_rank or has_adapter):
        frozen = copy.deepcopy(model) if weights is None else _load_model(_resolve(spec), device, torch_dtype)
    return Policy(model, tokenizer, name=spec, frozen=frozen, has_rough_gradients=dtype == "auto" and has_fast_products())


@torch.no_grad()
def _shares_prompts(model) -> bool:
    """Tell whether the model hands its attention arguments through to `rollout.cache.attention`."""
    shared = SharedPrompt(torch.tensor([1], device=model.device), 1)
    try:
        model.base_model(input_ids=torch.zeros(1, 1, dtype=torch.long, device=model.device), use_cache=False, shared=shared)
    except (TypeError, AttributeError):
        return False
    return len(shared.prompt) > 0


@torch.no_grad()
def _agreeing_lean_model(causal) -> LeanModel | None:
    """Return the model's lean forward pass, where it has one and the two agree on a few tokens."""
    lean = lean_model(causal)
    if lean is None:
        return None
    lean.refresh()
    tokens = torch.arange(7, device=causal.device)[None] + 5
    found, expected = (
        forward(tokens, position_ids=tokens, shared=SharedPrompt(torch.tensor([7], device=causal.device), 7))
        for forward in (lean, lambda tokens, **others: causal.base_model(input_ids=tokens, use_cache=False, **others).last_hidden_state))
    return lean if agrees("lean forward pass", relative_difference(found, expected), causal.dtype) else None


@torch.no_grad()
def _check_head(model, spec: str):
    """Raise UserError unless the logits are the output layer on the last hidden state, as `Policy.head` takes them to be."""
    tokens = torch.arange(4, device=model.device)[None]
    extra = {} if model.config._attn_implementation != NAME else {"shared": SharedPrompt(torch.tensor([4], device=model.device), 4)}
    logits = model(input_ids=tokens, use_cache=False, **extra).logits
    hidden = model.base_model(input_ids=tokens, use_cache=False, **extra).last_hidden_state
    if not torch.allclose(model.get_output_embeddings()(hidden), logits, atol=1e-3, rtol=1e-3):
        raise UserError(f"--model {spec}: the logits of {type(model).__name__} are more than its output layer on its last hidden state "
                        "(scaled or capped); such models are not supported")


def _resolve(spec: str) -> str:
    if spec == "builtin":
        return str(BUILTIN)
    if Path(spec).exists() and not (Path(spec) / "config.json").exists():
        raise UserError(f"--model {spec}: no model there (no config.json); give builtin, a directory in Hugging Face "
                        "layout, or a hub id")
    return spec


@contextmanager
def _loading(source: str):
    """Say in one line what `transformers` says in many of a model that is absent, damaged or incomplete."""
    try:
        yield
    except (OSError, ValueError, SafetensorError) as error:
        if "gated repo" in str(error):
            raise UserError(f"--model {source}: its owners ask for consent first: give it on https://huggingface.co/{source}, then log in (hf auth login); "
                            "or give a directory that holds the model") from error
        raise UserError(f"--model {source}: cannot be loaded ({str(error).splitlines()[0]}); give builtin, a directory "
                        "in Hugging Face layout, or a hub id that can be reached") from error


def _load_model(source: str, device: str, dtype: torch.dtype, quantise: str = "none"):
    load = partial(AutoModelForCausalLM.from_pretrained, source, dtype=dtype, device_map={"": device}, **STRANGERS, **_quantisation(quantise, dtype))
    with _loading(source):
        try:
            model = load(attn_implementation=NAME).eval()
            fit = _shares_prompts(model)
        except ValueError as error:  # how transformers refuses an attention that an architecture does not support
            if NAME not in str(error):
                raise
            fit = False
        if not fit:
            model = load().eval()
    return model


def _quantisation(name: str, dtype: torch.dtype) -> dict[str, BitsAndBytesConfig]:
    """Return what `from_pretrained` is told of it. Raises UserError where bitsandbytes is missing."""
    if name == "none":
        return {}
    if not is_bitsandbytes_available():
        raise UserError(f"--quantise {name}: bitsandbytes is not installed; pip install -c constraints.txt -e '.[bits]'")
    return {"quantization_config": BitsAndBytesConfig(bnb_4bit_compute_dtype=dtype, **QUANTISED[name])}


def _load_tokenizer(source: str):
    with _loading(source):
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def _stop_ids(model, tokenizer) -> tuple[int, ...]:
    """The end tokens of the generation config (one or several), and the tokenizer's own."""
    ids = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    ids = [ids] if isinstance(ids, int) else list(ids or [])
    if tokenizer.eos_token_id is not None:
        ids.append(tokenizer.eos_token_id)
    if not ids:
        raise UserError("the model names no end token (eos_token_id in generation_config.json); add one")
    return tuple(sorted(set(ids)))
