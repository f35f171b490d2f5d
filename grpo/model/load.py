"""A policy from what it is called: the embedded model, a directory in Hugging Face layout, a GGUF
file, or a hub id; and from a checkpoint on.
"""

import copy
import re
import socket
import warnings
from collections.abc import Iterable
from contextlib import contextmanager, nullcontext
from functools import cache
from pathlib import Path
from urllib.parse import urlparse
from urllib.request import getproxies

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.constants import ENDPOINT
from huggingface_hub.utils import logging as hub_logging
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from safetensors import SafetensorError, safe_open
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
)
from transformers.utils import is_bitsandbytes_available
from transformers.utils import logging as transformers_logging

from grpo.model import gguf
from grpo.model.finite import check_loaded
from grpo.model.matmul import has_fast_products
from grpo.model.policy import Policy
from tasks.base import UserError, needs

STRANGERS = {
    "trust_remote_code": False,
    "use_safetensors": True,
}  # a model's files are data: none of them is executed or unpickled
BITS_OPTIONS = {
    "none": None,
    "int8": dict(load_in_8bit=True),
    "nf4": dict(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True),
}  # as bitsandbytes is asked for them
PEFT_OPTIONS = {"lora": {}, "rslora": {"use_rslora": True}, "dora": {"use_dora": True}}
NAMED = 3  # tensors that an error names of each kind
HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
KINDS_OF_MODELS = "give builtin, a directory in Hugging Face layout, a GGUF file, or a hub id"
BUILTIN = Path(__file__).resolve().parents[2] / "data" / "base_model"


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
    start: str | None = None,
    keep_reference: bool = False,
    seed: int = 0,
) -> Policy:
    """Return the policy `spec`: "builtin", a directory in Hugging Face layout, a GGUF file, or a
    hub id.

    `weights` is a checkpoint to go on from: an adapter on top of `spec`, or a whole model instead
    of it. `start` is the checkpoint of an earlier run that this one began with: `spec` itself, or
    one that holds an adapter on top of `spec`. `dtype` auto is float32 on a CPU, with gradients by
    bfloat16 products where it has AMX, and bfloat16 on a GPU under LoRA, and for a model that is
    saved so. `lora_variant` is one of PEFT_OPTIONS, `quantise` of BITS_OPTIONS (under LoRA). Raises
    UserError when it cannot be loaded.
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
    # Where training began with an adapter, it is needed to begin, and as the reference.
    is_needed = start not in (None, spec) and (weights is None or keep_reference)
    first = _first_adapter(start) if is_needed else None
    weights = weights or first
    has_adapter = weights is not None and (weights / "adapter_config.json").exists()
    source = str(weights) if weights is not None and not has_adapter else resolve(spec)
    torch_dtype = (
        getattr(torch, dtype)
        if dtype != "auto"
        else dtype_on(device, spec, source, bool(lora_rank or has_adapter))
    )
    if quantise != "none" and not device.startswith("cuda"):
        raise UserError(
            f"--quantise {quantise}: for a GPU only (on a CPU bitsandbytes has no gradients "
            "through its layers)"
        )
    if quantise != "none" and gguf.is_gguf(source):
        raise UserError(
            f"--quantise {quantise}: not of a GGUF file, whose weights are dequantised; leave it "
            "out, or give "
            "--model a directory in Hugging Face layout"
        )
    # full fine-tuning goes on from the checkpoint, but its reference is the model it started from
    model = _load_model(source, device, torch_dtype, quantise)
    where = f"--model {spec}" if source != str(weights) else source
    check_loaded(dict(model.named_parameters()), where)
    tokenizer, note = _read_tokenizer(source)
    frozen = None
    if first and keep_reference:  # the policy as it was at the start, not its base
        frozen = _load_adapter(copy.deepcopy(model), first)
    if has_adapter:
        model = _load_adapter(model, weights)
        check_loaded(dict(model.named_parameters()), str(weights))
    elif lora_rank:
        torch.manual_seed(seed)  # the adapter's first matrices are random
        try:
            model = get_peft_model(model, adapter_of(lora_rank, lora_alpha, lora_variant))
        except ValueError as error:
            raise UserError(
                f"--lora-rank {lora_rank}: {str(error).splitlines()[0]}; give --lora-rank 0"
            ) from error
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
        note=note,
    )


def _first_adapter(start: str) -> Path:
    """Return the checkpoint whose adapter training began with. Raises UserError where it is not
    there.
    """
    if not (Path(start) / "adapter_config.json").exists():
        raise UserError(
            f"{start}: the adapter that the run began with is not there any more; put the "
            "checkpoint back"
        )
    return Path(start)


def adapter_of(rank: int, alpha: float, variant: str) -> LoraConfig:
    """Return the adapter as `peft` is asked for it: on all linear layers but the head."""
    return LoraConfig(
        r=rank,
        lora_alpha=alpha,
        target_modules="all-linear",
        task_type="CAUSAL_LM",
        **PEFT_OPTIONS[variant],
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


def resolve(spec: str) -> str:
    """Return the directory that `spec` means, or the hub id that it is. Raises UserError where
    there is nothing to be had.
    """
    if spec == "builtin":
        return str(BUILTIN)
    if gguf.is_gguf(spec):
        gguf.check_file(spec)
        return spec
    if Path(spec).exists() and not (Path(spec) / "config.json").exists():
        raise UserError(f"--model {spec}: no model there (no config.json); {KINDS_OF_MODELS}")
    if not Path(spec).exists() and not HUB_ID.fullmatch(spec):
        raise UserError(f"--model {spec}: no such directory; {KINDS_OF_MODELS}")
    if Path(spec).exists() or _hub_answers(ENDPOINT):
        return spec
    try:
        return snapshot_download(spec, local_files_only=True)  # as it was fetched once
    except (OSError, ValueError) as error:
        raise UserError(
            f"--model {spec}: no such directory, and the hub cannot be reached; give a directory "
            "in Hugging Face layout that holds the model, "
            "or builtin"
        ) from error


@cache
def _hub_answers(endpoint: str) -> bool:
    """Tell at once what the hub's own library finds out by trying again and again, a minute and
    more.
    """
    if getproxies():
        return True  # it may, through a proxy
    try:
        socket.create_connection((urlparse(endpoint).hostname, 443), timeout=5).close()
    except OSError:
        return False
    return True


@contextmanager
def _loading(source: str):
    """Say in one line what `transformers` says in many of a model that is absent, damaged or
    incomplete.
    """
    try:
        with gguf.reading() if gguf.is_gguf(source) else nullcontext():
            yield
    except torch.OutOfMemoryError:
        raise
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        if "gated repo" in str(error):
            raise UserError(
                f"--model {source}: its owners ask for consent first: give it on "
                f"https://huggingface.co/{source}, then log in (hf auth login); "
                "or give a directory that holds the model"
            ) from error
        raise UserError(
            f"--model {source}: cannot be loaded "
            f"({(str(error).splitlines() or [type(error).__name__])[0]}); "
            f"{KINDS_OF_MODELS} that can be reached"
        ) from error


def _load_model(source: str, device: str, dtype: torch.dtype, quantise: str = "none"):
    """Return the model; raises UserError unless the files hold its weights, all of them and
    nothing else.
    """
    place, options = gguf.place_of(source)
    options |= gguf.unpacking() if options else _quantisation(quantise, dtype)
    with _loading(source):
        try:
            model, info = AutoModelForCausalLM.from_pretrained(
                place,
                dtype=dtype,
                device_map={"": device},
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # else they are logged, and the exception names none
                **STRANGERS,
                **options,
            )
        except ValueError:
            _check_kind(source)
            raise
    # `transformers` leaves out what may be missing (tied weights) and what a class declares as
    # superfluous.
    _check_tensors(
        source,
        type(model).__name__,
        missing=info["missing_keys"],
        unexpected=info["unexpected_keys"],
        mismatched=[
            f"{name} {list(found)} instead of {list(wanted)}"
            for name, found, wanted in info["mismatched_keys"]
        ],
    )
    if gguf.is_gguf(source):
        gguf.name_model(model, source)
    return model.eval()


def _check_kind(source: str):
    """Raise UserError unless `transformers` knows the model as a causal language model."""
    config = load_shape(source)
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        kind = "an encoder-decoder" if config.is_encoder_decoder else "no causal language model"
        raise UserError(
            f"--model {source}: {config.model_type} is {kind}; give a decoder-only language model"
        )


def _load_adapter(model, folder: Path) -> PeftModel:
    """Return `model` with the adapter of a checkpoint, to be trained on. Raises UserError unless
    the file holds it whole.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of missing keys, which are named below
            adapted = PeftModel.from_pretrained(
                model, folder, is_trainable=True, use_safetensors=True
            )
        with safe_open(folder / "adapter_model.safetensors", "pt") as file:
            found = set(file.keys())
    except torch.OutOfMemoryError:
        raise
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        mismatches = [line for line in lines if line.startswith("size mismatch")]
        raise UserError(
            f"{folder}: its adapter does not fit {type(model).__name__} "
            f"({(mismatches or lines or ['unreadable'])[0]}); "
            "give the base model that it was trained on, and an adapter as save_pretrained writes "
            "it"
        ) from error
    expected = set(get_peft_model_state_dict(adapted, save_embedding_layers=False))
    _check_tensors(
        str(folder), "its adapter", missing=expected - found, unexpected=found - expected
    )
    return adapted


