"""Signals, and processes that end with the one that started them: real ones, in forks."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from sft_play import stops
from sft_play.data import tokenize
from sft_play.stops import REPEAT_SECONDS, STOPPING, StopSignals

FORK = multiprocessing.get_context("fork")
SECONDS = 60  # for a busy machine


def in_child(work: Callable[..., None], *arguments: object) -> multiprocessing.Process:
    child = FORK.Process(target=work, args=arguments)
    child.start()
    return child


def children_of(process: multiprocessing.Process, number: int) -> list[psutil.Process]:
    """Return the children of a process, once there are as many."""
    deadline = time.monotonic() + SECONDS
    while len(found := psutil.Process(process.pid).children()) < number:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return found


@pytest.mark.parametrize("number", STOPPING)
def test_a_first_signal_interrupts_and_the_handlers_come_back(number):
    before = signal.getsignal(number)
    with StopSignals() as signals:
        assert not signals.requested
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)
        signal.raise_signal(number)  # a launcher passes it on
        assert signals.requested
    assert signal.getsignal(number) == before


def test_a_second_signal_of_the_user_leaves_at_once_and_one_of_the_system_does_not():
    left: list[int] = []
    with StopSignals() as signals:
        signals.on_first = signals.at_once = lambda *number: left.append(len(number))
        signal.raise_signal(signal.SIGTERM)
        signals._requested_at -= REPEAT_SECONDS + 1
        signal.raise_signal(signal.SIGHUP)
        signal.raise_signal(signal.SIGUSR1)
        assert left == [1]
        signal.raise_signal(signal.SIGINT)
    assert left == [1, 0]


def test_nohup_keeps_a_run_from_hearing_that_its_terminal_was_closed():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignals() as signals:
            signal.raise_signal(signal.SIGHUP)
            assert not signals.requested
            assert signal.SIGHUP not in stops.listened()
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_signal_before_a_process_becomes_another_one_is_heard_by_that_one(tmp_path):
    other = (
        "from sft_play.stops import StopSignals\n"
        "with StopSignals() as signals:\n"
        "    print('kept')\n"
        "    signals.release()\n"
        "    print('not heard')\n"
    )

    def become() -> None:
        stops.hold()
        signal.raise_signal(signal.SIGTERM)
        with (tmp_path / "said").open("w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        os.execv(sys.executable, [sys.executable, "-c", other])

    child = in_child(become)
    child.join(SECONDS)
    said = (tmp_path / "said").read_text()
    assert "kept" in said and "KeyboardInterrupt" in said and "not heard" not in said


LAUNCHER = """
import signal, subprocess, sys, time
from sft_play import stops

def end():
    print("ended before a child", flush=True)
    stops.leave()

signal.signal(signal.SIGTERM, lambda *_: 1 / 0)  # torchrun's raises an error, too
begin = stops.pass_on(end)
if sys.argv[1:]:
    begin()
    sys.exit(subprocess.run([sys.executable, "-c", sys.argv[1]]).returncode)
print("imports", flush=True)
time.sleep(60)
"""
CHILD = """
import signal, sys, time
print("starts", flush=True)
time.sleep(0.5)
heard = []
signal.signal(signal.SIGTERM, lambda *_: heard.append(1))
signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
for number in (1, 2):
    while len(heard) < number:
        time.sleep(0.01)
    print("heard", number, flush=True)
