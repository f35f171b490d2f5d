"""Load a policy: the embedded model, a directory in Hugging Face layout, a GGUF file or a hub id,
and checkpoints of them.

`transformers` reads GGUF files (extra `gguf`). The weights are dequantised while they are loaded,
so the result is an ordinary model: it can be trained, saved, and loaded again without the file.
"""

import copy
import math
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.utils import logging as hub_logging
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors.torch import load_file
from tokenizers import AddedToken, Regex, decoders, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    GgufConfig,
)
from transformers.utils import is_bitsandbytes_available
from transformers.utils import logging as transformers_logging

from grpo.data.errors import UserError, command_of, lacks_memory, needs, shortened, shown
from grpo.data.files import kind_of, read_json
from grpo.model.check import (
    MEASURED_SIZE,
    TEXT,
    Model,
    check_files,
    check_loaded,
    check_names,
    fits_float16,
)
from grpo.model.policy import Policy
from grpo.model.prompts import Tokenizer
from grpo.model.rows import use_own_cache

try:
    from grpo.fast.accelerate import accelerate
except ModuleNotFoundError as missing:  # `grpo/fast/` may be deleted: all else runs without it
    if missing.name not in ("grpo.fast", "grpo.fast.accelerate"):
        raise

    def accelerate(policy: Policy, may_round: bool = False) -> None:
        """Leave the policy its model's own forward pass."""


BITS_OPTIONS: dict[str, dict[str, Any]] = {
    "int8": dict(load_in_8bit=True),
    "nf4": dict(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True),
}
LORA_RANK = 64  # of models that are trained with LoRA by default
HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
KINDS_OF_MODELS = "give builtin, a directory in Hugging Face layout, a GGUF file, or a hub id"
BUILTIN = Path(__file__).parents[1] / "data" / "base_model"

# How GGUF files split texts into words: a pattern, and whether GPT-2's follows.
LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPLITS = {
    "llama-bpe": (LLAMA_3, False),
    "qwen2": (LLAMA_3.replace("{1,3}", ""), False),
    "smollm": (r"\p{N}", True),
}
# Fields of GGUF files that change texts before they are split.
CHANGES = ("add_space_prefix", "remove_extra_whitespaces", "precompiled_charsmap")


def load_policy(
    spec: str,
    *,
    device: str = "auto",
    weights: Path | None = None,
    dtype: str = "auto",
    lora_rank: int | None = 0,
    seed: int = 0,
    quantise: str = "none",
    start: str | None = None,
    keep_reference: bool = False,
) -> Policy:
    """Return the policy of `spec`: "builtin", a directory, a GGUF file, or a hub id.

    - `weights`: a checkpoint to continue: an adapter on top of `spec`, or a whole model;
    - `dtype`: torch's name of the precision; auto: see `dtype_on`;
    - `lora_rank`: that of a new adapter, whose random weights follow from `seed`; 0: none, for full
      fine-tuning and for weights that have an adapter already; None: see `default_rank`;
    - `quantise` (with LoRA): one of BITS_OPTIONS;
    - `start`: the checkpoint from which the run started, if that holds an adapter on top of `spec`;
    - `keep_reference`: keep the policy as it was at the start, for the KL term.
    """
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    hub_logging.set_verbosity_error()
    torch.backends.cuda.enable_cudnn_sdp(False)  # it plans 50 ms for each new length of the prompts
    device = _device(device)

    # A run that started from an adapter needs it to begin with, and as its reference.
    first = None
    if start not in (None, spec) and (weights is None or keep_reference):
        first = Path(start)
        if not is_adapter(first):
            raise UserError(f"{first}: the adapter that the run started from is gone; put it back")

    # Where the whole model is, what messages call it, and the adapter on top of it.
    given = weights or first
    adapter = given if given and is_adapter(given) else None
    if given and not adapter:  # a checkpoint of a whole model
        check_files(given)
        source = name = str(given)
    else:
        source, name = resolve(spec), f"--model {spec}"
    is_whole_checkpoint = source == str(weights)
    if lora_rank is None:
        lora_rank = default_rank(source, quantise)
    is_lora = bool(lora_rank or adapter)

    if dtype != "auto":
        precision = getattr(torch, dtype)
    else:
        precision = dtype_on(device, spec, source, is_lora, is_whole_checkpoint)
    model = _load_model(source, device, precision, quantise)
    tokenizer, notes = read_tokenizer(source)
    if is_adapter(Path(source)):
        base, _ = layers_of(source)
        notes.append(f"{name}: an adapter; it is merged into its base model, {base}")

    is_chosen = dtype == "auto" and precision == torch.float16 and not is_whole_checkpoint
    if is_chosen and not fits_float16(model, tokenizer(TEXT).input_ids):
        del model
        model = _load_model(source, device, torch.bfloat16, quantise)
        notes.append(f"{name}: its hidden states are too large for float16; in bfloat16 now")
    check_loaded(dict(model.named_parameters()), name)

    # The reference is the policy as it was at the start, which need not be its base.
    frozen = None
    if keep_reference and not is_lora:
        if weights is None:
            frozen = copy.deepcopy(model)
        else:
            frozen = _load_model(resolve(spec), device, model.dtype)
    elif keep_reference and first:
        frozen = load_adapter(copy.deepcopy(model), first)

    if adapter:
        model = load_adapter(model, adapter)
        check_loaded(dict(model.named_parameters()), str(adapter))
    elif lora_rank:
        model = new_adapter(model, lora_rank, seed)

    reference = None
    if frozen is not None:
        reference = Policy(frozen.requires_grad_(False), tokenizer, name=spec)
        accelerate(reference)
    policy = Policy(model, tokenizer, name=spec, frozen=reference)
    probe = policy.probe
    accelerate(policy, may_round=dtype == "auto")
    if policy.decoder is None:
        use_own_cache(policy, probe)
    policy.notes = notes + policy.notes
    return policy


