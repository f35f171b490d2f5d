"""The comparison with the unmodified model: what it measures, and what it refuses by name."""

import pytest
import torch
from tiny_models import SHAPE, VOCABULARY, make_tiny_model
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoTokenizer,
    BertConfig,
    Gemma2Config,
    GraniteConfig,
)

from data.errors import UserError
from grpo.model.check import (
    FLOAT32_TOLERANCE,
    LOW_PRECISION_TOLERANCE,
    distance,
    probe_tokens,
)
from grpo.model.load import BUILTIN, load_policy
from grpo.model.policy import Policy

TOKENIZER = AutoTokenizer.from_pretrained(BUILTIN)


def model_of(config, dtype=torch.float32):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).to(dtype).eval()


def refused(model) -> str:
    with pytest.raises(UserError) as error:
        Policy(model, TOKENIZER, name="odd")
    said = str(error.value)
    assert said.startswith(f"--model odd: {type(model).__name__} is not supported: ")
    assert "\n" not in said
    return said


def test_the_probe_is_the_same_each_time_and_of_valid_tokens():
    prompts, completions = probe_tokens(50)
    assert (prompts, completions) == probe_tokens(50)
    tokens = {token for each in prompts + completions for token in each}
    assert max(tokens) < 50 and len(tokens) > 15
    assert len(set(map(len, prompts))) == 2 and len(set(map(len, completions))) > 2


def test_differences_by_hand():
    expected = torch.tensor([[0.0, 2.0], [0.0, -torch.inf], [1.0, 3.0]])
    found = torch.tensor([[0.1, 2.0], [0.4, -torch.inf], [1.3, 3.3]])
    assert distance(found, expected, False) == pytest.approx(0.3)  # 0.05, 0.2, 0.3: the worst
    # Less what is common to a place: 0.05, 0, 0. The deviations are 1, 0 and 1, 2/3 in the mean.
    assert distance(found, expected, True) == 0.0
    assert distance(found[:1], expected[:1], True) == pytest.approx(0.05)
    for low_precision, tolerance in ((False, FLOAT32_TOLERANCE), (True, LOW_PRECISION_TOLERANCE)):
        assert not distance(found * torch.nan, expected, low_precision) <= tolerance
    possible = found.nan_to_num(neginf=-100.0)  # a token that can never come
    assert distance(possible, expected, False) == torch.inf
    never = torch.tensor([[0.0, 2.0, -torch.inf]])
    assert distance(never, never, True) == 0.0
    assert not distance(never.nan_to_num(neginf=-100.0), never, True) <= LOW_PRECISION_TOLERANCE


def test_logits_times_a_constant_are_refused():
    model = model_of(GraniteConfig(**SHAPE, logits_scaling=8.0))
    assert "its logits are more than its output layer" in refused(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_capped_logits_are_refused(dtype):
    config = Gemma2Config(**SHAPE, head_dim=32, final_logit_softcapping=10.0)
    assert "more than its output layer" in refused(model_of(config, dtype))


@pytest.mark.parametrize("kind", ["gemma3_text", "gemma2"])
def test_a_cap_that_hardly_matters_yet_is_refused(kind):
    small = SHAPE | {"initializer_range": 0.006}
    config = CONFIG_MAPPING[kind](**small, final_logit_softcapping=30.0)
    assert "more than its output layer" in refused(model_of(config))


def test_a_model_that_looks_ahead_is_refused():
    config = BertConfig(**(SHAPE | {"num_key_value_heads": 4}), is_decoder=False)
    assert refused(model_of(config))


def test_a_model_that_mixes_the_sequences_of_a_batch_is_refused(tmp_path):
    model = AutoModelForCausalLM.from_pretrained(make_tiny_model(tmp_path))
    model.model.layers[0].mlp.register_forward_hook(lambda module, _, x: x - 0.5 * x.flip(0))
    assert "depend on more than the tokens before it" in refused(model)


def test_what_goes_wrong_in_the_model_itself_is_named(tmp_path, monkeypatch):
    model = AutoModelForCausalLM.from_pretrained(make_tiny_model(tmp_path))

    def fails(*_, **__):
        raise TypeError("missing 1 required argument: 'token_type_ids'\nand more")

    monkeypatch.setattr(model, "forward", fails)
    said = refused(model)
    assert "on token ids alone (TypeError: missing 1 required argument: 'token_type_ids')" in said


def test_an_encoder_decoder_is_refused(tmp_path):
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=VOCABULARY, d_model=32, d_ff=32, num_layers=1, num_heads=2, d_kv=16
    )
    T5ForConditionalGeneration(config).save_pretrained(tmp_path)
    TOKENIZER.save_pretrained(tmp_path)
    with pytest.raises(UserError, match="cannot be loaded .*T5Config") as error:
        load_policy(str(tmp_path), device="cpu")
    assert "\n" not in str(error.value)


def test_weights_that_are_not_numbers_are_named_as_such(tmp_path):
    model = AutoModelForCausalLM.from_pretrained(make_tiny_model(tmp_path))
    model.model.norm.weight.data[3] = torch.nan
    with pytest.raises(UserError, match="--model odd: its logits are not finite: the weights are"):
        Policy(model, TOKENIZER, name="odd")
