"""Find ranks of this launch on this machine that have ended. Does not load torch."""

import os
import time
from collections.abc import Sequence

import psutil

from sft_play import stops
from sft_play.errors import ExitClass
from sft_play.runs import folder

ORPHAN_SECONDS = 120  # to save a last checkpoint, after the launcher has ended
OF_TORCHRUN = "TORCHELASTIC_RUN_ID"  # set by torchrun, which accelerate starts, too


def rank() -> int:
    """Return the global rank of this process, 0 without a launcher."""
    return int(os.environ.get("RANK", 0))


def end_with_launcher() -> None:
    """Start a thread that ends this rank if its launcher is killed: it would keep its GPU.

    First send a signal, so that a last checkpoint is saved. A rank that waits in C++ for another
    rank does not handle signals, so after ORPHAN_SECONDS the process exits.
    """

    def end() -> None:
        os.kill(os.getpid(), stops.PARENT_GONE)
        time.sleep(ORPHAN_SECONDS)
        os._exit(ExitClass.PEER_LOST)

    stops.watch_parent(end)


def print_in_torchrun(cause: str) -> None:
    """Make torchrun print why this rank ends, in the last table that it prints."""
    folder.write_for_torchrun(os.environ, cause)


def missing_ranks() -> list[int]:
    """Return the ranks of this machine that torchrun started and whose process has ended.

    If a rank ends, torchrun sends SIGTERM to the others. A user may send the same signal.
    """
    if OF_TORCHRUN not in os.environ:
        return []
    first = rank() - int(os.environ["LOCAL_RANK"])
    expected = range(first, first + int(os.environ["LOCAL_WORLD_SIZE"]))
    try:
        alive = {_rank_of(process) for process in psutil.Process(os.getppid()).children()}
    except psutil.Error:
        return []  # the launcher is gone, which ends all ranks
    return [number for number in expected if number not in alive]


def describe_missing_ranks(ranks: Sequence[int]) -> str:
    """Return why a run fails whose ranks have ended, and what to do."""
    names = ", ".join(map(str, ranks))
    return (
        f"rank {names} ended without a word: it was killed, or crashed; the end of "
        f"logs/rank-{ranks[0]}.log has its last lines, and dmesg names what was killed for memory"
    )


def _rank_of(process: psutil.Process) -> int | None:
    try:
        if process.status() == psutil.STATUS_ZOMBIE:
            return None
        place = process.environ()
    except psutil.Error:
        return None
    return int(place["RANK"]) if OF_TORCHRUN in place and "RANK" in place else None
