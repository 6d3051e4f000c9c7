"""Runs on GPUs that are stopped and killed, and continue: `make test-gpu`, with the figures printed.

A run of 4-bit LoRA is stopped by Ctrl-C, and killed while it writes a checkpoint. The same command
again continues, and its losses are those of a run that was left alone.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil
import pytest
from make_runs import ROOT, run_make
from run_files import run_json
from test_gpu import needs_two, needs_unsloth

from sft_play.errors import ExitClass
from sft_play.runs import checkpoints
from sft_play.runs.folder import RunFolder

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu

STEPS = 16
SETTINGS = {
    "CONFIG": "configs/tiny.yaml",
    "RUN": "run",
    "RESUME": "auto",
    "TUNING_MODE": "qlora",
    "TRAIN_MAX_STEPS": str(STEPS),
    "TRAIN_LOGGING_STEPS": "1",
    "TRAIN_LEARNING_RATE": "2e-3",
    "TRAIN_SAVE_STRATEGY": "steps",
    "TRAIN_SAVE_STEPS": "1",
    "TRAIN_EVAL_STRATEGY": "no",
    "TRAIN_REOPEN_SAVED": "false",
    "TRAIN_PREDICT_WITH_GENERATE": "false",
}
SECONDS = 400
# A kernel that adds in another order each time rounds bfloat16 otherwise; losses fall from 3.3.
TOLERANCE = 6e-3
STARTS = [
    pytest.param("train-bnb", {}, id="bnb"),
    pytest.param("train-unsloth", {}, id="unsloth", marks=needs_unsloth),
    pytest.param("train-distributed", {"NUM_GPUS": "2"}, id="ddp", marks=needs_two),
    pytest.param("train-deepspeed", {"NUM_GPUS": "2"}, id="zero2", marks=needs_two),
]


class Started:
    """A make target that runs: its processes, and the folder of its run."""

    def __init__(self, target: str, variables: Mapping[str, str], outputs: Path):
        words = {**SETTINGS, **variables, "TRAIN_OUTPUT_DIR": str(outputs), "PY": sys.executable}
        self.folder = RunFolder(outputs / "run")
        self.output = outputs / "output.txt"
        outputs.mkdir(parents=True, exist_ok=True)
        with self.output.open("w") as file:
            self.process = subprocess.Popen(
                ["make", target, *(f"{name}={value}" for name, value in words.items())],
                cwd=ROOT,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait_until(self, is_so: Callable[[], bool]) -> None:
        """Wait for something that happens while the run continues."""
        deadline = time.monotonic() + SECONDS
        while not is_so():
            assert self.process.poll() is None, self.output.read_text()[-3000:]
            assert time.monotonic() < deadline, self.output.read_text()[-3000:]
            time.sleep(0.001)

    def has_logged(self, text: str) -> bool:
        """Return whether a text is in the log of the main rank."""
        log = self.folder.logs / "rank-0.log"
        return log.exists() and text in log.read_text()

    def signal_all(self, number: signal.Signals) -> float:
        """Send a signal to every process, as a terminal or an administrator does.

        Returns the seconds until all have ended.
        """
        parent = psutil.Process(self.process.pid)
        everyone = [*parent.children(recursive=True), parent]
        began = time.monotonic()
        if number == signal.SIGKILL:
            for process in everyone:
                process.kill()
        else:
            os.killpg(self.process.pid, number)
        _, alive = psutil.wait_procs(everyone, timeout=SECONDS)
        assert not alive, alive
        self.process.wait()
        return time.monotonic() - began


def losses_of(folder: RunFolder) -> dict[int, float]:
    """Return the loss of each step."""
    return {logged["step"]: logged["loss"] for logged in run_json(folder)["loss"]}


def staged(folder: RunFolder) -> list[Path]:
    """Return the checkpoints from step 5 on that are being written."""
    staging = folder.checkpoints / checkpoints.STAGING
    found = staging.glob("checkpoint-*") if staging.exists() else ()
    return [path for path in found if checkpoints.step_of(path) >= 5]


@pytest.mark.parametrize("target, variables", STARTS)
def test_a_run_that_is_killed_in_a_save_and_then_stopped_ends_as_if_it_had_not_been(
    tmp_path, target, variables
):
    """One run, four starts of make: the same command three times, next to one that is left alone."""
    alone = Started(target, variables, tmp_path / "alone")
    outputs = tmp_path / "outputs"
    started = Started(target, variables, outputs)
    started.wait_until(lambda: bool(staged(started.folder)))
    started.signal_all(signal.SIGKILL)
    left = [path.name for path in staged(started.folder)]
    alone.process.wait(SECONDS)
    expected = losses_of(alone.folder)
    assert sorted(expected) == list(range(1, STEPS + 1)), alone.output.read_text()[-3000:]
    assert expected[STEPS] < 0.7 * expected[1]

    again = Started(target, variables, outputs)
    again.wait_until(lambda: again.has_logged(f"step {STEPS - 4}/{STEPS} "))
    seconds = again.signal_all(signal.SIGINT)
    report = run_json(again.folder)
    assert report["exit_class"] == ExitClass.STOPPED, report["cause"]
    assert checkpoints.step_of(Path(report["resumed_from"])) >= 4
    (newest,) = (path for path in again.folder.checkpoints.glob(f"*-{report['global_step']}"))
    assert newest.is_dir(), "no step is lost"
    after_kill = largest_difference(again.folder, expected)

    run_make(target, outputs, SECONDS, **SETTINGS, **variables)
    report = run_json(started.folder)
    assert (report["status"], report["global_step"]) == ("done", STEPS)
    after_stop = largest_difference(started.folder, expected)
    print(
        f"\n{target}: killed with {', '.join(left) or 'nothing'} half written; Ctrl-C ended it in "
        f"{seconds:.1f} s; largest difference of a loss {after_kill:.2e} and {after_stop:.2e}"
    )


def largest_difference(folder: RunFolder, expected: dict[int, float]) -> float:
    """Return how far the losses since a run was resumed are from those of one left alone."""
    report = run_json(folder)
    begun = checkpoints.step_of(Path(report["resumed_from"]))
    found = losses_of(folder)
    compared = [step for step in range(begun + 1, report["global_step"] + 1) if step in found]
    assert len(compared) == report["global_step"] - begun
    largest = max(abs(found[step] - expected[step]) for step in compared)
    assert largest <= TOLERANCE
    return largest
