"""The fault matrix: what a row says, what an injection has at hand, and what a contract demands."""

import contextlib
import importlib
import io
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import psutil
from rank_processes import start_rank, wait_for, work

from sft_play.errors import ExitClass, SftPlayError
from sft_play.plan.launch import free_port
from sft_play.runs import checkpoints, seal
from sft_play.runs.folder import RunFolder

QUIET = {"train.predict_with_generate": False}
EVERY_STEP = {
    **QUIET,
    "train.save_strategy": "steps",
    "train.save_steps": 1,
    "train.save_total_limit": None,
}
LONG = {**EVERY_STEP, "train.max_steps": 60}
TWELVE = {**EVERY_STEP, "train.max_steps": 12, "tuning.lora.dropout": 0.1}
TWELVE_OF_TWO = {**TWELVE, "train.packing": False}
SECONDS = 90  # of a step of an injection, on a busy host
MOST_SAID = 1500  # characters: one line, or a table of settings


@dataclass(frozen=True)
class Outcome:
    """What became of a run that met a fault."""

    exit_class: int  # 0 where it continues
    said: str  # the cause, or the line that names the fault
    reached: int | None = None  # the last step that was trained
    goes_on_from: int | None = None  # the step of the checkpoint that a resume takes


class Guard(NamedTuple):
    """What makes a row pass, and what stands in its place where it is taken away."""

    path: str  # module:attribute
    instead: Any
    also: "Guard | None" = None  # where each of two is enough


class Fault(NamedTuple):
    """A row of the matrix."""

    name: str
    injected: str  # in words, for docs/evidence/reliability.md
    inject: Callable[["Bench"], Outcome]
    exit_class: ExitClass
    says: tuple[str, ...]  # parts of what is said; the last is what to do
    guard: Guard
    seconds: float = 30  # to the end, from the fault on
    loses: int | None = None  # steps at most; None where there is nothing to lose
    is_quick: bool = False  # a part of `make test`


@dataclass
class Bench:
    """What an injection has at hand: plans, workers, ranks, and a run with three checkpoints."""

    folder: Path
    plan: Callable[..., RunFolder]
    work: Callable[[RunFolder], int]
    saved: RunFolder
    settings: dict[str, Any]
    taught: Callable[[], Path]  # a base that has learned the rows
    uninterrupted: Callable[[int], RunFolder]  # a run of TWELVE by so many ranks
    before_work: Callable[[], None] = lambda: None  # after the plan
    number: int = 0  # of a count: moments and victims follow from it
    last: RunFolder | None = None  # of the run that was planned last
    guard: Guard | None = None  # that is taken away in the processes of a run, too
    began: float = 0.0  # when the fault was injected
    everyone: list[psutil.Process] = field(default_factory=list)

    def inject_now(self) -> None:
        """Note that the fault is injected at this moment."""
        self.began = time.monotonic()

    def copy(self) -> RunFolder:
        """Return a copy of a finished run of three steps with a checkpoint of each."""
        return RunFolder(shutil.copytree(self.saved.path, self.folder / "run"))

    def run(self, changes: dict[str, Any]) -> Outcome:
        """Plan a run and work on it in this process."""
        try:
            folder = self.last = self.plan({**EVERY_STEP, **changes})
        except SftPlayError as error:
            return Outcome(error.exit_class, str(error))
        self.inject_now()
        self.before_work()
        with contextlib.redirect_stdout(io.StringIO()) as shown:
            code = self.work(folder)
        return self.outcome(folder, code, shown.getvalue())

    def outcome(self, folder: RunFolder, code: int, shown: str) -> Outcome:
        """Return what a run's folder says, and the checkpoint that it continues from."""
        if not (folder.path / "run.json").exists():
            return Outcome(code, cause_in(shown))
        report = folder.read_report()
        if code and report.status == "running":  # not even that could be written
            return Outcome(code, cause_in(shown), report.global_step, newest(folder))
        assert (report.exit_class or 0) == code, (report.exit_class, code)
        return Outcome(code, report.cause or "", report.global_step, newest(folder))

    def start(self, folder: RunFolder, ranks: int = 1, prepare: Any = None, *words: Any) -> list:
        """Start the ranks of a planned run in processes of their own."""
        port, output = free_port(), folder.path / "output.txt"
        arguments = (folder.path, prepared, self.guard, prepare, words)
        started = [
            start_rank(work, arguments, rank, port, output, world_size=ranks)
            for rank in range(ranks)
        ]
        self.everyone += [psutil.Process(rank.pid) for rank in started]
        return started

    def wait_for(self, folder: RunFolder, text: str, ranks: list) -> None:
        """Wait until the main rank has logged a text."""
        log, deadline = folder.logs / "rank-0.log", time.monotonic() + SECONDS
        while not (log.exists() and text in log.read_text()):
            output = folder.path / "output.txt"
            assert any(rank.is_alive() for rank in ranks), output.read_text()[-2000:]
            assert time.monotonic() < deadline, f"{text!r} did not come"
            time.sleep(0.02)

    def carry_through(self, folder: RunFolder, ranks: int = 1) -> int:
        """Return the exit code of a planned run in processes of its own."""
        (code,) = set(self.ends(self.start(folder, ranks)))
        return code

    def ends(self, ranks: list) -> list[int]:
        """Return the exit codes of ranks."""
        return [wait_for(rank, SECONDS) for rank in ranks]


