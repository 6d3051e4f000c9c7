"""RMSNorm, by itself and with the residual add before it in one pass (Liger: fused add RMSNorm).

    y = x / rms(x) * (offset + weight),  rms(x) = sqrt(mean(x^2) + epsilon)

A norm by itself uses Liger's kernel on a GPU. With the residual add:

    forward    s = r + x,  n = s / rms(s),  y = n w
    backward   m = dy w,  dr = dx = ds + (m - n mean(m n)) / rms(s)

Every norm of a decoder layer reads the residual stream, and its gradient is added to the stream's.
On a GPU, Triton kernels compute both sums, one program per token. This is only for frozen weights:
the gradient of a trained weight needs sums over all tokens.

Legend: N tokens, H features.
"""

import contextlib
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from sft_kernels import triton_kernels
from sft_kernels.modules import FORWARD_CHECKPOINTS
from sft_kernels.partitioned import gathered_parameters, is_partitioned
from sft_kernels.training_setup import Gradients, is_training
from sft_kernels.triton_kernels import load_float32, program_number, tl, triton


@dataclass(frozen=True)
class NormKind:
    """How the RMSNorm of an architecture computes."""

    casting: str  # the part in float32: x / rms(x) for "llama", everything for "gemma"
    offset: float  # added to the weight
    eps: float  # added to the mean square
    # Whether the gradient of its input may overwrite the gradient of its output. False if its
    # output is added to the residual stream: then both summands have the same gradient tensor.
    in_place: bool = False


def norm_forward(self: nn.Module, hidden_states: Tensor) -> Tensor:
    """Forward method of an RMSNorm: Liger's in training, otherwise the one of its class.

    No gradient is computed for a frozen weight.
    """
    if not is_training(self):
        return type(self).forward(self, hidden_states)
    return normalize(hidden_states, self.weight, self.norm_kind)


def normalize(x: Tensor, weight: Tensor, kind: NormKind) -> Tensor:
    """Return y like x, computed by Liger's kernel."""
    if triton_kernels.is_traced:
        return AllocatedRmsNorm.apply(x, weight, kind.in_place)
    from liger_kernel.ops import LigerRMSNormFunction  # imports Triton, which needs a GPU

    options = (kind.offset, kind.casting, kind.in_place, None)
    return LigerRMSNormFunction.apply(x, weight, kind.eps, *options)


class AllocatedRmsNorm(torch.autograd.Function):
    """What an RMSNorm allocates in a trace: Liger's, or one with a gate.

    It saves its input, the weight or the gate, and a float32 per token or group of features.
    Backward may overwrite `grad`.
    """

    @staticmethod
    def forward(ctx, x: Tensor, factor: Tensor, in_place: bool) -> Tensor:
        """Return an output like x; `factor` is the weight or the gate."""
        ctx.save_for_backward(x, factor, x.new_empty(x.shape[:-1], dtype=torch.float32))
        ctx.in_place = in_place
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx, grad: Tensor) -> Gradients:
        """Return the gradient of x, and that of the factor if it needs one."""
        x, factor, _ = ctx.saved_tensors
        grad_x = grad if ctx.in_place else torch.empty_like(x)
        grad_factor = torch.empty_like(factor) if ctx.needs_input_grad[1] else None
        return grad_x, grad_factor, None


def epsilon(norm: nn.Module) -> float:
    """Return the epsilon that a norm adds to the mean square."""
    return norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps


