"""Indices of the documents of a batch for mixers, computed once for all layers.

Legend: B rows, T tokens per row, N documents.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sft_play.data.documents import Documents

ROUNDED_TO = 64  # tokens: a linear attention chunk; lengths in a group differ by less


class Groups(NamedTuple):
    """Documents of similar length as rows of one batch each."""

    tokens: tuple[Tensor, ...]  # per group (documents, width): indices of flattened tokens
    places: Tensor  # (B * T,): the index of each token in the flattened, concatenated groups


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
def places_with_gaps(documents: Documents, tokens: int, gap: int) -> Tensor:
    """Return the index (tokens,) of each token if `gap` empty places separate documents."""
    place = torch.arange(tokens, device=documents.boundaries.device)
    return place + gap * torch.bucketize(place, long_boundaries(documents)[1:-1], right=True)


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
