"""Where the documents of a packed batch begin, for modules whose layer does not pass this on.

Some models and layers pass `cu_seq_lens_q` on to their modules and others do not. Forward pre-hooks
of the model and its decoder therefore store the documents of the batch in one `PackedDocuments`,
which modules of the decoder read. Checkpointed layers that are recomputed in the backward pass read
the same batch.

For packed or padded rows, transformers passes a (T, T) mask to attention. The fastest kernels do
not accept a mask, and checking whether one is needed synchronizes with the GPU. Neither is
necessary: the collator knows where documents begin, and causal attention never reads padding on the
right. `attention.forward.remove_mask` replaces the mask with UNMASKED.

`forward_by_document` runs the original implementation of a module on one document after another.
This is exact for any module. It is the reference for fused code that runs on all documents at once.

Ranks may share each row's tokens (DeepSpeed-Ulysses, arXiv:2309.14509). Each of the c ranks in a
`ContextGroup` has T / c consecutive tokens of every row. It runs all per-token modules on these
tokens. For attention, the ranks exchange data: each rank receives all tokens of H / c heads. It
computes attention as on a single rank, with the boundaries of full documents, and sends each rank
the outputs of that rank's tokens. If there are fewer key and value heads than ranks, each head is
sent to several ranks, and their gradients are summed. Each exchange is one all-to-all. Its gradient
is the reverse exchange.

Legend: B rows, T tokens per row, N documents, G groups of documents, H query heads, K key and value
heads, D features per head.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed, nn
from torch.utils._pytree import tree_map_only
from torch.utils.hooks import RemovableHandle

from sft_play.data.collate import IMAGE_BLOCKS, RowPart
from sft_play.models.architecture import encoders_of
from sft_play.process import Process


@dataclass(frozen=True)
class ContextGroup:
    """The ranks that share rows; this rank has the `rank`-th part of each row."""

    rank: int
    size: int
    group: Any  # their process group in torch

    @property
    def part(self) -> RowPart:
        """The part of each row that this rank computes."""
        return RowPart(self.rank, self.size)

    def add(self, x: Tensor) -> Tensor:
        """Return the sum of a tensor over the ranks; it is not differentiable."""
        distributed.all_reduce(x, group=self.group)
        return x

    def heads(self, x: Tensor) -> Tensor:
        """Return all tokens (B, T, H / c, D) of this rank's heads from its tokens (B, T / c, H, D).

        With fewer than c heads, each head is repeated.
        """
        if x.shape[2] < self.size:
            x = x.repeat_interleave(self.size // x.shape[2], dim=2)
        parts = x.unflatten(2, (self.size, -1)).permute(2, 0, 1, 3, 4)  # (c, B, T / c, H / c, D)
        received = _Exchange.apply(parts, self.group)
        return received.transpose(0, 1).flatten(1, 2)

    def tokens(self, x: Tensor) -> Tensor:
        """Return this rank's tokens (B, T / c, H, D) from all (B, T, H / c, D); undoes `heads`."""
        parts = x.unflatten(1, (self.size, -1)).transpose(0, 1)  # (c, B, T / c, H / c, D)
        received = _Exchange.apply(parts, self.group)
        return received.permute(1, 2, 0, 3, 4).flatten(2, 3)

    def own_heads(self, x: Tensor | None) -> Tensor | None:
        """Return this rank's elements (H / c,) of a tensor with one element per head (H,)."""
        return None if x is None else x.unflatten(0, (self.size, -1))[self.rank]


@cache
def context_group(process: Process, size: int) -> ContextGroup | None:
    """Return this rank's group of `size` consecutive ranks; None if `size` is 1.

    Every rank must call it.
    """
    if size == 1:
        return None
    own = None
    for first in range(0, process.world_size, size):
        members = list(range(first, first + size))
        group = distributed.new_group(members, timeout=process.timeout)
        if process.rank in members:
            own = ContextGroup(process.rank - first, size, group)
    return own


