"""Forward and backward pass of a decoder, recorded for one shape of micro-batch.

A recording reads inputs from static buffers and adds to gradients in static buffers.

Legend: B rows, T tokens per row, N documents, H hidden features.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers.modeling_outputs import BaseModelOutputWithPast

from sft_play.data.packing import padded_width
from sft_play.models.adapter_state import part_of
from sft_play.models.fast.documents import (
    BOUNDARIES,
    UNMASKED,
    Documents,
    PackedDocuments,
    is_unmasked,
    named_documents,
)

Replay = Callable[[], None]
Record = Callable[[Callable[[], None]], Replay]  # returns what launches the same kernels again
MIN_DOCUMENTS = 64  # the number of documents is padded to this, or a power of two above it
MIN_LONGEST = 2048  # the same for the longest document's tokens; kernels skip missing tokens


class Shape(NamedTuple):
    """What micro-batches of one recording have in common."""

    rows: int
    tokens: int  # per row
    documents: int  # at most; 0 if rows are not packed
    longest: int  # tokens per document, at most


def common_shape(shapes: Sequence[Shape | None]) -> Shape | None:
    """Return the shape in which ranks compute their calls together; None if there is none.

    All rows of a call have one length. A single row can be padded to any length.
    """
    known = [shape for shape in shapes if shape is not None]
    if len(known) < len(shapes) or len({shape.rows for shape in known}) > 1:
        return None
    rows, *largest = map(max, zip(*known, strict=True))
    if rows > 1 and len({shape.tokens for shape in known}) > 1:
        return None
    return Shape(rows, *largest)


class DecoderCall(NamedTuple):
    """A call of a decoder that can be recorded."""

    input_ids: Tensor  # (B, T)
    position_ids: Tensor | None  # (B, T)
    documents: Documents | None
    shape: Shape  # of the recording that computes it; ranks that compute together agree on it


def shape_of_recording(
    input_ids: Tensor, documents: Documents | None, most_tokens: int | None
) -> Shape:
    """Return the shape whose recording computes a call with input_ids (B, T).

    Documents in one row have a different number of tokens each time. It is rounded up, but not
    beyond the most tokens of any micro-batch of the run, if known.
    """
    rows, tokens = input_ids.shape
    if documents is None:
        return Shape(rows, tokens, 0, tokens)
    count = len(documents.boundaries) - 1
    if count == rows and documents.longest == tokens:  # each row is one document
        return Shape(rows, tokens, count, tokens)
    if rows == 1:
        tokens = padded_width(tokens, most_tokens)
    padding = tokens - input_ids.shape[1]  # is a separate document
    most = max(MIN_DOCUMENTS, _power_of_two(count + 1))
    longest = max(MIN_LONGEST, documents.longest, padding)
    return Shape(rows, tokens, most, min(tokens, _power_of_two(longest)))


def _power_of_two(number: int) -> int:
    """Return the smallest power of two that is at least a number."""
    return 1 << (number - 1).bit_length()


def readable_call(
    args: tuple[Any, ...], kwargs: dict[str, Any], most_tokens: int | None
) -> DecoderCall | None:
    """Return a decoder's arguments as a call; None if there are any other arguments."""
    known = {"input_ids", "position_ids", "attention_mask", "use_cache", *BOUNDARIES}
    others = [value for name, value in kwargs.items() if name not in known]
    # a decoder with experts need not return router outputs
    if args or kwargs.get("use_cache") or any(value not in (None, False) for value in others):
        return None
    ids = kwargs.get("input_ids")
    if ids is None or not is_unmasked(kwargs.get("attention_mask")):
        return None
    documents = named_documents(kwargs)
    shape = shape_of_recording(ids, documents, most_tokens)
    return DecoderCall(ids, kwargs.get("position_ids"), documents, shape)


