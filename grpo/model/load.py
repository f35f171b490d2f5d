"""Load a policy: the embedded model, a directory in Hugging Face layout, a GGUF file or a hub id,
and checkpoints of them.
"""

import copy
import re
import socket
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlparse
from urllib.request import getproxies

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.constants import ENDPOINT
from huggingface_hub.utils import logging as hub_logging
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
)
from transformers.utils import is_bitsandbytes_available
from transformers.utils import logging as transformers_logging

from data.errors import UserError, needs
from data.files import kind_of
from data.text import shortened, shown
from grpo.model import gguf
from grpo.model.adapter import (
    first_adapter,
    is_adapter,
    layers_of,
    load_adapter,
    merged,
    new_adapter,
)
from grpo.model.encoding import Tokenizer, check_growth, encode
from grpo.model.files import TOKENIZERS, check_files, why_unreadable
from grpo.model.finite import check_loaded, check_names
from grpo.model.gguf_vocabulary import correct_vocabulary
from grpo.model.interfaces import Model
from grpo.model.matmul import has_fast_bf16_matmul
from grpo.model.options import LoadOptions
from grpo.model.policy import Policy
from grpo.model.precision import TEXT, default_dtype, fits_float16

# A model's files are data: none of them is executed or unpickled.
SAFE_FILES = {"trust_remote_code": False, "use_safetensors": True}

# How bitsandbytes is asked for each kind of quantisation.
BITS_OPTIONS: dict[str, dict[str, Any] | None] = {
    "none": None,
    "int8": dict(load_in_8bit=True),
    "nf4": dict(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True),
}
# More than any model has; a wrong number would be built for hours.
MAX_LAYERS = 2_000

HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
KINDS_OF_MODELS = "give builtin, a directory in Hugging Face layout, a GGUF file, or a hub id"
BUILTIN = Path(__file__).resolve().parents[2] / "data" / "base_model"

# While `transformers` loads a model, it patches torch and changes the default precision.
_LOCK = threading.RLock()


@contextmanager
def _one_thread() -> Iterator[None]:
    """Within this context, other threads wait to enter it."""
    with _LOCK:
        yield


@_one_thread()
def load_policy(
    spec: str,
    *,
    device: str = "auto",
    weights: Path | None = None,
    options: LoadOptions | None = None,
) -> Policy:
    """Return the policy of `spec`: "builtin", a directory, a GGUF file, or a hub id.

    `weights` is a checkpoint to continue: an adapter on top of `spec`, or a whole model. Raises
    UserError if the policy cannot be loaded.
    """
    options = options or LoadOptions()
    _configure_libraries()
    device = _device(device)

    files = _find_files(spec, weights, options.start, options.keep_reference)
    is_lora = bool(options.adapter or files.adapter)
    _check_quantise(options.quantise, device, files.source)
    model, tokenizer, notes = _load_base(files, spec, device, options)

    # The reference is the policy as it was at the start, which need not be its base.
    frozen = None
    if options.keep_reference and not is_lora:
        is_new = weights is None
        frozen = copy.deepcopy(model) if is_new else _load_model(resolve(spec), device, model.dtype)
    elif options.keep_reference and files.start_adapter:
        frozen = load_adapter(copy.deepcopy(model), files.start_adapter)

    if files.adapter:
        model = load_adapter(model, files.adapter)
        check_loaded(dict(model.named_parameters()), str(files.adapter))
    elif options.adapter:
        model = new_adapter(model, options.adapter)

    policy = Policy(
        model,
        tokenizer,
        name=spec,
        frozen=frozen,
        low_precision_backward=options.dtype == "auto" and has_fast_bf16_matmul(),
    )
    policy.notes = notes + policy.notes
    return policy


@dataclass(frozen=True)
class _Files:
    """Where a policy's weights are."""

    source: str  # the whole model: a directory, a GGUF file or a hub id
    name: str  # what messages call it
    adapter: Path | None  # the adapter on top of it
    start_adapter: Path | None  # the adapter from which training started, if it is needed
    is_continued: bool = False  # `source` is a checkpoint of a run that trained all weights


