"""The only rank of a run is started while its rows are read; another process waits to open its weights."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from rank_processes import start_command, wait_for
from test_launch_variables import SECONDS, start, variables_of

from sft_play import timeline
from sft_play.commands.early import RELAY, EarlyRank
from sft_play.errors import ExitClass
from sft_play.evaluation import opener
from sft_play.inference.export import export_run
from sft_play.plan.launch import WORKER, Launch
from sft_play.runs.exports import ExportAsked
from sft_play.runs.folder import RunFolder

ROOT = Path(__file__).parents[1]
REOPENED = "plain transformers opens the saved weights and says the same"
# what becomes the relay of a program that it has started
STARTER = """
import os, signal, subprocess, sys
signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM,))  # as the front end, until it is relayed
rank = subprocess.Popen([sys.executable, "-c", sys.argv[2]])
os.execv(sys.executable, [sys.executable, "-S", sys.argv[1], str(rank.pid)])
"""
SLEEPS = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
signal.pthread_sigmask(signal.SIG_SETMASK, ())
print("ready", flush=True)
time.sleep(60)
"""


def relay(program: str) -> subprocess.Popen:
    words = [sys.executable, "-c", STARTER, str(RELAY), program]
    return subprocess.Popen(words, stdout=subprocess.PIPE, text=True)


def test_a_relay_passes_signals_on_and_ends_as_its_rank_ends() -> None:
    process = relay(SLEEPS)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    assert process.wait(10) == ExitClass.STOPPED
    assert relay("import os; os.kill(os.getpid(), 9)").wait(10) == 128 + signal.SIGKILL
    assert relay("raise SystemExit(14)").wait(10) == ExitClass.DIVERGED


RANK = (sys.executable, str(WORKER), "outputs/a")
CPU = {"CUDA_VISIBLE_DEVICES": ""}


@pytest.mark.parametrize(
    "other",
    [
        Launch(RANK, {"CUDA_VISIBLE_DEVICES": "1"}),
        Launch((sys.executable, "-m", "torch.distributed.run"), CPU),  # as of ZeRO's only rank
    ],
)
def test_a_rank_that_the_plan_would_start_otherwise_is_not_taken(tmp_path, other) -> None:
    early = EarlyRank.start(Launch(RANK, CPU), os.environ)
    assert early.begin(other, tmp_path, os.environ) is None
    assert early.process.returncode == -signal.SIGKILL


def test_a_rank_ends_with_a_command_that_fails() -> None:
    program = (
        "import os, sys; from sft_play.commands.early import EarlyRank, Launch; "
        "print(EarlyRank.start(Launch((sys.executable,), {}), os.environ).process.pid)"
    )
    words = [sys.executable, "-c", program]
    pid = int(subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout)
    until = time.monotonic() + 10
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < until
        time.sleep(0.05)


def test_a_run_has_its_rank_before_its_rows(settings_of, tmp_path) -> None:
    run = start(settings_of, tmp_path, (), TRAIN_REOPEN_SAVED="true")
    said = run.communicate(timeout=SECONDS)[0]
    assert run.returncode == 0, said[-3000:]
    report = json.loads((tmp_path / "run" / "run.json").read_text())
    assert report["launcher_pid"] == run.pid != report["pid"]
    parts = {span["name"]: span for span in report["timeline"]}
    assert parts["imports"]["start"] < parts["rows are tokenized"]["end"]
    assert parts["config and plan"]["start"] <= min(span["start"] for span in parts.values())
    (check,) = [check for check in report["checks"] if check["name"] == REOPENED]
    assert check["passed"] and "opening the saved weights with plain transformers" in parts
    (line,) = [line for line in said.splitlines() if "adapter eval_loss=" in line]
    assert line.endswith("on 6 rows top-1 agreement=1.000 KL=0.0e+00 (at most 1e-06) stops=6/6")
    loss = report["metrics"]["after"]["eval_loss"]
    assert f"eval_loss={loss:.4f} (run {loss:.4f})" in line, "six rows are all of the test rows"
    page = (tmp_path / "run" / "report.html").read_text()
    assert "When what happened" in page and " s of steps, " in page


