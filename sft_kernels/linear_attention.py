"""Select the code of linear attention and state spaces: packaged kernels or the model's torch code.

When transformers imports a model's code, it uses the functions of flash-linear-attention,
causal-conv1d and mamba-ssm instead of the model's functions if those packages are installed. The
packaged kernels run only on a GPU. flash-linear-attention does not run with every Triton version.

What its kernels allocate in a trace follows the source of fla-core 0.6.0. Buffers that a kernel
frees when it returns are deleted at the end of a function.

Legend: B rows, T tokens per row, C channels, W width of a convolution, H heads, P features per
head, S per state.
"""

import ctypes
import functools
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from sft_kernels import triton_kernels
from sft_kernels.needs import MISSING, why_no_kernels

# Names that the code of transformers' models uses for these kernels
FLA_KERNELS = (
    "chunk_kimi_delta_attention",
    "recurrent_kimi_delta_attention",
    "torch_chunk_gated_delta_rule",
    "torch_recurrent_gated_delta_rule",
)
OTHER_KERNELS = (
    "causal_conv1d_fn",
    "causal_conv1d_update",
    "mamba2_chunk_scan",
    "mamba2_selective_state_update",
    "mamba2_split_conv1d_scan_combined",
    "mamba_inner_fn",
    "mamba_selective_scan",
    "mamba_selective_state_update",
)
IS_BOUND = "_chooses_by_device"

_in_torch: ContextVar[bool] = ContextVar("in_torch", default=False)


@contextmanager
def torch_code(is_on: bool = True) -> Iterator[None]:
    """Run torch code in this context, on a GPU too; with False, run packaged kernels.

    Fused code must be verified against other code than these kernels. They are also tuned on their
    first call, which takes a minute or more.
    """
    token = _in_torch.set(is_on)
    try:
        yield
    finally:
        _in_torch.reset(token)


@functools.cache
def why_no_fla() -> str | None:
    """Return why this process cannot use flash-linear-attention's kernels; None if it can."""
    if importlib.util.find_spec("fla") is None:
        return MISSING
    if not torch.cuda.is_available():
        return None
    import triton  # the module: the package metadata may belong to another one

    return why_no_kernels(torch.cuda.get_device_capability(), triton.__version__)


def uses_fla(tensor: Tensor) -> bool:
    """Return whether kernels of flash-linear-attention compute a tensor.

    A trace is for a GPU. Without an NVIDIA driver on this machine, the GPU is in another machine,
    on which `make install` adds the package.
    """
    if triton_kernels.is_traced:
        return not _has_driver() or why_no_fla() is None
    return _uses_packages(tensor) and why_no_fla() is None


def _uses_packages(tensor: Tensor) -> bool:
    return tensor.is_cuda and not _in_torch.get()


@functools.cache
def _has_driver() -> bool:
    try:
        ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return False
    return True


def bind_by_device(model: nn.Module) -> None:
    """Let a model's modules call packaged kernels only on GPUs.

    On a CPU, and if `why_no_fla` returns a reason, they call transformers' torch code.
    """
    for module in model.modules():
        names = vars(sys.modules[type(module).__module__])
        for name in (*FLA_KERNELS, *OTHER_KERNELS):
            own = names.get(name)
            if own is not None and not hasattr(own, IS_BOUND):
                names[name] = by_device(own, name in FLA_KERNELS)


def by_device(own: Callable, is_of_fla: bool) -> Callable:
    """Return a function that runs a packaged kernel, or the model's torch code if none can run."""
    in_torch = inspect.unwrap(own)

    @functools.wraps(own)
    def kernel(*args: Any, **kwargs: Any) -> Any:
        first = next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
        runs = _uses_packages(first) and not (is_of_fla and why_no_fla())
        chosen = own if runs else in_torch
        return chosen(*args, **kwargs)

    setattr(kernel, IS_BOUND, True)
    return kernel


CHUNK = 64  # tokens


def fla_convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, **boundaries: Tensor
) -> Tensor:
    """Return the causal convolution (B, T, C) of x (B, T, C) with weights (C, W)."""
    if triton_kernels.is_traced:
        return AllocatedConvolution.apply(x, weight)
    from fla.modules.causal_conv1d import causal_conv1d  # imports Triton, which needs a GPU

    mixed, _ = causal_conv1d(x, weight, bias, activation=activation, **boundaries)
    return mixed


def fla_delta_rule(
    name: str, *inputs: Tensor, is_normed: bool, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """Return the gated delta rule (B, T, H, P) and, if asked, the last states (N, H, S, P).

    `name` is the operator's. `options` may be boundaries, initial_state and output_final_state.

    Inputs: queries, keys (B, T, H, S), values (B, T, H, P), decays (B, T, H), or (B, T, H, S) for
    chunk_kda, and beta (B, T, H).
    """
    if triton_kernels.is_traced:
        return AllocatedDeltaRule.apply(*inputs), None
    if name == "chunk_kda":
        from fla.ops.kda import chunk_kda as kernel
    else:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule as kernel

    query, key, value, decay, beta = inputs
    return kernel(
        query, key, value, g=decay, beta=beta, use_qk_l2norm_in_kernel=is_normed, **options
    )


def fla_linear_attention(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, **boundaries: Tensor
) -> Tensor:
    """Return unscaled linear attention (B, T, H, P) with a decay (B, T, H) per head and token."""
    if triton_kernels.is_traced:
        return AllocatedLinearAttention.apply(query, key, value, decay)
    from fla.ops.simple_gla import chunk_simple_gla

    mixed, _ = chunk_simple_gla(query, key, value, g=decay, scale=1.0, **boundaries)
    return mixed


class AllocatedConvolution(torch.autograd.Function):
    """What a convolution of (B, T, C) allocates in a trace.

    It saves its input; backward recomputes its output.
    """

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


class AllocatedDeltaRule(torch.autograd.Function):
    """What the gated delta rule allocates in a trace.

    It saves normalized queries and keys and a (T, CHUNK) matrix per head. Forward and backward
    store the states of all chunks at once.
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


class AllocatedLinearAttention(torch.autograd.Function):
    """What linear attention allocates in a trace. Backward stores states in float32."""

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


def _states(key: Tensor, value: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the states of all chunks: (B, T / CHUNK, H, S, P)."""
    rows, tokens, heads, features = key.shape
    chunks = -(-tokens // CHUNK)
    return key.new_empty((rows, chunks, heads, features, value.shape[-1]), dtype=dtype)
