"""Each loss against TRL's, value and gradient, on the same model, tokens and log-probabilities.
Needs the extra `bench`; skipped without.

What differs by intent: TRL's `epsilon_high` of cispo is the bound itself, ours the distance from
1; the KL of a token has its own ratio here, in TRL's gspo that of the sequence.
"""

import pytest
import torch
from losses import step_loss
from torch import Tensor

from grpo.learn.loss import LOSSES, token_weights
from grpo.model.load import BUILTIN

pytest.importorskip("trl", reason="needs the extra bench")
pytestmark = pytest.mark.filterwarnings("ignore")  # TRL's and datasets' own

ROWS, PROMPT, LENGTHS, BUDGET = 8, 12, (9, 7, 5, 9, 1, 3, 8, 2), 20
LOW, HIGH = 0.2, 0.28


def trainer_of(kind: str, beta: float, folder):
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    config = GRPOConfig(
        output_dir=str(folder),
        per_device_train_batch_size=ROWS,
        num_generations=4,
        max_completion_length=BUDGET,
        beta=beta,
        loss_type="grpo" if kind == "gspo" else kind,
        importance_sampling_level="sequence" if kind == "gspo" else "token",
        epsilon=LOW,
        epsilon_high=1 + HIGH if kind == "cispo" else HIGH,
        model_init_kwargs={"dtype": "float32"},
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=False,
        report_to=[],
        disable_tqdm=True,
    )
    return GRPOTrainer(
        model=str(BUILTIN),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=config,
        train_dataset=Dataset.from_dict({"prompt": ["x"] * ROWS}),
    )


def batch() -> dict[str, Tensor]:
    """Return a batch in TRL's form: rows of right-padded tokens, advantages, and log-probabilities
    before and of the reference.
    """
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(4, 4000, (ROWS, PROMPT + max(LENGTHS)), generator=draw)
    mask = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
    return {
        "prompt_ids": ids[:, :PROMPT],
        "prompt_mask": torch.ones(ROWS, PROMPT, dtype=torch.long),
        "completion_ids": ids[:, PROMPT:],
        "completion_mask": mask.long(),
        "advantages": torch.randn(ROWS, generator=draw),
        "num_items_in_batch": mask.sum(),
        **{
            name: 0.3
            * (torch.randn(mask.shape, generator=draw) + torch.randn(ROWS, 1, generator=draw))
            for name in ("old_per_token_logps", "ref_per_token_logps")
        },
    }


def logprobs_of(model, inputs: dict[str, Tensor]) -> Tensor:
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
    logits = model(input_ids=ids, use_cache=False).logits[:, PROMPT - 1 : -1]
    return logits.log_softmax(-1).gather(-1, inputs["completion_ids"][..., None])[..., 0]


def gradients(model) -> Tensor:
    found = torch.cat([p.grad.flatten() for p in model.parameters()])
    model.zero_grad()
    return found


@pytest.mark.parametrize(
    ("kind", "beta"),
    [(kind, beta) for kind in LOSSES for beta in (0.0, 0.04) if (kind, beta) != ("gspo", 0.04)],
)
def test_loss_and_gradient_are_those_of_trl(kind, beta, tmp_path):
    trainer, inputs = trainer_of(kind, beta, tmp_path), batch()
    model = trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    for name in (
        "old_per_token_logps",
        "ref_per_token_logps",
    ):  # near the policy's own, so that some ratios are clipped and some are not
        inputs[name] += logprobs_of(model, inputs).detach()
    theirs = trainer._compute_loss(model, inputs)
    theirs.backward()
    expected = gradients(model)

    mask_RT = inputs["completion_mask"].bool()
    clips = {"clip_low": 1.0 if kind == "cispo" else LOW, "clip_high": HIGH}
    ours, sums = step_loss(
        kind,
        logprobs_of(model, inputs),
        inputs["old_per_token_logps"],
        inputs["advantages"],
        mask_RT,
        token_weights(kind, mask_RT.sum(1), max_length=BUDGET),
        beta=beta,
        ref_RT=inputs["ref_per_token_logps"],
        **clips,
    )
    ours.backward()
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-5)
    assert (gradients(model) - expected).norm() < 1e-5 * expected.norm()
    assert 0 < sums["clipped_high"] + sums["clipped_low"] < mask_RT.sum()
