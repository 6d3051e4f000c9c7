"""The order of an epoch: which samples make a step, and which of them a rank runs together.

A step holds the same samples for any batch size, number of ranks, packed or not; these decide its speed alone.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.utils.data import Sampler

from sft_play.data.packing import pack, padded_width
from sft_play.plan.layout import Layout

MicroBatch = list[
    list[int]
]  # sequences, each the indices of its samples; `~index` (negative) is a filler, which carries no loss


@dataclass(frozen=True)
class PaddedTokens:
    """Tokens of an epoch: real ones, and those that the model computes, padding and fillers included."""

    real: int
    unpacked: int
    packed: int


class StepSampler(Sampler[MicroBatch]):
    """The micro-batches of an epoch in global order: micro-batch k belongs to rank k % world_size.

    Samples are shuffled by seed and epoch and cut into optimizer steps; what is yielded is a function of these alone, so that
    a resumed run skips what it has trained. Every rank runs equally many micro-batches a step and no sample counts twice:
    what is missing are fillers. The micro-batches that the ranks run at the same time are of similar length.
    """

    batch_size = None  # accelerate asks; micro-batches of a packed run differ in it
    drop_last = False

    def __init__(self, lengths: Sequence[int] | np.ndarray, layout: Layout, seed: int):
        self.lengths = np.asarray(lengths).tolist()
        self.seed, self.epoch = seed, 0
        self.layout = layout  # another cuts the same samples' steps in another way from then on, while `effective_batch` is the same
        self.shortest = min(
            range(len(self.lengths)), key=self.lengths.__getitem__
        )  # the filler that costs least

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return (
            -(-len(self.lengths) // self.layout.rows_per_step)
            * self.layout.micro_batches
            * self.layout.world_size
        )

    def __iter__(self) -> Iterator[MicroBatch]:
        for samples in steps(len(self.lengths), self.layout.rows_per_step, self.seed, self.epoch):
            yield from self._packed(samples) if self.layout.is_packed else self._unpacked(samples)

    def _unpacked(self, samples: list[int]) -> Iterator[MicroBatch]:
        """Longest first, so that a micro-batch holds samples of similar length."""
        size = self.layout.batch_size
        samples = sorted(samples, key=self.lengths.__getitem__, reverse=True) + [~self.shortest] * (
            self.layout.rows_per_step - len(samples)
        )
        for start in range(0, len(samples), size):
            yield [[index] for index in samples[start : start + size]]

    def _packed(self, samples: list[int]) -> list[MicroBatch]:
        bins = self.layout.micro_batches * self.layout.world_size
        lengths = [self.lengths[index] for index in samples]
        sequences = pack_shortest(lengths, bins * self.layout.sequences, self.layout.max_seq_len)
        tokens = [sum(lengths[i] for i in sequence) for sequence in sequences]
        dealt = _deal(tokens, bins, self.layout.sequences)
        return [
            [[samples[i] for i in sequences[number]] for number in one] or [[~self.shortest]]
            for one in dealt
        ]


def steps(samples: int, effective_batch: int, seed: int, epoch: int) -> Iterator[list[int]]:
    """Yield the sample indices of each optimizer step of an epoch; the last may hold fewer."""
    generator = torch.Generator().manual_seed((seed * 1_000_003 + epoch) % 2**63)
    order = torch.randperm(samples, generator=generator).tolist()
    for start in range(0, samples, effective_batch):
        yield order[start : start + effective_batch]


def fullest_step(
    lengths: Sequence[int] | np.ndarray, layout: Layout, seed: int, epochs: int
) -> int:
    """Return how many sequences of `max_seq_len` tokens suffice for every packed step of `epochs` epochs."""
    lengths = np.asarray(lengths).tolist()
    return max(
        len(pack([lengths[index] for index in samples], layout.max_seq_len))
        for epoch in range(epochs)
        for samples in steps(len(lengths), layout.rows_per_step, seed, epoch)
    )


def padding(
    lengths: Sequence[int] | np.ndarray, unpacked: Layout, packed: Layout, seed: int
) -> PaddedTokens:
    """Return what the first epoch computes for its tokens under two layouts."""
    return PaddedTokens(
        int(np.sum(lengths)),
        *(_computed(StepSampler(lengths, layout, seed)) for layout in (unpacked, packed)),
    )


def _computed(order: StepSampler) -> int:
    """Tokens of all micro-batches of an epoch at the width that the collators pad to."""
    lengths = order.lengths

    def width(micro_batch: MicroBatch) -> int:
        longest = max(
            sum(lengths[max(index, ~index)] for index in sequence) for sequence in micro_batch
        )
        return padded_width(longest, order.layout.max_seq_len)

    return sum(len(micro_batch) * width(micro_batch) for micro_batch in order)


def pack_shortest(lengths: Sequence[int], most: int, max_seq_len: int) -> list[list[int]]:
    """Pack into at most `most` sequences that are as short as that allows.

    Short ones spread over the ranks, and cost less attention where it is computed over whole sequences. Where `max_seq_len`
    is too short for it, there are more than `most`.
    """
    capacity = max(padded_width(max(lengths), max_seq_len), -(-sum(lengths) // most))
    while capacity < max_seq_len:
        sequences = pack(lengths, capacity)
        if len(sequences) <= most:
            return sequences
        capacity += max(8, capacity // 64)  # by so much do the ranks' tokens differ
    return pack(lengths, max_seq_len)


def _deal(tokens: Sequence[int], bins: int, room: int) -> list[list[int]]:
    """Deal sequences to `bins` of at most `room` each, the longest first to the bin with the fewest tokens; return bins by tokens, most first."""
    assert len(tokens) <= bins * room, (
        f"{len(tokens)} sequences for {bins} micro-batches of {room}: count them with fullest_step"
    )
    dealt: list[list[int]] = [[] for _ in range(bins)]
    filled = [0] * bins
    for number in sorted(range(len(tokens)), key=tokens.__getitem__, reverse=True):
        least = min(
            (bin_ for bin_ in range(bins) if len(dealt[bin_]) < room), key=filled.__getitem__
        )
        dealt[least].append(number)
        filled[least] += tokens[number]
    return [dealt[bin_] for bin_ in sorted(range(bins), key=filled.__getitem__, reverse=True)]
