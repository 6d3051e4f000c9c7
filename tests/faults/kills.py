"""Faults that kill: a run, or one of its ranks, with SIGKILL; then it continues as if nothing had been."""

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
from make_runs import Launched
from rank_processes import start_rank, wait_for, work

from faults.bench import (
    EVERY_STEP,
    TWELVE,
    TWELVE_OF_TWO,
    Bench,
    Fault,
    Guard,
    Outcome,
    differences,
    prepared,
)
from faults.files import SEALED, nothing
from sft_play.errors import ExitClass
from sft_play.monitor.watch import run_table
from sft_play.plan.launch import free_port
from sft_play.runs import checkpoints, stamp
from sft_play.runs.folder import RunFolder

FILES = 9  # of a save, when it ends; the kill comes with any of them


def on_a_slow_disk() -> None:
    """Make a rank wait for each file that is brought to the disk."""
    sync = os.fsync

    def slowly(descriptor):
        time.sleep(0.05)
        sync(descriptor)

    os.fsync = slowly


def kill_inside_a_save(
    folder: RunFolder, after_step: int, guard: Guard | None = None, files: int = 0
) -> Path:
    """Start a run, kill it with SIGKILL while it saves a later step, and return what it staged.

    It is killed once so many files are staged, by default once Trainer has written its last one.
    """
    output = folder.path / "output.txt"
    arguments = (folder.path, prepared, guard, on_a_slow_disk, ())
    rank = start_rank(work, arguments, 0, free_port(), output, world_size=1)
    places = (folder.checkpoints / checkpoints.STAGING, folder.checkpoints)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and rank.is_alive():
        for step in range(after_step + 1, after_step + 4):
            staged, open_place = (place / f"checkpoint-{step}" for place in places)
            if guard is not None and guard.also and (open_place / "optimizer.pt").exists():
                staged = open_place
            if _is_so_far(staged, files) or staged == open_place:
                os.kill(rank.pid, signal.SIGKILL)
                assert wait_for(rank) == -signal.SIGKILL
                return staged
        time.sleep(0.001)
    raise AssertionError(output.read_text()[-3000:])


def _is_so_far(staged: Path, files: int) -> bool:
    if not files:
        return (staged / "trainer_state.json").exists()
    try:
        return len(list(staged.iterdir())) >= files
    except FileNotFoundError:
        return False


def gone_on(bench: Bench, folder: RunFolder) -> Outcome:
    """Continue with a run that was killed; what was said is its line of `make runs`.

    It must end with the losses and the weights of a run that nobody has killed.
    """
    line = run_table(folder.path.parent)[0]
    reached = folder.read_report().global_step
    ranks = folder.read_report().world_size
    settings = TWELVE if ranks == 1 else TWELVE_OF_TWO
    again = bench.plan({**settings, "train.resume_from": folder.path}, num_gpus=ranks)
    code = bench.carry_through(again, ranks)
    begun = again.read_report().resumed_from
    found = checkpoints.step_of(Path(begun)) if begun else None
    if code == ExitClass.DONE:
        other = differences(again, bench.uninterrupted(ranks))
        assert not other, other
    return Outcome(code, line, reached, found)


def killed_inside_a_save(bench: Bench) -> Outcome:
    after_step, files = 2 - bench.number % 2, bench.number % (FILES + 1)
    is_inside = False
    while not is_inside:
        folder = bench.plan(TWELVE)
        staged = kill_inside_a_save(folder, after_step, bench.guard, files)
        is_inside = bench.guard is not None or not (folder.checkpoints / staged.name).exists()
        files = max(1, files - 1)  # for another one, where the kill came too late
    outcome = gone_on(bench, folder)
    assert outcome.goes_on_from == checkpoints.step_of(staged) - 1, "it is the one before"
    return outcome


