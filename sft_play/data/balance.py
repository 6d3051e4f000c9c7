"""Which documents of a step go to which rank, so that no rank waits long for another.

Pure: no torch, no numpy, no I/O. Documents, sequences and micro-batches are dealt by number.
"""

import heapq
from collections.abc import Sequence

from sft_play.data.packing import batch_shape, pack, padded_width
from sft_play.plan.layout import Layout

# Of documents. A micro-batch without any trains a filler.
PackedSequence = list[int]
PackedMicroBatch = list[PackedSequence]


def deal(costs: Sequence[float], hands: int, most: int | None = None) -> list[list[int]]:
    """Return the numbers of the items of each hand, so that all hands cost nearly the same.

    The costliest item goes first, each to the hand with the least so far that holds fewer than
    `most` items. Without `most` no hand has over 4/3 of the least possible (Graham 1969).

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


def ranks_of_micro_batches(costs: Sequence[float], layout: Layout) -> list[list[int]]:
    """Return the numbers of each rank's micro-batches, given with the costliest first."""
    if layout.waits_each_micro_batch:  # those at the same time are alike
        return [
            list(range(rank, len(costs), layout.world_size)) for rank in range(layout.world_size)
        ]
    return deal(costs, layout.world_size, layout.micro_batches)


def pack_for_ranks(lengths: Sequence[int], layout: Layout) -> list[list[PackedMicroBatch]]:
    """Return the micro-batches of each rank, the costliest first.

    Documents are dealt to the ranks and packed there, or packed all together; whichever lets the
    slowest rank end sooner. The first balances better. The second pads less where a rank has few
    sequences.
    """
    together = _packed_together(lengths, layout)
    by_rank = _packed_by_rank(lengths, layout)
    if by_rank is None:
        return together
    return min(by_rank, together, key=lambda ranks: slowest_cost(ranks, lengths, layout))


def slowest_cost(
    ranks: Sequence[Sequence[PackedMicroBatch]], lengths: Sequence[int], layout: Layout
) -> float:
    """Return what a step costs the rank that the others wait for, in tokens."""
    costs = [[_cost(batch, lengths, layout) for batch in own] for own in ranks]
    if layout.waits_each_micro_batch:
        return sum(map(max, zip(*costs, strict=True)))
    return max(map(sum, costs))


def pack_shortest(lengths: Sequence[int], max_sequences: int, max_seq_len: int) -> list[list[int]]:
    """Pack into at most `max_sequences` sequences that are as short as that number allows.

    Short sequences cost less where attention is computed over whole sequences, and sequences of one
    length need no padding. There are more than `max_sequences` where `max_seq_len` is too short for
    it.
    """
    mean_tokens = -(-sum(lengths) // max_sequences)
    capacity = max(padded_width(max(lengths), max_seq_len), mean_tokens)
    sequences = pack(lengths, min(capacity, max_seq_len))
    while len(sequences) > max_sequences and capacity < max_seq_len:
        capacity = min(max_seq_len, capacity + max(8, capacity // 64))
        sequences = pack(lengths, capacity)
    # packing fills all but the last ones
    evened = deal(lengths, len(sequences))
    if _width(evened, lengths, max_seq_len) <= _width(sequences, lengths, max_seq_len):
        return evened
    return sequences


def _packed_by_rank(lengths: Sequence[int], layout: Layout) -> list[list[PackedMicroBatch]] | None:
    """Return the micro-batches of each rank; None where a rank's documents do not fit."""
    costs = [document_cost(length, layout) for length in lengths]
    most = layout.micro_batches * layout.sequences
    ranks = []
    for documents in deal(costs, layout.world_size):
        sequences: list[PackedSequence] = []
        if documents:
            own = [lengths[document] for document in documents]
            for places in pack_shortest(own, most, layout.max_seq_len):
                sequences.append([documents[place] for place in places])
        if len(sequences) > most:
            return None
        ranks.append(_micro_batches(sequences, lengths, layout, layout.micro_batches))
    return ranks


def _packed_together(lengths: Sequence[int], layout: Layout) -> list[list[PackedMicroBatch]]:
    """Return the micro-batches of each rank, packed from the documents of all."""
    count = layout.micro_batches * layout.world_size
    sequences = pack_shortest(lengths, count * layout.sequences, layout.max_seq_len)
    assert len(sequences) <= count * layout.sequences, (
        f"{len(sequences)} sequences for {count} micro-batches of {layout.sequences}: "
        "count them with fullest_step"
    )
    batches = _micro_batches(sequences, lengths, layout, count)
    costs = [_cost(batch, lengths, layout) for batch in batches]
    ranks = ranks_of_micro_batches(costs, layout)
    return [[batches[number] for number in numbers] for numbers in ranks]


def _micro_batches(
    sequences: list[PackedSequence], lengths: Sequence[int], layout: Layout, count: int
) -> list[PackedMicroBatch]:
    """Return sequences in `count` micro-batches, those of similar length together."""
    ordered = sorted(sequences, key=lambda one: _tokens(one, lengths), reverse=True)
    least, longer = divmod(len(ordered), count)
    batches = []
    start = 0
    for number in range(count):
        # the one more goes to short sequences
        end = start + least + (number >= count - longer)
        batches.append(ordered[start:end])
        start = end
    return sorted(batches, key=lambda batch: _cost(batch, lengths, layout), reverse=True)


def _cost(batch: PackedMicroBatch, lengths: Sequence[int], layout: Layout) -> float:
    """Return what a micro-batch costs, in tokens: those of its padding, and attention on top."""
    if not batch:
        return 0.0
    sequences = [[lengths[document] for document in sequence] for sequence in batch]
    rows, width = batch_shape(sequences, layout.max_seq_len, layout.in_one_row)
    padding = rows * width - sum(map(sum, sequences))
    costs = (document_cost(length, layout) for sequence in sequences for length in sequence)
    return padding + sum(costs)


def document_cost(length: int, layout: Layout) -> float:
    """Return what a document costs, in tokens: attention is a part of a token for each pair."""
    return length * (1 + layout.pair_cost * length)


def _width(batch: PackedMicroBatch, lengths: Sequence[int], max_seq_len: int) -> int:
    return padded_width(max(_tokens(sequence, lengths) for sequence in batch), max_seq_len)


def _tokens(sequence: PackedSequence, lengths: Sequence[int]) -> int:
    return sum(lengths[document] for document in sequence)
