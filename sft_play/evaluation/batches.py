"""Batches of prompts for generation: the longest first, as many at once as the memory holds."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from sft_play.plan.devices import host_memory
from sft_play.plan.model_shape import shape_of
from sft_play.process import Process

MOST_PROMPTS = {"cuda": 256, "cpu": 32}  # on a CPU more at once do not come faster
# Of the free memory: a cache that grows by a token leaves blocks of its former sizes behind
SHARE = 0.5
CACHE_COPIES = 2  # of a layer, while its cache is made one token longer
SCORE_COPIES = 3  # of the scores of a token: the head's, in float32, and processed


@dataclass(frozen=True)
class Room:
    """The memory that generation may take, and what it takes for each prompt."""

    free_bytes: int
    cached_token_bytes: int  # keys and values of all layers
    read_token_bytes: int  # activations of a layer, while the prompts are read
    prompt_bytes: int  # scores of all tokens of the vocabulary
    most: int  # prompts, however much memory there is

    def prompts(self, prompt_tokens: int, new_tokens: int) -> int:
        """Return how many prompts of so many tokens are answered at once, at least one."""
        bytes_each = (
            self.cached_token_bytes * (prompt_tokens + new_tokens)
            + self.read_token_bytes * prompt_tokens
            + self.prompt_bytes
        )
        return max(1, min(self.most, int(SHARE * self.free_bytes) // bytes_each))


def room_for(
    model: torch.nn.Module, process: Process, beams: int = 1, limit_bytes: int | None = None
) -> Room:
    """Return the room for generation beside what this process holds now.

    `limit_bytes` is what it may hold on its GPU in all; None is all that is free.
    """
    shape = shape_of(model.config.to_dict(), getattr(model.config, "name_or_path", ""))
    itemsize = process.compute_dtype.itemsize
    # inputs and outputs of attention and MLP, of the layer that is computed
    read_features = 8 * shape.hidden + 4 * shape.intermediate
    return Room(
        free_bytes=max(0, free_bytes(process, limit_bytes)),
        cached_token_bytes=beams * CACHE_COPIES * 2 * shape.kv_features * itemsize,
        read_token_bytes=beams * read_features * itemsize,
        prompt_bytes=beams * SCORE_COPIES * 4 * shape.vocab,
        most=max(1, MOST_PROMPTS[process.device.type] // beams),
    )


def free_bytes(process: Process, limit_bytes: int | None = None) -> int:
    """Return what this process can still allocate on the fullest of its devices."""
    if process.device.type != "cuda":
        return host_memory().available_bytes // process.world_size
    found = []
    for device in process.devices:
        free, _ = torch.cuda.mem_get_info(device)
        allocated = torch.cuda.memory_allocated(device)
        free += torch.cuda.memory_reserved(device) - allocated
        if limit_bytes is not None:
            free = min(free, limit_bytes - allocated)
        found.append(free)
    return min(found)


def batches_of(
    lengths: Sequence[int], rows_at: Callable[[int], int], world_size: int = 1
) -> list[list[int]]:
    """Split rows of `lengths` tokens into batches of their indices, the longest first.

    `rows_at(tokens)` is how many rows a batch takes whose longest has so many tokens. No batch is
    larger than a rank's share of all rows.
    """
    order = longest_first(lengths)
    share = -(-len(order) // world_size)
    found = []
    while order:
        rows = min(share, rows_at(lengths[order[0]]))
        found.append(order[:rows])
        order = order[rows:]
    return found


def longest_first(lengths: Sequence[int]) -> list[int]:
    """Return the indices of `lengths` from the longest to the shortest; equal ones in order."""
    return sorted(range(len(lengths)), key=lambda index: -lengths[index])


def share_of_rank(batches: Sequence[list[int]], process: Process) -> list[list[int]]:
    """Return this rank's batches; every rank has the same number.

    A rank with one batch too few gets a batch of one filler, `~index` of the last row.
    """
    missing = -len(batches) % process.world_size
    every = [*batches, *[[~batches[-1][-1]]] * missing]
    return every[process.rank :: process.world_size]
