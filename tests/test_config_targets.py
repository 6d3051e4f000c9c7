"""Which make variables each target reads, and what is said of the others."""

import re

import pytest
from conftest import ROOT

from sft_play.config import targets
from sft_play.config.invocation import Invocation
from sft_play.config.schema import env_name, settings
from sft_play.errors import ConfigError


def refusal(goals: str, *names: str) -> str:
    """Return the refusal of these names on make's command line, "" where there is none."""
    environ = {targets.GIVEN: " ".join(names), targets.GOALS: goals}
    try:
        targets.refuse_unread(environ)
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("LR", "TRAIN_LEARNING_RATE"),
        ("LEARNING_RATE", "TRAIN_LEARNING_RATE"),
        ("EPOCHS", "TRAIN_EPOCHS"),
        ("NUM_TRAIN_EPOCHS", "TRAIN_EPOCHS"),
        ("MODEL", "MODEL_NAME"),
        ("MODEL_NAME_OR_PATH", "MODEL_NAME"),
        ("BATCH_SIZE", "TRAIN_BATCH_SIZE"),
        ("per_device_train_batch_size", "TRAIN_BATCH_SIZE"),
        ("train_batch_size", "TRAIN_BATCH_SIZE"),
        ("DATASET", "DATA_TRAIN_PATH"),
        ("LORA_R", "TUNING_LORA_R"),
        ("MAX_SEQ_LEN", "MODEL_MAX_SEQ_LEN"),
        ("config", "CONFIG"),
        ("NGPUS", "NUM_GPUS"),
        ("NAME", "RUN"),
        ("Device", "DEVICE"),
    ],
)
def test_an_unknown_variable_is_refused_with_the_one_it_most_likely_means(
    name: str, meant: str
) -> None:
    assert refusal("train", name) == f"{name}: make train has no such variable; here it is {meant}"


def test_a_name_that_is_only_spelled_alike_is_a_guess() -> None:
    assert "did you mean TRAIN_BATCH_SIZE? (a guess" in refusal("train", "TRAIN_BATCH_SIZ")


def test_all_unknown_variables_come_at_once_and_one_without_a_like_says_where_to_look() -> None:
    lines = refusal("train", "LR", "MY_OWN").splitlines()
    assert len(lines) == 2
    assert lines[1].endswith("make help and make config list what there is")


@pytest.mark.parametrize(
    ("goals", "name", "words"),
    [
        (
            "eval",
            "TRAIN_LEARNING_RATE",
            "make eval does not read it, but make train, sweep, config",
        ),
        ("chat", "NUM_GPUS", "make chat does not read it, but make train, sweep"),
        ("runs", "CONFIG", "make runs does not read it, but make train"),
        ("train", "DEEPSPEED_CONFIG", "but make train-deepspeed, train-deepspeed-tb, config"),
        ("train", "GPUS", "did you mean NUM_GPUS?"),
        ("train", "STEPS", "make bench and bench-scaling do; did you mean TRAIN_MAX_STEPS?"),
        ("train", "TB_PORT", "tensorboard do; leave it out"),
        ("train", "EXACT", "but make plan does"),
        ("lint", "TRAIN_EPOCHS", "make lint reads no variable"),
    ],
)
def test_a_variable_that_the_target_does_not_read_is_refused_with_those_that_do(
    goals: str, name: str, words: str
) -> None:
    assert words in refusal(goals, name)


def test_a_variable_that_one_of_several_targets_reads_is_theirs() -> None:
    assert refusal("train eval", "TRAIN_LEARNING_RATE", "PROMPT").startswith("PROMPT: make train")
    assert refusal("eval chat", "RUN", "DATA_TEST_PATH") == ""


@pytest.mark.parametrize(
    "name",
    ["PY", "PYTHON", "HF_HOME", "NCCL_DEBUG", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS",
     "TRANSFORMERS_OFFLINE", "TORCH_LOGS", "PYTORCH_CUDA_ALLOC_CONF", "UNSLOTH_RETURN_LOGITS",
     "MAKEFLAGS", "PIP_EXTRA_INDEX_URL", "PYTEST_ADDOPTS"],
)  # fmt: skip
def test_variables_of_make_and_of_the_libraries_pass(name: str) -> None:
    assert refusal("train", name) == refusal("lint", name) == ""


def test_a_target_that_is_not_in_the_table_may_read_any_variable_of_ours() -> None:
    assert refusal("somebodys-own", "TRAIN_EPOCHS", "RUN") == ""
    assert "here it is TRAIN_EPOCHS" in refusal("somebodys-own", "EPOCHS")


def test_the_shells_own_variables_are_left_alone_and_settings_of_ours_that_do_nothing_are_named() -> (
    None
):
    shell = {
        "LR": "1",
        "HOME": "/",
        "TRAIN_EPOCHS": "3",
        "TRAIN_SEED": " ",
        "TRAIN_OUTPUT_DIR": "x",
    }
    targets.refuse_unread(shell)
    assert targets.unread_settings("eval", shell) == ["TRAIN_EPOCHS"]
    assert targets.unread_settings("train", shell) == []


def test_the_table_has_every_target_and_every_variable() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    written = set(re.findall(r"^([a-z][a-z-]*):[^=\n]*?## ", makefile, re.MULTILINE))
    assert written - {"help", "clean"} <= targets.READS.keys()
    fields = {name.upper() for name in Invocation.__dataclass_fields__}
    assert fields | set(map(env_name, settings())) <= targets.OURS
    assert set(targets.SYNONYMS.values()) <= targets.OURS
