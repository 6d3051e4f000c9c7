"""Pinned host memory, and copies between it and a GPU during the computation."""

import weakref

import torch
from torch import Tensor

from sft_play.errors import EnvironmentFault


class CopyStream:
    """The stream of a GPU on which copies run; on a CPU they are made at once."""

    def __init__(self, device: torch.device):
        self.device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def copy(self, target: Tensor, source: Tensor) -> "torch.cuda.Event | None":
        """Start a copy after what is queued so far; return an event at its end."""
        if self._stream is None:
            target.copy_(source)
            return None
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            return self._stream.record_event()

    def wait(self, copied: "torch.cuda.Event | None") -> None:
        """Let the computation that is queued from now on come after a copy."""
        if copied is not None:
            torch.cuda.current_stream(self.device).wait_event(copied)


def pin(buffer: Tensor, setting: str, remedy: str) -> None:
    """Pin a tensor's memory; torch would take the next power of two.

    Raises: EnvironmentFault, which names `setting` and ends with `remedy`, if CUDA refuses.
    """
    address = buffer.data_ptr()
    error = int(torch.cuda.cudart().cudaHostRegister(address, buffer.nbytes, 0))
    if error:
        size = f"{buffer.nbytes / 2**30:.1f} GiB of host memory"
        raise EnvironmentFault(
            f"{setting}: {size} could not be pinned (CUDA error {error}); {remedy}"
        )
    weakref.finalize(buffer, _unpin, address).atexit = False


def _unpin(address: int) -> None:
    torch.cuda.synchronize()  # a copy may still read it
    torch.cuda.cudart().cudaHostUnregister(address)
