"""What computes linear attention and state spaces: packages' kernels or a model's own torch code.

When transformers imports a model's code, it binds the functions of flash-linear-attention,
causal-conv1d and mamba-ssm to the names of its own, wherever those packages are installed. They run
on a GPU alone, and flash-linear-attention not with every Triton.
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

from sft_play.models import traced_gpu
from sft_play.plan.needs import MISSING, why_no_kernels

# Names by which the code of transformers' models calls these kernels
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
    """Let torch code compute what is called inside, on a GPU too; with False packages' kernels.

    What fused code is proved against must not be the same kernels, and these are tuned when they
    are first called, which takes a minute or more.
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
    import triton  # the module: its package's metadata may be that of another

    return why_no_kernels(torch.cuda.get_device_capability(), triton.__version__)


def uses_fla(tensor: Tensor) -> bool:
    """Return whether kernels of flash-linear-attention compute a tensor.

    A trace is for a GPU: without an NVIDIA driver here it is that of another machine, where `make
    install` adds the package.
    """
    if traced_gpu.is_on:
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
    """Let the code of a model's modules call kernels of packages on GPUs alone.

    What they call on a CPU, and if `why_no_fla` has a reason, is transformers' torch code.
    """
    for module in model.modules():
        names = vars(sys.modules[type(module).__module__])
        for name in (*FLA_KERNELS, *OTHER_KERNELS):
            own = names.get(name)
            if own is not None and not hasattr(own, IS_BOUND):
                names[name] = by_device(own, name in FLA_KERNELS)


def by_device(own: Callable, is_of_fla: bool) -> Callable:
    """Return a kernel of a model's code that is its torch code if no package's kernel runs."""
    in_torch = inspect.unwrap(own)

    @functools.wraps(own)
    def kernel(*args: Any, **kwargs: Any) -> Any:
        first = next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
        runs = _uses_packages(first) and not (is_of_fla and why_no_fla())
        chosen = own if runs else in_torch
        return chosen(*args, **kwargs)

    setattr(kernel, IS_BOUND, True)
    return kernel