def killed(bench: Bench) -> Outcome:
    """SIGKILL at any moment."""
    folder = bench.plan(TWELVE)
    ranks = bench.start(folder)
    bench.wait_for(folder, f"step {4 + bench.number % 5}/", ranks)
    time.sleep(bench.number * 0.003)
    os.kill(ranks[0].pid, signal.SIGKILL)
    bench.ends(ranks)
    bench.inject_now()
    return gone_on(bench, folder)


def rank_killed(bench: Bench) -> Outcome:
    """SIGKILL of one of two ranks; the other ends, and both continue from their last checkpoint."""
    folder = bench.plan(TWELVE_OF_TWO, num_gpus=2)
    ranks = bench.start(folder, 2, on_a_slow_disk)
    bench.wait_for(folder, f"step {2 + bench.number % 5}/", ranks)
    time.sleep(bench.number * 0.02)
    victim = (bench.number + 1) % 2
    killed_at = time.monotonic()
    os.kill(ranks[victim].pid, signal.SIGKILL)
    codes = bench.ends(ranks)
    assert codes[1 - victim] == ExitClass.PEER_LOST, codes
    assert time.monotonic() - killed_at < 10, "the other rank has waited"
    bench.inject_now()
    return gone_on(bench, folder)


def make_killed(bench: Bench) -> Outcome:
    """SIGKILL of make alone: its run hears of it."""
    out = bench.folder / "out"
    out.mkdir()
    settings = {**bench.settings, **EVERY_STEP, "train.max_steps": 3000}
    started = Launched(out, "train", settings, NUM_GPUS=None, PY=program(bench))
    started.wait_for("step 2/")
    bench.everyone += started.everyone
    bench.inject_now()
    started.make.kill()
    started.make.wait()
    psutil.wait_procs(started.everyone, timeout=15)
    code = started.folder.read_report().exit_class or 0
    return bench.outcome(started.folder, code, started.log.read_text())


def program(bench: Bench) -> str:
    """Return the Python of make; without the guard, one that listens to no make."""
    if bench.guard is None:
        return sys.executable
    path = bench.folder / "python"
    lines = (
        "import sys",
        "from sft_play import cli, stops",
        "stops.end_with_make = lambda: None",
        "sys.argv = sys.argv[2:]",
        "cli.main()",
    )
    path.write_text(f"#!/bin/sh\nexec {sys.executable} -c '{'; '.join(lines)}' \"$@\"\n")
    path.chmod(0o755)
    return str(path)


@contextmanager
def unstaged(target: Path, process: Any, facts: Any, keeps_refused: bool = False) -> Iterator[Path]:
    """Save a checkpoint under its final name from the first byte on."""
    target.mkdir(parents=True, exist_ok=True)
    yield target
    stamp.write(target, facts)


ROWS = (
    Fault(
        "kill-make",
        "SIGKILL of make while its run trains",
        make_killed,
        ExitClass.STOPPED,
        ("stopped on request at step", "continue with "),
        Guard("sft_play.stops:end_with_make", nothing),
        15,
        loses=0,
    ),
    Fault(
        "kill-in-a-save",
        "SIGKILL while a checkpoint is written",
        killed_inside_a_save,
        ExitClass.DONE,
        ("died", "continue with make train TRAIN_RESUME_FROM="),
        Guard("sft_play.training.checkpoints:published", unstaged, also=SEALED),
        60,
        loses=1,
    ),
    Fault(
        "kill",
        "SIGKILL between two saves",
        killed,
        ExitClass.DONE,
        ("died", "continue with make train TRAIN_RESUME_FROM="),
        Guard("sft_play.training.recorder:RunRecorder.note_checkpoint", nothing),
        60,
        loses=1,
    ),
    Fault(
        "kill-a-rank-and-go-on",
        "SIGKILL of one of two ranks; then both continue",
        rank_killed,
        ExitClass.DONE,
        ("ended without a word", "continue with make train-distributed"),
        Guard("sft_play.training.classify:_is_peer_lost", nothing),
        60,
        loses=1,
    ),
)