@dataclass(frozen=True)
class LayerRoles:
    """The names of a pre-norm layer's children.

    The layer computes h += m block1(norm1(h)), and then h += m block2(norm2(h)).
    """

    norm1: str
    block1: str  # attention or another mixer of tokens
    norm2: str
    block2: str  # MLP or experts
    is_tuple1: bool  # whether block1 returns a tuple
    is_tuple2: bool
    multiplier: float = 1.0  # m
    arguments: tuple[tuple[str, str], ...] = ()  # of block1: its name, the layer's name
    passes_more: bool = False  # whether the layer passes unknown arguments on to block1

    def arguments_of(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return block1's keyword arguments, selected from those of the layer."""
        chosen = {name: kwargs[given] for name, given in self.arguments if given in kwargs}
        if self.passes_more:
            known = {given for _, given in self.arguments}
            chosen |= {name: value for name, value in kwargs.items() if name not in known}
        return chosen


def layer_forward(
    self: nn.Module, hidden_states: Tensor, *args: Any, is_checkpointed: bool = False, **kwargs: Any
) -> Tensor:
    """Forward method of a pre-norm decoder layer: fused in training, else the one of its class.

    Shapes: (B, T, H) to (B, T, H).
    """
    if args or not is_training(self):
        return type(self).forward(self, hidden_states, *args, **kwargs)
    if FORWARD_CHECKPOINTS and self.gradient_checkpointing and not is_checkpointed:
        forward = partial(layer_forward, self, is_checkpointed=True, **kwargs)
        return self._gradient_checkpointing_func(forward, hidden_states)
    roles: LayerRoles = self.fused_roles
    norm1 = getattr(self, roles.norm1)
    norm2 = getattr(self, roles.norm2)
    block1 = getattr(self, roles.block1)
    block2 = getattr(self, roles.block2)
    normed, stream = add_norm(hidden_states, None, norm1)
    mixed = block1(hidden_states=normed, **roles.arguments_of(kwargs))
    mixed = mixed[0] if roles.is_tuple1 else mixed
    if roles.multiplier != 1.0:
        mixed = mixed * roles.multiplier
    normed, stream = add_norm(mixed, stream, norm2)
    output = block2(normed)
    output = output[0] if roles.is_tuple2 else output
    if roles.multiplier != 1.0:
        output = output * roles.multiplier
    return stream + output


def add_norm(x: Tensor, residual: Tensor | None, norm: nn.Module) -> tuple[Tensor, Tensor]:
    """Return norm(s) and s = residual + x, each (..., H) in x's dtype; s is x without residual.

    Use this s instead of x afterwards: then its gradient and the norm's are added in one pass.
    """
    return AddNormFunction.apply(x, residual, norm.weight, norm.norm_kind)


class AddNormFunction(torch.autograd.Function):
    """(norm(s), s) for s = residual + x. Saves s, as other modules do, and 1 / rms per token."""

    @staticmethod
    def forward(
        ctx, x: Tensor, residual: Tensor | None, weight: Tensor, kind: NormKind
    ) -> tuple[Tensor, Tensor]:
        """Return y and s (..., H)."""
        assert not weight.requires_grad, "a norm whose weight is trained"
        ctx.kernels = _kernels(x)
        y, s, inverse_rms = ctx.kernels.forward(x, residual, weight, kind)
        ctx.save_for_backward(s, weight, inverse_rms)
        ctx.kind = kind
        ctx.has_residual = residual is not None
        return y, s

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor, ds: Tensor) -> Gradients:
        """Return the gradient of x, and the same one for the residual."""
        s, weight, inverse_rms = ctx.saved_tensors
        with gathered_parameters([weight]) if is_partitioned(weight) else contextlib.nullcontext():
            dx = ctx.kernels.backward(dy, ds, s, weight, inverse_rms, ctx.kind)
        return dx, dx if ctx.has_residual else None, None, None


