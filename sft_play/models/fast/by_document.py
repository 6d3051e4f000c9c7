"""A module's own code on one document of a packed batch after another: exact for any module.

The reference that fused code over all documents at once is proved against.

Legend: B rows, T tokens of a row.
"""

from typing import Any

import torch
from torch import Tensor, nn


def forward_by_document(lengths: list[int], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Run a module's own forward method on each document, and join what it returns.

    Of a tensor of tokens a document's part is (1, its tokens, ...), and of a mask
    (1, heads, its tokens, its tokens).
    """
    rows, tokens = first_tensor(args, kwargs).shape[:2]
    outputs: list[Any] = []
    begin = 0  # in the flattened rows
    for length in lengths:
        row, first = divmod(begin, tokens)
        part = slice(first, first + length)
        part_args = tuple(_part(value, row, part, tokens) for value in args)
        part_kwargs = {name: _part(value, row, part, tokens) for name, value in kwargs.items()}
        outputs.append(type(module).forward(module, *part_args, **part_kwargs))
        begin += length
    return unflatten(_join(outputs, lengths), rows, tokens)


def first_tensor(args: tuple, kwargs: dict[str, Any]) -> Tensor:
    """Return the hidden states of a call: its first tensor."""
    values = (*args, *kwargs.values())
    return next(value for value in values if isinstance(value, Tensor))


def _part(value: Any, row: int, part: slice, tokens: int) -> Any:
    """Return what one document of a row needs of an argument for all of them."""
    if isinstance(value, tuple):
        return tuple(_part(element, row, part, tokens) for element in value)
    if not isinstance(value, Tensor) or value.dim() < 2:
        return value
    own_row = value[:1] if len(value) == 1 else value[row : row + 1]
    if value.dim() == 4 and value.shape[-2:] == (tokens, tokens):  # a mask
        return own_row[..., part, part]
    return own_row[:, part] if value.shape[1] == tokens else value


def unflatten(value: Any, rows: int, tokens: int) -> Any:
    """Return tensors (1, B * T, ...) as (B, T, ...), and anything else as it is."""
    if isinstance(value, tuple):
        return tuple(unflatten(element, rows, tokens) for element in value)
    if not _has_tokens(value, rows * tokens):
        return value
    return value.view(rows, tokens, *value.shape[2:])


def _has_tokens(value: Any, tokens: int) -> bool:
    return isinstance(value, Tensor) and value.dim() >= 2 and value.shape[:2] == (1, tokens)


def _join(outputs: list[Any], lengths: list[int]) -> Any:
    """Return the outputs of all documents as one: tensors of tokens joined, states dropped."""
    first = outputs[0]
    if isinstance(first, tuple):
        return tuple(_join(list(elements), lengths) for elements in zip(*outputs, strict=True))
    if not _has_tokens(first, lengths[0]):
        return None
    return torch.cat(outputs, dim=1)
