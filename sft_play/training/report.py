"""run.json: what became of a run, kept true from the first second, also when the run fails."""

import errno
import logging
import os
import re
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, NoReturn, Self

import torch

from sft_play.errors import ExitClass, SftPlayError, first_line
from sft_play.plan.run_plan import RunPlan
from sft_play.runs import stamp
from sft_play.runs.folder import RunFolder
from sft_play.training.failure_broadcast import FailureBroadcast

logger = logging.getLogger(__name__)
file_only = logging.getLogger("traceback")  # the terminal shows warnings of sft_play alone

# What gloo and NCCL say when a peer is gone or a collective took too long; gloo's errors are plain RuntimeErrors.
PEER_LOST = re.compile(
    r"gloo/|NCCL (error|operation)|Connection (reset|closed) by peer|Broken pipe|Timed out waiting",
    re.IGNORECASE,
)
# What safetensors and torch.save say of a full disk, where Python would raise an OSError.
DISK_FULL = re.compile(
    r"No space left on device|os error 28|Disk quota exceeded|PytorchStreamWriter failed|iostream error|unexpected pos"
)
NO_MEMORY = re.compile(
    r"can't allocate memory|out of memory", re.IGNORECASE
)  # torch's CPU allocator, and CUDA outside torch's


class Report:
    """A context around a rank's work: main writes run.json, and so does the rank that fails first.

    An error is recorded with its exit class, told once, and ends here; `exit_class` is what the process should exit with.
    With an `alarm` it ends the other ranks, too, and this process at once. `explain` says more of an error for want of memory:
    the cause in one line, and facts for run.json.
    """

    def __init__(self, folder: RunFolder, plan: RunPlan, mode: str, backend: str, rank: int):
        self.folder, self.rank, self.world_size = folder, rank, plan.ranks.world_size
        self.exit_class = ExitClass.UNEXPECTED
        self.alarm: FailureBroadcast | None = None
        self.is_following = False  # another rank failed first
        self.explain: Callable[[BaseException], tuple[str, dict[str, Any]]] | None = None
        self.started = time.perf_counter()
        self.facts: dict[str, Any] = {
            "run": folder.name,
            "status": "running",
            "exit_class": None,
            "cause": None,
            "world_size": plan.ranks.world_size,
            "strategy": plan.ranks.strategy,
            "device": plan.ranks.device,
            "backend": backend,
            "mode": mode,
            "checkpointing": plan.checkpointing,
            "global_step": 0,
            "pid": os.getpid(),
            "launcher_pid": os.getppid(),
            "started_at": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "versions": stamp.versions(),
            "seconds": {},
            "tokens_per_second": None,
            "peak_bytes": {
                "predicted": plan.memory.predicted_peak,
                "measured": None,
                "reserved": None,
            },
            "memory": {
                "predicted": plan.memory.totals(),
                "measured": {},
            },
            "metrics": {},
        }

    def __enter__(self) -> Self:
        if not self._has_ended_elsewhere():
            self.write()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        if error is None:
            return False
        if self.is_following:
            file_only.warning(
                "raised while this rank followed another one", exc_info=(kind, error, trace)
            )
            self.alarm.thread.join()  # it ends the process, unless the store went away before it could say that it heard
            os._exit(self.exit_class)
        self.exit_class, cause = classify(error)
        if self.exit_class is ExitClass.OUT_OF_MEMORY and not isinstance(
            error, SftPlayError
        ):  # which has said what to type
            cause = self._explained(error, cause)
        # a cause that has a class is its sentence, on the terminal; the log file has every traceback
        where, is_known = (kind, error, trace), self.exit_class is not ExitClass.UNEXPECTED
        told = f"{cause}\nexit class {int(self.exit_class)} ({self.exit_class.name.lower()}), rank {self.rank}, {self.folder.path}"
        logger.error("%s", told, exc_info=None if is_known else where)
        if is_known:
            file_only.warning("raised here", exc_info=where)
        try:
            self._record(cause)
        except (
            OSError
        ) as unwritable:  # a full disk: the cause was told, and must not be hidden by this
            logger.error("%s cannot be written: %s", self.folder.path / "run.json", unwritable)
        if self.alarm is not None:
            self.alarm.leave(self.exit_class, cause)
        return isinstance(error, Exception | KeyboardInterrupt)  # SystemExit goes on

    def _explained(self, error: BaseException, cause: str) -> str:
        if self.explain is None:
            return cause
        try:
            cause, self.facts["out_of_memory"] = self.explain(error)
        except RuntimeError as unknown:  # the device answers no question any more
            logger.warning("what held the memory cannot be said: %s", unknown)
        return cause

    def _record(self, cause: str) -> None:
        """Write the cause, unless another rank failed first: then this one failed because of it."""
        if self._has_ended_elsewhere():
            if self.rank == 0:
                logger.error("first to fail: %s", self.folder.read_report()["cause"])
            return
        if self.rank != 0:  # its log file is not what a person looks at
            sys.stderr.write(f"rank {self.rank}: {cause}\n")
        self.finish(
            "stopped" if self.exit_class is ExitClass.STOPPED else "failed",
            self.exit_class,
            cause,
            force=True,
        )

    def abandon(self) -> NoReturn:
        """Record that this rank waits for another one in vain, and end the process. For a thread, while the main one is stuck."""
        self.exit_class = ExitClass.PEER_LOST
        self._record(
            "another rank is gone or hangs: this one was told to stop while it waited; logs/rank-*.log of the run say which"
        )
        os._exit(self.exit_class)

    def follow(self, rank: int, exit_class: ExitClass, cause: str) -> None:
        """Record that another rank's error ends this one. For the alarm's thread, while the main one is stuck."""
        self.is_following, self.exit_class = True, exit_class
        logger.error(
            "rank %d failed first: %s\nexit class %d (%s), rank %d follows it",
            rank,
            cause,
            exit_class,
            exit_class.name.lower(),
            self.rank,
        )
        if self._has_ended_elsewhere():
            return
        try:  # a machine of its own has a run folder of its own
            self.finish(
                "stopped" if exit_class is ExitClass.STOPPED else "failed",
                exit_class,
                cause,
                force=True,
            )
        except OSError as unwritable:
            logger.error("%s cannot be written: %s", self.folder.path / "run.json", unwritable)

    def update(self, **facts: Any) -> None:
        """Add facts and write them down."""
        self.facts |= facts
        if not self._has_ended_elsewhere():
            self.write()

    def finish(
        self, status: str, exit_class: ExitClass, cause: str | None = None, force: bool = False
    ) -> None:
        """Record how the run ended."""
        self.exit_class = exit_class
        self.facts |= {"status": status, "exit_class": int(exit_class), "cause": cause}
        self.facts["seconds"]["total"] = round(time.perf_counter() - self.started, 3)
        self.write(force)

    def write(self, force: bool = False) -> None:
        if self.rank == 0 or force:
            self.folder.write_report(self.facts)

    def _has_ended_elsewhere(self) -> bool:
        """Return whether run.json says that another rank of this launch ended the run."""
        if self.world_size == 1:
            return False
        there = self.folder.read_report()
        return (
            there.get("status") in ("failed", "stopped")
            and there.get("launcher_pid") == self.facts["launcher_pid"]
        )