def test_what_fails_is_in_the_timeline_too() -> None:
    with pytest.raises(ValueError), timeline.span("a part that fails"):
        raise ValueError
    assert timeline.spans.pop().name == "a part that fails"


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_rank_saves_a_checkpoint_when_its_relay_is_stopped_or_killed(
    settings_of, tmp_path, number
) -> None:
    environ = variables_of(settings_of, tmp_path, TRAIN_MAX_STEPS="100000")
    output, report = tmp_path / "output.txt", tmp_path / "run" / "run.json"
    run = start_command(("train",), environ, output)
    until = time.monotonic() + SECONDS
    while not (output.exists() and "\nstep 1/" in output.read_text()):
        assert run.is_alive() and time.monotonic() < until, output.read_text()[-3000:]
        time.sleep(0.05)
    launched = json.loads(report.read_text())
    assert launched["launcher_pid"] == run.pid
    rank = psutil.Process(launched["pid"])
    os.kill(run.pid, number)
    wait_for(run)
    rank.wait(SECONDS)
    ended = json.loads(report.read_text())
    assert ended["exit_class"] == ExitClass.STOPPED
    assert any(RunFolder(tmp_path / "run").path.glob("checkpoints/*/MANIFEST.json"))


# packages that take long to import, and that training a LoRA does not use
UNUSED_BY_A_RANK = (
    "deepspeed",
    "unsloth",
    "trl",
    "evaluate",
    "rouge_score",
    "sklearn",
    "matplotlib",
)
OPENS_TWICE = """
import json, os, signal, sys, time
from pathlib import Path
from sft_play.evaluation import opener

def fork_loader():
    # with all files of this one, as a process that prepares batches has them
    pid = os.fork()
    if pid == 0:
        signal.alarm(60)
        time.sleep(600)
    return pid

opener.fork_opener()
loaders = [fork_loader()]
opener.dismiss()  # of no use, it ends
opener.fork_opener()
loaders += [fork_loader()]
(waiting, _), = opener._waiting
import sft_play.training.worker  # of which the process that waits is to know nothing
unused = [name for name in sys.argv[3:] if name in sys.modules]
from sft_play.evaluation.reference import Reference
from sft_play.evaluation.reopened import Folder, reopen
weights, evaluation = map(Path, sys.argv[1:3])
found = []
for fresh in (None, opener.subprocess):  # the first one must not start a process
    opener.subprocess = fresh
    found += [reopen(Folder(weights, "float32", {"": "cpu"}), Reference.read(evaluation))]
for loader in loaders:
    os.kill(loader, signal.SIGKILL)
    assert os.WTERMSIG(os.waitpid(loader, 0)[1]) == signal.SIGKILL, "it was not waited for"
print(json.dumps([waiting, unused, *(each.as_json() for each in found)]))
"""


@pytest.mark.long
def test_a_process_that_waited_opens_weights_as_a_fresh_one_does(finished) -> None:
    folder = finished("lora")
    weights = str(folder.weights("lora"))
    words = [sys.executable, "-c", OPENS_TWICE, weights, str(folder.evaluation), *UNUSED_BY_A_RANK]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    waited, imported, first, second = json.loads(done.stdout)
    assert imported == []
    assert first == second and first["faults"] == []
    assert not psutil.pid_exists(waited)


def test_a_process_that_was_killed_while_it_waited_is_replaced(tmp_path, monkeypatch) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    monkeypatch.setattr(opener, "_waiting", [(0, writing)])
    monkeypatch.setattr(opener, "SCRIPT", tmp_path / "script.py")
    opener.SCRIPT.write_text("import sys; print(sys.argv[1:]); sys.exit(3)")
    assert opener.run_opener(tmp_path / "a", tmp_path / "b", tmp_path / "said") == 3
    assert str(tmp_path / "a") in (tmp_path / "said").read_text()


@pytest.mark.slow
def test_a_first_export_opens_the_merge_and_the_quantized_files_once(
    finished, tmp_path, monkeypatch
):
    """Each process that opens a folder names it."""
    run = RunFolder(shutil.copytree(finished("lora").path, tmp_path / "run"))
    script, opened = tmp_path / "script.py", tmp_path / "opened"
    script.write_text(
        f"import json, runpy, sys; from pathlib import Path; opened = Path({str(opened)!r})\n"
        "with opened.open('a') as file: file.write(json.load(open(sys.argv[1]))['path'] + '\\n')\n"
        f"runpy.run_path({str(opener.SCRIPT)!r}, run_name='__main__')\n"
    )
    monkeypatch.setattr(opener, "SCRIPT", script)
    export_run(run, ExportAsked("int4", least_gain=0.0), "cpu")
    assert len(opened.read_text().splitlines()) == 2