class _Exchange(torch.autograd.Function):
    """Send part r of x (c, ...) to rank r of the group, and receive part r from it."""

    @staticmethod
    def forward(ctx, x: Tensor, group: Any) -> Tensor:
        """Return the parts (c, ...) received from the ranks."""
        ctx.group = group
        return _exchange(x, group)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        """Return the gradient of each part, received from the rank that got the part."""
        return _exchange(grad, ctx.group), None


def _exchange(x: Tensor, group: Any) -> Tensor:
    x = x.contiguous()
    received = torch.empty_like(x)
    distributed.all_to_all_single(received, x, group=group)
    return received


# The keyword arguments that pass documents to transformers' models
BOUNDARIES = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
ImageBlock = tuple[int, int, int]  # its start and end, its document's start, in flattened rows
ROUNDED_TO = 64  # tokens: a linear attention chunk; lengths in a group differ by less


CONTEXT = "context_group"  # the ranks that share the batch's rows
# Keys of a batch that only this module reads: they are not arguments of the model
NOT_PASSED_ON = ("document_lengths", IMAGE_BLOCKS, CONTEXT)


class Groups(NamedTuple):
    """Documents of similar length as rows of one batch each."""

    tokens: tuple[Tensor, ...]  # per group (documents, width): indices of flattened tokens
    places: Tensor  # (B * T,): the index of each token in the flattened, concatenated groups


