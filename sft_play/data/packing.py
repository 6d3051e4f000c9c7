"""Which documents share a sequence, and how wide a batch is padded. Pure: no torch, no numpy, no I/O."""

from collections.abc import Sequence

from sft_play.errors import ConfigError


def pack(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Return the indices of documents for each sequence of at most `capacity` tokens, by best-fit decreasing.

    The longest document goes first, each to the fullest sequence that still has room for it: at most 11/9 of the fewest
    sequences possible, and one (Johnson et al. 1974). Equal lengths keep their order. Raises: ConfigError for a length
    over the capacity.

    >>> pack([5, 3, 8, 2, 4], 8)
    [[2], [0, 1], [4, 3]]
    """
    sequences: list[list[int]] = []
    waiting: dict[int, list[int]] = {}  # sequences by the tokens that they have room for
    rooms = 0  # bit r is set where a sequence with room for r tokens waits, so that the least that suffices is one lowest bit
    for index in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
        length = lengths[index]
        if length > capacity:
            raise ConfigError(
                f"a sample of {length} tokens does not fit into a sequence of {capacity}; set MODEL_MAX_SEQ_LEN={length}"
            )
        suffice = rooms >> length
        if suffice:
            room = length + (suffice & -suffice).bit_length() - 1
            number = waiting[room].pop()
            if not waiting[room]:
                rooms ^= 1 << room
            sequences[number].append(index)
        else:
            room, number = capacity, len(sequences)
            sequences.append([index])
        left = room - length
        if left:
            waiting.setdefault(left, []).append(number)
            rooms |= 1 << left
    return sequences


def padded_width(longest: int, max_seq_len: int) -> int:
    """Return the tokens that a batch is padded to, `longest` and up to an eighth more.

    Few widths, since a GPU plans its kernels and its memory anew for each: 8 from one power of two to the next.

    >>> [padded_width(longest, 2048) for longest in (1, 8, 100, 130, 1025, 2047)], padded_width(1000, 1000)
    ([8, 8, 104, 144, 1152, 2048], 1000)
    """
    step = max(8, 1 << (longest.bit_length() - 4) if longest >= 16 else 8)
    return max(longest, min(-(-longest // step) * step, max_seq_len))
