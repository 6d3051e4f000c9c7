"""Run a command for a limited time, without settings of the caller's shell."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import psutil

SETTING_PREFIXES = ("MODEL_", "TUNING_", "TRAIN_", "DATA_")
MAKE_VARIABLES = (
    "MAKEFLAGS MAKELEVEL MFLAGS MAKEOVERRIDES WORKS ARMS GPUS STRATEGIES STEPS SECONDS "
    "CONFIG RUN EXACT"
).split()


def clean_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the caller's environment without settings of SFT-Play and variables of make."""
    kept = {}
    for name, value in environ.items():
        if not name.startswith(SETTING_PREFIXES) and name not in MAKE_VARIABLES:
            kept[name] = value
    return kept


class Ended(NamedTuple):
    """How a command of `run_limited` ended."""

    status: int | None  # None: it was killed after `limit` seconds
    limit: float
    started: float  # time.time()
    at: float  # time.time()
    log: Path

    @property
    def cause(self) -> str:
        """Why it wrote no report."""
        if self.status is None:
            return f"not done within {self.limit:.0f} s"
        words = self.log.read_text(encoding="utf-8", errors="replace").split()
        return f"ended with {self.status}: {' '.join(words[-60:])}"


def run_limited(
    command: list[str], log: Path, seconds: float, cwd: Path, environ: Mapping[str, str]
) -> Ended:
    """Run a command with its output in `log`.

    After `seconds` the command and its children are killed.
    """
    started, status = time.time(), None
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
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = process.wait(seconds)
        finally:
            if process.poll() is None:  # the time is up, or the benchmark itself is stopped
                # torchrun gives each rank a session, which a signal to the group does not reach
                children = psutil.Process(process.pid).children(recursive=True)
                os.killpg(process.pid, signal.SIGKILL)
                for child in children:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        child.kill()
                process.wait()
    return Ended(status, seconds, started, time.time(), log)


def fresh_folder(folder: Path) -> Path:
    """Return an empty folder; what it contained is deleted."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder
