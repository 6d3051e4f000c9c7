"""Faults of what is typed: bad configs, changed settings on resume, names that a shell would run."""

import contextlib
import dataclasses
import json
import os
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from run_files import held_by_another

from faults.bench import QUIET, Bench, Fault, Guard, Outcome
from faults.disks import NAMED, called, command_line, start_command_line, train_words
from faults.files import flip, nothing
from sft_play.errors import ExitClass
from sft_play.monitor.watch import run_table
from sft_play.runs.folder import RunFolder
from sft_play.runs.report import RunReport

ROOT = Path(__file__).resolve().parents[2]
MOMENT_SECONDS = 0.01  # between two kills of the front end; it takes some 0.3 s
CANARY = "hf_thisTokenIsNobodysAndMustNotBeSaved"
PAYLOADS = (
    "a; touch {}",
    "$(shell touch {})",
    "`touch {}`",
    "$$(touch {})",
    "$(touch {})",
    "' ; touch {} ; '",
    '" ; touch {} ; "',
    "x\ntouch {}\n",
)


def config_of(text: str) -> Callable[[Bench], Outcome]:
    """Return an injection: a config file with a text."""

    def inject(bench):
        path = bench.folder / "a.yaml"
        path.write_text(text)
        return command_line(bench, ["config"], {"CONFIG": str(path)})

    return inject


def of_environment(**variables: str) -> Callable[[Bench], Outcome]:
    """Return an injection: variables that make hands on."""

    def inject(bench):
        environ = {"CONFIG": "tests/fixtures/empty.yaml", **variables}
        return command_line(bench, ["plan"], environ)

    return inject


def resumed_with(changes: dict[str, object]) -> Callable[[Bench], Outcome]:
    """Return an injection: a run continues from a checkpoint, with something changed."""

    def inject(bench):
        run = bench.copy()
        words = {**QUIET, "train.max_steps": 3, "train.resume_from": run.path, **changes}
        return called(bench, words)

    return inject


def other_rows(bench: Bench) -> Outcome:
    path = bench.folder / "train.jsonl"
    lines = Path(bench.settings["data.train_path"]).read_text().splitlines(keepends=True)
    path.write_text("".join(reversed(lines)))
    return resumed_with({"data.train_path": path})(bench)


def other_base(bench: Bench) -> Outcome:
    path = Path(bench.settings["model.name"]) / "model.safetensors"
    position = path.stat().st_size - 100
    flip(path, position, 1)
    try:
        return resumed_with({})(bench)
    finally:
        flip(path, position, 1)


def renamed(bench: Bench) -> Outcome:
    run = bench.copy()
    shutil.rmtree(run.checkpoints / "checkpoint-3")
    (run.checkpoints / "checkpoint-2").rename(run.checkpoints / "checkpoint-3")
    words = {**QUIET, "train.max_steps": 3, "train.resume_from": run.path}
    return called(bench, words)


def held(bench: Bench) -> Outcome:
    """Another process trains in the folder."""
    run = bench.copy()
    with held_by_another(run.path):
        return called(bench, {"train.output_dir": bench.folder})


def killed(bench: Bench) -> Outcome:
    """SIGKILL of the front end; then the same command is typed again.

    It is killed once it has written run.json; one of a count, at a moment that its number gives.
    """
    words = train_words(bench, {})
    output_dir = bench.folder / "out"
    child = start_command_line(bench, words, NAMED)
    deadline = time.monotonic() + (60 if bench.number == 0 else bench.number * MOMENT_SECONDS)
    while time.monotonic() < deadline:
        if bench.number == 0 and (output_dir / "run" / "run.json").exists():
            break
        time.sleep(0.0005)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    lines = run_table(output_dir)
    return dataclasses.replace(command_line(bench, words, NAMED), said=lines[0])


def few_files() -> None:
    """Allow this process no more open files than it has."""
    first_free = os.open(os.devnull, os.O_RDONLY)
    os.close(first_free)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (first_free, most))


def without_files(bench: Bench) -> Outcome:
    bench.copy()
    return command_line(bench, ["runs"], {"TRAIN_OUTPUT_DIR": str(bench.folder)}, few_files)


def long_name(bench: Bench) -> Outcome:
    return called(bench, {"train.run_name": None, "data.train_path": f"{'a' * 300}.jsonl"})


def circle(bench: Bench) -> Outcome:
    path = bench.folder / "rows.jsonl"
    path.symlink_to(path)
    return called(bench, {"data.train_path": path})