def differences(run: RunFolder, whole: RunFolder) -> str:
    """Return in what a run that was resumed is not one that went through; '' where in nothing."""
    ours, theirs = (folder.read_report().loss for folder in (run, whole))
    if ours != theirs:
        return f"losses {ours} are not {theirs}"
    config = run.read_config()
    for path in whole.weights(config.tuning.mode).glob("*.safetensors"):
        if path.read_bytes() != (run.weights(config.tuning.mode) / path.name).read_bytes():
            return f"{path.name} has other bits"
    return ""


def cause_in(shown: str) -> str:
    """Return the cause that was shown on a terminal: the line before the exit class."""
    lines = shown.splitlines()
    named = [number for number, line in enumerate(lines) if line.startswith("exit class")]
    return lines[named[0] - 1] if named else shown


def prepared(guard: Guard | None, prepare: Callable[..., None] | None, words: tuple) -> None:
    """Prepare a rank: without the guard, and with what its fault needs."""
    while guard is not None:
        owner, name = owner_of(guard.path)
        setattr(owner, name, guard.instead)
        guard = guard.also
    if prepare is not None:
        prepare(*words)


def owner_of(path: str) -> tuple[Any, str]:
    """Return the module or class that a guard belongs to, and the guard's name there."""
    module, _, attribute = path.partition(":")
    *inner, name = attribute.split(".")
    owner: Any = importlib.import_module(module)
    for part in inner:
        owner = getattr(owner, part)
    return owner, name


def newest(folder: RunFolder) -> int | None:
    """Return the step of the newest whole checkpoint; nothing is renamed."""
    for checkpoint in checkpoints.list_checkpoints(folder.checkpoints):
        if seal.find_damage(checkpoint) is None:
            return checkpoints.step_of(checkpoint)
    return None


def problems(fault: Fault, outcome: Outcome, seconds: float, left: list[str]) -> list[str]:
    """Return in what an outcome breaks the contract of a row; [] where it keeps it."""
    found = []
    if outcome.exit_class != fault.exit_class:
        found.append(f"class {outcome.exit_class}, not {fault.exit_class:d}")
    found += [f"does not say {part!r}" for part in fault.says if part not in outcome.said]
    if "Traceback" in outcome.said or len(outcome.said) > MOST_SAID:
        found.append("more than a cause and its fix")
    if fault.loses is not None:
        if outcome.goes_on_from is None:
            found.append("no checkpoint to continue from")
        elif outcome.reached - outcome.goes_on_from > fault.loses:
            found.append(f"step {outcome.reached} was reached, {outcome.goes_on_from} is left")
    if seconds > fault.seconds:
        found.append(f"{seconds:.1f} s, not {fault.seconds:g}")
    return found + [f"left behind: {process}" for process in left]


def meet(fault: Fault, bench: Bench) -> tuple[list[str], Outcome, float]:
    """Inject a fault; return what breaks its contract, what came of it, and the seconds it took."""
    bench.inject_now()
    try:
        outcome = fault.inject(bench)
        seconds = time.monotonic() - bench.began
    finally:
        left = [] if fault.is_quick else orphans(bench)
    return problems(fault, outcome, seconds, left), outcome, seconds


def meet_without_guard(fault: Fault, bench: Bench) -> list[str]:
    """Return what breaks the contract of a row whose guard is taken away."""
    bench.guard = guard = fault.guard
    with contextlib.ExitStack() as stack:
        while guard is not None:
            stack.enter_context(patch.object(*owner_of(guard.path), guard.instead))
            guard = guard.also
        try:
            return meet(fault, bench)[0]
        except (AssertionError, OSError, RuntimeError, ValueError, KeyError) as error:
            return [f"{type(error).__name__}: {error}"]


def orphans(bench: Bench) -> list[str]:
    """Return processes of a run that are still there; they are ended."""
    seen = [*bench.everyone, *processes_of(bench.folder)]
    _, alive = psutil.wait_procs(seen, timeout=3 if seen else 0)
    names = []
    for process in alive:
        if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
            names.append(" ".join(process.cmdline())[:80])
            process.kill()
    bench.everyone.clear()
    return names


def processes_of(folder: Path) -> list[psutil.Process]:
    own = os.getpid()
    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = " ".join(process.info["cmdline"] or [])
        if str(folder) in words and process.pid != own and "pytest" not in words:
            found.append(process)
    return found
