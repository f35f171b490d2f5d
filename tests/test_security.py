"""What comes from a stranger is data: nothing in a model, checkpoint, run or dataset is executed,
and nothing leaves the run's directory.
"""

import json
import os
import pickle
import re
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from small_runs import FEW
from small_train import fails as refused
from tiny_models import make_tiny_model

from grpo import inspect
from grpo.config import parse
from grpo.curriculum import load_supply
from grpo.data.errors import UserError
from grpo.data.files import _StrictLoader
from grpo.learn.loss import load_loss
from grpo.model.load import load_policy
from grpo.tasks import audit
from grpo.tools import evaluation, train

TOP = Path(__file__).resolve().parent.parent
SMALL = [*FEW, *"--steps 2 --config {'eval_problems':2} --save-every 1 --words 2".split()]
BOMB = "open('executed', 'w').close()\n"


class Bomb:
    def __reduce__(self):
        return exec, (BOMB,)


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    yield
    assert not Path("executed").exists()


def test_the_bomb_goes_off_where_it_is_unpickled(tmp_path):  # or the tests below would show nothing
    with pytest.raises(Exception):  # noqa: B017
        torch.load(_pickled(tmp_path / "a.bin"), weights_only=False)["x"] + 1
    Path("executed").unlink()


def _pickled(path):
    path.write_bytes(pickle.dumps({"x": Bomb()}))
    return path


def test_a_model_that_is_pickled_is_not_loaded(tmp_path, capsys):
    folder = make_tiny_model(tmp_path / "model")
    (folder / "model.safetensors").unlink()
    _pickled(folder / "pytorch_model.bin")
    assert "--model model: cannot be loaded" in refused(capsys, *SMALL, "--model", "model")
    assert "--model model: cannot be loaded" in refused(
        capsys, "--model", "model", main=evaluation.main
    )


@pytest.mark.parametrize("name", ["pytorch_model.bin", "training_args.bin", "optimizer.pt"])
def test_a_pickle_beside_the_weights_is_not_opened(tmp_path, name):
    _pickled(make_tiny_model(tmp_path / "model") / name)
    load_policy("model", device="cpu")


@pytest.mark.parametrize(
    "file, entry",
    [
        ("config.json", {"AutoConfig": "bomb.Config", "AutoModelForCausalLM": "bomb.Model"}),
        ("tokenizer_config.json", {"AutoTokenizer": ["bomb.Tokenizer", None]}),
    ],
)
@pytest.mark.parametrize("kind", ["llama", "bomb"])
def test_code_that_comes_with_a_model_is_not_run(tmp_path, file, entry, kind):
    folder = make_tiny_model(tmp_path / "model")
    (folder / "bomb.py").write_text(BOMB)
    settings = json.loads((folder / file).read_text()) | {"auto_map": entry}
    if file == "config.json":
        settings["model_type"] = kind
    elif kind == "bomb":
        settings["tokenizer_class"] = "BombTokenizer"
    (folder / file).write_text(json.dumps(settings))
    try:
        load_policy("model", device="cpu")  # what is known anyway may be loaded without the code
    except UserError as error:
        assert "--model model: cannot be loaded" in str(error)


