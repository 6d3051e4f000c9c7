"""What recorded passes read and write: inputs and gradients in memory that stays where it is.

Legend: B rows, T tokens of a row, N documents, H hidden features, L labelled tokens, C of them and
others that the last layer computes.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sft_play.data.packing import padded_width
from sft_play.models.fast.attention.masks import is_unmasked, unmasked
from sft_play.models.fast.documents import Documents, named_documents
from sft_play.models.fast.labelled import computed_count, computed_tokens

MIN_DOCUMENTS = 64  # the number of documents is padded to this, or a power of two above it
MIN_LONGEST = 2048  # and the tokens of the longest one; kernels skip what is not there


class Shape(NamedTuple):
    """What micro-batches of one recording have in common."""

    rows: int
    tokens: int  # of a row
    documents: int  # at most; 0 where rows are not packed
    longest: int  # tokens of a document, at most
    computed: int = 0  # tokens that the last layer computes alone; 0: all


class DecoderCall(NamedTuple):
    """A call of a decoder that can be recorded."""

    input_ids: Tensor  # (B, T)
    position_ids: Tensor | None  # (B, T)
    documents: Documents | None
    most_tokens: int | None = None  # that a micro-batch of the run has, where it is known
    labelled: Tensor | None = None  # (L,) tokens, where the last layer computes those alone

    @property
    def shape(self) -> Shape:
        """Return the shape whose recording computes this call.

        Documents in one row have another number of tokens each time: it is rounded up, but not
        beyond what a micro-batch of the run has at most.
        """
        shape = self._shape_of_inputs
        tokens = shape.rows * shape.tokens
        computed = 0 if self.labelled is None else computed_count(len(self.labelled), tokens)
        return shape._replace(computed=computed % tokens)

    @property
    def _shape_of_inputs(self) -> Shape:
        rows, tokens = self.input_ids.shape
        if self.documents is None:
            return Shape(rows, tokens, 0, tokens)
        count = len(self.documents.boundaries) - 1
        if count == rows and self.documents.longest == tokens:  # each row is one document
            return Shape(rows, tokens, count, tokens)
        if rows == 1:
            tokens = padded_width(tokens, self.most_tokens)
        padding = tokens - self.input_ids.shape[1]  # a document of its own
        most = max(MIN_DOCUMENTS, _power_of_two(count + 1))
        longest = max(MIN_LONGEST, self.documents.longest, padding)
        return Shape(rows, tokens, most, min(tokens, _power_of_two(longest)))


def _power_of_two(number: int) -> int:
    """Return the smallest power of two that is not below a number."""
    return 1 << (number - 1).bit_length()


def readable_call(
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    most_tokens: int | None = None,
    labelled: Tensor | None = None,
) -> DecoderCall | None:
    """Return a decoder's arguments as a call, None where something else is among them."""
    known = {"input_ids", "position_ids", "attention_mask", "use_cache"}
    known |= {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"}
    others = [value for name, value in kwargs.items() if name not in known]
    if args or kwargs.get("use_cache") or any(value is not None for value in others):
        return None
    if kwargs.get("input_ids") is None or not is_unmasked(kwargs.get("attention_mask")):
        return None
    documents = named_documents(kwargs)
    positions = kwargs.get("position_ids")
    return DecoderCall(kwargs["input_ids"], positions, documents, most_tokens, labelled)


class StaticInputs:
    """The arguments of a decoder in memory that stays: each micro-batch is copied there."""

    def __init__(self, call: DecoderCall):
        self.shape = call.shape
        size = self.shape.rows, self.shape.tokens
        self.input_ids = call.input_ids.new_zeros(size)
        self.position_ids = None
        if call.position_ids is not None:
            self.position_ids = call.position_ids.new_zeros(size)
        self.boundaries = None
        if call.documents is not None:
            size = self.shape.documents + 1
            self.boundaries = call.documents.boundaries.new_empty(size)
        self.computed = None  # (C,), what the last layer computes alone
        if self.shape.computed:
            self.computed = call.labelled.new_zeros(self.shape.computed)
        self.fill(call)

    def fill(self, call: DecoderCall) -> None:
        """Copy a call of this shape.

        What is left of a row is a document of what was there before; documents that are missing are
        empty ones at the end.
        """
        tokens = call.input_ids.shape[1]
        self.input_ids[:, :tokens] = call.input_ids
        if self.position_ids is not None:
            self.position_ids[:, :tokens] = call.position_ids
        if self.boundaries is not None:
            boundaries = call.documents.boundaries
            self.boundaries[: len(boundaries)] = boundaries
            self.boundaries[len(boundaries) :] = self.input_ids.numel()
        if self.computed is not None:
            self.computed.copy_(computed_tokens(call.labelled, self.input_ids.numel()))

    @property
    def arguments(self) -> dict[str, Any]:
        """Return the decoder's arguments."""
        arguments: dict[str, Any] = {"input_ids": self.input_ids, "use_cache": False}
        if self.position_ids is not None:
            arguments["position_ids"] = self.position_ids
        documents = None
        if self.boundaries is not None:
            longest = self.shape.longest
            documents = Documents(self.boundaries, longest)
            arguments |= {"cu_seq_lens_q": self.boundaries, "cu_seq_lens_k": self.boundaries}
            arguments |= {"max_length_q": longest, "max_length_k": longest}
        return {**arguments, "attention_mask": unmasked(documents)}


class StaticGradients:
    """The gradients of trained parameters in memory that stays: one tensor for each type."""

    def __init__(self, parameters: Sequence[nn.Parameter]):
        self.parameters = list(parameters)
        by_type: dict[torch.dtype, list[nn.Parameter]] = {}
        for parameter in self.parameters:
            by_type.setdefault(parameter.dtype, []).append(parameter)
        self.wholes: list[Tensor] = []
        parts: dict[nn.Parameter, Tensor] = {}
        for dtype, alike in by_type.items():
            sizes = [parameter.numel() for parameter in alike]
            whole = torch.zeros(sum(sizes), dtype=dtype, device=alike[0].device)
            self.wholes.append(whole)
            for parameter, part in zip(alike, whole.split(sizes), strict=True):
                parts[parameter] = part.view_as(parameter)
        self.buffers = [parts[parameter] for parameter in self.parameters]

    def take_over(self) -> None:
        """Make the buffers the gradients of the parameters, with what these hold by now.

        Between steps Trainer sets gradients to None, which stands for zero.
        """
        missing: list[Tensor] = []
        for parameter, buffer in zip(self.parameters, self.buffers, strict=True):
            if parameter.grad is buffer:
                continue
            if parameter.grad is None:
                missing.append(buffer)
            else:
                buffer.copy_(parameter.grad)
            parameter.grad = buffer
        if missing:
            torch._foreach_zero_(missing)

    def average(self, ranks: int) -> None:
        """Average the gradients over all ranks. Every rank must call it."""
        for whole in self.wholes:
            torch.distributed.all_reduce(whole)
            whole /= ranks

    def add(self, gradients: Sequence[Tensor | None]) -> None:
        """Add gradients, in the order of the parameters."""
        reached = [
            (buffer, gradient)
            for buffer, gradient in zip(self.buffers, gradients, strict=True)
            if gradient is not None
        ]
        if reached:
            buffers, found = zip(*reached, strict=True)
            torch._foreach_add_(list(buffers), list(found))
