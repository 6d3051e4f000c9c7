"""The last words of a run: below what its launcher prints, and in torchrun's own table."""

import subprocess
import sys
from pathlib import Path

import pytest

from sft_play.runs.folder import ERROR_FILE, RunFolder, last_words, tell_launcher
from sft_play.runs.report import RunReport

ROOT = Path(__file__).resolve().parents[1]
CAUSE = "train.batch_size=8 does not fit; try TRAIN_BATCH_SIZE=4"
ENDED = {
    "failed": RunReport(status="failed", exit_class=15, cause=CAUSE, next="make train RUN=a"),
    "unexpected": RunReport(status="failed", exit_class=1, cause="it broke", next="make train"),
    "stopped": RunReport(status="stopped", exit_class=75, cause="stopped at step 3"),
    "done": RunReport(status="done", exit_class=0),
    "running": RunReport(status="running"),
}
WORDS = {
    "failed": f"{CAUSE}\nexit class 15 (out_of_memory), {{path}}",
    "unexpected": "it broke\nexit class 1 (unexpected), {path}\ngo on with make train",
    "stopped": "stopped at step 3\nexit class 75 (stopped), {path}",
}


@pytest.mark.parametrize("name", ENDED)
def test_the_last_words_of_a_run_are_its_cause_and_what_to_type(name, tmp_path):
    folder = RunFolder(tmp_path)
    folder.write_report(ENDED[name])
    words = WORDS.get(name)
    assert last_words(folder) == (words and words.format(path=tmp_path))


def test_the_cause_of_a_run_is_below_what_its_launcher_prints(tmp_path):
    folder = RunFolder(tmp_path / "run")
    folder.write_report(ENDED["failed"])
    (tmp_path / "failing_launcher.py").write_text("raise RuntimeError('of the launcher')\n")
    command = [sys.executable, "scripts/launch.py", str(folder.path), "failing_launcher"]
    environ = {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True)
    assert done.returncode == 1
    expected = f"RuntimeError: of the launcher\n\n{WORDS['failed']}\n".format(path=folder.path)
    assert done.stderr.endswith(expected), done.stderr


def test_the_table_of_torchrun_has_the_cause(tmp_path):
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

    error_file = tmp_path / "error.json"
    tell_launcher({}, CAUSE)  # started by nobody
    tell_launcher({ERROR_FILE: str(error_file)}, CAUSE)
    failures = {
        0: ProcessFailure(0, 100, 15, str(tmp_path / "none.json")),
        1: ProcessFailure(1, 101, 15, str(error_file)),
    }
    failures[0].timestamp += 1  # noticed later
    table = str(ChildFailedError("train.py", failures))
    _, root = table.split("Root Cause (first observed failure):")
    assert f"traceback : {CAUSE}" in root
