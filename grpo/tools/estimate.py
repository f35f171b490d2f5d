"""Estimate the memory and the time of a step, from the sizes of the model and of the work.

It counts:

- memory: weights, masters and moments (`grpo.model.memory`), keys and values of the rollout,
  activations of a micro-batch, logits;
- a decoding step: reading weights, keys and values at a share of the GPU's bandwidth, matrix
  products at a share of its FLOP/s, and what each layer takes for its kernels;
- the update: matrix products of 4 (LoRA) or 6 (full fine-tuning) FLOPs for each weight and token,
  and 2 more with a reference; the head, which runs forward twice; attention; the optimizer's
  memory traffic.

The shares and the fixed times are fitted to measurements on an H200 (runs/LOG.md). What a GPU
can do is measured by `grpo.tools.measure`.
"""

import math
from dataclasses import dataclass, replace

from grpo.config import Config
from grpo.model.memory import (
    DeviceMemory,
    Shape,
    optimizer_bytes,
    prompts_at_once,
    update_tokens,
)
from grpo.rollout.cuda_memory import bucket

# A decoding step, fitted to 35 steps of five shapes and to ten rollouts: the seconds that a layer
# takes, those that it takes more for each row and for each token of a prompt; the shares of the
# GPU's bandwidth at which the step reads weights, and keys and values; and the share of its FLOP/s.
# The shares exceed 1, because reading and computing overlap with the layers' own seconds.
LAYER = 37e-6
LAYER_ROW = 51e-9
LAYER_PROMPT_TOKEN = 6.3e-9
WEIGHTS = 1.38
CACHE = 1.09
DECODED = 1.11

# The shares of the GPU's FLOP/s that prefill and update reach: by the matrix products, by the
# attention of completions, and by that of prompts to themselves.
PRODUCTS = 0.58
ATTENTION = 0.3
PROMPT_ATTENTION = 0.7

# Seconds that the host needs to launch all kernels of a micro-batch: the least time it can take.
LAUNCH = 0.1

# Seconds of other work on the host, in each of rollout, update and communication.
HOST = 0.02

# Seconds that each completion adds to an update beside its products, fitted to small models.
COMPLETION = 0.4e-3

# Tokens whose logits exist at the same time.
LOGITS = 1024


@dataclass(frozen=True)
class Gpu:
    """The capacity of a GPU."""

    memory: float  # bytes
    bandwidth: float  # bytes read and written per second by a copy
    rate: float  # FLOP/s of large bfloat16 matrix products
    link: float  # bytes per second to another GPU of the kind


# The bytes per second to another GPU, where this is neither measured nor known: PCIe 4.0.
LINK = 20e9

# Kinds that can be planned for without having one. They are measured, except for the link.
GPUS = {
    "H200": Gpu(150.7e9, 4.2e12, 780e12, 300e9),
    "H100": Gpu(85.5e9, 3.0e12, 780e12, 300e9),
}


@dataclass(frozen=True)
class PlannedModel:
    """A model as it would be loaded."""

    shape: Shape
    context: int  # tokens
    vocabulary: int
    size: int  # parameters
    trained: int  # of these
    is_lora: bool

    @property
    def head(self) -> int:
        """The parameters of the output layer."""
        return self.vocabulary * self.shape.width

    @property
    def body(self) -> int:
        """All other parameters."""
        return self.size - self.head


@dataclass(frozen=True)
class Work:
    """The work of a step."""

    prompts: int
    prompt: float  # mean tokens of a prompt
    group: int  # completions of each prompt
    tokens: float  # mean tokens of a completion
    room: int  # most tokens of a completion


