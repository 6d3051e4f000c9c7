"""RESUME: the same command typed again continues, and a finished run is not trained again."""

import errno
import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from run_files import GONE, held_by_another, write_holder
from safetensors.torch import load_file

from sft_play.commands import call as calls
from sft_play.commands import train as training
from sft_play.commands.resumption import is_in_place, resumption
from sft_play.data import sources
from sft_play.errors import ConfigError, DataError, EnvironmentFault, ExitClass
from sft_play.plan.run_plan import PlannedRun
from sft_play.process_id import ProcessId
from sft_play.runs import lock
from sft_play.runs.folder import RunFolder, give_up_name
from sft_play.runs.metrics import read_metrics

ROOT = Path(__file__).resolve().parents[1]
NO_CONFIG = ROOT / "tests" / "fixtures" / "empty.yaml"


@pytest.fixture
def typed(settings_of, tmp_path):
    """A function that prepares a run named `run` as `make train` does, up to its launch."""

    def prepare(*words: str, **variables: str) -> RunFolder | str:
        settings = settings_of(
            {
                "train.output_dir": tmp_path,
                "train.max_steps": 4,
                "tuning.lora.dropout": 0.1,
                "train.eval_strategy": "steps",
                "train.eval_steps": 1,
                "train.predict_with_generate": False,
            }
        )
        overrides = tuple(f"{name}={value}" for name, value in settings.items())
        environ = {"DEVICE": "cpu", "RUN": "run", "CONFIG": str(NO_CONFIG), **variables}
        call = calls.Call(calls.invocations.read_invocation(environ), environ, (*overrides, *words))
        begin = resumption(call)
        if begin.finished is not None:
            return begin.finished
        return training.prepare_run(begin.call, distributed=False, use_deepspeed=False)[0]

    return prepare


def test_the_same_command_again_goes_on_in_the_same_folder_as_if_it_had_never_stopped(
    typed, run_worker, losses_of, capsys, monkeypatch, tmp_path
):
    whole = typed(RUN="whole")
    assert run_worker(whole) == ExitClass.DONE
    folder = typed("train.stop_after=2")
    assert run_worker(folder) == ExitClass.STOPPED
    stopped = folder.read_report()
    capsys.readouterr()
    assert typed() == folder
    assert f"run {folder.path} continues; another RUN starts a new run" in capsys.readouterr().out
    assert run_worker(folder) == ExitClass.DONE
    report = folder.read_report()
    assert report.run_id == stopped.run_id
    assert report.resumed_from == str(folder.checkpoints / "checkpoint-2")
    assert losses_of(folder) == losses_of(whole)
    metrics = [run.read_report().metrics for run in (folder, whole)]
    for when in ("before", "after"):  # before is that of the base model
        assert metrics[0][when]["eval_loss"] == metrics[1][when]["eval_loss"]
    names = ("adapter_model.safetensors",)
    weights = [load_file(run.weights("lora") / names[0]) for run in (folder, whole)]
    assert all(weights[0][name].equal(weights[1][name]) for name in weights[1])
    logged = [
        [
            (line.step, line.values["loss"])
            for line in read_metrics(run.metrics).lines
            if "loss" in line.values
        ]
        for run in (folder, whole)
    ]
    assert logged[0] == logged[1], "each step once"
    done = typed()
    assert f"{folder.path} is finished at step 4" in done and "make eval RUN=run" in done
    with pytest.raises(ConfigError) as caught:
        typed("tuning.lora.r=2", "train.save_steps=3", TRAIN_SEED="7")
    _, rank, seed, _ = str(caught.value).splitlines()
    assert rank.startswith("tuning.lora.r=2 (--set") and rank.endswith(" 16")
    assert seed.startswith("train.seed=7 (environment TRAIN_SEED)") and seed.endswith(" 42")
    with pytest.raises(ConfigError, match=r"RUN=run: .* exists already; choose another name"):
        typed(RESUME="never")
    refuse_other_rows(folder, typed, monkeypatch, tmp_path)


def test_a_run_goes_on_with_the_micro_batches_that_it_had(typed, run_worker, tmp_path):
    """As where a probe had found too little memory for those of the plan."""
    words = ("train.batch_size=auto", "train.grad_accum=auto", "train.effective_batch_size=8")
    folder = typed("train.stop_after=2", *words)
    assert run_worker(folder) == ExitClass.STOPPED
    planned = PlannedRun.read(folder)
    assert planned.plan.layout.batch_size == 8
    smaller = replace(planned.plan.layout, batch_size=2, grad_accum=4)
    planned.with_layout(smaller, planned.plan.memory).write(folder)
    assert typed(*words) == folder
    assert PlannedRun.read(folder).plan.layout == smaller
    (folder.path / "plan.json").write_text("{}")  # of another version
    with pytest.raises(EnvironmentFault, match="another version"):
        typed(*words)


def refuse_other_rows(folder: RunFolder, typed, monkeypatch, tmp_path) -> None:
    """Type the command of a finished run again, its rows in other places and with other bytes."""
    config = folder.read_config().data
    train = Path(config.train_path)
    rows = train.read_bytes()
    copied = tmp_path / "rows.jsonl"
    copied.write_bytes(rows)
    asked = f"data.train_path={copied}"
    assert "nothing to do" in typed(asked), "the same rows elsewhere"
    read: list[Path] = []
    digest = sources.digest_files
    monkeypatch.setattr(
        sources, "digest_files", lambda files, *choice: read.extend(files) or digest(files, *choice)
    )
    for edited, is_read in ((rows.replace(b"1", b"2", 1), True), (rows + b"\n", False)):
        copied.write_bytes(edited)
        read.clear()
        with pytest.raises(ConfigError) as caught:
            typed(asked, "tuning.lora.r=2")
        _, rank, rows_of, _ = str(caught.value).splitlines()
        assert rank.startswith("tuning.lora.r=2") and rows_of.startswith("data.train_path=")
        assert f"{copied} has other bytes" in rows_of
        assert (copied in read) is is_read, "another size tells by itself"
    copied.unlink()
    with pytest.raises(DataError, match="no such file"):
        typed(asked)


def test_a_path_is_where_a_new_run_goes_on_from(finished, tmp_path):
    call = named(tmp_path, RESUME="outputs/a")
    assert resumption(call).call.environ["TRAIN_RESUME_FROM"] == "outputs/a"
    path = finished("lora").path
    assert is_in_place(path, str(path)) and is_in_place(path, f"{path}/checkpoints/checkpoint-2")
    assert not is_in_place(tmp_path, str(path)) and not is_in_place(path, None)


def named(output_dir: Path, **variables: str) -> calls.Call:
    environ = {"TRAIN_OUTPUT_DIR": str(output_dir), **variables}
    return calls.Call(calls.invocations.read_invocation(environ), environ, ())


def test_two_answers_and_auto_without_a_name_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="both select what to resume; leave one out"):
        resumption(named(tmp_path, RESUME="auto", TRAIN_RESUME_FROM="a", RUN="b"))
    with pytest.raises(ConfigError, match="set RUN=<name>"):
        resumption(named(tmp_path, RESUME="auto"))
    assert resumption(named(tmp_path, RUN="new")).call.environ.get("TRAIN_RESUME_FROM") is None


# The lock


@pytest.fixture
def folder(tmp_path) -> RunFolder:
    (tmp_path / "run").mkdir()
    return RunFolder(tmp_path / "run")


def assert_taken(folder: RunFolder) -> None:
    """Take a folder, which says whose it was and makes this process its holder."""
    said: list[str] = []
    lock.take(folder.path, said.append)
    assert lock.read_holder(folder.path) == ProcessId.read()
    assert len(said) == 1 and said[0].endswith("this run takes it over"), said


def test_a_folder_in_which_a_run_goes_on_is_refused_with_its_holder(folder):
    with held_by_another(folder.path) as other:
        with pytest.raises(EnvironmentFault) as caught:
            lock.take(folder.path, print)
        assert f"{other} trains in it; make watch" in str(caught.value)
        assert str(caught.value).endswith(f"kill {other.pid} stops it")
        assert caught.value.exit_class == 13
        os.kill(other.pid, signal.SIGKILL)
        os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)
        assert psutil.Process(other.pid).status() == psutil.STATUS_ZOMBIE
        assert_taken(folder)


def test_a_number_that_another_process_had_before_says_nothing(folder):
    own = ProcessId.read(os.getppid())
    write_holder(folder.path, replace(own, started=own.started - 100))
    assert_taken(folder)


