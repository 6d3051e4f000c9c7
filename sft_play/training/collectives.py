"""What the ranks tell each other between steps, on their CPUs: a GPU that is asked keeps its CPU from running ahead."""

from datetime import timedelta
from functools import lru_cache
from typing import Any

import torch
from torch import distributed
from torch.distributed import ReduceOp


def sum_over_ranks(number: int, timeout: timedelta) -> int:
    """Return the sum of all ranks' numbers. Every rank must call it, and fails when one has not for `timeout`."""
    return _over_ranks(number, ReduceOp.SUM, timeout)


def min_over_ranks(number: int, timeout: timedelta) -> int:
    """Return the least of all ranks' numbers, as `sum_over_ranks`."""
    return _over_ranks(number, ReduceOp.MIN, timeout)


def max_over_ranks(number: int, timeout: timedelta) -> int:
    """Return the largest of all ranks' numbers, as `sum_over_ranks`."""
    return _over_ranks(number, ReduceOp.MAX, timeout)


def all_of_ranks(value: Any, timeout: timedelta) -> list[Any]:
    """Return the values of all ranks, that of the main one first. Every rank must call it."""
    if not _are_several():
        return [value]
    values: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(values, value, group=_cpu_group(distributed.group.WORLD, timeout))
    return values


def _over_ranks(number: int, operation: ReduceOp.RedOpType, timeout: timedelta) -> int:
    if not _are_several():
        return number
    total = torch.tensor(number, dtype=torch.int64)
    distributed.all_reduce(total, operation, group=_cpu_group(distributed.group.WORLD, timeout))
    return int(total)


def _are_several() -> bool:
    return distributed.is_initialized() and distributed.get_world_size() > 1


@lru_cache(maxsize=1)
def _cpu_group(world: distributed.ProcessGroup, timeout: timedelta) -> distributed.ProcessGroup:
    """All ranks over gloo, beside the group that belongs to the GPUs; made when it is first needed, by all of them at once."""
    return distributed.new_group(backend="gloo", timeout=timeout)