def _find_files(spec: str, weights: Path | None, start: str | None, keep_reference: bool) -> _Files:
    """Return where the weights are that `load_policy` is asked for.

    Raises UserError if they are not there.
    """
    # A run that started from an adapter needs it to begin with, and as its reference.
    start_adapter = None
    if start is not None and start != spec and (weights is None or keep_reference):
        start_adapter = first_adapter(start)

    weights = weights or start_adapter
    if weights is None:
        return _Files(resolve(spec), f"--model {spec}", None, None)
    if (weights / "adapter_config.json").exists():
        return _Files(resolve(spec), f"--model {spec}", weights, start_adapter)
    check_files(weights)
    return _Files(str(weights), str(weights), None, start_adapter, is_continued=True)


def _load_base(
    files: _Files, spec: str, device: str, options: LoadOptions
) -> tuple[Model, Tokenizer, list[str]]:
    """Return the whole model without an adapter, its tokenizer, and warnings about them."""
    is_automatic = options.dtype == "auto"
    if is_automatic:
        is_lora = bool(options.adapter or files.adapter)
        dtype = dtype_on(device, spec, files.source, is_lora, files.is_continued)
    else:
        dtype = getattr(torch, options.dtype)

    model = _load_model(files.source, device, dtype, options.quantise)
    tokenizer, notes = _read_tokenizer(files.source)
    if is_adapter(Path(files.source)):
        base, _ = layers_of(files.source)
        notes.append(f"{files.name}: an adapter; it is merged into its base model, {base}")

    is_asked = is_automatic and dtype == torch.float16 and not files.is_continued
    if is_asked and not fits_float16(model, encode(tokenizer, TEXT).input_ids):
        del model
        model = _load_model(files.source, device, torch.bfloat16, options.quantise)
        notes.append(f"{files.name}: its hidden states are too large for float16; in bfloat16 now")
    check_loaded(dict(model.named_parameters()), files.name)
    return model, tokenizer, notes


def _configure_libraries() -> None:
    """Silence the libraries that load models, and switch off cuDNN's attention."""
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    hub_logging.set_verbosity_error()
    # It takes 50 ms to plan for each new length of the prompts.
    torch.backends.cuda.enable_cudnn_sdp(False)


def _device(name: str) -> str:
    """Return the device that --device names. Raises UserError if there is none."""
    if not isinstance(name, str):
        raise UserError(f"--device {name!r}: give auto, cpu or cuda")
    has_gpu = torch.cuda.is_available()
    if name == "auto":
        name = "cuda" if has_gpu else "cpu"
    if name.startswith("cuda") and not has_gpu:
        raise UserError(f"--device {name}: torch sees no GPU here; give --device cpu")
    if name.split(":")[0] not in ("cpu", "cuda"):
        raise UserError(f"--device {name}: no such device; give auto, cpu or cuda")
    # Each rank has its own GPU.
    return f"cuda:{torch.cuda.current_device()}" if name == "cuda" else name


def _check_quantise(quantise: str, device: str, source: str) -> None:
    """Raise UserError where the weights cannot be quantised."""
    if quantise == "none":
        return
    if not device.startswith("cuda"):
        raise UserError(
            f"--quantise {quantise}: needs a GPU, as bitsandbytes computes no gradients through "
            "its layers on a CPU; leave it out"
        )
    if is_adapter(Path(source)):
        raise UserError(
            f"--quantise {quantise}: does not apply to an adapter, which is merged into its base; "
            "leave it out, or give --model a whole model (python -m grpo.export ADAPTER FOLDER)"
        )
    if gguf.is_gguf(source):
        raise UserError(
            f"--quantise {quantise}: does not apply to a GGUF file, whose weights are dequantised; "
            "leave it out, or give --model a directory in Hugging Face layout"
        )


