"""run.json: what became of a run, kept true from the first second, also when the run fails."""

import errno
import logging
import os
import resource
import time
from types import TracebackType
from typing import Any, Self

import torch

from sft_play.errors import ExitClass, SftPlayError
from sft_play.runs import stamp
from sft_play.runs.folder import RunFolder

logger = logging.getLogger(__name__)


class Report:
    """A context around a rank's work: main writes run.json, and so does the rank that fails first.

    An error is recorded with its exit class and goes on; `exit_class` is what the process should exit with.
    """

    def __init__(self, folder: RunFolder, plan: dict[str, Any], mode: str, backend: str, rank: int):
        self.folder, self.rank = folder, rank
        self.started = time.perf_counter()
        self.facts: dict[str, Any] = {
            "run": folder.name,
            "status": "running",
            "exit_class": None,
            "cause": None,
            "world_size": plan["world_size"],
            "strategy": plan["strategy"],
            "device": plan["device"],
            "backend": backend,
            "mode": mode,
            "global_step": 0,
            "pid": os.getpid(),
            "started_at": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "versions": stamp.versions(),
            "seconds": {},
            "tokens_per_second": None,
            "peak_bytes": {"predicted": plan["memory"]["predicted_peak"], "measured": None},
            "metrics": {},
        }

    def __enter__(self) -> Self:
        self.write()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None:
            return
        exit_class, cause = classify(error)
        already = self.folder.read_report().get("status")
        if already in ("planned", "running"):  # the first rank to fail has the cause; the others fail because of it
            self.finish("failed", exit_class, cause, force=True)
        # rank 0 prints to the terminal, the others to their log file; the launcher prints what is no error of ours
        where = None if isinstance(error, SftPlayError) else (kind, error, trace)
        logger.error("%s\nexit class %d (%s), rank %d, %s", cause, exit_class, exit_class.name.lower(), self.rank, self.folder.path, exc_info=where)

    def update(self, **facts: Any) -> None:
        """Add facts and write them down."""
        self.facts |= facts
        self.write()

    def finish(self, status: str, exit_class: ExitClass, cause: str | None = None, force: bool = False) -> None:
        """Record how the run ended."""
        self.facts |= {"status": status, "exit_class": int(exit_class), "cause": cause}
        self.facts["seconds"]["total"] = round(time.perf_counter() - self.started, 3)
        self.write(force)

    def write(self, force: bool = False) -> None:
        if self.rank == 0 or force:
            self.folder.write_report(self.facts)


def classify(error: BaseException) -> tuple[ExitClass, str]:
    """Return the exit class of an error and the sentence for run.json and the terminal."""
    if isinstance(error, SftPlayError):
        return error.exit_class, str(error)
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return ExitClass.OUT_OF_MEMORY, f"out of memory: {_first_line(error)}"
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return ExitClass.DISK_FULL, f"{error.strerror}: {error.filename or 'a file of the run'}; free some space, then resume"
    if isinstance(error, torch.distributed.DistBackendError | ConnectionError):
        return ExitClass.PEER_LOST, f"another rank is gone or hangs: {_first_line(error)}; logs/rank-*.log of the run say which"
    if isinstance(error, KeyboardInterrupt):
        return ExitClass.STOPPED, "interrupted before the first checkpoint"
    return ExitClass.UNEXPECTED, f"{type(error).__name__}: {_first_line(error)}"


def peak_bytes(device: torch.device) -> int:
    """Return this process's peak memory in bytes: what the allocator reserved on a GPU, resident memory on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts KiB


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
