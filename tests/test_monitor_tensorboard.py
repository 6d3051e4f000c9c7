"""`make tensorboard` and `make tb-stop`, with real processes and ports."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import psutil
import pytest
from calls import outcome_of
from run_files import run_json, variables_of

from sft_play.errors import ConfigError, EnvironmentFault
from sft_play.monitor import tensorboard
from sft_play.plan.launch import free_port
from sft_play.process_id import ProcessId
from sft_play.runs.folder import RunFolder


@pytest.fixture
def pid_file(tmp_path):
    """Where the pid file of a test goes; what it names is stopped afterwards."""
    path = tmp_path / "outputs" / ".tensorboard.json"
    yield path
    tensorboard.stop(path)


def _record(pid_file: Path, process: ProcessId) -> None:
    pid_file.parent.mkdir(parents=True, exist_ok=True)
    pid_file.write_text(
        json.dumps({"process": asdict(process), "port": 6006, "logdir": "/somewhere"})
    )


def _interpreter(path: Path, script: str) -> Path:
    """A stand-in for Python that a TensorBoard can fail in."""
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def test_a_recycled_pid_is_never_stopped(pid_file):
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        own = ProcessId.read(child.pid)
        _record(pid_file, replace(own, started=own.started - 60))
        assert tensorboard.stop(pid_file) == "no TensorBoard of ours is running"
        assert child.poll() is None
        assert not pid_file.exists()
        child.communicate(b"\n")


@pytest.mark.parametrize("text", [None, "", "[1]", '{"pid": 1}'])
def test_without_a_readable_pid_file_none_is_running(pid_file, text):
    if text is not None:
        pid_file.parent.mkdir()
        pid_file.write_text(text)
    assert tensorboard.stop(pid_file) == "no TensorBoard of ours is running"


def test_a_process_that_ignores_sigterm_is_killed(pid_file):
    code = (
        "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
        "print('ready', flush=True); signal.pause()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as child:
        assert child.stdout.readline() == b"ready\n"
        _record(pid_file, ProcessId.read(child.pid))
        said = tensorboard.stop(pid_file, grace_seconds=0.1)
        survived = psutil.pid_exists(child.pid)
        child.kill()  # or a failure would hang here
    assert said == f"stopped the TensorBoard of /somewhere on port 6006 (pid {child.pid})"
    assert not survived
    assert not pid_file.exists()


def test_a_tensorboard_that_dies_at_once_is_an_environment_fault_with_its_words(pid_file, tmp_path):
    interpreter = _interpreter(tmp_path / "python", "echo No module named tensorboard >&2; exit 1")
    with (
        socket.create_server(("127.0.0.1", 0)) as busy,
        pytest.raises(EnvironmentFault, match="No module named tensorboard"),
    ):
        tensorboard.start_tensorboard(
            tmp_path, busy.getsockname()[1], str(interpreter), {}, pid_file
        )
    assert not pid_file.exists()


def test_a_call_that_cannot_start_is_an_error_with_what_is_wrong(pid_file, tmp_path, monkeypatch):
    monkeypatch.setattr(tensorboard, "PORTS_TRIED", 1)
    with socket.create_server(("127.0.0.1", 0)) as busy:
        for port, python, kind, said in (
            (busy.getsockname()[1], sys.executable, EnvironmentFault, "no free port"),
            (free_port(), str(tmp_path / "none"), EnvironmentFault, "make install"),
            (65536, sys.executable, ConfigError, "TB_PORT=65536"),
        ):
            with pytest.raises(kind, match=said):
                tensorboard.start_tensorboard(tmp_path, port, python, {}, pid_file)


def test_a_tensorboard_that_never_answers_is_stopped(pid_file, tmp_path, monkeypatch):
    interpreter = _interpreter(
        tmp_path / "python",
        f"echo importing; echo $$ > {tmp_path}/pid; exec {shutil.which('tail')} -f /dev/null",
    )
    monkeypatch.setattr(tensorboard, "START_SECONDS", 0.3)
    with pytest.raises(EnvironmentFault, match=r"did not answer on port (?s:.*)importing"):
        tensorboard.start_tensorboard(tmp_path, free_port(), str(interpreter), {}, pid_file)
    assert not pid_file.exists()
    assert not psutil.pid_exists(int((tmp_path / "pid").read_text()))


@pytest.mark.slow
def test_tensorboard_starts_once_beside_a_busy_port_and_stops(pid_file, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]
        first, message = tensorboard.start_tensorboard(
            tmp_path / "logs", port, sys.executable, os.environ, pid_file
        )
    assert first.port > port
    assert f"port {port} is taken, it uses {first.port}" in message
    (address,) = re.findall(r"TensorBoard: (\S+)", message)
    pinned = parse_qs(urlsplit(address).query)["pinnedCards"]
    assert json.loads(pinned[0]) == [{"plugin": "scalars", "tag": "train/loss"}]
    assert json.loads(pid_file.read_text())["process"]["pid"] == first.pid
    with urllib.request.urlopen(f"{first.url}/data/environment") as answer:
        assert json.load(answer)["data_location"] == str(tmp_path / "logs")
    again, _ = tensorboard.start_tensorboard(
        tmp_path / "logs", port, sys.executable, os.environ, pid_file
    )
    assert (again.pid, again.port) == (first.pid, first.port)
    other, message = tensorboard.start_tensorboard(
        tmp_path / "other", port, sys.executable, os.environ, pid_file
    )
    assert other.pid != first.pid and not psutil.pid_exists(first.pid)
    assert f"stopped the TensorBoard of {tmp_path / 'logs'}" in message
    with pytest.raises(ConfigError, match=f"TB_PORT=1: .* type make tb-stop TB_PORT={other.port}"):
        tensorboard.stop(pid_file, port=1)
    stopped = tensorboard.stop(pid_file, port=other.port)
    assert stopped.startswith(f"stopped the TensorBoard of {tmp_path / 'other'}")
    assert not psutil.pid_exists(other.pid) and tensorboard._is_free(other.port)
    assert tensorboard.stop(pid_file) == "no TensorBoard of ours is running"


@pytest.mark.long
@pytest.mark.parametrize("target", ["train-distributed-tb", "train-deepspeed-tb"])
def test_a_target_that_ends_in_tb_trains_with_tensorboard_beside_it(target, settings_of, tmp_path):
    words = variables_of(settings_of({"train.predict_with_generate": False}))
    words |= {
        "CONFIG": "tests/fixtures/empty.yaml",
        "TRAIN_OUTPUT_DIR": str(tmp_path),
        "RUN": "run",
        "DEVICE": "cpu",
        "NUM_GPUS": "2",
        "TB_PORT": str(free_port()),
        "PY": sys.executable,
    }
    command = ["make", target, *(f"{name}={value}" for name, value in words.items())]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    try:
        done = outcome_of(command, environ, 400)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        assert run_json(RunFolder(tmp_path / "run"))["world_size"] == 2
        url = re.search(r"TensorBoard: (http://127\.0\.0\.1:\d+)", done.stdout)[1]
        deadline = time.monotonic() + 60
        tags: dict[str, Any] = {}
        while not tags and time.monotonic() < deadline:  # it reads the files now and then
            with urllib.request.urlopen(f"{url}/data/plugin/scalars/tags") as answer:
                tags = json.load(answer)
            time.sleep(0.5)
    finally:
        said = tensorboard.stop(tmp_path / ".tensorboard.json")
    assert any("train/loss" in of_run for of_run in tags.values()), tags
    assert said.startswith("stopped the TensorBoard of ")
