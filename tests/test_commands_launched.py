"""Processes of a launcher that the user started: which one plans, and what the others hear."""

import os
import subprocess
import sys
import threading

import pytest

from sft_play.commands import launched as launching
from sft_play.config.place import LaunchPlace
from sft_play.errors import EnvironmentFault
from sft_play.plan.launch import WORKER, free_port
from sft_play.runs.folder import RunFolder


@pytest.fixture
def place() -> LaunchPlace:
    """The second of three processes on this machine."""
    return LaunchPlace(1, 3, 1, 3, "127.0.0.1", free_port())


class Waiting(threading.Thread):
    """Another process of the machine, which waits for the first one's answer."""

    def __init__(self, place: LaunchPlace) -> None:
        super().__init__(daemon=True)
        self.place = place
        self.answer: object = "none yet"
        self.start()

    def run(self) -> None:
        self.answer = launching._wait_for_answer(self.place)

    def result(self) -> object:
        self.join(20)
        return self.answer


def test_all_that_wait_hear_of_the_run_also_those_that_came_first(place, tmp_path):
    early = Waiting(place)
    meeting = launching.Meeting(place)
    late = Waiting(place)
    with meeting:
        meeting.announce(RunFolder(tmp_path))
    assert early.result() == late.result() == launching.LeaderMessage(str(tmp_path))


@pytest.mark.parametrize(
    ("end", "code"), [(SystemExit(10), 10), (SystemExit(0), 0), (ValueError("a fault of ours"), 1)]
)
def test_all_that_wait_end_as_the_first_one_does(place, end, code):
    meeting = launching.Meeting(place)
    waiting = [Waiting(place), Waiting(place)]
    with pytest.raises(type(end)), meeting:
        raise end
    assert [each.result() for each in waiting] == [launching.LeaderMessage(exit_code=code)] * 2


def test_all_that_wait_notice_that_the_first_one_was_killed(place):
    meeting = launching.Meeting(place)
    waiting = Waiting(place)
    connection, _ = meeting.socket.accept()
    connection.close()
    meeting.socket.close()
    assert waiting.result() is None


def test_a_process_that_does_not_come_is_an_error(place, tmp_path, monkeypatch):
    monkeypatch.setattr(launching, "ARRIVAL_SECONDS", 0.1)
    with pytest.raises(EnvironmentFault, match="2 of 3 processes of this machine did not start"):
        launching.Meeting(place).announce(RunFolder(tmp_path))


def test_two_launches_do_not_share_a_port(place):
    first = launching.Meeting(place)
    with pytest.raises(EnvironmentFault, match="another launch on this machine uses it"):
        launching.Meeting(place)
    first.socket.close()


def test_one_process_is_left_where_one_is_forced():
    environ = {"WORLD_SIZE": "2", "UNSLOTH_FORCE_SINGLE_GPU": "1", "DEVICE": "cpu"}
    started = [launching.read_launch({**environ, "RANK": rank}) for rank in ("0", "1")]
    assert [each.is_surplus for each in started] == [False, True]
    assert started[0].place is None
    assert "WORLD_SIZE" not in started[0].environ


def start(rank: int, port: int, *words: str, **environ: str) -> subprocess.Popen[str]:
    """Start one of two processes by hand, as `RANK=0 WORLD_SIZE=2 python scripts/train.py`."""
    variables = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_PORT": str(port), **environ}
    return subprocess.Popen(
        [sys.executable, str(WORKER), f"--local_rank={rank}", *words],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.parametrize(
    ("words", "environ", "message", "code"),
    [
        (("--config", "tiny"), {"TRAIN_BATCH_SIZE": "0"}, "train.batch_size=0 is not valid", 10),
        (("--confg", "tiny"), {}, "No such option: --confg", 2),
    ],
)
def test_an_error_of_the_plan_ends_both_processes_with_one_message(words, environ, message, code):
    port = free_port()
    processes = [start(rank, port, *words, **environ) for rank in (1, 0)]
    texts = [process.communicate(timeout=60)[0] for process in processes]
    assert [process.returncode for process in processes] == [code, code]
    assert texts[0] == ""
    assert texts[1].count(message) == 1


def test_the_words_are_those_of_the_user():
    words = ["--local_rank=1", "--config", "tiny", "--local-rank=1"]
    assert launching.own_words(words) == ["--config", "tiny"]


@pytest.mark.parametrize("given", [["--deepspeed", "a.json"], ["--deepspeed=a.json"]])
def test_a_json_behind_deepspeed_is_the_one_that_is_named(given):
    words = ["--config", "tiny", *given, "--set", "train.seed=1"]
    left, variables = launching.named_json(words)
    assert left == ["--config", "tiny", "--deepspeed", "--set", "train.seed=1"]
    assert variables == {"DEEPSPEED_CONFIG": "a.json"}
    assert launching.named_json(left) == (left, {})
