"""The command line as a user types it: make and python in processes of their own."""

import itertools
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from calls import outcome_of
from faults.front import PAYLOADS
from front_end import Done, FrontEnd
from typer.testing import CliRunner

from sft_play.cli import app

ROOT = Path(__file__).resolve().parents[1]
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
PREFIXES = """
    TRAIN_ MODEL_ TUNING_ DATA_ MAKE MFLAGS NUM_GPUS CONFIG RUN DEVICE GPUS NNODES NODE_RANK MASTER_
    DEEPSPEED SFT_PLAY_
"""
OURS = tuple(PREFIXES.split())


def clean(**extra: str) -> dict[str, str]:
    """Return this environment without GPUs and what steers a run, so that tests are the same on
    every host."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(OURS)}
    return kept | {"CUDA_VISIBLE_DEVICES": ""} | extra


def make(
    *words: str, python: str = sys.executable, **environ: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["make", f"PY={python}", *words],
        cwd=ROOT,
        env=clean(**environ),
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=60,
    )


@pytest.fixture(scope="module")
def sft_play(tmp_path_factory) -> Iterator[Callable[..., Done]]:
    """A function that calls the command line, in a process of its own, and returns what it said."""
    front_end = FrontEnd(clean(), tmp_path_factory.mktemp("called"))
    yield lambda *words, **environ: front_end.call(words, clean(**environ))
    front_end.close()


def test_make_config_shows_values_and_origins():
    in_shell = {"TUNING_LORA_R": "8", "TRAIN_BATCH_SIZE": "3"}  # the command line wins
    shown = make("config", "TRAIN_LEARNING_RATE=1e-4", "TRAIN_BATCH_SIZE=2", **in_shell)
    assert shown.returncode == 0, shown.stderr
    lines = {line.split()[0]: " ".join(line.split()[1:]) for line in shown.stdout.splitlines()}
    assert lines["train.learning_rate"] == "= 0.0001 # environment TRAIN_LEARNING_RATE"
    assert lines["train.batch_size"] == "= 2 # environment TRAIN_BATCH_SIZE"
    assert lines["tuning.lora.r"] == "= 8 # environment TUNING_LORA_R"
    assert re.fullmatch(r"= 4\.0 # configs/tiny.yaml:\d+", lines["train.epochs"])
    assert lines["train.adam_beta1"] == "= 0.9 # built-in default"


def test_make_plan_is_for_the_hardware_that_gpus_names():
    shown = make("plan", "GPUS=2xH200", "CONFIG=configs/multi_gpu_config.yaml")
    assert shown.returncode == 0, shown.stderr
    assert "4 x 2 GPUs x 4 = 32 rows per step" in shown.stdout


def test_commands_for_people_answer_programs_too(tmp_path):
    def answer(command: str) -> Any:
        environ = {"TRAIN_OUTPUT_DIR": str(tmp_path), "DEVICE": "cpu"}
        return json.loads(CliRunner().invoke(app, [command, "--json"], env=environ).stdout)

    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "plan.json").write_text("{}")
    (tmp_path / "a" / "run.json").write_text('{"run": "a", "status": "done", "exit_class": 0}')
    (run,) = answer("runs")
    assert run["run"] == "a" and run["state"] == "done" and run["folder"] == str(tmp_path / "a")
    assert answer("gpu-info")["cpu_count"] >= 1
    assert {"level", "subject", "found", "fix"} == set(answer("doctor")[0])


def test_plan_as_json_is_json_alone(sft_play):
    shown = sft_play(
        "plan", "--json", "--gpus", "2xH200", "--distributed", "--set", "train.batch_size=2"
    )
    facts = json.loads(shown.stdout)
    assert (
        facts["world_size"],
        facts["per_device_batch_size"],
        facts["grad_accum"],
        facts["env"]["CUDA_VISIBLE_DEVICES"],
    ) == (2, 2, 8, "0,1")


# Values of variables are text

NAMES = """
    CONFIG TRAIN_RUN_NAME RUN NO_SUCH_VARIABLE TRAIN_NO_SUCH_NAME NUM_GPUS PYTHON TB_PORT
    DEEPSPEED_CONFIG SFT CHECK ENV PARALLEL_TESTS LEFT IN_PATHS GIVEN SFT_PLAY_TARGETS