def forecast(
    config: Config, model: PlannedModel, work: Work, gpu: Gpu, gpus: int
) -> tuple[dict[str, float], dict[str, float]]:
    """Return the bytes on each GPU and the seconds of a step, each by purpose."""
    local = replace(work, prompts=-(-work.prompts // gpus))  # of each GPU
    weights, optimizer, gradients = _permanent(config, model, gpus)
    available = DeviceMemory(gpu.memory, reserved=weights + optimizer)

    # The rollout decodes as many prompts at once as have room in memory.
    batch = prompts_at_once(
        model.shape,
        available,
        completions=work.group,
        prompt=round(work.prompt),
        room=work.room,
    )
    batch = min(local.prompts, batch)
    cached = bucket(batch * work.group) * _round_up(work.room, 64)
    cached += batch * _round_up(work.prompt, 128)

    # The update takes as large micro-batches as have room. The gradients appear while the
    # activations of the last micro-batch are freed.
    saves = config.gradient_checkpointing
    most = config.micro_tokens or update_tokens(
        model.shape, available, gradient_checkpointing=saves
    )
    largest, number = _micro_batches(local, most)
    activations = model.shape.activations(saves) * largest
    if number == 1:
        in_update = max(gradients, activations)
    else:
        in_update = gradients + activations

    logits = 2 * LOGITS * model.vocabulary * model.shape.number
    if not model.is_lora:
        logits += 2 * model.head * model.shape.number

    memory = {
        "weights": weights,
        "optimizer": optimizer - gradients,
        "keys and values": model.shape.cache * cached,
        "gradients and activations": in_update,
        "logits": logits,
    }
    seconds = {
        "prefill": _prefill(model, local, gpu),
        "decoding": _decoding(model, work, gpu, batch) * local.prompts / batch + HOST,
        "update": config.epochs * _update(config, model, local, gpu, number),
        "communication": config.epochs * _communication(config, model, gpu, gpus),
    }
    return memory, seconds


def _permanent(config: Config, model: PlannedModel, gpus: int) -> tuple[float, float, float]:
    """Return the bytes of weights (the reference included), of the optimizer, and of gradients.

    Those of the optimizer include the gradients.
    """
    has_own_reference = config.beta and (
        not model.is_lora or config.start not in (None, config.model)
    )
    weights = model.size * model.shape.number * (2 if has_own_reference else 1)
    if model.is_lora:
        weights += 4 * model.trained
    optimizer = optimizer_bytes(
        model.trained,
        4 if model.is_lora else model.shape.number,
        config.optimizer,
        gpus if config.shard else 1,
    )
    return weights, optimizer, 4 * model.trained


def _micro_batches(work: Work, most: float) -> tuple[float, int]:
    """Return the tokens of the largest micro-batch and the number of micro-batches.

    Each has at most `most` tokens; groups are cut as in `learn.batch`.
    """
    fit = min(work.group, max(1, int((most - work.prompt) // work.tokens)))
    cuts = -(-work.group // fit)
    part = work.prompt + -(-work.group // cuts) * work.tokens
    together = min(work.prompts * cuts, max(1, int(most // part)))
    return part * together, -(-work.prompts * cuts // together)


def _prefill(model: PlannedModel, work: Work, gpu: Gpu) -> float:
    """Return the seconds in which the prompts are processed."""
    tokens = work.prompts * work.prompt
    products = 2 * model.body * tokens
    attention = _attention(model, tokens, work.prompt / 2)
    return products / (PRODUCTS * gpu.rate) + attention / (PROMPT_ATTENTION * gpu.rate)


def _decoding(model: PlannedModel, work: Work, gpu: Gpu, batch: int) -> float:
    """Return the seconds in which the completions of `batch` prompts are decoded."""
    rows = batch * work.group
    cached = model.shape.cache * (rows * work.tokens / 2 + batch * work.prompt)
    layer = LAYER + LAYER_ROW * rows + LAYER_PROMPT_TOKEN * work.prompt
    decoding_step = (
        layer * model.shape.layers
        + model.size * model.shape.number / (WEIGHTS * gpu.bandwidth)
        + cached / (CACHE * gpu.bandwidth)
        + 2 * model.size * rows / (DECODED * gpu.rate)
    )
    return decoding_step * work.tokens


def _update(config: Config, model: PlannedModel, work: Work, gpu: Gpu, number: int) -> float:
    """Return the seconds of an update in a `number` of micro-batches."""
    reference = bool(config.beta)  # one forward pass more
    completions = work.prompts * work.group * work.tokens
    tokens = completions + work.prompt * max(
        work.prompts, number
    )  # each micro-batch runs its prompts

    # FLOPs for each weight and token. With gradient checkpointing the layers run forward twice.
    body, head = (4, 6) if model.is_lora else (6, 8)
    extra = 2 * reference + 2 * config.gradient_checkpointing
    products = (body + extra) * model.body * tokens
    products += (head + 2 * reference) * model.head * completions
    seconds = products / (PRODUCTS * gpu.rate)

    # A backward pass of attention takes 2.5 forward passes.
    passes = 3.5 + reference + config.gradient_checkpointing
    attention = _attention(model, completions, work.prompt + work.tokens / 2)
    seconds += passes * attention / (ATTENTION * gpu.rate)
    attention = _attention(model, tokens - completions, work.prompt / 2)
    seconds += passes * attention / (PROMPT_ATTENTION * gpu.rate)

    traffic = (28 if model.is_lora else 34 + 10 * number) * model.trained
    seconds = max(seconds, LAUNCH * number) + COMPLETION * work.prompts * work.group
    return seconds + traffic / gpu.bandwidth + HOST


def _communication(config: Config, model: PlannedModel, gpu: Gpu, gpus: int) -> float:
    """Return the seconds in which gradients and, with --shard, weights are exchanged."""
    if gpus == 1:
        return 0.0
    each = 4 + model.shape.number if config.shard else 8
    return each * model.trained * (gpus - 1) / gpus / gpu.link + HOST


def _attention(model: PlannedModel, tokens: float, seen: float) -> float:
    """Return the FLOPs of a forward pass of attention, if each of the tokens sees `seen` others."""
    return 4 * tokens * seen * model.shape.width * model.shape.layers


def _round_up(number: float, step: int) -> int:
    """Return the next multiple of `step`."""
    return math.ceil(number / step) * step
