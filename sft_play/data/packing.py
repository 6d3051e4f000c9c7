"""Which documents share a sequence and belong to which rank, and how wide a batch is padded.

Pure: no torch, no numpy, no I/O. Documents, sequences and micro-batches are distributed by index,
so that no rank waits long for another.
"""

import heapq
from collections.abc import Sequence
from typing import NamedTuple

from sft_play.errors import ConfigError
from sft_play.plan.step import Layout

# A row of all documents of a micro-batch is padded to a multiple of ROW_STEP tokens; a row of less
# than 1,024 tokens to a width of `padded_width`.
ROW_STEP = 64
# Rows of one document each stay separate if at most this share of their tokens is padding: kernels
# for rows are faster than those for documents. A single document always does, padded to one of few
# widths: for each new width cuDNN plans its kernels, which takes time.
MOST_ROW_PADDING = 1 / 32


def pack_documents(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Return the indices of documents for each sequence of at most `capacity` tokens.

    Best-fit decreasing: the longest document goes first, each into the fullest sequence that still
    has space for it. This needs at most 11/9 of the optimal number of sequences, plus one (Johnson
    et al. 1974). Equal lengths keep their order. Raises ConfigError for a length over the capacity.

    >>> pack_documents([5, 3, 8, 2, 4], 8)
    [[2], [0, 1], [4, 3]]
    """
    sequences: list[list[int]] = []
    open_by_room: dict[int, list[int]] = {}  # tokens of free space: sequences
    rooms = 0  # bit r is set if a sequence has r free tokens; the best fit is the lowest bit
    for index in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
        length = lengths[index]
        if length > capacity:
            raise ConfigError(
                f"a sample of {length} tokens does not fit into a sequence of {capacity}; "
                f"set MODEL_MAX_SEQ_LEN={length}"
            )
        large_enough = rooms >> length
        if large_enough:
            room = length + (large_enough & -large_enough).bit_length() - 1
            sequence = open_by_room[room].pop()
            if not open_by_room[room]:
                rooms ^= 1 << room
            sequences[sequence].append(index)
        else:
            room = capacity
            sequence = len(sequences)
            sequences.append([index])
        left = room - length
        if left:
            open_by_room.setdefault(left, []).append(sequence)
            rooms |= 1 << left
    return sequences


def padded_width(longest: int, max_seq_len: int | None = None) -> int:
    """Return the tokens that a batch is padded to: `longest`, or up to an eighth more.

    They never exceed `max_seq_len`, if it is given.

    There are few widths, 8 between consecutive powers of two, because a GPU plans its kernels
    and its memory again for each width.

    >>> [padded_width(longest, 2048) for longest in (1, 8, 100, 130, 1025, 2047)]
    [8, 8, 104, 144, 1152, 2048]
    >>> padded_width(1000), padded_width(1000, max_seq_len=1000)
    (1024, 1000)
    """
    step = 8
    if longest >= 16:
        step = max(8, 1 << (longest.bit_length() - 4))
    rounded_up = -(-longest // step) * step
    if max_seq_len is None:
        return rounded_up
    return max(longest, min(rounded_up, max_seq_len))


class BatchShape(NamedTuple):
    """The shape of a micro-batch."""

    rows: int
    width: int  # tokens of a row, with padding


def batch_shape(
    sequences: Sequence[Sequence[int]], max_seq_len: int, in_one_row: bool = False
) -> BatchShape:
    """Return the shape of a micro-batch of sequences, given as the lengths of their documents.

    With `in_one_row` the documents of all sequences form one row, which needs hardly any padding.
    A single document, and several of about the same length, stay separate rows.

    >>> batch_shape([[500, 300], [700]], max_seq_len=1024)
    BatchShape(rows=2, width=832)
    >>> batch_shape([[500, 300], [700]], max_seq_len=1024, in_one_row=True)
    BatchShape(rows=1, width=1536)
    >>> batch_shape([[60, 40], [90]], max_seq_len=128, in_one_row=True)
    BatchShape(rows=1, width=192)
    >>> batch_shape([[1000], [1024]], max_seq_len=1024, in_one_row=True)
    BatchShape(rows=2, width=1024)
    >>> batch_shape([[1200]], max_seq_len=2048, in_one_row=True)
    BatchShape(rows=1, width=1280)
    """
    tokens = [sum(documents) for documents in sequences]
    width = padded_width(max(tokens), max_seq_len)
    rows = len(sequences)
    are_rows = all(len(documents) == 1 for documents in sequences)
    padding = rows * width - sum(tokens)
    stay_rows = are_rows and (rows == 1 or padding <= MOST_ROW_PADDING * rows * width)
    if not in_one_row or stay_rows:
        return BatchShape(rows, width)
    filled = -(-sum(tokens) // ROW_STEP) * ROW_STEP
    return BatchShape(1, padded_width(sum(tokens), filled))  # less padding if there are few tokens


PackedMicroBatch = list[list[int]]  # sequences of documents; an empty one trains a filler


def deal(costs: Sequence[float], hands: int, most: int | None = None) -> list[list[int]]:
    """Return the indices of the items of each hand, so that all hands cost nearly the same.

    The most expensive item goes first, each to the cheapest hand so far that has fewer than
    `most` items. Without `most` no hand exceeds 4/3 of the optimum (Graham 1969).

    >>> deal([5, 4, 3, 3, 3], hands=2)
    [[0, 3], [1, 2, 4]]
    >>> deal([5, 1, 1, 1], hands=2, most=2)
    [[0, 3], [1, 2]]
    """
    assert most is None or len(costs) <= hands * most, (
        f"{len(costs)} items for {hands} hands of {most}: count them with fullest_step"
    )
    dealt: list[list[int]] = [[] for _ in range(hands)]
    open_hands = [(0.0, hand) for hand in range(hands)]
    for item in sorted(range(len(costs)), key=costs.__getitem__, reverse=True):
        cost, hand = heapq.heappop(open_hands)
        dealt[hand].append(item)
        if len(dealt[hand]) != most:
            heapq.heappush(open_hands, (cost + costs[item], hand))
    return dealt


def deal_micro_batches(costs: Sequence[float], layout: Layout) -> list[list[int]]:
    """Return the indices of each rank's micro-batches; they are given with the costliest first."""
    if layout.waits_each_micro_batch:  # micro-batches that run in parallel are alike
        return [list(range(rank, len(costs), layout.replicas)) for rank in range(layout.replicas)]
    return deal(costs, layout.replicas, layout.micro_batches)


def pack_for_ranks(lengths: Sequence[int], layout: Layout) -> list[list[PackedMicroBatch]]:
    """Return the micro-batches of each rank, the most expensive first.

    Documents are either dealt to the ranks and packed there, or packed all together; the variant
    whose slowest rank ends sooner is used. The first balances better. The second pads less if a
    rank has few sequences.
    """
    together = _pack_together(lengths, layout)
    by_rank = _pack_by_rank(lengths, layout)
    if by_rank is None:
        return together
    return min(by_rank, together, key=lambda ranks: slowest_cost(ranks, lengths, layout))


def slowest_cost(
    ranks: Sequence[Sequence[PackedMicroBatch]], lengths: Sequence[int], layout: Layout
) -> float:
    """Return the cost in tokens of a step on the slowest rank."""
    costs = [[_cost(batch, lengths, layout) for batch in batches] for batches in ranks]
    if layout.waits_each_micro_batch:
        return sum(map(max, zip(*costs, strict=True)))
    return max(map(sum, costs))


def pack_shortest(lengths: Sequence[int], max_sequences: int, max_seq_len: int) -> list[list[int]]:
    """Pack into at most `max_sequences` sequences that are as short as that number allows.

    Short sequences cost less if attention is computed over full sequences, and sequences of equal
    length need no padding. There are more than `max_sequences` sequences if `max_seq_len` requires
    it.
    """
    mean_tokens = -(-sum(lengths) // max_sequences)
    capacity = max(padded_width(max(lengths), max_seq_len), mean_tokens)
    sequences = pack_documents(lengths, min(capacity, max_seq_len))
    while len(sequences) > max_sequences and capacity < max_seq_len:
        capacity = min(max_seq_len, capacity + max(8, capacity // 64))
        sequences = pack_documents(lengths, capacity)
    # packing fills all except the last ones

    def width(packed: list[list[int]]) -> int:
        """Return the padded width of the longest sequence."""
        return padded_width(max(_sum_lengths(one, lengths) for one in packed), max_seq_len)

    return min(deal(lengths, len(sequences)), sequences, key=width)


def _pack_by_rank(lengths: Sequence[int], layout: Layout) -> list[list[PackedMicroBatch]] | None:
    """Return the micro-batches of each rank; None if a rank's documents do not fit."""
    costs = [document_cost(length, layout) for length in lengths]
    most = layout.micro_batches * layout.sequences
    ranks = []
    for documents in deal(costs, layout.replicas):
        sequences: PackedMicroBatch = []
        if documents:
            dealt = [lengths[document] for document in documents]
            for positions in pack_shortest(dealt, most, layout.capacity):
                sequences.append([documents[position] for position in positions])
        if len(sequences) > most:
            return None
        ranks.append(_cut_micro_batches(sequences, lengths, layout, layout.micro_batches))
    return ranks


def _pack_together(lengths: Sequence[int], layout: Layout) -> list[list[PackedMicroBatch]]:
    """Return the micro-batches of each rank, packed from the documents of all ranks."""
    count = layout.micro_batches * layout.replicas
    sequences = pack_shortest(lengths, count * layout.sequences, layout.capacity)
    assert len(sequences) <= count * layout.sequences, (
        f"{len(sequences)} sequences for {count} micro-batches of {layout.sequences}: "
        "count them with fullest_step"
    )
    batches = _cut_micro_batches(sequences, lengths, layout, count)
    costs = [_cost(batch, lengths, layout) for batch in batches]
    ranks = deal_micro_batches(costs, layout)
    return [[batches[number] for number in numbers] for numbers in ranks]


def _cut_micro_batches(
    sequences: PackedMicroBatch, lengths: Sequence[int], layout: Layout, count: int
) -> list[PackedMicroBatch]:
    """Return sequences in `count` micro-batches, grouped by similar length."""
    ordered = sorted(sequences, key=lambda one: _sum_lengths(one, lengths), reverse=True)
    least, longer = divmod(len(ordered), count)
    batches = []
    start = 0
    for number in range(count):
        # micro-batches with one more sequence get the short ones
        end = start + least + (number >= count - longer)
        batches.append(ordered[start:end])
        start = end
    return sorted(batches, key=lambda batch: _cost(batch, lengths, layout), reverse=True)


def _cost(batch: PackedMicroBatch, lengths: Sequence[int], layout: Layout) -> float:
    """Return the cost of a micro-batch in tokens, including padding and attention."""
    if not batch:
        return 0.0
    sequences = [[lengths[document] for document in sequence] for sequence in batch]
    rows, width = batch_shape(sequences, layout.capacity, layout.in_one_row)
    padding = rows * width - sum(map(sum, sequences))
    costs = (document_cost(length, layout) for sequence in sequences for length in sequence)
    return padding + sum(costs)


def document_cost(length: int, layout: Layout) -> float:
    """Return the cost of a document in tokens: attention costs a part of a token per pair."""
    return length * (1 + layout.pair_cost * length)


def _sum_lengths(documents: Sequence[int], lengths: Sequence[int]) -> int:
    return sum(lengths[document] for document in documents)
