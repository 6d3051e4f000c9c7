"""Fakes of flash-linear-attention's kernels for a trace: they allocate what the kernels do.

Read in fla-core 0.6.0. What a kernel frees when it returns is deleted at the end.

Legend: B rows, T tokens of a row, H heads, S features of a state, P of a
value, C channels.
"""

from typing import Any

import torch
from torch import Tensor, nn

CHUNK = 64  # tokens


class FakeConvolution(torch.autograd.Function):
    """A causal convolution of (B, T, C). Saves its input; backward computes its output again."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:
        """Return an output like x."""
        ctx.save_for_backward(x, weight)
        return torch.empty_like(x, memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of x and of the weight, which is computed even if frozen."""
        x, weight = ctx.saved_tensors
        chunks = x.shape[0] * -(-x.shape[1] // CHUNK)
        buffers = [
            torch.empty_like(x),
            weight.new_empty((chunks, *weight.shape), dtype=torch.float),
        ]
        grad_x = torch.empty_like(x)
        del buffers
        return grad_x, torch.empty_like(weight) if ctx.needs_input_grad[1] else None


def fla_convolution(x: Tensor, weight: Tensor, *_: Any, **__: Any) -> Tensor:
    """`mixers.kernels.fla_convolution`."""
    return FakeConvolution.apply(x, weight)


class FakeDeltaRule(torch.autograd.Function):
    """The gated delta rule. Saves normalized queries and keys and a (T, CHUNK) matrix a head.

    Forward and backward hold the states of all chunks at once.
    """

    @staticmethod
    def forward(
        ctx, query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor
    ) -> Tensor:
        """Return an output like the values."""
        normed = [torch.empty_like(query), torch.empty_like(key)]
        summed = torch.empty_like(decay, dtype=torch.float32)
        system = key.new_empty((*key.shape[:3], CHUNK))
        buffers = [torch.empty_like(key), torch.empty_like(value), torch.empty_like(value)]
        buffers.append(_states(key, value, key.dtype))
        output = torch.empty_like(value, memory_format=torch.contiguous_format)
        del buffers
        ctx.save_for_backward(*normed, value.contiguous(), summed, beta, system)
        return output

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, ...]:
        """Return the gradients of all inputs."""
        query, key, value, decay, beta, _ = ctx.saved_tensors
        buffers = [_states(key, value, key.dtype), _states(key, value, key.dtype)]
        buffers += [torch.empty_like(key) for _ in range(3)]
        buffers += [torch.empty_like(value) for _ in range(3)]
        gradients = tuple(torch.empty_like(saved) for saved in (query, key, value, decay, beta))
        del buffers
        return gradients


def fla_delta_rule(name: str, *inputs: Tensor, **_: Any) -> Tensor:
    """`mixers.kernels.fla_delta_rule`."""
    return FakeDeltaRule.apply(*inputs)


class FakeLinearAttention(torch.autograd.Function):
    """Linear attention with a decay a head and token. Backward holds states in float32."""

    @staticmethod
    def forward(ctx, query: Tensor, key: Tensor, value: Tensor, decay: Tensor) -> Tensor:
        """Return an output like the values."""
        summed = torch.empty_like(decay, dtype=torch.float32)
        ctx.save_for_backward(query, key, value, summed)
        states = _states(key, value, key.dtype)
        output = torch.empty_like(value)
        del states
        return output

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, ...]:
        """Return the gradients of all inputs."""
        _, key, value, _ = ctx.saved_tensors
        buffers = [_states(key, value, torch.float32), _states(key, value, torch.float32)]
        gradients = tuple(torch.empty_like(saved) for saved in ctx.saved_tensors)
        del buffers
        return gradients


def fla_linear_attention(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, **_: Any
) -> Tensor:
    """`mixers.kernels.fla_linear_attention`."""
    return FakeLinearAttention.apply(query, key, value, decay)


def _states(key: Tensor, value: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the states of all chunks: (B, T / CHUNK, H, S, P)."""
    rows, tokens, heads, features = key.shape
    chunks = -(-tokens // CHUNK)
    return key.new_empty((rows, chunks, heads, features, value.shape[-1]), dtype=dtype)


class FakeGatedNorm(torch.autograd.Function):
    """A gated RMSNorm. Saves its two inputs and a float32 a row."""

    @staticmethod
    def forward(ctx, x: Tensor, gate: Tensor) -> Tensor:
        """Return an output like x."""
        ctx.save_for_backward(x, gate, x.new_empty(x.shape[:-1], dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, ...]:
        """Return the gradients of both inputs."""
        x, gate, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(gate)


def gated_norm(norm: nn.Module, x: Tensor, gate: Tensor) -> Tensor:
    """`mixers.gated_norms.norm_then_silu`."""
    return FakeGatedNorm.apply(x, gate)
