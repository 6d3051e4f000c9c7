"""The order of an epoch: the samples of each optimizer step, and the micro-batches of each rank.

A step holds the same samples for any batch size and any number of ranks, packed or not; these
change only its speed.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch.utils.data import Sampler

from sft_play.data.ledger import PaddedTokens
from sft_play.data.packing import pack, padded_width
from sft_play.plan.layout import Layout

# Sequences, each a list of sample indices. `~index` (negative) is a filler, which carries no loss.
MicroBatch = list[list[int]]


class StepSampler(Sampler[MicroBatch]):
    """The micro-batches of an epoch in global order: micro-batch k belongs to rank k % world_size.

    Samples are shuffled by seed and epoch and cut into optimizer steps. The order depends on
    nothing else, so a resumed run skips what it has trained. Every rank runs the same number of
    micro-batches in a step and no sample counts twice: fillers take the places that are left.
    Micro-batches that the ranks run at the same time have similar lengths.
    """

    batch_size = None  # accelerate reads it; the micro-batches of a packed run differ in size
    drop_last = False

    def __init__(self, lengths: Sequence[int] | np.ndarray, layout: Layout, seed: int):
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
        samples_of_steps = steps(
            len(self.lengths), self.layout.rows_per_step, self.seed, self.epoch
        )
        for samples in samples_of_steps:
            if self.layout.is_packed:
                yield from self._packed(samples)
            else:
                yield from self._unpacked(samples)

    def _unpacked(self, samples: list[int]) -> Iterator[MicroBatch]:
        """Yield the longest samples first: a micro-batch then holds samples of similar length."""
        size = self.layout.batch_size
        ordered = sorted(samples, key=self.lengths.__getitem__, reverse=True)
        ordered += [self.filler] * (self.layout.rows_per_step - len(samples))
        for start in range(0, len(ordered), size):
            yield [[index] for index in ordered[start : start + size]]

    def _packed(self, samples: list[int]) -> Iterator[MicroBatch]:
        """Yield the micro-batches with the most tokens first."""
        micro_batches = self.layout.micro_batches * self.layout.world_size
        max_sequences = micro_batches * self.layout.sequences
        lengths = [self.lengths[index] for index in samples]
        packed = pack_shortest(lengths, max_sequences, self.layout.max_seq_len)
        sequences: MicroBatch = []
        tokens: list[int] = []
        for positions in packed:
            sequences.append([samples[position] for position in positions])
            tokens.append(sum(lengths[position] for position in positions))
        for numbers in _distribute(tokens, micro_batches, self.layout.sequences):
            yield [sequences[number] for number in numbers] or [[self.filler]]


def steps(samples: int, effective_batch: int, seed: int, epoch: int) -> Iterator[list[int]]:
    """Yield the sample indices of each optimizer step of an epoch; the last may hold fewer."""
    generator = torch.Generator().manual_seed((seed * 1_000_003 + epoch) % 2**63)
    order = torch.randperm(samples, generator=generator).tolist()
    for start in range(0, samples, effective_batch):
        yield order[start : start + effective_batch]


def fullest_step(
    lengths: Sequence[int] | np.ndarray, layout: Layout, seed: int, epochs: int
) -> int:
    """Return how many sequences of `max_seq_len` tokens hold the fullest step of all epochs."""
    lengths = np.asarray(lengths).tolist()
    fullest = 0
    for epoch in range(epochs):
        for samples in steps(len(lengths), layout.rows_per_step, seed, epoch):
            sequences = pack([lengths[index] for index in samples], layout.max_seq_len)
            fullest = max(fullest, len(sequences))
    return fullest


def padding(
    lengths: Sequence[int] | np.ndarray, unpacked: Layout, packed: Layout, seed: int
) -> PaddedTokens:
    """Return what the first epoch computes for its tokens under two layouts."""
    return PaddedTokens(
        real=int(np.sum(lengths)),
        unpacked=_computed_tokens(StepSampler(lengths, unpacked, seed)),
        packed=_computed_tokens(StepSampler(lengths, packed, seed)),
    )


def _computed_tokens(sampler: StepSampler) -> int:
    """Return the tokens of all micro-batches of an epoch, with the padding of the collators."""
    total = 0
    for micro_batch in sampler:
        longest = max(_sequence_tokens(sequence, sampler.lengths) for sequence in micro_batch)
        total += len(micro_batch) * padded_width(longest, sampler.layout.max_seq_len)
    return total


def _sequence_tokens(sequence: list[int], lengths: list[int]) -> int:
    return sum(lengths[max(index, ~index)] for index in sequence)


def pack_shortest(lengths: Sequence[int], max_sequences: int, max_seq_len: int) -> list[list[int]]:
    """Pack into at most `max_sequences` sequences that are as short as that number allows.

    Short sequences spread better over the ranks, and cost less where attention is computed over
    whole sequences. There are more than `max_sequences` where `max_seq_len` is too short for it.
    """
    mean_tokens = -(-sum(lengths) // max_sequences)
    capacity = max(padded_width(max(lengths), max_seq_len), mean_tokens)
    while capacity < max_seq_len:
        sequences = pack(lengths, capacity)
        if len(sequences) <= max_sequences:
            return sequences
        capacity += max(8, capacity // 64)  # the ranks' tokens may differ by as much
    return pack(lengths, max_seq_len)


def _distribute(tokens: Sequence[int], micro_batches: int, max_sequences: int) -> list[list[int]]:
    """Distribute sequences, longest first, each to the micro-batch with the fewest tokens.

    Return the sequence numbers of each micro-batch, the one with the most tokens first.
    """
    assert len(tokens) <= micro_batches * max_sequences, (
        f"{len(tokens)} sequences for {micro_batches} micro-batches of {max_sequences}: "
        "count them with fullest_step"
    )
    sequences: list[list[int]] = [[] for _ in range(micro_batches)]
    filled_tokens = [0] * micro_batches
    for number in sorted(range(len(tokens)), key=tokens.__getitem__, reverse=True):
        with_room = [k for k in range(micro_batches) if len(sequences[k]) < max_sequences]
        emptiest = min(with_room, key=filled_tokens.__getitem__)
        sequences[emptiest].append(number)
        filled_tokens[emptiest] += tokens[number]
    by_tokens = sorted(range(micro_batches), key=filled_tokens.__getitem__, reverse=True)
    return [sequences[k] for k in by_tokens]