@dataclass(eq=False)
class Documents:
    """Where documents begin in a batch's flattened rows, and cached indices computed from it."""

    boundaries: Tensor  # (N + 1,) int32, the cu_seq_lens of flash attention
    longest: int  # tokens of the longest document
    context: ContextGroup | None = None  # the ranks that share each row's tokens
    given_lengths: Sequence[int] | None = None  # tokens per document, if the batch has them
    image_blocks: Sequence[ImageBlock] = ()
    # By the mask that attention gets: the tokens that image tokens attend to, as `ImageRows`
    image_rows: dict[Tensor, Any] = field(default_factory=dict)
    _places_with_gaps: dict[int, Tensor] = field(init=False, default_factory=dict)
    _elsewhere: dict[torch.device, "Documents"] = field(init=False, default_factory=dict)

    @property
    def arguments(self) -> dict[str, Any]:
        """The keyword arguments that pass the documents to transformers' models."""
        values = (self.boundaries, self.boundaries, self.longest, self.longest)
        return dict(zip(BOUNDARIES, values, strict=True))

    def on(self, device: torch.device) -> "Documents":
        """Return the same documents for modules on a device; they are copied there once."""
        if self.boundaries.device == device:
            return self
        if device not in self._elsewhere:
            boundaries = self.boundaries.to(device)
            self._elsewhere[device] = replace(
                self, boundaries=boundaries, given_lengths=self.lengths
            )
        return self._elsewhere[device]

    @cached_property
    def lengths(self) -> list[int]:
        """Return the tokens of each document; waits for the GPU if the batch lacks the lengths."""
        if self.given_lengths is not None:
            return list(self.given_lengths)
        return self.boundaries.diff().tolist()

    @cached_property
    def boundaries_on_cpu(self) -> Tensor:
        """Return the boundaries (N + 1,) int64 on the CPU."""
        lengths = torch.tensor([0, *self.lengths], dtype=torch.int64)
        return lengths.cumsum(0)

    @cached_property
    def long_boundaries(self) -> Tensor:
        """Return the boundaries (N + 1,) int64 on the batch's device."""
        return self.boundaries.long()

    def places_with_gaps(self, tokens: int, gap: int) -> Tensor:
        """Return the index (tokens,) of each token if `gap` empty places separate documents."""
        if gap not in self._places_with_gaps:
            place = torch.arange(tokens, device=self.boundaries.device)
            document = torch.bucketize(place, self.long_boundaries[1:-1], right=True)
            self._places_with_gaps[gap] = place + gap * document
        return self._places_with_gaps[gap]

    @cached_property
    def groups(self) -> Groups:
        """Return the documents in groups of one width each, a multiple of ROUNDED_TO tokens.

        After the end of its document, a row repeats the last token; results there are not used.
        """
        ends = self.boundaries_on_cpu[1:]
        by_width: dict[int, list[int]] = {}
        for document, length in enumerate(self.lengths):
            width = -(-length // ROUNDED_TO) * ROUNDED_TO
            by_width.setdefault(width, []).append(document)
        tokens: list[Tensor] = []
        places = torch.empty(int(ends[-1]), dtype=torch.int64)
        first_place = 0
        for rounded, members in by_width.items():
            width = min(rounded, max(self.lengths[document] for document in members))
            last = ends[members][:, None] - 1
            starts = self.boundaries_on_cpu[members][:, None]
            indices = starts + torch.arange(width)  # (documents, width)
            is_inside = indices <= last
            own_places = first_place + torch.arange(indices.numel()).view_as(indices)
            places[indices[is_inside]] = own_places[is_inside]
            tokens.append(indices.minimum(last))
            first_place += indices.numel()
        device = self.boundaries.device
        return Groups(tuple(index.to(device) for index in tokens), places.to(device))


def named_documents(kwargs: dict[str, Any]) -> Documents | None:
    """Return the documents that a batch passes by transformers' keywords; None without any."""
    boundaries = kwargs.get("cu_seq_lens_q")
    if boundaries is None:
        return None
    return Documents(
        boundaries,
        kwargs["max_length_q"],
        kwargs.get(CONTEXT),
        kwargs.get("document_lengths"),
        kwargs.get(IMAGE_BLOCKS, ()),
    )


class PackedDocuments:
    """The documents of the batch that a model is computing; None if it is not packed."""

    def __init__(self) -> None:
        self.batch: Documents | None = None
        self.has_images = False  # also set for batches that are not packed
        self._is_inside_model = False

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

    def enter_model(
        self, module: nn.Module, args: tuple, kwargs: dict[str, Any]
    ) -> tuple[tuple, dict[str, Any]]:
        """Forward pre-hook of the full model, which may not pass boundaries on to its decoder."""
        args, kwargs = self.note(module, args, kwargs)
        self._is_inside_model = True
        return args, kwargs

    def leave_model(self, module: nn.Module, args: tuple, output: Any) -> None:
        """Forward hook of the full model. The documents are kept for the backward pass."""
        self._is_inside_model = False

    def note(
        self, module: nn.Module, args: tuple, kwargs: dict[str, Any]
    ) -> tuple[tuple, dict[str, Any]]:
        """Forward pre-hook of a decoder: store the documents of the batch.

        Arguments that only this hook needs are not passed on. One of them is the lengths: with
        them, the CPU does not have to wait for the GPU.
        """
        if self._is_inside_model:
            return args, kwargs
        self.batch = named_documents(kwargs)
        self.has_images = kwargs.get("pixel_values") is not None
        return args, {name: value for name, value in kwargs.items() if name not in NOT_PASSED_ON}


def watch_documents(model: nn.Module, decoder: nn.Module) -> PackedDocuments:
    """Return the object in which a model and its decoder store the documents of a batch."""
    found = vars(decoder).get("packed_documents")
    if found is not None:
        return found
    packed = PackedDocuments()
    decoder.packed_documents = packed
    decoder.register_forward_pre_hook(packed.note, with_kwargs=True)
    if model is not decoder:
        model.register_forward_pre_hook(packed.enter_model, with_kwargs=True)
        model.register_forward_hook(packed.leave_model, always_call=True)
    for encoder in encoders_of(model).values():
        hide_arguments(encoder, BOUNDARIES)  # documents of the text are not its sequences
    return packed


def hide_arguments(module: nn.Module, names: Sequence[str]) -> RemovableHandle:
    """Call a module without some keyword arguments; return the hook."""

    def hide(_: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        return args, {name: value for name, value in kwargs.items() if name not in names}

    return module.register_forward_pre_hook(hide, with_kwargs=True)


def forward_by_document(lengths: list[int], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Return the joined outputs of a module's own forward method, run on each document.

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
