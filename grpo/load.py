"""A policy from what it is called: the embedded model, a directory in Hugging Face layout, or a hub id; and from a checkpoint on."""

import copy
import re
import socket
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from urllib.parse import urlparse
from urllib.request import getproxies

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.constants import ENDPOINT
from huggingface_hub.utils import logging as hub_logging
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig
from transformers.utils import is_bitsandbytes_available
from transformers.utils import logging as transformers_logging

from grpo.learn.finite import check_loaded
from grpo.learn.precision import has_fast_products
from grpo.policy import Policy
from grpo.rollout.cache import NAME, SharedPrompt
from tasks.base import UserError, needs

STRANGERS = {
    "trust_remote_code": False,
    "use_safetensors": True,
}  # a model's files are data: none of them is executed or unpickled
QUANTISED = {
    "none": None,
    "int8": dict(load_in_8bit=True),
    "nf4": dict(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True),
}  # as bitsandbytes is asked for them
LORA_VARIANTS = {"lora": {}, "rslora": {"use_rslora": True}, "dora": {"use_dora": True}}
HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
BUILTIN = Path(__file__).resolve().parent.parent / "data" / "base_model"


def load_policy(
    spec: str,
    *,
    device: str = "auto",
    dtype: str = "auto",
    lora_rank: int = 0,
    lora_alpha: float = 32.0,
    lora_variant: str = "lora",
    quantise: str = "none",
    weights: Path | None = None,
    keep_reference: bool = False,
    seed: int = 0,
) -> Policy:
    """Return the policy `spec`: "builtin", a directory in Hugging Face layout, or a hub id.

    `weights` is a checkpoint to go on from: an adapter on top of `spec`, or a whole model instead of it.
    `dtype` auto is float32 on a CPU, with gradients by bfloat16 products where it has AMX, and bfloat16 on a GPU
    under LoRA, and for a model that is saved so. `lora_variant` is one of LORA_VARIANTS, `quantise` of QUANTISED (under LoRA).
    Raises UserError when it cannot be loaded.
    """
    transformers_logging.set_verbosity_error()
    hub_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    torch.backends.cuda.enable_cudnn_sdp(
        False
    )  # it plans for 50 ms at each new length of the prompts
    device = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise UserError(f"--device {device}: torch sees no GPU here; give --device cpu")
    if device == "cuda":
        device = f"cuda:{torch.cuda.current_device()}"  # of several ranks each has its own
    has_adapter = weights is not None and (weights / "adapter_config.json").exists()
    source = str(weights) if weights is not None and not has_adapter else resolve(spec)
    torch_dtype = (
        getattr(torch, dtype)
        if dtype != "auto"
        else dtype_on(device, spec, source, bool(lora_rank or has_adapter))
    )
    if quantise != "none" and not device.startswith("cuda"):
        raise UserError(
            f"--quantise {quantise}: for a GPU only (on a CPU bitsandbytes has no gradients through its layers)"
        )
    # full fine-tuning goes on from the checkpoint, but its reference is the model it started from
    model = _load_model(source, device, torch_dtype, quantise)
    where = f"--model {spec}" if source != str(weights) else source
    check_loaded(dict(model.named_parameters()), where)
    _check_head(model, spec)
    tokenizer = load_tokenizer(source)
    if has_adapter:
        model = PeftModel.from_pretrained(model, weights, is_trainable=True, use_safetensors=True)
        check_loaded(dict(model.named_parameters()), str(weights))
    elif lora_rank:
        torch.manual_seed(seed)  # the adapter's first matrices are random
        try:
            model = get_peft_model(model, adapter_of(lora_rank, lora_alpha, lora_variant))
        except ValueError as error:
            raise UserError(
                f"--lora-rank {lora_rank}: {str(error).splitlines()[0]}; give --lora-rank 0"
            ) from error
    frozen = None
    if keep_reference and not (lora_rank or has_adapter):
        frozen = (
            copy.deepcopy(model)
            if weights is None
            else _load_model(resolve(spec), device, torch_dtype)
        )
    return Policy(
        model,
        tokenizer,
        name=spec,
        frozen=frozen,
        has_rough_gradients=dtype == "auto" and has_fast_products(),
    )


def adapter_of(rank: int, alpha: float, variant: str) -> LoraConfig:
    """Return the adapter as `peft` is asked for it: on all linear layers but the head."""
    return LoraConfig(
        r=rank,
        lora_alpha=alpha,
        target_modules="all-linear",
        task_type="CAUSAL_LM",
        **LORA_VARIANTS[variant],
    )


