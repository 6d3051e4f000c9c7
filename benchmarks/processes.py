"""Runs a command for a limited time, without the settings of the caller's shell; busy cores."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

SETTING_PREFIXES = ("MODEL_", "TUNING_", "TRAIN_", "DATA_")
MAKE_VARIABLES = (
    "MAKEFLAGS",
    "MAKELEVEL",
    "MFLAGS",
    "MAKEOVERRIDES",
    "WORKS",
    "ARMS",
    "GPUS",
    "STRATEGIES",
    "STEPS",
    "SECONDS",
    "CONFIG",
    "RUN",
)
# ends with the process that it is told, however that one ends
BUSY_LOOP = """
import os, sys
while os.getppid() == int(sys.argv[1]):
    sum(range(100_000))
"""


def clean_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the caller's environment without settings of SFT-Play and variables of make."""
    kept = {}
    for name, value in environ.items():
        if not name.startswith(SETTING_PREFIXES) and name not in MAKE_VARIABLES:
            kept[name] = value
    return kept


@contextlib.contextmanager
def busy_cores() -> Iterator[None]:
    """Keep every core that this process may use busy with a process of its own."""
    command = [sys.executable, "-c", BUSY_LOOP, str(os.getpid())]
    loops = []
    try:
        for _ in os.sched_getaffinity(0):
            loops.append(subprocess.Popen(command, start_new_session=True))  # no Ctrl-C of ours
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def run_limited(
    command: list[str], log: Path, seconds: float, cwd: Path, environ: Mapping[str, str]
) -> int | None:
    """Run a command with its output in `log` and return its status.

    After `seconds` it is killed with all its children, and None is returned.
    """
    with log.open("w", encoding="utf-8") as out:
        process = subprocess.Popen(
            command,
            cwd=cwd,
            env=dict(environ),
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            if process.poll() is None:  # the time is up, or the benchmark itself was told to stop
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def failure_cause(status: int | None, seconds: float, log: Path) -> str:
    """Return why a command of `run_limited` left no report."""
    if status is None:
        return f"not done within {seconds:.0f} s"
    return f"ended with {status}: {last_words(log)}"


def last_words(log: Path) -> str:
    """Return the last 60 words of a log."""
    if not log.exists():
        return "no log"
    words = log.read_text(encoding="utf-8", errors="replace").split()
    return " ".join(words[-60:])
