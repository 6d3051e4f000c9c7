"""Samples that begin alike, as a tree in which a token attends to those on its way from the root.

In depth-first order, each sample is a `Branch`: its first tokens are those of the sample before it,
the others are new. The tokens of a tree, in this order, are the new tokens of its branches.
Documents of a row are trees of one branch. No torch.

Legend: T tokens.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Branch(NamedTuple):
    """The tokens of a sample in a tree."""

    shared: int  # at its beginning, which are tokens of earlier branches
    new: int  # all others, at least one


class TreeTokens(NamedTuple):
    """Facts about the tokens of a tree, (T,) int64 each.

    Token i attends to token j if j <= i < ends[j].
    """

    positions: np.ndarray  # in its sample
    ends: np.ndarray  # first place after the tokens that follow it in any sample
    parents: np.ndarray  # place of the token before it in its sample; -1 for a first token


def lay_out(branches: Sequence[Branch]) -> TreeTokens:
    """Return the facts about the tokens of branches.

    >>> tokens = lay_out([Branch(0, 3), Branch(1, 2)])
    >>> tokens.positions.tolist(), tokens.ends.tolist(), tokens.parents.tolist()
    ([0, 1, 2, 1, 2], [5, 3, 3, 5, 5], [-1, 0, 1, 0, 3])
    """
    size = sum(branch.new for branch in branches)
    positions = np.concatenate([np.arange(new) + shared for shared, new in branches])
    ends = np.full(size, size)
    parents = np.arange(-1, size - 1)
    path = np.zeros(max(map(sum, branches)), np.int64)  # places of the sample's tokens
    place = depth = 0
    for shared, new in branches:
        ends[path[shared:depth]] = place
        parents[place] = path[shared - 1] if shared else -1
        depth = shared + new
        path[shared:depth] = np.arange(place, place + new)
        place += new
    return TreeTokens(positions, ends, parents)
