"""Forward and backward pass of a decoder, recorded for one shape of micro-batch.

Legend: B rows, T tokens of a row, N documents, H hidden features.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from transformers.modeling_outputs import BaseModelOutputWithPast

from sft_play.models.fast.graphs.inputs import DecoderCall, StaticGradients, StaticInputs
from sft_play.models.fast.labelled import LabelledTokens, computed_count

Replay = Callable[[], None]
Record = Callable[[Callable[[], None]], Replay]


class RecordedPass:
    """Forward and backward pass of a decoder for one shape."""

    def __init__(
        self,
        decoder: Callable[..., BaseModelOutputWithPast],
        call: DecoderCall,
        gradients: StaticGradients,
        record: Record,
        labelled: LabelledTokens | None = None,
    ):
        self.decoder = decoder
        self.labelled = labelled  # what the last layer is told
        self.inputs = StaticInputs(call)
        self.gradients = gradients
        self.hidden: Tensor  # (B, T, H), of the last replay
        self.replay_forward = record(self._forward)
        self.grad_hidden = torch.zeros_like(self.hidden)
        self.tokens = call.input_ids.shape[1]  # of a row of the last call, at most T
        self.replay_backward = record(self._backward)
        self.is_first_run = True

    def _forward(self) -> None:
        with contextlib.ExitStack() as stack:
            stack.enter_context(_without_cast_cache(self.inputs.input_ids.device))
            if self.labelled is not None:
                stack.enter_context(self.labelled.computing(self.inputs.computed))
            output = self.decoder(**self.inputs.arguments)
        self.hidden = output.last_hidden_state

    def _backward(self) -> None:
        parameters = self.gradients.parameters
        found = torch.autograd.grad(self.hidden, parameters, self.grad_hidden, allow_unused=True)
        self.gradients.add(found)

    @property
    def is_filled_up(self) -> bool:
        """Whether the rows of the last call were shorter than those that were recorded."""
        return self.tokens < self.inputs.shape.tokens

    @property
    def computed(self) -> Tensor:
        """The hidden states (B, T, H) of the last call, without those of the padding."""
        return self.hidden.detach()[:, : self.tokens]

    def fill_gradient(self, grad: Tensor) -> None:
        """Copy the gradient of `computed`; that of the padding is zero."""
        self.grad_hidden[:, : self.tokens] = grad
        self.grad_hidden[:, self.tokens :] = 0

    def _fill(self, call: DecoderCall) -> None:
        self.inputs.fill(call)
        self.tokens = call.input_ids.shape[1]

    def run(self, call: DecoderCall, anchor: Tensor) -> Tensor:
        """Return the hidden states (B, T, H); their backward pass adds to the gradients."""
        self.is_first_run = False
        self._fill(call)
        self.gradients.take_over()
        return _Replayed.apply(anchor, self)

    def difference(self, call: DecoderCall, hidden: Tensor) -> float:
        """Return the largest relative difference of a replay from what the layers compute.

        `hidden` (B, T, H) is what they returned for the call, with its graph. Tokens that the last
        layer does not compute in both are not compared.
        """
        self._fill(call)
        generator = torch.Generator(hidden.device).manual_seed(0)
        grad = torch.randn(
            hidden.shape, dtype=hidden.dtype, device=hidden.device, generator=generator
        )
        compared = self._computed_in_both(call)
        of_compared = torch.zeros_like(grad.flatten(0, 1))
        of_compared[compared] = grad.flatten(0, 1)[compared]
        grad = of_compared.view_as(grad)
        parameters = self.gradients.parameters
        expected = torch.autograd.grad(
            hidden,
            parameters,
            grad.clone(),  # the kernel of the last norm overwrites it
            retain_graph=True,
            allow_unused=True,
        )
        kept = [buffer.clone() for buffer in self.gradients.buffers]
        torch._foreach_zero_(self.gradients.buffers)
        self.replay_forward()
        self.fill_gradient(grad)
        self.replay_backward()
        both = (self.computed, hidden.detach())
        pairs = [tuple(states.flatten(0, 1)[compared] for states in both)]
        for buffer, gradient in zip(self.gradients.buffers, expected, strict=True):
            pairs.append((buffer, torch.zeros_like(buffer) if gradient is None else gradient))
        largest = max(float(_relative_difference(*pair)) for pair in pairs)
        torch._foreach_copy_(self.gradients.buffers, kept)
        return largest

    def _computed_in_both(self, call: DecoderCall) -> Tensor | slice:
        """Return the tokens that the layers compute for a call, and a replay of it does, too.

        A micro-batch may have no labelled token, which would prove nothing: there are always others
        that are computed. Both begin with the same ones.
        """
        if self.inputs.computed is None:
            return slice(None)
        count = computed_count(len(call.labelled), call.input_ids.numel())
        return self.inputs.computed[:count].to(self.hidden.device)


def _relative_difference(found: Tensor, expected: Tensor) -> Tensor:
    """Return |found - expected| / |expected|; 0 where both are 0."""
    wide = expected.float()
    size = wide.norm()
    return (found.float() - wide).norm() / torch.where(size == 0, 1.0, size)


def _without_cast_cache(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Keep autocast from reusing weights that it cast outside of a recording, or inside of one."""
    if not torch.is_autocast_enabled(device.type):
        return contextlib.nullcontext()
    dtype = torch.get_autocast_dtype(device.type)
    return torch.autocast(device.type, dtype=dtype, cache_enabled=False)


class _Replayed(torch.autograd.Function):
    """A replayed forward pass whose gradient is a replayed backward pass."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, recorded: RecordedPass) -> Tensor:
        """Return the hidden states (B, T, H). `anchor` only makes autograd ask for a gradient."""
        ctx.recorded = recorded
        with torch.enable_grad():
            recorded.replay_forward()
        return recorded.computed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_hidden: Tensor) -> tuple[None, None]:
        """Add to the gradients of the parameters."""
        ctx.recorded.fill_gradient(grad_hidden)
        ctx.recorded.replay_backward()
        return None, None


def record_on_gpu() -> Record:
    """Return a function that records kernels; all recordings share one pool of memory.

    They may: between a forward pass and its backward pass no other is replayed.
    """
    pool = torch.cuda.graph_pool_handle()

    def record(launch: Callable[[], None]) -> Replay:
        """Return what launches the same kernels again. Raises: RuntimeError where one cannot be."""
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.current_stream()
        try:
            # threads that load data may use the GPU meanwhile
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                launch()
        except RuntimeError:
            torch.cuda.set_stream(stream)  # a recording that fails leaves its own behind
            raise
        return graph.replay

    return record
