"""Which documents share a sequence, and how wide a batch is padded.

Pure: no torch, no numpy, no I/O.
"""

from collections.abc import Sequence
from typing import NamedTuple

from sft_play.errors import ConfigError

# A row of all documents of a micro-batch is padded to a multiple of so many tokens; one of less
# than 1,024 to a width of `padded_width`.
ROW_STEP = 64
# Rows of one document each stay rows where no more of their tokens are padding: there are faster
# kernels for whole rows than for documents. A document alone always does, of one of few widths:
# for each new one cuDNN plans its kernels, which takes a while.
MOST_ROW_PADDING = 1 / 32


def pack(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Return the indices of documents for each sequence of at most `capacity` tokens.

    Best-fit decreasing: the longest document goes first, each into the fullest sequence that still
    has room for it. That is at most 11/9 of the fewest sequences possible, plus one (Johnson et al.
    1974). Equal lengths keep their order. Raises ConfigError for a length over the capacity.

    >>> pack([5, 3, 8, 2, 4], 8)
    [[2], [0, 1], [4, 3]]
    """
    sequences: list[list[int]] = []
    open_by_room: dict[int, list[int]] = {}  # tokens of room left: sequences
    rooms = 0  # bit r is set if a sequence has room for r tokens; the best fit is the lowest bit
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

    They are no more than `max_seq_len`, where that is given.

    There are few widths, 8 between one power of two and the next, because a GPU plans its kernels
    and its memory anew for each.

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

    With `in_one_row` the documents of all sequences are one row, which needs hardly any padding;
    a document alone, and several that are about as long, stay rows.

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
    return BatchShape(1, padded_width(sum(tokens), filled))  # less padding where tokens are few