def _device(name: str) -> str:
    has_gpu = torch.cuda.is_available()
    if name == "auto":
        name = "cuda" if has_gpu else "cpu"
    if name.startswith("cuda") and not has_gpu:
        raise UserError(f"--device {name}: torch sees no GPU here; give --device cpu")
    if name.split(":")[0] not in ("cpu", "cuda"):
        raise UserError(f"--device {name}: no such device; give auto, cpu or cuda")
    # Each rank has its own GPU.
    return f"cuda:{torch.cuda.current_device()}" if name == "cuda" else name


def dtype_on(
    device: str, spec: str, source: str, is_lora: bool, is_continued: bool = False
) -> torch.dtype:
    """Return the default precision of a model: `source`, which the user named `spec`.

    A model that `is_continued`, all of whose weights were trained by us, keeps its own. On a GPU,
    float16 is as fast as bfloat16 and rounds eight times as finely: policies learned as with
    float32 (runs/archive/LOG.md, 2026-11-26; arXiv:2510.26788).
    """
    if not device.startswith("cuda"):
        return torch.float32
    own = transformers_config(source).dtype
    if is_continued and own is not None:
        return own
    is_half = is_lora or (spec != "builtin" and own is not None)
    return torch.float16 if is_half else torch.float32


def default_rank(source: str, quantise: str = "none") -> int:
    """Return the default rank of a model's adapter; 0: none (runs/decisions.md)."""
    config = transformers_config(source).get_text_config(decoder=True)
    # What is not a language model may lack a hidden size; loading it says what is wrong.
    hidden_size = getattr(config, "hidden_size", math.inf)
    return 0 if hidden_size <= MEASURED_SIZE and quantise == "none" else LORA_RANK


def transformers_config(source: str) -> Any:
    """Return the configuration of the whole model under `source`, as `transformers` reads it."""
    whole, adapters = _layers(source)
    place, options = _place_of(whole)
    with _loading(whole, adapters):
        return AutoConfig.from_pretrained(place, trust_remote_code=False, **options)


def resolve(spec: str) -> str:
    """Return the directory, file or hub id of `spec`. Raises UserError if nothing is there."""
    if spec == "builtin":
        return str(BUILTIN)
    path, exists = Path(spec), kind_of(spec)
    if path.suffix == ".gguf":
        if exists != "file":
            raise UserError(f"--model {spec}: no such file; {KINDS_OF_MODELS}")
        with needs("gguf", "gguf", f"--model {spec}"):
            import gguf  # noqa: F401
        return spec

    if not exists and (not HUB_ID.fullmatch(spec) or path.parts[0] == "runs"):
        raise UserError(f"--model {spec}: no such directory; {KINDS_OF_MODELS}")
    if exists and not is_adapter(path) and not (path / "config.json").exists():
        raise UserError(f"--model {spec}: no model there (no config.json); {KINDS_OF_MODELS}")
    if exists:
        check_files(path)
    return spec


