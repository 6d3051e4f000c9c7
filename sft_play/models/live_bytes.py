"""Bytes of the tensors that live at a time, counted storage by storage. Knows tensors alone, with data or without.

A storage counts from the operation that makes it to the moment when nothing refers to it any more, views once, as in a caching
allocator; what a kernel needs inside of an operation is not seen.
"""

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Inside the mode: `now` and `peak` bytes of what operations made and of what `count` was given, and still lives."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._sizes: dict[int, int] = {}  # by storage

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        self.count(tree_leaves(out))
        return out

    def count(self, values: Iterable[Any]) -> None:
        """Count the storages of all tensors among `values` that are not counted yet."""
        for value in values:
            if isinstance(value, Tensor):
                self._count(value.untyped_storage())

    def _count(self, storage: torch.UntypedStorage) -> None:
        address = storage._cdata
        if address not in self._sizes:
            self._sizes[address] = storage.nbytes()
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._forget, address).atexit = False

    def _forget(self, address: int) -> None:
        self.now -= self._sizes.pop(address)

    def restart(self) -> int:
        """Let the peak begin at what lives now, and return that."""
        self.peak = self.now
        return self.now


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the storages behind `tensors`, each storage once."""
    return sum(
        {
            storage._cdata: storage.nbytes()
            for storage in (tensor.untyped_storage() for tensor in tensors)
        }.values()
    )