""".split()


def make_config(way: str, values: dict[str, str], **options: str) -> int:
    """Return the code with which `make config` ends, given values in one of two ways."""
    if way == "command line":
        words = [f"{name}={value}" for name, value in values.items()]
        return make("config", *words, **options).returncode
    return make("config", **options, **values).returncode


@pytest.mark.parametrize("way", ["command line", "environment"])
def test_no_value_of_a_variable_is_ever_run(way, tmp_path):
    for number, payload in enumerate(PAYLOADS):
        values = {name: payload.format(tmp_path / f"{name}-{number}") for name in NAMES}
        # make and its shells see all of them; Python, which starts none, is left out
        assert make_config(way, values, python="true") == 0
    payloads = itertools.cycle(PAYLOADS)
    values = {name: next(payloads).format(tmp_path / name) for name in NAMES}
    # 2 is make's code for a failed recipe: the config is refused, as none of them is valid
    assert make_config(way, values) == 2
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("way", ["command line", "environment"])
def test_the_python_of_a_call_is_one_path(way, tmp_path):
    for number, payload in enumerate([*PAYLOADS, "touch {}", "{}/../bin/python -c pass"]):
        python = payload.format(tmp_path / str(number))
        words = ["PY=" + python] if way == "command line" else []
        done = outcome_of(["make", "plan", *words], clean(PY=python), 60)
        assert done.returncode == 2
        assert "write the path of one Python program" in done.stderr
    assert os.listdir(tmp_path) == []


def test_a_value_arrives_as_it_was_typed(tmp_path):
    value = f"$(shell touch {tmp_path / 'x'})`y` $HOME $$ ${{HOME}} 'a' \"b\" \\ # end"
    shown = make("config", f"DATA_SYSTEM_PROMPT={value}")
    assert shown.returncode == 0, shown.stderr
    assert f"= {value} " in next(
        line for line in shown.stdout.splitlines() if line.startswith("data.system_prompt")
    )
    assert os.listdir(tmp_path) == []


# Bad calls


def test_bad_calls_exit_with_their_class_and_say_what_to_type(sft_play, tmp_path):
    def written(name: str, text: str) -> str:
        (tmp_path / name).write_text(text)
        return str(tmp_path / name)

    unknown = written("unknown.yaml", "train:\n  batch_sise: 4\n")
    zero = written("zero.json", '{"zero_optimization": {"stage": 7}}')
    missing = {"DATA_TRAIN_PATH": f"{tmp_path}/no.jsonl"}
    calls: list[tuple[int, str, list[str], dict[str, str]]] = [
        (10, f"{unknown}:2: ", [], {"CONFIG": unknown}),
        (10, "environment TRAIN_BATCH_SIZ: ", [], {"TRAIN_BATCH_SIZ": "4"}),
        (10, "CONFIG=configs/small.yaml?", [], {"CONFIG": "smal"}),
        (10, "NUM_GPUS=two: ", [], {"NUM_GPUS": "two"}),
        (10, "RUN=../x ", [], {"RUN": "../x"}),
        (10, "NNODES=2 without MASTER_ADDR", ["--distributed"], {"NNODES": "2"}),
        (10, f"{zero}:1:24: ", ["--deepspeed"], {"DEEPSPEED_CONFIG": zero}),
        (11, f"data.train_path={tmp_path}/no.jsonl (environment", [], missing),
        (13, "DEVICE=cuda finds no GPU: ", ["--distributed"], {"DEVICE": "cuda", "NUM_GPUS": "8"}),
        (13, "TUNING_BACKEND=bnb", ["--backend", "unsloth"], {}),
        (12, f"{tmp_path}/none: no such", [], {"TRAIN_RESUME_FROM": f"{tmp_path}/none"}),
    ]
    output = tmp_path / "outputs"
    for exit_class, message, options, environ in calls:
        done = sft_play("train", *options, **environ, TRAIN_OUTPUT_DIR=str(output))
        assert message in done.stderr, (environ, done.stdout, done.stderr)
        assert done.returncode == exit_class
        assert f"exit class {exit_class} (" in done.stderr
        assert "Traceback" not in done.stderr
        assert not output.exists() or os.listdir(output) == [], f"{environ} left something behind"


def test_control_characters_of_names_are_made_visible(sft_play, tmp_path):
    """A terminal would obey them: colors, a bell, a line written over."""
    config = tmp_path / "a.yaml"
    config.write_text('"tra\\e[31min\\a\\u202e": 3\n')
    done = sft_play("config", CONFIG=str(config))
    assert done.returncode == 10
    assert "unknown setting 'tra\\x1b[31min\\x07\\u202e'" in done.stderr


# tests/test_data_bad_files.py tells each kind; here it is what a command does
def test_a_run_on_bad_rows_ends_before_anything_heavy_is_loaded_and_says_so_in_its_folder(
    sft_play, tmp_path
):
    told = ":2: not valid JSON"
    path, output = tmp_path / "rows.jsonl", tmp_path / "outputs"
    path.write_text('{"question": "q", "answer": "a"}\n{"question": ')
    # where torch is loaded, the call ends with another code
    done = sft_play("train", DATA_TRAIN_PATH=str(path), TRAIN_OUTPUT_DIR=str(output), RUN="run")
    assert f"{path}{told}" in done.stderr and done.returncode == 11, done.stderr
    report = json.loads((output / "run" / "run.json").read_text())
    assert (report["status"], report["exit_class"]) == ("failed", 11) and f"{path}{told}" in report[
        "cause"
    ]
    places = {
        path.parent for path in output.rglob("*") if path.is_file() and path.suffix != ".lock"
    }
    assert places == {output / "run"}, "nothing half-written"
    assert not (output / "run" / "data.json").exists()


def test_more_processes_than_gpus_are_refused_with_the_number_that_there_is():
    done = make("plan", "GPUS=2xH200", "NUM_GPUS=3")
    assert done.returncode == 2
    assert "NUM_GPUS=3: this host has 2 usable GPUs; set NUM_GPUS=2" in done.stderr
    assert "exit class 13 (environment)" in done.stderr


# The Makefile


@pytest.mark.parametrize("target", ["eval", "lint"])  # with and without a recipe that is ours
def test_a_variable_that_no_target_reads_stops_make(target):
    done = make(target, "LR=1e-4")
    assert done.returncode == 2
    assert f"LR: make {target} " in done.stderr
    assert "exit class 10 (config)" in done.stderr


def test_targets_that_read_nothing_need_no_python_to_say_so():
    done = make("clean", "LR=1e-4", "PY=/no/such/python")
    assert done.returncode == 2
    assert "make clean reads no variable, such as LR; name a target that does" in done.stderr


def test_settings_in_the_shell_that_a_target_does_not_read_are_a_warning(tmp_path):
    listed = make("runs", TRAIN_EPOCHS="3", LR="1", TRAIN_OUTPUT_DIR=str(tmp_path))
    assert listed.returncode == 0
    assert listed.stderr == "warning: runs does not read TRAIN_EPOCHS of the environment\n"


def rules() -> dict[str, str]:
    """Every target with its help text."""
    found = re.findall(r"^([a-z][a-z-]*):[^=\n]*?(?:## (.*))?$", MAKEFILE, re.MULTILINE)
    return dict(found)


def phony() -> list[str]:
    declared = re.search(r"^\.PHONY: ((?:.*\\\n)*.*)$", MAKEFILE, re.MULTILINE)
    assert declared
    return declared[1].replace("\\\n", " ").split()


def test_every_target_is_phony_once_and_has_a_text():
    assert sorted(phony()) == sorted(rules())
    assert [name for name, text in rules().items() if not text] == []


def test_help_lists_every_target_with_its_text():
    shown = make().stdout
    listed = dict(re.findall(r"^  ([a-z-]+) +(.*)$", shown, re.MULTILINE))
    assert listed == rules()
    assert make("help").stdout == shown
    variables = "CONFIG RUN NUM_GPUS DEEPSPEED_CONFIG TB_PORT DEVICE NNODES NODE_RANK MASTER_ADDR"
    assert all(variable in shown for variable in variables.split())


def test_every_target_can_be_made_and_names_commands_that_exist(sft_play):
    done = make("-n", *phony())
    assert done.returncode == 0, done.stderr
    called = set(re.findall(r"-m sft_play ([a-z-]+)", done.stdout))
    commands = set(re.findall(r"^\s+│?\s*([a-z-]+)  ", sft_play("--help").stdout, re.MULTILINE))
    hidden = {"check-variables"}
    assert called <= commands | hidden, sorted(called - commands)


def test_a_recipe_never_names_a_value_of_the_user():
    recipes = [line for line in MAKEFILE.splitlines() if line.startswith("\t")]
    named = {name for line in recipes for name in re.findall(r"(?<!\$)\$[({](\w+)", line)}
    assert named <= {"PY", "NEWEST_PY", "SFT", "CHECK", "PARALLEL_TESTS"}
