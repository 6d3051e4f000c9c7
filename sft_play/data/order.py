"""The order of an epoch: the samples of each optimizer step, and the micro-batches of each rank.

A step has the same samples for any batch size and any number of ranks, packed or not; these
change only its speed.
"""

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
    pack,
    pack_for_ranks,
)
from sft_play.plan.step import Layout

# Sequences, each a list of sample indices. `~index` (negative) is a filler, which carries no loss.
MicroBatch = list[list[int]]


class StepSampler:
    """The micro-batches of an epoch in global order: number k is of rank k % world_size.

    Samples are shuffled by seed and epoch (not without a seed) and cut into optimizer steps. The
    order depends on nothing else, so a resumed run skips what it has trained. Every rank runs the
    same number of micro-batches in a step and no sample counts twice: fillers take the places that
    are left.
    All ranks work about equally long in a step, and begin with the costliest micro-batch. Ranks
    that share rows have the same micro-batches.
    """

    batch_size = None  # accelerate reads it; the micro-batches of a packed run differ in size
    drop_last = False

    def __init__(self, lengths: Sequence[int] | np.ndarray, layout: Layout, seed: int | None):
        self.lengths = np.asarray(lengths).tolist()
        self.seed = seed
        self.epoch = 0
        self.layout = layout  # may be replaced by one with the same `rows_per_step`
        shortest = min(range(len(self.lengths)), key=self.lengths.__getitem__)
        self.filler = ~shortest  # the shortest sample costs least

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        optimizer_steps = -(-len(self.lengths) // self.layout.rows_per_step)
        return optimizer_steps * self.layout.micro_batches * self.layout.world_size

    def __iter__(self) -> Iterator[MicroBatch]:
        for batch in self.micro_batches():
            yield from itertools.repeat(batch, self.layout.context_parallel)

    def micro_batches(self) -> Iterator[MicroBatch]:
        """Yield each micro-batch once."""
        rows_per_step = self.layout.rows_per_step
        for samples in steps(len(self.lengths), rows_per_step, self.seed, self.epoch):
            if self.layout.is_packed:
                yield from self._packed(samples)
            else:
                yield from self._unpacked(samples)

    def find_samples(self, step: int, micro_batch: int, rank: int) -> list[int]:
        """Return the samples of a rank's micro-batch of a step, without fillers; steps from 1."""
        per_step = self.layout.micro_batches * self.layout.world_size
        epoch, number = divmod(step - 1, len(self) // per_step)
        sampler = StepSampler(self.lengths, self.layout, self.seed)
        sampler.set_epoch(epoch)
        at = number * per_step + micro_batch * self.layout.world_size + rank
        batch = next(itertools.islice(sampler, at, None))
        return [index for sequence in batch for index in sequence if index >= 0]

    def _unpacked(self, samples: list[int]) -> Iterator[MicroBatch]:
        """Yield micro-batches of samples of similar length."""
        layout = self.layout
        ordered = sorted(samples, key=self.lengths.__getitem__, reverse=True)
        ordered += [self.filler] * (layout.rows_per_step - len(samples))
        batches = []
        for start in range(0, len(ordered), layout.batch_size):
            batches.append([[index] for index in ordered[start : start + layout.batch_size]])
        costs = [document_cost(self.shape(batch).width, layout) for batch in batches]
        ranks = deal_micro_batches(costs, layout)
        for numbers in zip(*ranks, strict=True):
            yield from (batches[number] for number in numbers)

    def _packed(self, samples: list[int]) -> Iterator[MicroBatch]:
        """Yield micro-batches of sequences that have the samples."""
        lengths = [self.lengths[index] for index in samples]
        for batches in zip(*pack_for_ranks(lengths, self.layout), strict=True):
            for batch in batches:
                yield [[samples[i] for i in sequence] for sequence in batch] or [[self.filler]]

    def shape(self, batch: MicroBatch) -> BatchShape:
        """Return the shape of a micro-batch, with its padding."""
        layout = self.layout
        sequences = [[self.lengths[max(i, ~i)] for i in sequence] for sequence in batch]
        in_one_row = layout.is_packed and layout.in_one_row
        return batch_shape(sequences, layout.max_seq_len, in_one_row)


def steps(samples: int, effective_batch: int, seed: int | None, epoch: int) -> Iterator[list[int]]:
    """Yield the sample indices of each optimizer step of an epoch; the last may have fewer.

    Without a seed samples stay in their order.
    """
    order = list(range(samples))
    if seed is not None:
        shuffle(order, seed * 1_000_003 + epoch)
    for start in range(0, samples, effective_batch):
        yield order[start : start + effective_batch]


def shuffle(order: list[int], seed: int) -> None:
    """Shuffle indices as torch.randperm does with a generator of the same seed.

    Earlier runs resume in the order that torch gave them, and data-check imports no torch.
    """
    draws = np.random.RandomState(seed % 2**32).randint(2**32, size=len(order), dtype=np.uint32)
    for place, draw in enumerate(draws.tolist()):
        other = place + draw % (len(order) - place)
        order[place], order[other] = order[other], order[place]


def fullest_step(
    lengths: Sequence[int] | np.ndarray, layout: Layout, seed: int | None, epochs: int
) -> int:
    """Return how many sequences of `max_seq_len` tokens have the fullest step of all epochs."""
    lengths = np.asarray(lengths).tolist()
    fullest = 0
    for epoch in range(epochs):
        for samples in steps(len(lengths), layout.rows_per_step, seed, epoch):
            sequences = pack([lengths[index] for index in samples], layout.max_seq_len)
            fullest = max(fullest, len(sequences))
    return fullest


def padding(
    lengths: Sequence[int] | np.ndarray, unpacked: Layout, packed: Layout, seed: int | None
) -> PaddedTokens:
    """Return what the first epoch computes for its tokens under two layouts."""
    computed = []  # of all micro-batches, with the padding of the collators
    for layout in (unpacked, packed):
        sampler = StepSampler(lengths, layout, seed)
        computed.append(sum(math.prod(sampler.shape(batch)) for batch in sampler.micro_batches()))
    return PaddedTokens(int(np.sum(lengths)), *computed)