class ReferenceNorms:
    """The formulas in torch, for CPUs and tests. They round where transformers' norms round."""

    @staticmethod
    def forward(
        x: Tensor, residual: Tensor | None, weight: Tensor, kind: NormKind
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return y and s (..., H), and 1 / rms(s) (..., 1) float32."""
        s = x if residual is None else residual + x
        wide = s.float()
        inverse_rms = torch.rsqrt(wide.square().mean(-1, keepdim=True) + kind.eps)
        if kind.casting == "gemma":
            y = (wide * inverse_rms * (kind.offset + weight.float())).to(x.dtype)
        else:
            y = (kind.offset + weight) * (wide * inverse_rms).to(x.dtype)
        return y, s, inverse_rms

    @staticmethod
    def backward(
        dy: Tensor, ds: Tensor, s: Tensor, weight: Tensor, inverse_rms: Tensor, kind: NormKind
    ) -> Tensor:
        """Return dx (..., H)."""
        n = s.float() * inverse_rms
        m = dy.float() * (kind.offset + weight.float())
        dx = ds.float() + inverse_rms * (m - n * (m * n).mean(-1, keepdim=True))
        return dx.to(s.dtype)


class Allocated:
    """What the kernels allocate in a trace."""

    @staticmethod
    def forward(x: Tensor, residual: Tensor | None, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Return y and s like x, and a float32 for each token."""
        y = torch.empty_like(x)
        s = x if residual is None else torch.empty_like(x)
        return y, s, x.new_empty(x.shape[:-1], dtype=torch.float32)

    @staticmethod
    def backward(dy: Tensor, ds: Tensor, s: Tensor, *_: Any) -> Tensor:
        """Return dx like s."""
        return torch.empty_like(s)


FEATURES_PER_WARP = 512  # 16 per thread: two 16-byte loads of bfloat16


@triton.jit
def _forward(
    x,
    residual,
    weight,
    y,
    s,
    inverse,
    features,
    eps,
    offset,
    is_gemma: tl.constexpr,
    has_residual: tl.constexpr,
    block: tl.constexpr,
):
    row = program_number()
    columns = tl.arange(0, block)
    inside = columns < features
    at = row * features + columns
    stream = tl.load(x + at, inside, 0)
    if has_residual:  # the norm reads the rounded sum, as a norm by itself does
        added = load_float32(residual + at, inside)
        stream = (stream.to(tl.float32) + added).to(x.dtype.element_ty)
        tl.store(s + at, stream, inside)
    wide = stream.to(tl.float32)
    factor = 1 / tl.sqrt(tl.sum(wide * wide, 0) / features + eps)
    tl.store(inverse + row, factor)
    normed = wide * factor
    if not is_gemma:
        normed = normed.to(x.dtype.element_ty).to(tl.float32)
    scale = load_float32(weight + columns, inside) + offset
    tl.store(y + at, (normed * scale).to(y.dtype.element_ty), inside)


@triton.jit
def _backward(dy, ds, s, weight, inverse, dx, features, offset, block: tl.constexpr):
    row = program_number()
    columns = tl.arange(0, block)
    inside = columns < features
    factor = tl.load(inverse + row)
    at = row * features + columns
    n = load_float32(s + at, inside) * factor
    scale = load_float32(weight + columns, inside) + offset
    m = load_float32(dy + at, inside) * scale
    stream = load_float32(ds + at, inside)
    mean = tl.sum(m * n, 0) / features
    tl.store(dx + at, stream + factor * (m - n * mean), inside)


def _sizes(x: Tensor) -> tuple[int, int, int]:
    """Return the number of features per token, their block size, and its number of warps."""
    features = x.shape[-1]
    block = triton.next_power_of_2(features)
    return features, block, min(32, max(1, block // FEATURES_PER_WARP))


class TritonNorms:
    """The Triton kernels, one program per token."""

    @staticmethod
    def forward(
        x: Tensor, residual: Tensor | None, weight: Tensor, kind: NormKind
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return y and s (..., H), and 1 / rms(s) (N,) float32."""
        x = x.contiguous()
        y = torch.empty_like(x)
        s = x
        if residual is not None:
            residual = residual.to(x.dtype).contiguous()
            s = torch.empty_like(x)
        inverse = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
        features, block, warps = _sizes(x)
        tensors = (x, residual, weight, y, s, inverse)
        flags = (kind.casting == "gemma", residual is not None)
        _forward[(inverse.numel(),)](
            *tensors, features, kind.eps, kind.offset, *flags, block, num_warps=warps
        )
        return y, s, inverse

    @staticmethod
    def backward(
        dy: Tensor, ds: Tensor, s: Tensor, weight: Tensor, inverse: Tensor, kind: NormKind
    ) -> Tensor:
        """Return dx (..., H)."""
        dx = torch.empty_like(s)
        features, block, warps = _sizes(s)
        dy, ds = dy.contiguous(), ds.contiguous()
        tensors = (dy, ds, s, weight, inverse, dx)
        sizes = (features, kind.offset, block)
        _backward[(inverse.numel(),)](*tensors, *sizes, num_warps=warps)
        return dx


def _kernels(x: Tensor) -> Any:
    """Return the implementation for the device of x: the Triton kernels or the reference."""
    if x.is_cuda:
        return TritonNorms
    return Allocated if triton_kernels.is_traced else ReferenceNorms
