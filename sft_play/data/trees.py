"""Samples of a row that begin alike, as a tree: what they share is stored and computed once.

A chat template may write an answer differently once the conversation continues, so a conversation
gives several samples with the same beginning. In depth-first order, each sample is a `Branch`: its
first tokens are those of the sample before it, the others are new. The tokens of a tree, in this
order, are the new tokens of its branches. Documents of a row are trees of one branch.

Legend: N samples, R rows, U units, T tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


def depth_first(samples: Sequence[np.ndarray]) -> tuple[list[int], list[int]]:
    """Return the order of samples (T,) as a tree, and what each shares with the one before it.

    A sample goes behind the last one of those with which it shares most.

    >>> depth_first([np.array([1, 2, 3]), np.array([1, 4]), np.array([1, 2, 5])])
    ([0, 2, 1], [0, 2, 1])
    """
    order: list[int] = []
    shared: list[int] = []
    for index, ids in enumerate(samples):
        common = [_common(samples[other], ids) for other in order]
        most = max(common, default=0)
        place = len(order)
        if most:
            place = len(common) - common[::-1].index(most)
        order.insert(place, index)
        shared.insert(place, most)
        if place + 1 < len(order):
            shared[place + 1] = _common(ids, samples[order[place + 1]])
    return order, shared


def _common(one: np.ndarray, other: np.ndarray) -> int:
    """Return how many tokens two samples have in common at their beginning."""
    length = min(len(one), len(other))
    differs = one[:length] != other[:length]
    return int(differs.argmax()) if differs.any() else length


@dataclass(frozen=True)
class Units:
    """What a sequence is packed of: consecutive samples, each as one document.

    A unit is one sample, or the samples of a tree.
    """

    ends: np.ndarray  # (U,) int64, of its samples
    lengths: np.ndarray  # (U,) int64: its tokens, those that its samples share once
    row_ends: np.ndarray  # (R,) int64: ends of the rows among the units

    def samples(self, unit: int) -> range:
        """Return the indices of a unit's samples."""
        return range(int(self.ends[unit - 1]) if unit else 0, int(self.ends[unit]))


def find_units(
    lengths: np.ndarray, shared: np.ndarray, row_ends: np.ndarray, capacity: int | None
) -> Units:
    """Return the units of samples: trees of at most `capacity` tokens, or without it the samples.

    lengths (N,) are the samples' tokens, and shared (N,) those shared with the sample before it.
    A tree with more tokens is cut into parts that repeat as few tokens as possible.
    """
    if capacity is None:
        return Units(np.arange(1, len(lengths) + 1), lengths, row_ends)
    sizes = np.cumsum(lengths - shared)
    begins = np.flatnonzero(shared == 0)
    before = np.append(0, sizes)[begins]
    found = np.diff(np.append(before, sizes[-1:]))  # tokens of each tree
    ends = np.append(begins[1:], len(lengths))
    cuts = [
        begin + np.array(_cut(lengths[begin:end], shared[begin:end], capacity))
        for begin, end in zip(begins[found > capacity], ends[found > capacity], strict=True)
    ]
    begins = np.unique(np.concatenate([begins, *cuts], dtype=np.int64))
    ends = np.append(begins[1:], len(lengths))
    own = sizes[ends - 1] - np.append(0, sizes)[begins]
    return Units(ends, own + shared[begins], np.searchsorted(ends, row_ends) + 1)


def _cut(lengths: np.ndarray, shared: np.ndarray, capacity: int) -> list[int]:
    """Return where the parts of one tree begin, of at most `capacity` tokens each.

    >>> _cut(np.array([4, 6, 8, 9]), np.array([0, 2, 4, 4]), 12)
    [0, 3]
    """
    least = [0]  # repeated tokens of the first samples, cut
    begins: list[int] = []  # of their last part
    for end in range(1, len(lengths) + 1):
        best, size = None, 0
        for begin in range(end - 1, -1, -1):
            size += int(lengths[begin] - shared[begin])
            if size + shared[begin] > capacity and begin < end - 1:
                break
            repeated = least[begin] + int(shared[begin])
            if best is None or repeated < best[0]:
                best = repeated, begin
        assert best is not None, "a part has at least one sample"
        least.append(best[0])
        begins.append(best[1])
    found, end = [], len(lengths)
    while end:
        end = begins[end - 1]
        found.append(end)
    return found[::-1]
