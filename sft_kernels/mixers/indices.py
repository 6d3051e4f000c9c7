"""Indices of the documents of a batch for mixers, computed once for all layers.

Legend: B rows, T tokens per row, N documents.
"""

from collections.abc import Callable
from functools import wraps
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sft_kernels.boundaries import Documents
from sft_kernels.trees import Branch, lay_out

ROUNDED_TO = 64  # tokens: a linear attention chunk; lengths in a group differ by less


class Groups(NamedTuple):
    """Documents of similar length as rows of one batch each."""

    tokens: tuple[Tensor, ...]  # per group (documents, width): indices of flattened tokens
    places: Tensor  # (B * T,): the index of each token in the flattened, concatenated groups


class Level(NamedTuple):
    """Segments of trees: runs of tokens that the same samples have, S of them."""

    tokens: Tensor  # of the flattened tokens, those of all segments
    lengths: list[int]  # (S,)
    boundaries: dict[str, Tensor]  # arguments of flash-linear-attention
    parents: Tensor  # (S,) int64, segments of the level before; -1 in the first level


class Segments(NamedTuple):
    """Segments by the number of those before them in their samples."""

    levels: list[Level]
    places: Tensor  # (B * T,): the index of each token in the concatenated levels


def _once(compute: Callable[..., Any]) -> Callable[..., Any]:
    """Store what a function computes for a batch in its documents."""

    @wraps(compute)
    def stored(documents: Documents, *args: int) -> Any:
        key = compute.__name__, *args
        if key not in documents.indices:
            documents.indices[key] = compute(documents, *args)
        return documents.indices[key]

    return stored


@_once
def boundaries_on_cpu(documents: Documents) -> Tensor:
    """Return the boundaries (N + 1,) int64 on the CPU."""
    lengths = torch.tensor([0, *documents.lengths], dtype=torch.int64)
    return lengths.cumsum(0)


@_once
def long_boundaries(documents: Documents) -> Tensor:
    """Return the boundaries (N + 1,) int64 on the batch's device."""
    return documents.boundaries.long()


@_once
def segments(documents: Documents) -> Segments:
    """Return the segments of the trees of a batch."""
    branches, device = documents.tree.branches, documents.boundaries.device
    parents = lay_out(branches).parents.tolist()
    begins = [*accumulate((branch.new for branch in branches), initial=0)]
    starts = {*begins, *(parents[begin] + 1 for begin in begins[:-1])}
    found = {0: (-1, -1)}  # by the place after a segment: its level, and its number there
    # of each level: begin, end and the number of the parent
    members: list[list[tuple[int, int, int]]] = []
    for begin, end in pairwise(sorted(starts)):
        level, parent = found[parents[begin] + 1]
        if len(members) == level + 1:
            members.append([])
        found[end] = level + 1, len(members[level + 1])
        members[level + 1].append((begin, end, parent))
    levels = []
    for of_level in members:
        tokens = torch.cat([torch.arange(begin, end) for begin, end, _ in of_level])
        lengths = [end - begin for begin, end, _ in of_level]
        ends = torch.tensor([0, *accumulate(lengths)])
        before = torch.tensor([parent for _, _, parent in of_level]).to(device)
        boundaries = {"cu_seqlens": ends.to(device), "cu_seqlens_cpu": ends}
        levels.append(Level(tokens.to(device), lengths, boundaries, before))
    return Segments(levels, torch.cat([level.tokens for level in levels]).argsort())


@_once
def places_with_ancestors(documents: Documents, gap: int) -> tuple[Tensor, Tensor]:
    """Return flattened tokens so that each follows the `gap` before it in its sample; -1 for none.

    Also returns the index (B * T,) of each token among them.
    """
    tree, device = documents.tree, documents.boundaries.device
    branches = tree.branches if tree else [Branch(0, length) for length in documents.lengths]
    parents = [*lay_out(branches).parents.tolist(), -1]  # of -1, too
    found: list[int] = []
    places: list[int] = []
    begin = 0
    for branch in branches:
        ancestors = [begin]
        for _ in range(gap):
            ancestors.append(parents[ancestors[-1]])
        found += ancestors[:0:-1]
        places += range(len(found), len(found) + branch.new)
        found += range(begin, begin + branch.new)
        begin += branch.new
    return torch.tensor(found).to(device), torch.tensor(places).to(device)


@_once
def groups(documents: Documents) -> Groups:
    """Return the documents in groups of one width each, a multiple of ROUNDED_TO tokens.

    After the end of its document, a row repeats the last token; results there are not used.
    """
    boundaries = boundaries_on_cpu(documents)
    ends = boundaries[1:]
    by_width: dict[int, list[int]] = {}
    for document, length in enumerate(documents.lengths):
        width = -(-length // ROUNDED_TO) * ROUNDED_TO
        by_width.setdefault(width, []).append(document)
    tokens: list[Tensor] = []
    places = torch.empty(int(ends[-1]), dtype=torch.int64)
    first_place = 0
    for rounded, members in by_width.items():
        width = min(rounded, max(documents.lengths[document] for document in members))
        last = ends[members][:, None] - 1
        found = boundaries[members][:, None] + torch.arange(width)  # (documents, width)
        is_inside = found <= last
        own_places = first_place + torch.arange(found.numel()).view_as(found)
        places[found[is_inside]] = own_places[is_inside]
        tokens.append(found.minimum(last))
        first_place += found.numel()
    device = documents.boundaries.device
    return Groups(tuple(index.to(device) for index in tokens), places.to(device))