def test_a_chat_template_is_no_program(tmp_path):
    folder = make_tiny_model(tmp_path / "model")
    (folder / "chat_template.jinja").write_text("{{ ''.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(Exception) as error:
        load_policy("model", device="cpu").encode("a")
    assert "unsafe" in str(error.value).lower() or "SecurityError" in type(error.value).__name__


@pytest.fixture(scope="module")
def made(tmp_path_factory, tiny_flags):
    home = tmp_path_factory.mktemp("made")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        assert train.main([*SMALL, *tiny_flags, "--name", "a"]) in (0, 3)
    return home / "runs" / "a"


@pytest.fixture()
def run(made):
    """A copy of a run, to be tampered with."""
    return Path(shutil.copytree(made, "runs/a"))


@pytest.mark.parametrize(
    "text",
    [
        "!!python/object/apply:os.system ['touch executed']",
        "a: !!python/object/new:os.system [touch executed]",
    ],
)
def test_a_configuration_is_no_program(run, capsys, text):
    (run / "config.yaml").write_text(text)
    assert "config.yaml" in refused(capsys, "--resume", "runs/a")


def test_a_pickle_in_a_checkpoint_is_not_opened(run):
    last = run / "checkpoints" / "step-000002"
    shutil.rmtree(run / "checkpoints" / "step-000001")
    for name in ("optimizer.pt", "pytorch_model.bin", "rng_state.pth"):
        _pickled(last / name)
    assert train.main(["--resume", "runs/a", "--steps", "3"]) in (0, 3)


def test_the_task_of_a_strangers_run_is_not_executed(run, capsys):
    (run / "bomb.py").write_text(BOMB)
    config = yaml.safe_load((run / "config.yaml").read_text())
    (run / "config.yaml").write_text(yaml.safe_dump(config | {"task": "runs/a/bomb.py:Bomb"}))
    said = (
        "runs/a: its task is a program that would be executed, runs/a/bomb.py:Bomb; if you "
        "trust it, give --task runs/a/bomb.py:Bomb as well"
    )
    assert said in refused(capsys, "--resume", "runs/a")
    assert said in refused(capsys, "--model", "runs/a", main=evaluation.main)
    assert said in refused(capsys, "runs/a", main=audit.main)
    assert said in refused(capsys, "runs/a", "replay", "1", main=inspect.main)


PROGRAM = "bomb.py:bomb"
NAMING = {  # the flag that names a program, and the settings that do
    "--task": {"task": PROGRAM},
    "--loss": {"loss": PROGRAM},
    "--reward-file": {"task": "data", "task_options": {"data": "a", "reward-file": PROGRAM}},
}


@pytest.mark.parametrize("flag", NAMING)
def test_no_program_of_a_strangers_settings_is_executed(capsys, flag):
    Path("bomb.py").write_text(BOMB)
    said = (
        f"--config a.yaml: its {flag[2:].removesuffix('-file')} is a program that would be "
        f"executed, {PROGRAM}; if you trust it, give {flag} {PROGRAM} as well"
    )
    for facts in ({}, {"facts": {}}):  # as a user writes it, and as a run does
        Path("a.yaml").write_text(yaml.safe_dump(NAMING[flag] | facts))
        for more in ([], ["--wording", "a.yaml"], ["--config", "{seed: 1}"]):
            assert said in refused(capsys, "--config", "a.yaml", *more)
    if flag == "--task":  # which is loaded for the flags that it has
        assert said in refused(capsys, "--config", "a.yaml", "--family", "chain")


@pytest.mark.parametrize("flag", NAMING)
def test_a_program_that_the_command_line_names_is_executed(monkeypatch, flag):
    def execute(*arguments):
        raise UserError("executed")

    monkeypatch.setattr("grpo.tasks.registry.load_from_file", execute)
    Path("a.yaml").write_text(yaml.safe_dump(NAMING[flag]))
    Path("a").write_text('{"prompt": "a"}')
    for named in (
        [flag, "./bomb.py:bomb"],
        [f"{flag}={PROGRAM}"],
        ["--config", json.dumps(NAMING[flag])],
    ):
        with pytest.raises(UserError, match="executed$"):
            config, _ = parse(["--config", "a.yaml", *named])
            load_supply(config)
            load_loss(config.loss)


def test_a_program_that_the_command_line_replaces_is_not_executed():
    settings = {"task": "bomb.py:Bomb", "loss": "bomb.py:loss"}
    Path("a.yaml").write_text(yaml.safe_dump(settings))
    config, _ = parse(["--config", "a.yaml", "--task", "interleave", "--loss", "grpo"])
    assert (config.task, config.loss) == ("interleave", "grpo")
    options = {"task": "data", "task_options": {"data": "a.jsonl", "reward-file": "bomb.py:r"}}
    Path("a.yaml").write_text(yaml.safe_dump(options))
    config, _ = parse(["--config", "a.yaml", "--reward-file", "mine.py:r"])
    assert config.task_options == {"data": "a.jsonl", "reward-file": "mine.py:r"}


def test_no_secret_of_the_environment_is_written(monkeypatch, capfd, quick_flags):
    for name in ("HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "s3cr3t-" + name)
    assert train.main([*SMALL, *quick_flags, "--name", "a"]) == 0
    said = capfd.readouterr()
    assert "s3cr3t" not in said.out + said.err
    values = {
        value.encode()
        for name, value in os.environ.items()
        if re.search("KEY|TOKEN|SECRET|PASS", name) and len(value) > 8
    }
    for path in Path("runs").rglob("*"):
        if path.is_file():
            content = path.read_bytes()
            assert not any(value in content for value in values), path


def test_nothing_in_the_project_unpickles_or_evaluates():
    forbidden = re.compile(
        r"\b(pickle|marshal|shelve|joblib)\b|torch\.load\(|np\.load\(|allow_pickle"
        r"|yaml\.(load|unsafe_load|full_load)\(|\beval\(|\bexec\(|trust_remote_code=True"
    )
    for room in ("align", "data", "tasks", "grpo"):
        for path in (TOP / room).rglob("*.py"):
            code = "\n".join(
                line for line in path.read_text().splitlines() if "No pickle" not in line
            )
            # The loader is a SafeLoader, which makes plain values alone.
            for harmless in ("model.eval()", ".eval()", "yaml.load(text, Loader=_StrictLoader)"):
                code = code.replace(harmless, "")
            assert not forbidden.search(code), path
    assert issubclass(_StrictLoader, yaml.SafeLoader)
