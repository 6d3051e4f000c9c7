"""Which make variables each target reads, and what is said of the others."""

import os
import re
import subprocess
import sys

import pytest
from conftest import ROOT
from typer.main import get_command

from sft_play.cli import app
from sft_play.config import targets
from sft_play.config.invocation import Invocation
from sft_play.config.schema import env_name, settings
from sft_play.errors import ConfigError


def refusal(goals: str, *names: str) -> str:
    """Return the refusal of these names on make's command line, "" where there is none."""
    environ = {targets.GIVEN: " ".join(names), targets.GOALS: goals}
    try:
        targets.refuse_unread_variables(environ)
    except ConfigError as error:
        return str(error)
    return ""


MEANT = {
    "LR": "TRAIN_LEARNING_RATE",
    "NUM_TRAIN_EPOCHS": "TRAIN_EPOCHS",
    "MODEL": "MODEL_NAME",
    "BATCH_SIZE": "TRAIN_BATCH_SIZE",
    "per_device_train_batch_size": "TRAIN_BATCH_SIZE",
    "LORA_R": "TUNING_LORA_R",
    "MAX_SEQ_LEN": "MODEL_MAX_SEQ_LEN",
    "Device": "DEVICE",
}
# of make and of the libraries
PASSING = """
    PY PYTHON HF_HOME NCCL_DEBUG CUDA_VISIBLE_DEVICES OMP_NUM_THREADS TRANSFORMERS_OFFLINE
    TORCH_LOGS PYTORCH_CUDA_ALLOC_CONF UNSLOTH_RETURN_LOGITS MAKEFLAGS PIP_EXTRA_INDEX_URL
    PYTEST_ADDOPTS
"""


@pytest.mark.parametrize(
    ("goals", "name", "words"),
    [
        *(("train", name, f"^{name}: .* {meant}$") for name, meant in MEANT.items()),
        *((goals, name, "^$") for goals in ("train", "lint") for name in PASSING.split()),
        ("eval", "TRAIN_LEARNING_RATE", "make train, config"),
        ("train", "DEEPSPEED_CONFIG", "make train-deepspeed, train-deepspeed-tb, config"),
        ("train", "GPUS", r"NUM_GPUS\?"),
        ("train", "STEPS", r"TRAIN_MAX_STEPS\?"),
        ("train", "GPU", "here it is NUM_GPUS$"),
        ("plan", "GPU", "here it is GPUS$"),  # a machine, such as 1x4090
        ("chat", "BATCH", "no such variable; make help"),  # not TRAIN_BATCH_SIZE, which it refuses
        ("lint", "TRAIN_EPOCHS", "make lint"),
    ],
)
def test_a_variable_passes_or_is_refused_with_what_it_means_or_what_reads_it(goals, name, words):
    assert re.search(words, refusal(goals, name), re.DOTALL)


def test_all_unknown_variables_come_at_once_and_one_that_is_spelled_alike_is_a_guess():
    first, second, third = refusal("train", "LR", "MY_OWN", "TRAIN_BATCH_SIZ").splitlines()
    assert first.startswith("LR: ") and "make help" in second
    assert "TRAIN_BATCH_SIZE? (a guess" in third


def test_a_variable_that_one_of_several_targets_reads_is_theirs():
    assert refusal("train eval", "TRAIN_LEARNING_RATE", "PROMPT").startswith("PROMPT: make train")
    assert refusal("eval chat", "RUN", "DATA_TEST_PATH") == ""


def test_a_target_that_is_not_in_the_table_may_read_any_variable_of_ours():
    assert refusal("somebodys-own", "TRAIN_EPOCHS", "RUN") == ""
    assert "here it is TRAIN_EPOCHS" in refusal("somebodys-own", "EPOCHS")