def _place_of(source: str) -> tuple[str, dict[str, str]]:
    """Return the directory or hub id for `from_pretrained`, and the keyword for a GGUF file."""
    path = Path(source)
    return (str(path.parent), {"gguf_file": path.name}) if path.suffix == ".gguf" else (source, {})


def _layers(source: str) -> tuple[str, list[Path]]:
    """Return where the whole model under `source` is, and the adapters to merge into it."""
    whole, adapters = layers_of(source)
    return (resolve(whole), adapters) if adapters else (source, [])


@contextmanager
def _loading(source: str, adapters: Sequence[Path] = ()) -> Iterator[None]:
    """Make errors about models that are absent, damaged or incomplete a UserError of one line.

    The first of the `adapters` names `source` as its base.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except UserError:
        raise
    except BaseException as error:
        if lacks_memory(error):
            raise
        # The Rust code of `tokenizers` and `safetensors` panics with a BaseException.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        reason = shortened(" ".join(str(error).split()) or type(error).__name__, 200)
        base = f"{adapters[0]}: its base model " if adapters else ""
        raise UserError(
            f"--model {base}{source}: cannot be loaded ({reason}); {KINDS_OF_MODELS} that can be "
            "reached"
        ) from error


def _load_model(source: str, device: str, dtype: torch.dtype, quantise: str = "none") -> Model:
    """Return the model, its adapters merged. Raises UserError if the weights are not its own."""
    source, adapters = _layers(source)
    place, options = _place_of(source)
    extra: dict[str, Any] = {}
    if quantise != "none":
        if adapters or options or not device.startswith("cuda"):
            raise UserError(
                f"--config: quantise {quantise}: needs a GPU, and a whole model in Hugging Face "
                f"layout; leave it out, or merge both ({command_of('export')} ADAPTER FOLDER)"
            )
        with needs("bitsandbytes", "bits", f"--config: quantise {quantise}"):
            if not is_bitsandbytes_available():
                raise ImportError
        bits = BitsAndBytesConfig(bnb_4bit_compute_dtype=dtype, **BITS_OPTIONS[quantise])
        extra = {"quantization_config": bits}
    elif options:  # else the weights would stay in their blocks on a GPU
        extra = {"quantization_config": GgufConfig(dequantize=True)}

    with _loading(source, adapters):
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            place,
            dtype=dtype,
            device_map={"": device},
            output_loading_info=True,
            # Else mismatches are logged, and the exception does not name them.
            ignore_mismatched_sizes=True,
            # The files are data: none of them is executed or unpickled.
            trust_remote_code=False,
            use_safetensors=True,
            **options,
            **extra,
        )

    # `transformers` leaves out what may be missing (tied weights) and what a class declares as
    # superfluous.
    model, info = loaded
    differences = {
        "missing": info["missing_keys"],
        "unexpected": info["unexpected_keys"],
        "of another shape": [
            f"{name} {list(found)} instead of {list(wanted)}"
            for name, found, wanted in info["mismatched_keys"]
        ],
    }
    check_names(source, type(model).__name__, differences)
    if getattr(model, "_hf_peft_config_loaded", False):  # `transformers` follows an adapter's name
        raise UserError(
            f"--model {source}: is an adapter on the hub; fetch it with hf download {source} "
            "--local-dir FOLDER, and give --model FOLDER"
        )
    if options:  # an adapter takes its `base_model_name_or_path` from there
        model.name_or_path = model.config.name_or_path = source
        vars(model.config).pop("_model_name_or_path", None)  # the file's title, not a path
        fields = _tokenizer_fields(source)
        ends = [fields.get(f"{name}_token_id") for name in ("eos", "eot", "eom")]
        model.generation_config.eos_token_id = [end for end in ends if end is not None]
    for folder in adapters:
        model = load_adapter(model, folder).merge_and_unload().requires_grad_(True)
        model.name_or_path = model.config.name_or_path = str(folder)
    return model.eval()


def read_tokenizer(source: str) -> tuple[Tokenizer, list[str]]:
    """Return the tokenizer, and warnings about it. An adapter's own comes before its base's."""
    source, adapters = _layers(source)
    for folder in adapters:
        if (folder / "tokenizer_config.json").exists():
            source = str(folder)
    place, options = _place_of(source)
    with _loading(source):
        tokenizer: Any = AutoTokenizer.from_pretrained(place, trust_remote_code=False, **options)
        notes = _correct_tokenizer(tokenizer, source) if options else []
        tokenizer("a")  # fails if tokenizer_config.json holds what it cannot use
        if isinstance(tokenizer.chat_template, dict):  # several, by name
            tokenizer.chat_template = tokenizer.chat_template["default"]
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer, notes


def _tokenizer_fields(path: str) -> dict[str, Any]:
    """Return `tokenizer.ggml.NAME` of a GGUF file by name; the merges are only counted."""
    from transformers.integrations.gguf import read_gguf_metadata

    prefix = "tokenizer.ggml."
    metadata, _ = read_gguf_metadata(path, (prefix + "tokens",))
    return {name.removeprefix(prefix): value for name, value in metadata.items()}


def _correct_tokenizer(tokenizer: Any, path: str) -> list[str]:
    """Make the `tokenizer` of a GGUF file the one that the file describes; return warnings.

    `transformers` 5 reads byte-level vocabularies (Llama 3, SmolLM, Qwen) as another tokenizer than
    the model's own: texts are split into words as GPT-2's are, lose their first blank, and have
    only some of the added tokens; `add_bos_token` is ignored. It reads SentencePiece's vocabularies
    of byte pairs as a unigram model, with tokens that the policy never saw: these are refused.
    """
    from gguf import TokenType

    fields = _tokenizer_fields(path)
    fault = ""
    if fields.get("model") != "gpt2":
        fault = f"its vocabulary ({shown(fields.get('model'))}) is not byte-level"
    elif changes := [name for name in CHANGES if fields.get(name)]:
        fault = f"its tokenizer changes texts ({changes[0]}), which is not done here"
    if fault:
        raise UserError(f"--model {path}: {fault}; give the directory in Hugging Face layout")

    # Splitting and decoding.
    pre, backend = fields.get("pre"), tokenizer.backend_tokenizer
    backend.decoder = decoders.ByteLevel()
    if pre in SPLITS:
        pattern, is_gpt2 = SPLITS[pre]
        split = pre_tokenizers.Split(Regex(pattern), "isolated")
        by_byte = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=is_gpt2)
        backend.pre_tokenizer = pre_tokenizers.Sequence([split, by_byte])
    backend.model.ignore_merges = pre == "llama-bpe"  # a word in the vocabulary is one token

    # Added tokens, and those at the beginning and the end of a text.
    special = {TokenType.CONTROL: True, TokenType.USER_DEFINED: False}
    tokenizer.add_tokens(
        [
            AddedToken(token, normalized=False, special=special[kind])
            for token, kind in zip(fields["tokens"], fields["token_type"], strict=True)
            if kind in special
        ]
    )
    if (end := fields.get("eos_token_id")) is not None:  # the reader may take the start of a turn
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(end)
    tokenizer.add_bos_token = fields.get("add_bos_token", pre == "llama-bpe")
    tokenizer.add_eos_token = fields.get("add_eos_token", False)

    if pre in (*SPLITS, "gpt-2"):
        return []
    return [
        f"--model {path}: how it splits texts into words ({shown(pre)}) is not known here, so its "
        "token ids may not be the model's own; to be sure, give --model the directory in Hugging "
        "Face layout"
    ]


# LoRA adapters (arXiv:2106.09685)

ALPHA = 32  # an adapter adds ALPHA / rank times its product

# PEFT refuses an adapter of their "out_proj", because fused kernels read the weight by itself.
MAMBA = {"falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h"}


def new_adapter(model: Model, rank: int, seed: int) -> PeftModel:
    """Return `model` with a new adapter on all linear layers that text passes, but the head and
    those that return more than a product, such as some routers of experts.
    """
    linear = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear)
    }
    if len({module.weight for module in linear.values()}) < len(linear):
        raise UserError(
            f"--lora-rank {rank}: layers of {type(model).__name__} share weights, into which their "
            "adapters could not be merged; give --lora-rank 0"
        )
    excluded = [name for name, module in linear.items() if not _is_product(module)]
    if model.config.get_text_config(decoder=True) is not model.config:  # layers of images, of sound
        of_text = set(model.get_decoder().modules())
        excluded += [name for name, module in linear.items() if module not in of_text]
    # Mamba multiplies by the weight of this one itself, so its adapter would have no effect.
    excluded += [name for name in linear if name.endswith(".dt_proj")]
    if model.config.model_type in MAMBA:
        excluded += [name for name in linear if name.endswith(".out_proj")]
    settings = LoraConfig(
        r=rank,
        lora_alpha=ALPHA,
        target_modules="all-linear",
        exclude_modules=excluded or None,
        task_type="CAUSAL_LM",
    )
    torch.manual_seed(seed % 2**63)  # the adapter's A is random
    try:
        return get_peft_model(model, settings)
    except ValueError as error:
        raise UserError(
            f"--lora-rank {rank}: {str(error).splitlines()[0]}; give --lora-rank 0"
        ) from error


@torch.no_grad()
def _is_product(layer: torch.nn.Linear) -> bool:
    """Return whether a layer returns its input times its weight, as a model's own kind may not."""
    if not type(layer).__module__.startswith("transformers.models."):
        return True
    with suppress(Exception):  # it may need another input
        found = layer(layer.weight.new_ones(1, layer.in_features))
        return isinstance(found, torch.Tensor) and found.shape == (1, layer.out_features)
    return False