sys.exit(75)
"""


def test_a_launcher_passes_each_signal_on_and_ends_as_its_child_ends():
    """Also one that comes before the child listens."""
    command = [sys.executable, "-c", LAUNCHER, CHILD]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as launcher:
        for said in ("starts\n", "heard 1\n"):
            assert launcher.stdout.readline() == said
            launcher.send_signal(signal.SIGTERM)
        assert launcher.communicate(timeout=SECONDS) == ("heard 2\n", "")
    assert launcher.returncode == 75


def test_a_signal_ends_a_launcher_that_has_started_nothing():
    command = [sys.executable, "-c", LAUNCHER]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout.readline() == "imports\n"
        launcher.send_signal(signal.SIGINT)
        assert launcher.communicate(timeout=SECONDS)[0] == "ended before a child\n"
    assert launcher.returncode == 75


def sleeping_chunks(task: int) -> None:
    time.sleep(60)


def tokenize_rows() -> None:
    with StopSignals():
        list(tokenize.tokenize_tasks(iter(range(8)), sleeping_chunks, 2))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_processes_that_tokenize_end_with_the_front_end(number):
    front_end = in_child(tokenize_rows)
    pool = children_of(front_end, 2)
    time.sleep(0.2)  # they have begun
    for process in pool:
        process.send_signal(signal.SIGTERM)  # as batch systems do: to every process
    assert all(process.is_running() for process in pool)
    os.kill(front_end.pid, number)
    assert not psutil.wait_procs(pool, timeout=SECONDS)[1]
    front_end.join(SECONDS)
    assert not front_end.is_alive()


def refuse_nohup() -> None:
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        pytest.skip("these tests run under nohup, and so a hangup is to be ignored")


@pytest.mark.faults
def test_a_signal_at_any_moment_of_the_tokenizers_start_ends_it():
    """An interrupt between a fork and its entry in the pool would wait for that process for ever."""
    refuse_nohup()
    for moment in range(40):
        front_end = in_child(tokenize_rows)
        time.sleep(moment / 1000)
        os.kill(front_end.pid, (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)[moment % 3])
        front_end.join(SECONDS)
        assert not front_end.is_alive(), moment


def test_a_process_ends_with_the_one_that_started_it_where_the_system_does_not_say_so(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")

    def start_one() -> None:
        in_child(lambda: (stops.end_with_parent(), time.sleep(60)))
        time.sleep(60)

    parent = in_child(start_one)
    (child,) = children_of(parent, 1)
    time.sleep(0.2)
    parent.kill()
    assert not psutil.wait_procs([child], timeout=SECONDS)[1]
    parent.join()


@pytest.mark.faults
@pytest.mark.parametrize(
    ("number", "target"),
    [
        (signal.SIGKILL, "front end"),
        (signal.SIGKILL, "make"),
        (signal.SIGTERM, "front end"),
        (signal.SIGTERM, "group"),
        (signal.SIGINT, "group"),
        (signal.SIGHUP, "group"),
    ],
)
def test_a_signal_while_rows_are_tokenized_ends_all_processes(tmp_path, number, target):
    from sft_play.runs.folder import RunFolder

    refuse_nohup()
    rows = tmp_path / "rows.jsonl"
    line = '{"question": "%d %s", "answer": "%s"}\n'
    with rows.open("w") as file:
        for row in range(60_000):
            file.write(line % (row, "word " * 60, "yes " * 40))
    words = {
        "CONFIG": "tests/fixtures/empty.yaml",
        "MODEL_NAME": "data/tiny_llama",
        "DEVICE": "cpu",
        "RUN": "run",
        "PY": sys.executable,
        "DATA_TRAIN_PATH": rows,
        "DATA_CACHE_DIR": tmp_path / "cache",
        "TRAIN_OUTPUT_DIR": tmp_path,
    }
    make = subprocess.Popen(
        ["make", "train", *(f"{name}={value}" for name, value in words.items())],
        cwd=Path(__file__).resolve().parents[1],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    (front_end,) = children_of(make, 1)
    pool = children_of(front_end, 3)  # two that tokenize, and the rank that waits for its folder
    victim = {"front end": front_end.pid, "make": make.pid, "group": -make.pid}[target]
    os.kill(victim, number)
    assert not psutil.wait_procs([front_end, *pool], timeout=SECONDS)[1]
    make.wait(SECONDS)
    report = RunFolder(tmp_path / "run").read_report()
    if number == signal.SIGKILL and target == "front end":
        assert report.state == "died"
    else:
        assert (report.state, report.exit_class) == ("stopped", 75)