@pytest.mark.parametrize("has_ended", [False, True])
def test_the_lock_of_a_process_that_is_gone_is_taken_over_with_a_line(folder, has_ended):
    write_holder(folder.path)
    said: list[str] = []
    lock.take(folder.path, said.append, has_ended=has_ended)
    lock.take(folder.path, said.append)  # its own
    assert len(said) == (not has_ended)
    assert all(f"process {2**22 + 1} on {socket.gethostname()}" in line for line in said)
    assert lock.read_holder(folder.path) == ProcessId.read()


def test_a_lock_that_was_cut_off_is_nobodys(folder):
    (folder.path / lock.NAME).write_text('{"pid": 1')
    lock.take(folder.path, print)
    assert lock.read_holder(folder.path) == ProcessId.read()


def test_a_run_before_a_reboot_is_gone(folder):
    write_holder(folder.path, replace(GONE, boot="another"))
    assert_taken(folder)


def test_a_run_of_another_host_counts_while_it_gives_signs_of_life(folder, monkeypatch):
    monkeypatch.setattr(lock, "is_local", lambda path: False)
    write_holder(folder.path, replace(GONE, host="elsewhere", boot="another"))
    with pytest.raises(EnvironmentFault, match=r"if it is gone for good, rm .*run.lock"):
        lock.take(folder.path, print)
    moment = (folder.path / lock.NAME).stat().st_mtime - lock.SILENT_SECONDS - 1
    os.utime(folder.path / lock.NAME, (moment, moment))
    assert_taken(folder)


def test_ranks_that_outlive_their_launcher_keep_the_folder(folder):
    with held_by_another(folder.path):
        write_holder(folder.path)
        with pytest.raises(EnvironmentFault, match="its launcher is gone, and its ranks save"):
            lock.take(folder.path, print)


def test_the_lock_of_an_older_version_counts_while_its_run_gives_signs_of_life(folder):
    path = folder.path / lock.NAME
    path.write_text(json.dumps({"pid": 2**22 + 1, "host": socket.gethostname(), "started": 1.5}))
    with pytest.raises(EnvironmentFault, match="trains in it"):
        lock.take(folder.path, print)
    moment = path.stat().st_mtime - lock.SILENT_SECONDS - 1
    os.utime(path, (moment, moment))
    assert_taken(folder)


def test_without_locks_of_the_disk_the_process_counts_and_it_is_said(folder, monkeypatch):
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(lock.fcntl, "flock", refuse)
    said: list[str] = []
    write_holder(folder.path, ProcessId.read(os.getppid()))
    with pytest.raises(EnvironmentFault, match=f"kill {os.getppid()} stops it"):
        lock.take(folder.path, said.append)
    write_holder(folder.path, GONE)
    moment = time.time() - lock.ORPHAN_SECONDS - 1
    os.utime(folder.path / lock.NAME, (moment, moment))
    lock.take(folder.path, said.append)
    assert "its file system has no locks (flock)" in said[-1]


def test_a_folder_is_renamed_only_under_its_lock(folder):
    (folder.path / "run.json").write_text('{"status": "failed"}')
    with held_by_another(folder.path):
        assert give_up_name(folder.path.parent, "run") is None
    assert give_up_name(folder.path.parent, "run").name == "run-untrained-1"


def test_a_fork_that_outlives_its_run_does_not_keep_the_folder(folder):
    code = (
        "import os, sys, time; from pathlib import Path; from sft_play.runs import lock; "
        "lock.take(Path(sys.argv[1]), print); child = os.fork(); "
        "time.sleep(60 if child == 0 else 0); print(child, flush=True)"
    )
    command = [sys.executable, "-c", code, str(folder.path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as other:
        child = int(other.stdout.readline())
        other.wait()
        try:
            assert psutil.pid_exists(child)
            assert_taken(folder)
        finally:
            os.kill(child, signal.SIGKILL)


def test_another_machine_of_a_run_is_not_refused_for_the_first_ones_folder(typed, tmp_path):
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    (folder.path / "plan.json").write_text("{}")
    with held_by_another(folder.path):
        second = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "127.0.0.1", "NUM_GPUS": "1"}
        assert typed(**second).name == "run-node1"
        with pytest.raises(EnvironmentFault, match="trains in it"):
            typed()