class StaticInputs:
    """The arguments of a decoder in static buffers: each micro-batch is copied there."""

    def __init__(self, call: DecoderCall):
        self.shape = call.shape
        size = self.shape.rows, self.shape.tokens
        self.input_ids = call.input_ids.new_zeros(size)
        self.position_ids = None
        if call.position_ids is not None:
            self.position_ids = call.position_ids.new_zeros(size)
        self.documents: Documents | None = None
        if call.documents is not None:
            boundaries = call.documents.boundaries.new_empty(self.shape.documents + 1)
            self.documents = Documents(boundaries, self.shape.longest)
        self.fill(call)

    def fill(self, call: DecoderCall) -> None:
        """Copy a call of this shape.

        The rest of a row keeps its old tokens as one more document. Missing documents become empty
        ones at the end.
        """
        self.tokens = tokens = call.input_ids.shape[1]  # per row of this call, at most T
        self.input_ids[:, :tokens] = call.input_ids
        if self.position_ids is not None:
            self.position_ids[:, :tokens] = call.position_ids
        if self.documents is not None:
            boundaries = call.documents.boundaries
            self.documents.boundaries[: len(boundaries)] = boundaries
            self.documents.boundaries[len(boundaries) :] = self.input_ids.numel()

    @property
    def arguments(self) -> dict[str, Any]:
        """Return the decoder's arguments."""
        arguments: dict[str, Any] = {
            "input_ids": self.input_ids,
            "position_ids": self.position_ids,
            "attention_mask": UNMASKED,
            "use_cache": False,
        }
        if self.documents is not None:
            arguments |= self.documents.arguments
        return arguments

    @property
    def batch(self) -> Documents | None:
        """Return the documents as modules of the decoder see them, without cached indices."""
        return None if self.documents is None else replace(self.documents)


class StaticGradients:
    """The gradients of trained parameters in static buffers.

    One tensor contains all gradients of a dtype. Another contains those of experts that are only on
    this rank.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]):
        self.parameters = list(parameters)
        by_kind: dict[tuple[torch.dtype, bool], list[nn.Parameter]] = {}
        for parameter in self.parameters:
            kind = parameter.dtype, part_of(parameter) is not None
            by_kind.setdefault(kind, []).append(parameter)
        self.of_all_ranks: list[Tensor] = []
        parts: dict[nn.Parameter, Tensor] = {}
        for (dtype, is_of_one_rank), alike in by_kind.items():
            sizes = [parameter.numel() for parameter in alike]
            whole = torch.zeros(sum(sizes), dtype=dtype, device=alike[0].device)
            if not is_of_one_rank:
                self.of_all_ranks.append(whole)
            for parameter, part in zip(alike, whole.split(sizes), strict=True):
                parts[parameter] = part.view_as(parameter)
        self.buffers = [parts[parameter] for parameter in self.parameters]

    def use_static_buffers(self) -> None:
        """Point each parameter's .grad at its static buffer, keeping the values accumulated so far.

        Trainer sets gradients to None between steps, which means zero.
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
        for whole in self.of_all_ranks:
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


class StaticHidden:
    """The hidden states of the last replay and their gradient; all recordings share the memory."""

    def __init__(self, most_tokens: int | None):
        self.most_tokens = most_tokens or 0  # of a micro-batch
        self.whole: Tensor | None = None  # (2, tokens, H)

    def parts(self, shape: Shape, computed: Tensor | None) -> tuple[Tensor, ...]:
        """Return both (B, T, H) for a shape, in the dtype of the hidden states `computed`.

        `computed` is what the layers returned; it may be None if the shape was requested before.
        """
        tokens = shape.rows * shape.tokens
        if self.whole is None or self.whole.shape[1] < tokens:
            most = max(tokens, self.most_tokens)
            self.whole = computed.new_zeros(2, most, computed.shape[-1])
        return self.whole[:, :tokens].view(2, shape.rows, shape.tokens, -1).unbind()


class Computed(NamedTuple):
    """What the layers compute for a call."""

    hidden: Tensor  # (B, T, H), detached
    gradients: list[Tensor]  # of the trained parameters, in host memory

    @classmethod
    def by_layers(cls, hidden: Tensor, parameters: Sequence[nn.Parameter]) -> "Computed":
        """Return hidden states (B, T, H) and the gradients from their graph, which is freed."""
        gradient = _gradient_of_proof(hidden)
        found = torch.autograd.grad(hidden, parameters, gradient, materialize_grads=True)
        return cls(hidden.detach(), [each.cpu() for each in found])


def _gradient_of_proof(hidden: Tensor) -> Tensor:
    """Return the same random gradient (B, T, H) in a new tensor: kernels may overwrite it."""
    generator = torch.Generator(hidden.device).manual_seed(0)
    size = hidden.shape
    return torch.randn(size, dtype=hidden.dtype, device=hidden.device, generator=generator)


