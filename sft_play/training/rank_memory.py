"""Peak memory of one rank, beside what its device has. Loads no kernels."""

import resource
import socket

import torch

from sft_play.plan.devices import host_memory
from sft_play.runs.report import RankMemory


def rank_memory(rank: int, device: torch.device, before_bytes: int, peak_bytes: int) -> RankMemory:
    """Return a rank's peaks beside what its GPU, or this host, has."""
    if device.type == "cuda":
        card = torch.cuda.get_device_properties(device)
        name, total_bytes = card.name, card.total_memory
    else:
        name, total_bytes = "CPU", host_memory().total_bytes
    return RankMemory(
        rank=rank,
        host=socket.gethostname(),
        device=str(device),
        name=name,
        total_bytes=total_bytes,
        before_bytes=before_bytes,
        peak_bytes=peak_bytes,
    )


def resident_peak_bytes() -> int:
    """Return the most memory that this process has had on the host."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts KiB