def broken_report(bench: Bench) -> Outcome:
    """run.json of one of two runs is cut off; `make runs` shows both."""
    run = bench.copy()
    shutil.copytree(run.path, bench.folder / "whole")
    os.truncate(run.path / "run.json", 20)
    outcome = command_line(bench, ["runs"], {"TRAIN_OUTPUT_DIR": str(bench.folder)})
    assert "whole" in outcome.said, outcome.said
    return outcome


def injected(bench: Bench) -> Outcome:
    """Payloads in variables of make: none of them is run."""
    run = 0
    names = ("CONFIG", "RUN", "TRAIN_RUN_NAME", "DATA_TRAIN_PATH", "NUM_GPUS")
    for number, payload in enumerate(PAYLOADS):
        words = [f"{name}={payload.format(bench.folder / f'{name}-{number}')}" for name in names]
        command = ["make", "-f", str(makefile(bench)), "config", f"PY={shutil.which('true')}"]
        subprocess.run([*command, *words], cwd=ROOT, capture_output=True, timeout=60)
        run += sum((bench.folder / f"{name}-{number}").exists() for name in names)
    return Outcome(run, f"{run} of {len(PAYLOADS) * len(names)} were run")


def makefile(bench: Bench) -> Path:
    """Return the Makefile; without its guard, one that lets make expand what is typed."""
    text = (ROOT / "Makefile").read_text()
    if bench.guard is None:
        return ROOT / "Makefile"
    path = bench.folder / "Makefile"
    guarded = [line for line in text.splitlines() if "$$(value $(v))" in line]
    assert len(guarded) == 1
    path.write_text(text.replace(guarded[0], "$(foreach v,$(GIVEN),$(eval export $(v)))"))
    return path


BOMB = "a: &a [x, x]\n" + "".join(
    f"{chr(98 + n)}: &{chr(98 + n)} [*{chr(97 + n)}, *{chr(97 + n)}]\n" for n in range(20)
)
SAID = Guard("sft_play.cli:_errors_as_messages", contextlib.nullcontext)
RESUMED = Guard("sft_play.runs.resumed:Resumed.refuse_changes", nothing)
STEPS = Guard("sft_play.commands.resumption:refuse_other_steps", nothing)


def wrong(name: str, injected: str, inject: Callable[[Bench], Outcome], *says: str) -> Fault:
    """Return a row: something that is typed is refused in the front end."""
    return Fault(name, injected, inject, ExitClass.CONFIG, says, SAID, 5, None, True)


def refused(
    name: str, injected: str, inject: Callable[[Bench], Outcome], says: str, guard: Guard
) -> Fault:
    """Return a row: a run may not continue from its checkpoint, and nothing is loaded."""
    return Fault(name, injected, inject, ExitClass.CHECKPOINT, (says,), guard, 10)


def repeated(name: str) -> str:
    """Say of an unknown variable what it holds."""
    return f"{name}={os.environ[name]}: no such setting"


def strictly(value: Any) -> Any:
    """Resolve a path, and raise if links point at each other."""
    return os.path.realpath(value, strict=True) if isinstance(value, str) else value


def unchecked(folder: RunFolder) -> RunReport:
    """Read run.json as it stands."""
    return RunReport.from_json(json.loads((folder.path / "run.json").read_text()))


