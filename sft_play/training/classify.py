"""The exit class of an error, and its message for run.json and the terminal."""

import re
from typing import NamedTuple

import torch

from sft_play.errors import (
    MORE_SHARED_MEMORY,
    ExitClass,
    SftPlayError,
    first_line,
    is_out_of_memory,
    lacks_shared_memory,
    of_os_error,
)

# Messages of gloo and NCCL if a peer is gone or a collective timed out; gloo raises plain
# RuntimeErrors.
PEER_LOST = re.compile(
    r"gloo/|NCCL (error|operation)|Connection (reset|closed) by peer|Broken pipe|Timed out waiting",
    re.IGNORECASE,
)
# Messages of safetensors and torch.save on a full disk, for which Python would raise an OSError
DISK_FULL = re.compile(
    r"No space left on device|os error 28|Disk quota exceeded|"
    r"PytorchStreamWriter failed|iostream error|unexpected pos"
)

# Messages of torch's DataLoader, also raised by its signal handler in the middle of other code
LOADER_GONE = re.compile(r"DataLoader worker \(pid.*\) (is killed by signal|exited unexpectedly)")


class Failure(NamedTuple):
    """Why a run ends."""

    exit_class: ExitClass
    cause: str


def classify(error: BaseException) -> Failure:
    """Return the exit class of an error and its message for run.json and the terminal."""
    first = first_line(error)
    if isinstance(error, SftPlayError):
        return Failure(error.exit_class, str(error))
    if lacks_shared_memory(error):
        return Failure(ExitClass.ENVIRONMENT, f"{MORE_SHARED_MEMORY} ({first})")
    if is_out_of_memory(error):
        return Failure(
            ExitClass.OUT_OF_MEMORY,
            f"out of memory: {first}; try half of TRAIN_BATCH_SIZE, "
            "TRAIN_GRADIENT_CHECKPOINTING=true or TUNING_MODE=qlora",
        )
    of_disk = of_os_error(error) if isinstance(error, OSError) else None
    if of_disk is not None:
        return Failure(of_disk.exit_class, str(of_disk))
    if LOADER_GONE.search(first):
        return Failure(
            ExitClass.OUT_OF_MEMORY,
            f"a process that loads rows has ended ({first}), most likely because memory was "
            "short: free some or set TRAIN_DATALOADER_NUM_WORKERS=0, then resume",
        )
    if DISK_FULL.search(str(error)):
        return Failure(
            ExitClass.DISK_FULL,
            f"a file of the run could not be written: {first}; free some space, then resume",
        )
    if _is_peer_lost(error):
        return Failure(
            ExitClass.PEER_LOST,
            f"another rank is gone or hangs: {first}; logs/rank-*.log of the run say which",
        )
    return Failure(ExitClass.UNEXPECTED, f"{type(error).__name__}: {first}")


def _is_peer_lost(error: BaseException) -> bool:
    if isinstance(error, torch.distributed.DistError | ConnectionError):
        return True
    return isinstance(error, RuntimeError) and bool(PEER_LOST.search(str(error)))