def classify(error: BaseException) -> tuple[ExitClass, str]:
    """Return the exit class of an error and the sentence for run.json and the terminal."""
    first = first_line(error)
    if isinstance(error, SftPlayError):
        return error.exit_class, str(error)
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and NO_MEMORY.search(str(error))
    ):
        return (
            ExitClass.OUT_OF_MEMORY,
            f"out of memory: {first}; try half of TRAIN_BATCH_SIZE, TRAIN_GRADIENT_CHECKPOINTING=true or TUNING_MODE=qlora",
        )
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return (
            ExitClass.DISK_FULL,
            f"{error.strerror}: {error.filename or 'a file of the run'}; free some space, then resume",
        )
    if DISK_FULL.search(str(error)):
        return (
            ExitClass.DISK_FULL,
            f"a file of the run could not be written: {first}; free some space, then resume",
        )
    if isinstance(error, torch.distributed.DistError | ConnectionError) or (
        isinstance(error, RuntimeError) and PEER_LOST.search(str(error))
    ):
        return (
            ExitClass.PEER_LOST,
            f"another rank is gone or hangs: {first}; logs/rank-*.log of the run say which",
        )
    if isinstance(error, KeyboardInterrupt):
        return ExitClass.STOPPED, "stopped on request before the first step; nothing was trained"
    return ExitClass.UNEXPECTED, f"{type(error).__name__}: {first}"