def _check_tensors(
    source: str,
    what: str,
    *,
    missing: Iterable[str],
    unexpected: Iterable[str],
    mismatched: Iterable[str] = (),
):
    """Raise UserError if the weights of `what`, as read from `source`, are not exactly those
    wanted.
    """
    kinds = {"missing": missing, "unexpected": unexpected, "of another shape": mismatched}
    problems = []
    for kind, names in kinds.items():
        names = sorted(names)
        if names:
            others = ", ..." if len(names) > NAMED else ""
            problems.append(f"{len(names)} {kind} ({', '.join(names[:NAMED])}{others})")
    if problems:
        raise UserError(
            f"--model {source}: the tensors there are not those of {what}: {'; '.join(problems)}; "
            "give a folder whose weights and configuration were saved together"
        )


def _quantisation(name: str, dtype: torch.dtype) -> dict[str, BitsAndBytesConfig]:
    """Return what `from_pretrained` is told of it. Raises UserError where bitsandbytes
    is missing.
    """
    if name == "none":
        return {}
    with needs("bitsandbytes", "bits", f"--quantise {name}"):
        if not is_bitsandbytes_available():
            raise ImportError
    options = BITS_OPTIONS[name]
    return {"quantization_config": BitsAndBytesConfig(bnb_4bit_compute_dtype=dtype, **options)}


def load_shape(spec: str):
    """Return the model's configuration alone. Raises UserError when it cannot be loaded."""
    source = resolve(spec)
    place, options = gguf.place_of(source)
    with _loading(source):
        return AutoConfig.from_pretrained(place, trust_remote_code=False, **options)


def load_tokenizer(spec: str):
    """Return the tokenizer alone. Raises UserError when it cannot be loaded."""
    return _read_tokenizer(resolve(spec))[0]


def _read_tokenizer(source: str):
    """Return the tokenizer, and what is to be said of it, "" for nothing."""
    place, options = gguf.place_of(source)
    with _loading(source):
        tokenizer = AutoTokenizer.from_pretrained(place, trust_remote_code=False, **options)
        note = gguf.correct_end(tokenizer, source) if options else ""
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer, note
