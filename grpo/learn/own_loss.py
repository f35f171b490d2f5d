"""Losses of the user's own: ``--loss path/to/file.py:function``.

    def loss(inputs, settings):
        ratio_RT = (inputs.logp_RT - inputs.old_RT).exp()
        return -ratio_RT * inputs.advantages

The function gets `LossInputs` and `LossSettings` of `grpo.learn.loss` and returns the policy term
of each token (R, T), which is minimised. Like `policy_loss` it may return two masks (R, T) besides:
which tokens were clipped low and high. The advantages are always (R, T), padding is 0, and the
entropies have a gradient, as the log-probabilities do (only an own loss pays for it). Weights,
importance, the KL term and the metrics are those of `step_loss`, as for the built-in losses.

An attribute `token_weights` of the function names the built-in loss whose weights its tokens have
(`loss.token_weights`); without it they are those of dapo.

Shapes: R rows (completions), T tokens.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from data.errors import UserError
from grpo.choices import FROM_PYTHON, LOSSES
from grpo.learn.loss import LossInputs, LossSettings, PolicyTerm, zero_padding
from tasks.user_code import calling, load_from_file

# The weights of the tokens of a function that names none.
WEIGHTS = "dapo"


class OwnLoss:
    """A user's loss function, called and checked. `spec` is how the user wrote it."""

    def __init__(self, function: Callable, spec: str):
        self.function = function
        self.spec = spec
        self.weights = getattr(function, "token_weights", WEIGHTS)
        if self.weights not in LOSSES:
            raise UserError(
                f"--loss {spec}: its token_weights is {self.weights!r}; give one of "
                f"{', '.join(LOSSES)}"
            )

    def __call__(self, inputs: LossInputs, settings: LossSettings) -> PolicyTerm:
        """Return what `policy_loss` returns.

        Raises UserError if the function raises, or if it or its gradient has the wrong shape or is
        not finite.
        """
        return _CheckedTerm.apply(inputs.logp_RT, inputs.entropy_RT, self, inputs, settings)

    def term(self, inputs: LossInputs, settings: LossSettings) -> PolicyTerm:
        """Return the policy term (0 at padding) and the two masks, checked."""
        own_mask = replace(inputs, mask_RT=inputs.mask_RT.clone())  # the function may write to it
        with self.user_code():
            returned = self.function(own_mask, settings)

        parts = returned if isinstance(returned, tuple) else (returned,)
        if len(parts) == 1:
            parts += 2 * (torch.zeros_like(inputs.mask_RT),)
        if len(parts) != 3:
            raise UserError(
                f"--loss {self.spec}: returned {len(parts)} values; it must return one number for "
                "each token, or these and two masks: which tokens were clipped low, and high"
            )
        loss_RT, is_low_RT, is_high_RT = parts
        self._check_tensor(loss_RT, inputs, "its loss", torch.Tensor.is_floating_point, "numbers")
        for mask_RT in (is_low_RT, is_high_RT):
            self._check_tensor(mask_RT, inputs, "its mask", _is_bool, "truth values")

        if not loss_RT.requires_grad:
            raise UserError(
                f"--loss {self.spec}: its loss has no gradient; compute it from inputs.logp_RT"
            )
        loss_RT = zero_padding(loss_RT, inputs.mask_RT)
        self.check_finite(loss_RT, inputs, "its loss")
        return loss_RT, is_low_RT & inputs.mask_RT, is_high_RT & inputs.mask_RT

    def _check_tensor(
        self,
        given: Any,
        inputs: LossInputs,
        what: str,
        is_kind: Callable[[Tensor], bool],
        kind: str,
    ) -> None:
        """Raise UserError unless `given` is a tensor (R, T) of the right kind."""
        shape = tuple(inputs.mask_RT.shape)
        where = f"--loss {self.spec}: {what}"
        if not isinstance(given, Tensor):
            raise UserError(f"{where} is {type(given).__name__}; it must be a tensor {shape}")
        if tuple(given.shape) != shape:
            raise UserError(
                f"{where} has the shape {tuple(given.shape)}; it must be {shape}: one for each "
                "token of each completion"
            )
        if not is_kind(given):
            raise UserError(f"{where} holds {given.dtype}; it must hold {kind}")

    def check_finite(self, values_RT: Tensor, inputs: LossInputs, what: str) -> None:
        """Raise UserError, which names a token, unless all `values_RT` are finite."""
        is_bad_RT = ~values_RT.detach().isfinite()
        if not is_bad_RT.any():
            return
        row, token = is_bad_RT.nonzero()[0].tolist()
        numbers = {
            "log-probability": inputs.logp_RT,
            "sampler's": inputs.old_RT,
            "advantage": inputs.advantages,
        }
        said = ", ".join(f"{name} {x[row, token].item():.4g}" for name, x in numbers.items())
        raise UserError(
            f"--loss {self.spec}: {what} is {values_RT[row, token].item()} at token {token} of row "
            f"{row} ({said})"
        )

    @contextmanager
    def user_code(self) -> Iterator[None]:
        """Within this block the user's code runs: what it raises becomes a UserError.

        `torch.OutOfMemoryError` is raised as it is, because `grpo.learn.oom_retry` handles it.
        """
        try:
            with calling(f"--loss {self.spec}"):
                yield
        except UserError as error:
            if isinstance(error.__cause__, torch.OutOfMemoryError):
                raise error.__cause__ from None
            raise


