"""The order of an epoch: the samples of each optimizer step, and the micro-batches of each rank.

A step has the same rows for any batch size and any number of ranks, packed or not; these
only change its speed. A conversation may give several samples: all of them are in the step of their
row. `row_ends` (R,) are the ends of the rows among the samples; None means one sample per row.
Where samples share beginnings, their units (`data.trees`) take the place of samples.
"""

import copy
import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np

from sft_play.data.ledger import PaddedTokens
from sft_play.data.packing import (
    BatchShape,
    batch_shape,
    deal_micro_batches,
    document_cost,
    pack_documents,
    pack_for_ranks,
)
from sft_play.plan.step import Layout

# Sequences, each a list of sample indices. `~index` (negative) is a filler, which carries no loss.
MicroBatch = list[list[int]]

MEASURED_ROWS = 100_000  # whose padding is measured as a sample of the epoch


class StepSampler:
    """The micro-batches of an epoch in global order: number k belongs to rank k % world_size.

    Rows are shuffled by seed and epoch (not without a seed) and cut into optimizer steps. The
    order depends on nothing else, so a resumed run skips what it has trained. Every rank runs the
    same number of micro-batches per step, and no sample counts twice: fillers use the remaining
    places. All ranks work about equally long in a step, and start with the most expensive
    micro-batch. Ranks that share rows have the same micro-batches.
    """

    batch_size = None  # accelerate reads it; the micro-batches of a packed run differ in size
    drop_last = False

    def __init__(
        self,
        lengths: Sequence[int] | np.ndarray,
        layout: Layout,
        seed: int | None,
        row_ends: np.ndarray | None = None,
    ):
        self.lengths = memoryview(np.asarray(lengths))  # a list needs 36 bytes per row
        self.row_ends = row_ends
        self.rows = len(self.lengths) if row_ends is None else len(row_ends)
        self.seed = seed
        self.epoch = 0
        self.layout = layout  # may be replaced by one with the same `rows_per_step`
        shortest = min(range(len(self.lengths)), key=self.lengths.__getitem__)
        self.filler = ~shortest  # the shortest sample costs least

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        optimizer_steps = -(-self.rows // self.layout.rows_per_step)
        return optimizer_steps * self.layout.micro_batches * self.layout.world_size

    def __iter__(self) -> Iterator[MicroBatch]:
        for batch in self.micro_batches():
            yield from itertools.repeat(batch, self.layout.context_parallel)

    def micro_batches(self) -> Iterator[MicroBatch]:
        """Yield each micro-batch once."""
        samples, per_step = len(self.lengths), self.layout.rows_per_step
        for step in steps(samples, per_step, self.seed, self.epoch, self.row_ends):
            if self.layout.is_packed:
                yield from self._packed(step)
            else:
                yield from self._unpacked(step)

    def find_samples(self, step: int, micro_batch: int, rank: int) -> list[int]:
        """Return the samples of a rank's micro-batch of a step, without fillers; steps from 1."""
        per_step = self.layout.micro_batches * self.layout.world_size
        epoch, number = divmod(step - 1, len(self) // per_step)
        sampler = copy.copy(self)
        sampler.set_epoch(epoch)
        at = number * per_step + micro_batch * self.layout.world_size + rank
        batch = next(itertools.islice(sampler, at, None))
        return [index for sequence in batch for index in sequence if index >= 0]

    def _unpacked(self, samples: list[int]) -> Iterator[MicroBatch]:
        """Yield micro-batches of samples of similar length."""
        layout = self.layout
        ordered = sorted(samples, key=self.lengths.__getitem__, reverse=True)
        places = layout.batch_size * layout.micro_batches * layout.replicas
        ordered += [self.filler] * (places - len(samples))
        batches = []
        for start in range(0, len(ordered), layout.batch_size):
            batches.append([[index] for index in ordered[start : start + layout.batch_size]])
        costs = [document_cost(self.shape(batch).width, layout) for batch in batches]
        ranks = deal_micro_batches(costs, layout)
        for numbers in zip(*ranks, strict=True):
            yield from (batches[number] for number in numbers)

    def _packed(self, samples: list[int]) -> Iterator[MicroBatch]:
        """Yield micro-batches of sequences that contain the samples."""
        lengths = [self.lengths[index] for index in samples]
        for batches in zip(*pack_for_ranks(lengths, self.layout), strict=True):
            for batch in batches:
                yield [[samples[i] for i in sequence] for sequence in batch] or [[self.filler]]

    def shape(self, batch: MicroBatch) -> BatchShape:
        """Return the shape of a micro-batch, with its padding."""
        layout = self.layout
        sequences = [[self.lengths[max(i, ~i)] for i in sequence] for sequence in batch]
        in_one_row = layout.is_packed and layout.in_one_row
        return batch_shape(sequences, layout.capacity, in_one_row)


def steps(
    samples: int,
    rows_per_step: int,
    seed: int | None,
    epoch: int,
    row_ends: np.ndarray | None = None,
) -> Iterator[list[int]]:
    """Yield the sample indices of each optimizer step of an epoch; the last may have fewer rows.

    Without a seed rows stay in their order.
    """
    ends = np.arange(1, samples + 1) if row_ends is None else row_ends
    starts = np.append(0, ends)
    order = epoch_order(len(ends), seed, epoch)
    for first in range(0, len(order), rows_per_step):
        rows = order[first : first + rows_per_step]
        places = map(range, starts[rows].tolist(), ends[rows].tolist())
        yield [*itertools.chain.from_iterable(places)]


def epoch_order(rows: int, seed: int | None, epoch: int) -> np.ndarray:
    """Return the indices of the rows of an epoch.

    They are shuffled like torch.randperm with a generator of the same seed. Earlier runs resume
    in the order that torch gave them, and data-check need not import torch.
    """
    order = np.arange(rows)
    if seed is None:
        return order
    draws = np.random.RandomState((seed * 1_000_003 + epoch) % 2**32)
    left = np.arange(rows, 0, -1)
    others = np.arange(rows) + draws.randint(2**32, size=rows, dtype=np.uint32) % left
    places = memoryview(order)  # faster than an array, and smaller than a list
    for place, other in enumerate(memoryview(others)):
        places[place], places[other] = places[other], places[place]
    return order


def fullest_step(
    lengths: Sequence[int] | np.ndarray,
    layout: Layout,
    seed: int | None,
    epochs: int,
    row_ends: np.ndarray | None = None,
) -> int:
    """Return the number of sequences of `capacity` tokens in the fullest step of all epochs.

    Only the steps that may be fuller than the fullest so far are packed.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    fullest = 0
    for epoch in range(epochs):
        found = list(steps(len(lengths), layout.rows_per_step, seed, epoch, row_ends))
        samples = np.zeros((len(found), max(map(len, found))), dtype=np.int64)
        for places, step in zip(samples, found, strict=True):
            places[: len(step)] = lengths[step]
        limits = most_sequences(samples, layout.capacity)
        for step in np.argsort(-limits, kind="stable"):
            if limits[step] <= fullest:
                break
            documents = samples[step][samples[step] > 0].tolist()
            fullest = max(fullest, len(pack_documents(documents, layout.capacity)))
    return fullest


def most_sequences(rows: np.ndarray, capacity: int) -> np.ndarray:
    """Return the maximum number of sequences that `pack` makes of each row of document lengths.

    `rows` has the shape (steps, documents); 0 means no document. A document starts a new sequence
    only if all others have less space than its length, so longer documents fill them that far.

    >>> most_sequences(np.array([[5, 3, 8, 2, 4], [5, 3, 0, 0, 0]]), 8)
    array([3, 1])
    """
    longest_first = -np.sort(-rows, axis=1)
    longer = np.cumsum(longest_first, axis=1) - longest_first
    filled = np.maximum(1, capacity - longest_first + 1)  # by each of the others, at least
    others = np.minimum(np.arange(rows.shape[1]), longer // filled)
    return np.where(longest_first > 0, others + 1, 0).max(axis=1)


def padding(
    lengths: Sequence[int] | np.ndarray,
    unpacked: Layout,
    packed: Layout,
    seed: int | None,
    row_ends: np.ndarray | None = None,
) -> PaddedTokens:
    """Return the tokens of the first epoch, and those computed with padding, under two layouts.

    Of a long epoch the first MEASURED_ROWS rows, in complete steps, represent all.
    """
    measured = math.ceil(MEASURED_ROWS / unpacked.rows_per_step)
    lengths = np.asarray(lengths)
    computed = []  # of all micro-batches, with the padding of the collators
    for layout in (unpacked, packed):
        sampler = StepSampler(lengths, layout, seed, row_ends)
        batches = sampler.micro_batches()
        batches = itertools.islice(batches, measured * layout.micro_batches * layout.replicas)
        computed.append(sum(math.prod(sampler.shape(batch)) for batch in batches))
    drawn = steps(len(lengths), unpacked.rows_per_step, seed, 0, row_ends)
    first = itertools.islice(drawn, measured)
    real, measured_real = int(lengths.sum()), int(lengths[list(itertools.chain(*first))].sum())
    return PaddedTokens(real, *(tokens * real // measured_real for tokens in computed))
