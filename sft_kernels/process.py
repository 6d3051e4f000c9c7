"""One of the processes that train: where it computes, in what type, and how it talks to the others.

Its collectives run on the ranks' CPUs over gloo: asking a GPU would stop its CPU from running
ahead.
"""

from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from typing import Any, TypeVar

import torch
from torch import distributed
from torch.distributed import ReduceOp

DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}  # by precision
DEFAULT_TIMEOUT = timedelta(minutes=30)

Number = TypeVar("Number", int, float)
Value = TypeVar("Value")


@dataclass(frozen=True)
class Process:
    """This process among the ranks of a run. The process group exists if `world_size` > 1."""

    rank: int
    local_rank: int  # among the ranks of this machine
    world_size: int
    device: torch.device
    compute_dtype: torch.dtype = torch.float32  # of matrix products
    timeout: timedelta = (
        DEFAULT_TIMEOUT  # after which a collective that a rank has not joined fails
    )
    gpus: int = 1  # more: GPUs from cuda:0 on that one model is placed on; `device` is the first

    @classmethod
    def alone(cls, device: torch.device, compute_dtype: torch.dtype = torch.float32) -> "Process":
        """Return a process that is the only one of its run."""
        return cls(0, 0, 1, device, compute_dtype)

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """The devices of this process's model."""
        if self.gpus == 1:
            return (self.device,)
        return tuple(torch.device("cuda", number) for number in range(self.gpus))

    @property
    def is_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def autocast(self) -> torch.autocast:
        """Return the context to run a model in; off if the products are in float32."""
        is_half = self.compute_dtype != torch.float32
        return torch.autocast(self.device.type, dtype=self.compute_dtype, enabled=is_half)

    def sum(self, number: Number) -> Number:
        """Return the sum of all ranks' numbers. Every rank must call it."""
        return self._reduced(number, ReduceOp.SUM)

    def min(self, number: int) -> int:
        """Return the least of all ranks' numbers. Every rank must call it."""
        return self._reduced(number, ReduceOp.MIN)

    def max(self, number: Number) -> Number:
        """Return the largest of all ranks' numbers. Every rank must call it."""
        return self._reduced(number, ReduceOp.MAX)

    def gather(self, value: Value) -> list[Value]:
        """Return the values of all ranks, by rank. Every rank must call it."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        distributed.all_gather_object(values, value, group=self._cpu_group())
        return values

    def broadcast(self, value: Value) -> Value:
        """Return the value of rank 0, pickled. Every rank must call it."""
        if self.world_size == 1:
            return value
        values: list[Any] = [value]
        distributed.broadcast_object_list(values, src=0, group=self._cpu_group())
        return values[0]

    def _reduced(self, number: Number, operation: ReduceOp.RedOpType) -> Number:
        if self.world_size == 1:
            return number
        total = torch.tensor(number, dtype=torch.float64 if type(number) is float else torch.int64)
        distributed.all_reduce(total, operation, group=self._cpu_group())
        return total.item()

    def _cpu_group(self) -> distributed.ProcessGroup:
        return _cpu_group(distributed.group.WORLD, self.timeout)


@lru_cache(maxsize=1)
def _cpu_group(world: distributed.ProcessGroup, timeout: timedelta) -> distributed.ProcessGroup:
    """All ranks over gloo, next to the group that belongs to the GPUs; made at its first use."""
    return distributed.new_group(backend="gloo", timeout=timeout)