def is_adapter(folder: Path) -> bool:
    """Return whether `folder` holds an adapter."""
    return kind_of(folder / "adapter_config.json") == "file"


def layers_of(source: str) -> tuple[str, list[Path]]:
    """Return the whole model under `source` and the adapters on it, the innermost first.

    An adapter names the model that it was trained on. Raises UserError if it names none or itself.
    """
    adapters: list[Path] = []
    while is_adapter(folder := Path(source)):
        file = folder / "adapter_config.json"
        found = read_json(file)
        base = found.get("base_model_name_or_path") if isinstance(found, dict) else None
        if not isinstance(base, str) or not base or Path(base) in [folder, *adapters]:
            raise UserError(f"{file}: names no base model (base_model_name_or_path)")
        adapters.insert(0, folder)
        source = base
    return source, adapters


def load_adapter(model: Model, folder: Path) -> PeftModel:
    """Return `model` with an adapter. Raises UserError unless the file has exactly its weights.

    PEFT stores the embeddings too where tokens were added or they were trained.
    """
    try:
        saved = load_file(folder / "adapter_model.safetensors")
        embedding = model.get_input_embeddings()
        names = [name for name, module in model.named_modules() if module is embedding]
        size = len(saved.get(f"base_model.model.{names[0]}.weight", embedding.weight))
        if size != embedding.num_embeddings:
            model.resize_token_embeddings(size, mean_resizing=False)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # missing keys are reported below
            adapted = PeftModel.from_pretrained(
                model, folder, is_trainable=True, use_safetensors=True
            )
    except Exception as error:  # PEFT does not check what the configuration holds
        if lacks_memory(error):
            raise
        reason = shortened(" ".join(str(error).split()), 200)
        raise UserError(
            f"{folder}: its adapter does not fit {type(model).__name__} ({reason}); give its base "
            "model and adapter_model.safetensors, or merge it where it was made (merge_and_unload)"
        ) from error

    needed = get_peft_model_state_dict(adapted, save_embedding_layers=False).keys()
    known = get_peft_model_state_dict(adapted, save_embedding_layers=True)
    differences = {
        "missing": needed - saved.keys(),
        "unexpected": saved.keys() - known.keys(),
        "of another shape": [
            f"{name} {list(weight.shape)} instead of {list(known[name].shape)}"
            for name, weight in saved.items()
            if name in known and weight.shape != known[name].shape
        ],
    }
    check_names(str(folder), "its adapter", differences)
    # PEFT gives some weights another name (Laguna's), does not find them, and keeps random ones.
    for name, weight in saved.items():
        known[name].copy_(weight)

    ends = (adapted.get_input_embeddings(), adapted.get_output_embeddings())
    config = model.config.get_text_config(decoder=True)
    if getattr(config, "tie_word_embeddings", False) and any(
        isinstance(layer, BaseTunerLayer) for layer in ends
    ):
        raise UserError(
            f"{folder}: its adapter changes the embeddings or the head, which are one in "
            f"{type(model).__name__}; give one without them in target_modules"
        )
    return adapted
