"""Bytes of the tensors that are alive, counted by storage; tensors need no data.

A storage counts from the operation that creates it until its last reference is gone. Views share
the storage of their base. Memory that a kernel needs only inside an operation is not counted.
"""

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class MemoryTracker(TorchDispatchMode):
    """A dispatch mode that counts the bytes of tensors that operations create or `track` gets."""

    def __init__(self) -> None:
        super().__init__()
        self.live_bytes = 0
        self.peak_bytes = 0
        self._sizes: dict[int, int] = {}  # bytes by address of the storage

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        self.track(tree_leaves(out))
        return out

    def track(self, values: Iterable[Any]) -> None:
        """Count the storages of all tensors among `values` that are not counted yet."""
        for value in values:
            if isinstance(value, Tensor):
                self._track_storage(value.untyped_storage())

    def reset_peak(self) -> int:
        """Reset the peak to the bytes that are alive now, and return them."""
        self.peak_bytes = self.live_bytes
        return self.live_bytes

    def _track_storage(self, storage: torch.UntypedStorage) -> None:
        address = storage._cdata
        if address in self._sizes:
            return
        self._sizes[address] = storage.nbytes()
        self.live_bytes += storage.nbytes()
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        weakref.finalize(storage, self._forget, address).atexit = False

    def _forget(self, address: int) -> None:
        self.live_bytes -= self._sizes.pop(address)


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the storages of `tensors`, each storage once."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    sizes = {storage._cdata: storage.nbytes() for storage in storages}
    return sum(sizes.values())
