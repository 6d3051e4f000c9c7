"""The documents of a packed batch, for modules whose layer does not pass them on.

Some models and layers pass `cu_seq_lens_q` on to their modules and others do not. A forward
pre-hook of the model therefore stores the documents of the batch in `PackedDocuments`, which
modules of the decoder read. Checkpointed layers that are recomputed in the backward pass read the
same batch.

For packed or padded rows, transformers passes a (T, T) mask to attention. The fastest kernels do
not accept a mask, and checking whether one is needed synchronizes with the GPU. Neither is
necessary: the collator knows where documents begin, and causal attention never reads padding on the
right. `attention.forward.remove_mask` replaces the mask with UNMASKED.

`forward_by_document` runs the original implementation of a module on one document after another.
This is exact for any module. It is the reference for fused code that runs on all documents at once.

Legend: B rows, T tokens per row.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from torch.utils.hooks import RemovableHandle

from sft_kernels.boundaries import BOUNDARIES, DOCUMENTS, Documents


class PackedDocuments:
    """The documents of the batch that a model is computing; None if it is not packed."""

    def __init__(self) -> None:
        self.batch: Documents | None = None
        self.has_images = False  # also set for batches that are not packed

    def on(self, device: torch.device) -> Documents | None:
        """Return the documents for a module on a device."""
        return None if self.batch is None else self.batch.on(device)

    @contextmanager
    def showing(self, batch: Documents | None) -> Iterator[None]:
        """Make modules called inside read another batch; None for rows without documents."""
        before = self.batch
        self.batch = batch
        try:
            yield
        finally:
            self.batch = before

    def note(
        self, module: nn.Module, args: tuple, kwargs: dict[str, Any]
    ) -> tuple[tuple, dict[str, Any]]:
        """Forward pre-hook of a model: store the documents of the batch, for both passes.

        They are passed on under the names that transformers' models know.
        """
        self.batch = kwargs.get(DOCUMENTS)
        self.has_images = kwargs.get("pixel_values") is not None
        passed = {name: value for name, value in kwargs.items() if name != DOCUMENTS}
        return args, passed | (self.batch.arguments if self.batch else {})


def watch_documents(
    model: nn.Module, decoder: nn.Module, encoders: Iterable[nn.Module] = ()
) -> PackedDocuments:
    """Return the object in which a model stores the documents of a batch for its decoder.

    `encoders` are parts that read no text; the first call must name them.
    """
    found = vars(decoder).get("packed_documents")
    if found is not None:
        return found
    packed = PackedDocuments()
    decoder.packed_documents = packed
    model.register_forward_pre_hook(packed.note, with_kwargs=True)
    for encoder in encoders:
        hide_arguments(encoder, BOUNDARIES)  # documents of the text are not its sequences
    return packed


def hide_arguments(module: nn.Module, names: Sequence[str]) -> RemovableHandle:
    """Call a module without some keyword arguments; return the hook."""

    def hide(_: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        return args, {name: value for name, value in kwargs.items() if name not in names}

    return module.register_forward_pre_hook(hide, with_kwargs=True)


def forward_by_document(lengths: list[int], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Return the joined outputs of a module's original forward method, run on each document.

    A document's part of a tensor of tokens is (1, its tokens, ...). Its part of a mask is
    (1, heads, its tokens, its tokens).
    """
    rows, tokens = first_tensor(args, kwargs).shape[:2]
    outputs: list[Any] = []
    begin = 0  # in the flattened rows
    for length in lengths:
        row, first = divmod(begin, tokens)
        part = slice(first, first + length)
        cut = partial(_part, row=row, part=part, tokens=tokens)
        part_args, part_kwargs = tree_map_only(Tensor, cut, (args, kwargs))
        outputs.append(type(module).forward(module, *part_args, **part_kwargs))
        begin += length
    return unflatten(_join(outputs, lengths), rows, tokens)


def first_tensor(args: tuple, kwargs: dict[str, Any]) -> Tensor:
    """Return the hidden states of a call: its first tensor."""
    values = (*args, *kwargs.values())
    return next(value for value in values if isinstance(value, Tensor))


def _part(value: Tensor, row: int, part: slice, tokens: int) -> Tensor:
    """Return the part of an argument that one document of a row needs."""
    if value.dim() < 2:
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


# Replaces the mask of a batch that needs none. transformers does not change a mask with four
# dimensions, and no other attention accepts this shape
UNMASKED = torch.empty((1, 1, 0, 0))


def is_unmasked(mask: Tensor | None) -> bool:
    """Return whether a mask is UNMASKED."""
    return isinstance(mask, Tensor) and mask.shape == UNMASKED.shape