def dtype_on(
    device: str, spec: str, source: str, is_lora: bool, is_continued: bool = False
) -> torch.dtype:
    """Return the default precision of a model: `source`, which the user named `spec`.

    float32 on a CPU; on a GPU see `grpo.model.precision.default_dtype`. Whether the model fits
    float16 is not known yet.
    """
    if not device.startswith("cuda"):
        return torch.float32
    saved = None if spec == "builtin" and not is_continued else load_shape(source).dtype
    return default_dtype(is_lora=is_lora, saved=saved, is_continued=is_continued)


def resolve(spec: str) -> str:
    """Return the directory or file that `spec` names, or the hub id that it is.

    Raises UserError if there is nothing to load.
    """
    if spec == "builtin":
        return str(BUILTIN)
    if gguf.is_gguf(spec):
        gguf.check_file(spec)
        return spec

    exists = kind_of(spec)
    if is_adapter(Path(spec)):
        check_files(Path(spec))
        return spec
    if exists and not (Path(spec) / "config.json").exists():
        raise UserError(f"--model {spec}: no model there (no config.json); {KINDS_OF_MODELS}")
    if exists:
        check_files(Path(spec))
    if not exists and not HUB_ID.fullmatch(spec):
        raise UserError(f"--model {spec}: no such directory; {KINDS_OF_MODELS}")
    if exists or _hub_answers(ENDPOINT):
        return spec

    # Offline, an earlier download will do.
    try:
        return snapshot_download(spec, local_files_only=True)
    except (OSError, ValueError) as error:
        raise UserError(
            f"--model {spec}: no such directory, and the hub cannot be reached; give a directory "
            "in Hugging Face layout that holds the model, or builtin"
        ) from error


def _layers(source: str) -> tuple[str, list[Path]]:
    """Return where the whole model under `source` is, and the adapters to merge into it."""
    whole, adapters = layers_of(source)
    if not adapters:
        return source, []
    try:
        return resolve(whole), adapters
    except UserError as error:
        raise UserError(
            f"--model {source}: the base model of this adapter cannot be loaded; correct "
            f"base_model_name_or_path in {adapters[0] / 'adapter_config.json'} ({error})"
        ) from error


@cache
def _hub_answers(endpoint: str) -> bool:
    """Return whether the hub can be reached; the hub's own library retries for over a minute."""
    if getproxies():
        return True  # perhaps it can; connecting directly would not tell
    try:
        socket.create_connection((urlparse(endpoint).hostname, 443), timeout=5).close()
    except OSError:
        return False
    return True


@contextmanager
def _loading(source: str) -> Iterator[None]:
    """Within this context, errors of `transformers` become a UserError of one line.

    They concern models that are absent, damaged or incomplete.
    """
    try:
        reading = gguf.reading() if gguf.is_gguf(source) else nullcontext()
        with warnings.catch_warnings(), reading:
            warnings.simplefilter("ignore")
            yield
    except (torch.OutOfMemoryError, MemoryError, UserError):
        raise
    except BaseException as error:
        # The Rust code of `tokenizers` and `safetensors` panics with a BaseException.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        if "gated repo" in str(error):
            raise UserError(
                f"--model {source}: its owners require consent: give it on "
                f"https://huggingface.co/{source}, then log in (hf auth login); "
                "or give a directory that holds the model"
            ) from error
        reason = why_unreadable(Path(source)) if kind_of(source) == "folder" else ""
        if not reason:
            reason = shortened(" ".join(str(error).split()) or type(error).__name__, 200)
        raise UserError(
            f"--model {source}: cannot be loaded ({reason}); {KINDS_OF_MODELS} that can be reached"
        ) from error


