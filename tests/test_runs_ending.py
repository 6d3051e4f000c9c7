"""The last words of a run: below what its launcher prints, and in torchrun's own table."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from calls import outcome_of
from marks import long

from sft_play.runs.folder import ERROR_FILE, RunFolder, last_words, write_for_torchrun
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
    failing = "def main():\n    raise RuntimeError('of the launcher')\n"
    (tmp_path / "failing_launcher.py").write_text(failing)
    command = [sys.executable, "scripts/launch.py", str(folder.path), "failing_launcher"]
    environ = {"PYTHONPATH": str(tmp_path)}
    done = outcome_of(command, environ)
    assert done.returncode == 1
    expected = f"RuntimeError: of the launcher\n\n{WORDS['failed']}\n".format(path=folder.path)
    assert done.stderr.endswith(expected), done.stderr


RANK = """
import os, signal, sys, time
from pathlib import Path
from sft_play.errors import ExitClass
from sft_play.runs.folder import RunFolder
from sft_play.runs.report import RunReport
from sft_play.stops import StopSignals

folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
with StopSignals(is_rank=True) as signals:
    signals.on_first = lambda number: None
    signals.release()
    (folder / f"started-{rank}").touch()
    while not signals.requested:
        time.sleep(0.01)
    time.sleep(1)  # to save a checkpoint, and to hear what comes meanwhile
    if rank == 0:
        report = RunReport(status="stopped", exit_class=75, cause="stopped at step 3")
        RunFolder(folder).write_report(report)
    else:
        time.sleep(1)
sys.exit(ExitClass.STOPPED)
"""


@pytest.mark.slow
@pytest.mark.parametrize("to", ["launcher", long("timeout")])
def test_two_signals_at_once_end_a_launched_run_with_the_class_of_its_ranks(tmp_path, to):
    """As `timeout` of coreutils sends them: one to its child, one to the group."""
    folder = RunFolder(tmp_path / "run")
    folder.write_report(RunReport(status="planned"))
    (tmp_path / "rank.py").write_text(RANK)
    words = "torch.distributed.run --standalone --nproc_per_node 2".split()
    launch = [sys.executable, "scripts/launch.py", str(folder.path), *words]
    launcher = subprocess.Popen(
        [*launch, str(tmp_path / "rank.py"), str(folder.path)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    while len(list(folder.path.glob("started-*"))) < 2:
        assert launcher.poll() is None, launcher.stderr.read()
        time.sleep(0.05)
    launcher.send_signal(signal.SIGTERM)
    if to == "timeout":
        os.killpg(launcher.pid, signal.SIGTERM)
    else:
        time.sleep(0.3)
        launcher.send_signal(signal.SIGTERM)
    errors = launcher.communicate(timeout=60)[1]
    assert launcher.returncode == 75, errors
    assert errors == f"\n{WORDS['stopped']}\n".format(path=folder.path)
    with pytest.raises(ProcessLookupError):
        os.killpg(launcher.pid, 0)


@pytest.mark.slow
def test_a_signal_while_a_launcher_is_imported_ends_the_run_before_it_begins(tmp_path):
    folder = RunFolder(tmp_path / "run")
    folder.write_report(RunReport(status="planned"))
    module = "import pathlib, time\npathlib.Path('imports').touch()\ntime.sleep(60)\n"
    (tmp_path / "slow_launcher.py").write_text(module)
    launcher = subprocess.Popen(
        [sys.executable, str(ROOT / "scripts/launch.py"), str(folder.path), "slow_launcher"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        stderr=subprocess.PIPE,
        text=True,
    )
    while not (tmp_path / "imports").exists():
        assert launcher.poll() is None
        time.sleep(0.05)
    launcher.send_signal(signal.SIGTERM)
    assert "nothing was trained" in launcher.communicate(timeout=60)[1]
    assert (launcher.returncode, folder.read_report().exit_class) == (75, 75)


def test_the_table_of_torchrun_has_the_cause(tmp_path):
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

    error_file = tmp_path / "error.json"
    write_for_torchrun({}, CAUSE)  # started by nobody
    write_for_torchrun({ERROR_FILE: str(error_file)}, CAUSE)
    failures = {
        0: ProcessFailure(0, 100, 15, str(tmp_path / "none.json")),
        1: ProcessFailure(1, 101, 15, str(error_file)),
    }
    failures[0].timestamp += 1  # noticed later
    table = str(ChildFailedError("train.py", failures))
    _, root = table.split("Root Cause (first observed failure):")
    assert f"traceback : {CAUSE}" in root