TYPED = (
    wrong(
        "unknown-setting",
        "a setting is misspelled",
        config_of("train:\n  batch_sise: 4\n"),
        "unknown setting 'train.batch_sise'",
        "did you mean train.batch_size?",
    ),
    wrong(
        "empty-name",
        "a name is empty, as from a variable of the shell that is not set",
        of_environment(MODEL_NAME=""),
        "environment MODEL_NAME: model.name is empty",
        "leave it out",
    ),
    wrong(
        "not-utf8",
        "a path has bytes that are not UTF-8",
        of_environment(DATA_TRAIN_PATH="bad\udcff"),
        "data.train_path=bad\\xff is not UTF-8",
        "rename it",
    ),
    wrong(
        "wrong-type",
        "a number is a word",
        config_of("train:\n  batch_size: two\n"),
        "a.yaml:2: train.batch_size=two is not valid",
        "write a whole number of at least 1, or auto",
    ),
    wrong(
        "given-twice",
        "a key is given twice",
        config_of("train:\n  seed: 1\n  seed: 2\n"),
        "a.yaml:3: key 'seed' is given twice, first on line 2",
    ),
    wrong(
        "not-yaml",
        "the file ends in the middle of a list",
        config_of("train:\n  report_to: [a\n"),
        "a.yaml:",
    ),
    wrong("deep", "a file of 1,500 brackets", config_of("[" * 1500), "nested too deeply to read"),
    wrong(
        "bomb", "aliases that name each other 2^20 times", config_of(BOMB), "aliases repeat values"
    ),
    wrong(
        "escape-codes",
        "a key with codes that a terminal obeys",
        config_of('"tra\\e[31min": 3\n'),
        "unknown setting 'tra\\x1b[31min'",
    ),
    wrong(
        "huge-number",
        "TRAIN_BATCH_SIZE=10^13",
        of_environment(TRAIN_BATCH_SIZE="1" + "0" * 13),
        "is too large; write at most",
    ),
    wrong(
        "huge-seed",
        "a seed beyond 32 bits",
        of_environment(TRAIN_SEED=str(2**40)),
        "is too large; write at most",
    ),
    wrong(
        "nan-rate",
        "TRAIN_LEARNING_RATE=nan",
        of_environment(TRAIN_LEARNING_RATE="nan"),
        "train.learning_rate=nan is not valid; write a number above 0",
    ),
    wrong(
        "no-config",
        "CONFIG names no file",
        of_environment(CONFIG="smal"),
        "did you mean CONFIG=configs/small.yaml?",
    ),
    Fault(
        "secret-variable",
        "a variable with a token has a name like that of a setting",
        of_environment(MODEL_API_KEY=CANARY),
        ExitClass.CONFIG,
        ("environment MODEL_API_KEY: no such setting; unset MODEL_API_KEY",),
        Guard("sft_play.config.layers:_variable_hint", repeated),
        5,
        None,
        True,
    ),
)
RESUME = (
    refused(
        "other-rate",
        "a run continues with another learning rate",
        resumed_with({"train.learning_rate": 0.5}),
        "Leave these out: TRAIN_RESUME_FROM=",
        RESUMED,
    ),
    refused(
        "other-adapter",
        "a run continues with another rank of its adapter",
        resumed_with({"tuning.lora.r": 4}),
        "Leave these out: TRAIN_RESUME_FROM=",
        RESUMED,
    ),
    refused(
        "other-rows",
        "a run continues with its rows in another order",
        other_rows,
        "its run had other rows",
        STEPS,
    ),
    refused(
        "other-base",
        "a bit of the base model is another one when a run continues",
        other_base,
        "base_digest: the checkpoint has ",
        Guard("sft_play.runs.stamp:differences", lambda *_: []),
    ),
    refused("renamed", "checkpoint-2 is renamed to checkpoint-3", renamed, "it was renamed", STEPS),
)
OTHERS = (
    Fault(
        "held-folder",
        "another process trains in the run's folder",
        held,
        ExitClass.ENVIRONMENT,
        ("trains in it", "make watch RUN="),
        Guard("sft_play.runs.lock:_lock", lambda *_, **__: True),
        10,
    ),
    Fault(
        "shell-words",
        "values of make variables that a shell would run",
        injected,
        ExitClass.DONE,
        ("0 of 40 were run",),
        Guard("sft_play.config.targets:refuse_unread", nothing),
        60,
    ),
)
SYSTEM = (
    Fault(
        "killed-front-end",
        "SIGKILL of the front end once it has made the run's folder; the same command follows",
        killed,
        ExitClass.DONE,
        ("died", "killed before it could write why", "the same command starts it again"),
        Guard("sft_play.runs.folder:give_up_name", nothing),
        10,
    ),
    Fault(
        "few-open-files",
        "the shell allows no more open files",
        without_files,
        ExitClass.ENVIRONMENT,
        ("Too many open files", "raise it with ulimit -n"),
        Guard("sft_play.errors:of_os_error", nothing),
        5,
        None,
        True,
    ),
    Fault(
        "long-name",
        "a path of 300 characters",
        long_name,
        ExitClass.ENVIRONMENT,
        ("File name too long", "give it a shorter name"),
        Guard("sft_play.errors:of_os_error", nothing),
        5,
        None,
        True,
    ),
    Fault(
        "links-in-a-circle",
        "the file of rows is a link to itself",
        circle,
        ExitClass.DATA,
        ("a link to", "which leads to no file", "set DATA_TRAIN_PATH to a data file"),
        Guard("sft_play.plan.sources:_absolute", strictly),
        5,
        None,
        True,
    ),
    Fault(
        "broken-report",
        "run.json of a run is cut off; `make runs` is to list all",
        broken_report,
        ExitClass.DONE,
        ("run.json cannot be read",),
        Guard("sft_play.runs.folder:RunFolder.read_report", unchecked),
        5,
        None,
        True,
    ),
)
ROWS = (*TYPED, *RESUME, *OTHERS, *SYSTEM)