def _load_model(source: str, device: str, dtype: torch.dtype, quantise: str = "none") -> Model:
    """Return the model. Raises UserError unless the files hold exactly its weights.

    Adapters are merged into it.
    """
    source, adapters = _layers(source)
    place, options = gguf.place_of(source)
    extra = gguf.dequantised() if options else _quantisation(quantise, dtype)
    if kind_of(source) == "folder":
        _check_layers(source)
    with _loading(source):
        try:
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                place,
                dtype=dtype,
                device_map={"": device},
                output_loading_info=True,
                # Else mismatches are logged, and the exception does not name them.
                ignore_mismatched_sizes=True,
                **SAFE_FILES,
                **options,
                **extra,
            )
        except ValueError:
            _check_kind(source)
            raise

    # `transformers` leaves out what may be missing (tied weights) and what a class declares as
    # superfluous.
    model, info = loaded
    mismatched = [
        f"{name} {list(found)} instead of {list(wanted)}"
        for name, found, wanted in info["mismatched_keys"]
    ]
    check_names(
        source,
        type(model).__name__,
        missing=info["missing_keys"],
        unexpected=info["unexpected_keys"],
        mismatched=mismatched,
    )
    if getattr(model, "_hf_peft_config_loaded", False):  # `transformers` follows an adapter's name
        raise UserError(
            f"--model {source}: is an adapter on the hub; fetch it with hf download {source} "
            "--local-dir FOLDER, and give --model FOLDER"
        )
    if gguf.is_gguf(source):
        gguf.name_model(model, source)
    for folder in adapters:
        model = merged(model, folder)
    return model.eval()


def _check_layers(source: str) -> None:
    layers = getattr(load_shape(source), "num_hidden_layers", 0) or 0
    if layers > MAX_LAYERS:
        raise UserError(f"--model {source}: its config.json asks for {layers:,} layers")


def _check_kind(source: str) -> None:
    """Raise UserError unless `transformers` has a causal language model of this architecture."""
    config = load_shape(source)
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        kind = "an encoder-decoder" if config.is_encoder_decoder else "not a causal language model"
        raise UserError(
            f"--model {source}: {config.model_type} is {kind}; give a decoder-only language model"
        )


def _quantisation(name: str, dtype: torch.dtype) -> dict[str, BitsAndBytesConfig]:
    """Return the arguments of `from_pretrained` for a quantisation.

    Raises UserError if bitsandbytes is missing.
    """
    options = BITS_OPTIONS[name]
    if options is None:
        return {}
    with needs("bitsandbytes", "bits", f"--quantise {name}"):
        if not is_bitsandbytes_available():
            raise ImportError
    return {"quantization_config": BitsAndBytesConfig(bnb_4bit_compute_dtype=dtype, **options)}


@_one_thread()
def load_shape(spec: str) -> Any:
    """Return the model's configuration, without its weights.

    Raises UserError if it cannot be loaded.
    """
    source, _ = _layers(resolve(spec))
    place, options = gguf.place_of(source)
    with _loading(source):
        return AutoConfig.from_pretrained(place, trust_remote_code=False, **options)


@_one_thread()
def load_tokenizer(spec: str) -> Tokenizer:
    """Return the tokenizer of a model. Raises UserError if it cannot be loaded."""
    return _read_tokenizer(resolve(spec))[0]


def _read_tokenizer(source: str) -> tuple[Tokenizer, list[str]]:
    """Return the tokenizer, and warnings about it. An adapter's own comes before its base's."""
    source, adapters = _layers(source)
    for folder in adapters:
        if any((folder / name).exists() for name in TOKENIZERS):
            source = str(folder)
    place, options = gguf.place_of(source)
    with _loading(source):
        tokenizer: Any = AutoTokenizer.from_pretrained(place, trust_remote_code=False, **options)
        check_growth(tokenizer, source)
        notes: list[str] = []
        if options:
            tokenizer, note = correct_vocabulary(tokenizer, source)
            notes = list(filter(None, (note, gguf.correct_end(tokenizer, source))))
    if isinstance(tokenizer.chat_template, dict):  # several, by name
        if "default" not in tokenizer.chat_template:
            names = ", ".join(map(shown, tokenizer.chat_template))
            raise UserError(
                f"--model {source}: its chat templates are {names}, and none is 'default'; give a "
                "model with one template"
            )
        tokenizer.chat_template = tokenizer.chat_template["default"]
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer, notes
