"""The watch of ranks over each other, with real processes that are killed, stopped and suspended."""

import os
import signal
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch
from rank_processes import start_rank, wait_for

from sft_kernels.process import Process
from sft_play.plan.launch import free_port
from sft_play.training import peers, ranks
from sft_play.training.ranks import RankWatch

HANG_SECONDS = 2


def be_watched(folder: Path, is_hanging: bool) -> None:
    """Be one of two ranks, which writes why it gives up; it hangs inside a step, or sleeps outside."""
    ranks.TICK_SECONDS, ranks.GONE_SECONDS = 0.2, 0.6
    torch.distributed.init_process_group("gloo")
    rank = peers.rank()

    def give_up(cause):
        (folder / f"{rank}.cause").write_text(cause)
        os._exit(17)

    watch = RankWatch(Process(rank, rank, 2, torch.device("cpu")), folder, HANG_SECONDS, give_up)
    if is_hanging:
        watch.on_step_begin()  # the first step, which compiles
        watch.on_step_begin()
    (folder / f"{rank}.began").touch()
    time.sleep(60)


@pytest.fixture
def start(tmp_path):
    """A function that starts two ranks which watch each other; what is left is killed in the end."""
    started: list[BaseProcess] = []

    def two(is_hanging=False):
        port = free_port()
        for rank in (0, 1):
            started.append(start_rank(be_watched, (tmp_path, is_hanging), rank, port))
        while not all((tmp_path / f"{rank}.began").exists() for rank in (0, 1)):
            assert all(rank.is_alive() for rank in started)
            time.sleep(0.02)
        return started

    yield two
    for rank in started:
        rank.kill()
        rank.join()


def test_a_rank_that_was_killed_is_named_and_ends_the_other(start, tmp_path):
    ranks = start()
    began = time.monotonic()
    ranks[1].kill()
    assert wait_for(ranks[0]) == 17 and time.monotonic() - began < HANG_SECONDS
    assert (tmp_path / "0.cause").read_text().startswith("rank 1 ended without a word: ")


def test_a_rank_that_was_stopped_ends_the_other_and_both_say_where_they_were(start, tmp_path):
    ranks = start()
    began = time.monotonic()
    os.kill(ranks[1].pid, signal.SIGSTOP)
    assert wait_for(ranks[0]) == 17 and time.monotonic() - began < HANG_SECONDS + 3
    cause = (tmp_path / "0.cause").read_text()
    assert cause.startswith(f"rank 1 (process {ranks[1].pid} on ") and "TRAIN_HANG_TIMEOUT" in cause
    assert wait_for(ranks[1]) == 17  # it continues, and finds the other one gone
    for rank in (0, 1):
        assert "in be_watched" in (tmp_path / f"rank-{rank}.stacks").read_text()


@pytest.mark.long
def test_a_job_that_is_suspended_as_a_whole_hangs_for_nobody(start, tmp_path):
    ranks = start()
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for rank in ranks:
            os.kill(rank.pid, number)
        time.sleep(HANG_SECONDS + 0.5 if number == signal.SIGSTOP else 0.8)
    assert all(rank.is_alive() for rank in ranks) and not list(tmp_path.glob("*.cause"))


@pytest.mark.long
def test_ranks_that_live_and_do_not_get_on_in_a_step_end(start, tmp_path):
    ranks = start(is_hanging=True)
    assert [wait_for(rank) for rank in ranks] == [17, 17]
    said = "has finished no micro-batch for 2 s (train.hang_timeout=2)"
    assert any(said in path.read_text() for path in tmp_path.glob("*.cause"))
    assert any(path.stat().st_size for path in tmp_path.glob("*.stacks"))