def dtype_on(device: str, spec: str, source: str, is_lora: bool) -> torch.dtype:
    """Return the precision in which `source`, called `spec`, is loaded there if nothing is said."""
    if not device.startswith("cuda"):
        return torch.float32
    return (
        torch.bfloat16
        if is_lora or spec != "builtin" and load_shape(source).dtype == torch.bfloat16
        else torch.float32
    )


@torch.no_grad()
def _shares_prompts(model) -> bool:
    """Tell whether the model hands its attention arguments through to `rollout.cache.attention`."""
    shared = SharedPrompt(torch.tensor([1], device=model.device), 1)
    try:
        model.base_model(
            input_ids=torch.zeros(1, 1, dtype=torch.long, device=model.device),
            use_cache=False,
            shared=shared,
        )
    except (TypeError, AttributeError):
        return False
    return len(shared.prompt) > 0


@torch.no_grad()
def _check_head(model, spec: str):
    """Raise UserError unless the logits are the output layer on the last hidden state, as `Policy.head` takes them to be."""
    tokens = torch.arange(4, device=model.device)[None]
    extra = (
        {}
        if model.config._attn_implementation != NAME
        else {"shared": SharedPrompt(torch.tensor([4], device=model.device), 4)}
    )
    logits = model(input_ids=tokens, use_cache=False, **extra).logits
    hidden = model.base_model(input_ids=tokens, use_cache=False, **extra).last_hidden_state
    if not torch.allclose(model.get_output_embeddings()(hidden), logits, atol=1e-3, rtol=1e-3):
        raise UserError(
            f"--model {spec}: the logits of {type(model).__name__} are more than its output layer on its last hidden state "
            "(scaled or capped); such models are not supported"
        )


def resolve(spec: str) -> str:
    """Return the directory that `spec` means, or the hub id that it is. Raises UserError where there is nothing to be had."""
    if spec == "builtin":
        return str(BUILTIN)
    if Path(spec).exists() and not (Path(spec) / "config.json").exists():
        raise UserError(
            f"--model {spec}: no model there (no config.json); give builtin, a directory in Hugging Face "
            "layout, or a hub id"
        )
    if not Path(spec).exists() and not HUB_ID.fullmatch(spec):
        raise UserError(
            f"--model {spec}: no such directory; give builtin, a directory in Hugging Face layout, or a hub id"
        )
    if Path(spec).exists() or _hub_answers(ENDPOINT):
        return spec
    try:
        return snapshot_download(spec, local_files_only=True)  # as it was fetched once
    except (OSError, ValueError) as error:
        raise UserError(
            f"--model {spec}: no such directory, and the hub cannot be reached; give a directory in Hugging Face layout that holds the model, "
            "or builtin"
        ) from error


@cache
def _hub_answers(endpoint: str) -> bool:
    """Tell at once what the hub's own library finds out by trying again and again, a minute and more."""
    if getproxies():
        return True  # it may, through a proxy
    try:
        socket.create_connection((urlparse(endpoint).hostname, 443), timeout=5).close()
    except OSError:
        return False
    return True


@contextmanager
def _loading(source: str):
    """Say in one line what `transformers` says in many of a model that is absent, damaged or incomplete."""
    try:
        yield
    except (OSError, ValueError, SafetensorError) as error:
        if "gated repo" in str(error):
            raise UserError(
                f"--model {source}: its owners ask for consent first: give it on https://huggingface.co/{source}, then log in (hf auth login); "
                "or give a directory that holds the model"
            ) from error
        raise UserError(
            f"--model {source}: cannot be loaded ({str(error).splitlines()[0]}); give builtin, a directory "
            "in Hugging Face layout, or a hub id that can be reached"
        ) from error


def _load_model(source: str, device: str, dtype: torch.dtype, quantise: str = "none"):
    load = partial(
        AutoModelForCausalLM.from_pretrained,
        source,
        dtype=dtype,
        device_map={"": device},
        **STRANGERS,
        **_quantisation(quantise, dtype),
    )
    with _loading(source):
        try:
            model = load(attn_implementation=NAME).eval()
            fit = _shares_prompts(model)
        except (
            ValueError
        ) as error:  # how transformers refuses an attention that an architecture does not support
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
    with needs("bitsandbytes", "bits", f"--quantise {name}"):
        if not is_bitsandbytes_available():
            raise ImportError
    return {
        "quantization_config": BitsAndBytesConfig(bnb_4bit_compute_dtype=dtype, **QUANTISED[name])
    }


def load_shape(spec: str):
    """Return the model's configuration alone. Raises UserError when it cannot be loaded."""
    source = resolve(spec)
    with _loading(source):
        return AutoConfig.from_pretrained(source, trust_remote_code=False)


def load_tokenizer(spec: str):
    """Return the tokenizer alone. Raises UserError when it cannot be loaded."""
    source = resolve(spec)
    with _loading(source):
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer
