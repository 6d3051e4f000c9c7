"""Training targets as a user types them."""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from calls import outcome_of

from sft_play.runs.folder import RunFolder

ROOT = Path(__file__).resolve().parents[1]
SECONDS = 240
QUIET = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}  # two ranks on two cores


def run_make(target: str, folder: Path, seconds: int, **variables: str) -> str:
    """Run a make target to its end, its run in `folder`; return what it printed."""
    words = {"TRAIN_OUTPUT_DIR": str(folder), "RUN": "run", "PY": sys.executable, **variables}
    done = outcome_of(
        ["make", target, *(f"{name}={value}" for name, value in words.items())], os.environ, seconds
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def losses(report: dict[str, Any]) -> list[float]:
    """Return the logged losses of a run.json."""
    return [logged["loss"] for logged in report["loss"]]


def check_losses(found: list[float], expected: list[float], rounding: float = 2e-3) -> None:
    """Assert that two runs learned the same, but for a share of the first loss.

    Where a loss hardly falls, it would be the same with wrong gradients.
    """
    assert expected[-1] < 0.7 * expected[0], expected
    assert found == pytest.approx(expected, abs=rounding * expected[0])


class Launched:
    """A make target that runs, in a session of its own, and its output."""

    def __init__(
        self, output_dir: Path, target: str, settings: dict[str, object], **variables: str | None
    ):
        words = {
            name.upper().replace(".", "_"): "null" if value is None else value
            for name, value in {**settings, "train.output_dir": output_dir}.items()
        }
        words |= {
            "CONFIG": "tests/fixtures/empty.yaml",
            "DEVICE": "cpu",
            "RUN": "run",
            "PY": sys.executable,
            "NUM_GPUS": "2",
            **variables,
        }
        given = [f"{name}={value}" for name, value in words.items() if value is not None]
        command = ["make", target, *given]
        self.log, self.folder = output_dir / "make.log", RunFolder(output_dir / "run")
        with self.log.open("w") as log:
            self.make = subprocess.Popen(
                command,
                cwd=ROOT,
                env={**os.environ, **QUIET},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait_for(self, text: str) -> None:
        """Return once the output holds `text`, with `everyone` the processes below make that run then."""
        deadline = time.monotonic() + SECONDS
        while text not in self.log.read_text():
            assert self.make.poll() is None and time.monotonic() < deadline, self.log.read_text()[
                -3000:
            ]
            time.sleep(0.05)
        self.everyone = psutil.Process(self.make.pid).children(recursive=True)

    def ranks(self) -> list[psutil.Process]:
        """Return the processes that run the worker, rank 0 first."""
        found = [
            p
            for p in psutil.process_iter(["environ", "cmdline"])
            if str(self.folder.path) in (p.info["cmdline"] or [])
            and "RANK" in (p.info["environ"] or {})
        ]
        return sorted(found, key=lambda p: int(p.info["environ"]["RANK"]))

    def finish(self) -> None:
        """Wait for an end without an error."""
        assert self.make.wait(SECONDS) == 0, self.log.read_text()[-3000:]