def test_the_shells_own_variables_are_left_alone_and_settings_of_ours_that_do_nothing_are_named():
    shell = {
        "LR": "1",
        "HOME": "/",
        "TRAIN_EPOCHS": "3",
        "TRAIN_SEED": " ",
        "TRAIN_OUTPUT_DIR": "x",
    }
    targets.refuse_unread_variables(shell)
    assert targets.unread_settings("eval", shell) == ["TRAIN_EPOCHS"]
    assert targets.unread_settings("train", shell) == []


def test_the_table_has_every_target_and_every_variable():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    written = set(re.findall(r"^([a-z][a-z-]*):[^=\n]*?## ", makefile, re.MULTILINE))
    assert written - {"help", "clean"} <= targets.READS.keys()
    fields = {name.upper() for name in Invocation.__dataclass_fields__}
    assert fields | set(map(env_name, settings())) <= targets.OURS
    assert set(targets.SYNONYMS.values()) <= targets.OURS


@pytest.mark.parametrize(
    ("target", "meant"),
    [("trian", "train"), ("finetune", "train"), ("plan-distributed", "plan"), ("evaluate", "eval"), ("tensorbord", "tensorboard"), ("reprot", "report")],
)  # fmt: skip
def test_an_unknown_target_is_refused_with_the_one_it_most_likely_means(target, meant):
    with pytest.raises(ConfigError, match=f"^{target}: no such target; did you mean {meant}\\?$"):
        targets.refuse_unknown_targets({targets.GOALS: f"help train {target}"})


def test_make_fails_for_an_unknown_target_with_the_nearest_one():
    done = subprocess.run(
        ["make", f"PY={sys.executable}", "trian"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode != 0
    assert "trian: no such target; did you mean train?" in done.stderr


@pytest.mark.parametrize(
    ("command", "option", "words"),
    [
        ("train", "--model", "MODEL_NAME (or --set model.name=...)"),
        ("train", "--data", "DATA_TRAIN_PATH (or --set data.train_path=...)"),
        ("train", "--lr", "TRAIN_LEARNING_RATE (or --set train.learning_rate=...)"),
        ("eval", "--run", "RUN"),
    ],
)
def test_an_unknown_option_is_refused_with_the_variable_and_the_setting(command, option, words):
    with pytest.raises(ConfigError) as refused:
        get_command(app)([command, option, "x"])
    assert str(refused.value) == f"{option}: {command} has no such option; here it is {words}"


def test_an_unknown_command_is_refused_with_the_nearest_one():
    with pytest.raises(ConfigError, match="trian: no such target; did you mean train"):
        get_command(app)(["trian"])


def test_an_option_behind_two_dashes_is_a_word():
    with pytest.raises(SystemExit):  # by the parser: train takes no such word
        get_command(app)(["train", "--", "--model"])


def test_a_command_takes_the_targets_and_variables_of_make(monkeypatch):
    monkeypatch.setattr(os, "environ", {"PATH": os.environ["PATH"]})
    context = get_command(app).make_context("sft_play", ["train-bnb-tb"], resilient_parsing=True)
    words = ["train-bnb-tb", "RUN=a", "TRAIN_RUN_NAME=x=y", "--set", "train.seed=1"]
    name, _, left = get_command(app).resolve_command(context, words)
    assert name == "train"
    assert left == ["--set", "train.seed=1", "--backend", "bnb", "--tensorboard"]
    assert (os.environ["RUN"], os.environ["TRAIN_RUN_NAME"]) == ("a", "x=y")
    assert os.environ[targets.GIVEN] == "RUN TRAIN_RUN_NAME"
    _, _, left = get_command(app).resolve_command(context, ["infer", "RUN", "F=ma"])
    assert left == ["RUN", "F=ma"]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("next make chat RUN=a | make eval RUN=a", "next sft-play chat RUN=a | sft-play eval RUN=a"),
        ("type make install-unsloth", "type pip install 'sft-play[unsloth]'"),
        ("make help lists them", "sft-play --help lists them"),
        ("make it smaller; make train-tb", "make it smaller; sft-play train-tb"),
    ],
)  # fmt: skip
def test_an_installed_package_names_its_own_commands(text, shown):
    assert targets.as_installed(text) == shown