class RecordedPass:
    """Forward and backward pass of a decoder for one shape."""

    def __init__(
        self,
        decoder: Callable[..., BaseModelOutputWithPast],
        packed: PackedDocuments,
        call: DecoderCall,
        gradients: StaticGradients,
        hidden: tuple[Tensor, ...],
        record: Record,
    ):
        self.decoder = decoder
        self.packed = packed  # the modules of the decoder read it
        self.inputs = StaticInputs(call)
        self.gradients = gradients
        self.hidden, self.grad_hidden = hidden  # (B, T, H), of the last replay
        self.output: Tensor | None = None  # the same with its graph, until the backward pass
        self.replay_forward = record(self._forward)
        self.grad_hidden.zero_()
        self.replay_backward = record(self._backward)

    def _forward(self) -> None:
        device = self.inputs.input_ids.device
        with _without_cast_cache(device.type), self.packed.showing(self.inputs.batch):
            self.output = self.decoder(**self.inputs.arguments).last_hidden_state
        self.hidden.copy_(self.output.detach())

    def _backward(self) -> None:
        parameters = self.gradients.parameters
        output, self.output = self.output, None
        found = torch.autograd.grad(output, parameters, self.grad_hidden, allow_unused=True)
        self.gradients.add(found)

    @property
    def is_filled_up(self) -> bool:
        """Whether the rows of the last call were shorter than the recorded ones."""
        return self.inputs.tokens < self.inputs.shape.tokens

    @property
    def computed(self) -> Tensor:
        """The hidden states (B, T, H) of the last call, without those of the padding."""
        return self.hidden[:, : self.inputs.tokens]

    def fill_gradient(self, grad: Tensor) -> None:
        """Copy the gradient of `computed`; that of the padding is zero."""
        self.grad_hidden[:, : self.inputs.tokens] = grad
        self.grad_hidden[:, self.inputs.tokens :] = 0

    def run(self, call: DecoderCall, anchor: Tensor) -> Tensor:
        """Return the hidden states (B, T, H); their backward pass adds to the static gradients."""
        self.inputs.fill(call)
        return _Replayed.apply(anchor, self)

    def difference(self, call: DecoderCall, computed: Computed) -> float:
        """Return the largest relative difference between a replay and what the layers computed."""
        self.inputs.fill(call)
        buffers = self.gradients.buffers
        kept = [buffer.to("cpu", copy=True) for buffer in buffers]
        torch._foreach_zero_(buffers)
        self.replay_forward()
        self.fill_gradient(_gradient_of_proof(computed.hidden))
        self.replay_backward()
        pairs = zip(buffers, computed.gradients, strict=True)
        pairs = [(self.computed, computed.hidden), *pairs]
        largest = max(float(_relative_difference(*pair)) for pair in pairs)
        for buffer, before in zip(buffers, kept, strict=True):
            buffer.copy_(before)
        return largest


def _relative_difference(found: Tensor, expected: Tensor) -> Tensor:
    """Return |found - expected| / |expected|; 0 if both are 0, infinite for NaN."""
    wide = expected.to(found.device).float()
    size = wide.norm()
    difference = (found.float() - wide).norm() / torch.where(size == 0, 1.0, size)
    return difference.nan_to_num(nan=torch.inf, posinf=torch.inf)


def _without_cast_cache(kind: str) -> torch.autocast:
    """Stop autocast from reusing weights cast outside of a recording, or inside another one."""
    dtype, is_on = torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
    return torch.autocast(kind, dtype, is_on, cache_enabled=False)


class _Replayed(torch.autograd.Function):
    """A replayed forward pass whose gradient is a replayed backward pass."""

    @staticmethod
    def forward(ctx, anchor: Tensor, recorded: RecordedPass) -> Tensor:
        """Return the hidden states (B, T, H). `anchor` only makes autograd ask for a gradient."""
        ctx.recorded = recorded
        with torch.enable_grad():
            recorded.replay_forward()
        return recorded.computed

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_hidden: Tensor) -> tuple[None, None]:
        """Add to the gradients of the parameters."""
        ctx.recorded.fill_gradient(grad_hidden)
        ctx.recorded.replay_backward()
        return None, None