class _CheckedTerm(torch.autograd.Function):
    """The policy term of a user's function, whose gradient is computed and checked by itself."""

    @staticmethod
    def forward(
        ctx: Any,
        logp_RT: Tensor,
        entropy_RT: Tensor | None,
        own: OwnLoss,
        inputs: LossInputs,
        settings: LossSettings,
    ) -> PolicyTerm:
        """Return what `OwnLoss.term` returns."""
        with torch.enable_grad():
            inputs = _without_padding(inputs)
            loss_RT, is_low_RT, is_high_RT = own.term(inputs, settings)
        ctx.own, ctx.inputs, ctx.loss_RT = own, inputs, loss_RT
        ctx.mark_non_differentiable(is_low_RT, is_high_RT)
        return loss_RT.detach(), is_low_RT, is_high_RT

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients with respect to the log-probabilities and the entropies, 0 at
        padding; None where the loss does not depend on them.
        """
        own, inputs = ctx.own, ctx.inputs
        leaves = [x_RT for x_RT in (inputs.logp_RT, inputs.entropy_RT) if x_RT is not None]
        with own.user_code():
            gradients = torch.autograd.grad(ctx.loss_RT, leaves, outputs[0], allow_unused=True)

        checked: list[Tensor | None] = [None] * 5
        for number, d_RT in enumerate(gradients):
            if d_RT is not None:
                checked[number] = zero_padding(d_RT, inputs.mask_RT)
                own.check_finite(checked[number], inputs, "its gradient")
        return tuple(checked)


def _is_bool(tensor: Tensor) -> bool:
    return tensor.dtype == torch.bool


def _without_padding(inputs: LossInputs) -> LossInputs:
    """Return the inputs with 0 at padding, and the advantages as (R, T).

    The log-probabilities and the entropies are leaves that take gradients.
    """
    mask_RT = inputs.mask_RT
    advantages_RT = inputs.advantages
    if advantages_RT.dim() == 1:
        advantages_RT = advantages_RT[:, None].expand(mask_RT.shape)

    names = ("logp_RT", "old_RT", "ref_RT", "entropy_RT", "importance_RT")
    given = {name: getattr(inputs, name) for name in names} | {"advantages": advantages_RT}
    padded = {
        name: zero_padding(x_RT.detach(), mask_RT)
        for name, x_RT in given.items()
        if x_RT is not None
    }
    for name in ("logp_RT", "entropy_RT"):
        if name in padded:
            padded[name].requires_grad_()
    return replace(inputs, **padded)


def load_loss(spec: str) -> OwnLoss | None:
    """Return the loss ``path/to/file.py:function``; None for a loss of `LOSSES`.

    The file is executed. Raises UserError if there is no such file or function.
    """
    if spec in LOSSES:
        return None
    if spec.startswith(FROM_PYTHON):
        raise UserError(
            f"--loss {spec}: is a function that was given in Python; give it again, as "
            "grpo.train(loss=FUNCTION)"
        )
    where, _, name = spec.rpartition(":")
    function = load_from_file(Path(where), name, kind="loss", where=f"--loss {spec}")
    if not callable(function):
        raise UserError(f"--loss {spec}: {where} defines no function {name}")
    return OwnLoss(function, spec)


def from_python(function: Callable) -> OwnLoss:
    """Return the loss of a function that was given in Python."""
    name = getattr(function, "__name__", type(function).__name__)
    return OwnLoss(function, f"{FROM_PYTHON}{name}")
