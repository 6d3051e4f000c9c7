"""Select the code of linear attention and state spaces: packaged kernels or the model's torch code.

When transformers imports a model's code, it uses the functions of flash-linear-attention,
causal-conv1d and mamba-ssm instead of the model's functions if those packages are installed. The
packaged kernels run only on a GPU. flash-linear-attention does not run with every Triton version.
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
