"""`glu` with the thin products of the adapter of the linear behind it.

    h A^T (N, r) forward, dA = dU^T h (r, I) backward

By itself each takes as long as reading h does. On a Hopper GPU the kernel that computes h has both
(`glu_adapter_kernels`), for ranks of at most 16. Elsewhere they are products of their own.

Legend: N tokens, I intermediate features, r rank.
"""

import torch
from torch import Tensor

from sft_play.models.fast.linears.activations import Activation
from sft_play.models.fast.linears.adapter_gradients import LARGEST_RANK, a_gradient, is_hopper
from sft_play.models.fast.linears.glu import glu_backward, glu_forward

# Forward a program computes whole rows: fewer of them would keep few of a GPU's processors busy.
LEAST_ROWS = 4096


def forward_with_adapter(
    gate: Tensor, up: Tensor, activation: Activation, a: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Return h (N, I), and h A^T (N, r) where the kernel has it. A (r, I); None: no adapter."""
    if a is None or not fit_one_kernel(gate, up, len(a), LEAST_ROWS):
        return glu_forward(gate, up, activation), None
    from sft_play.models.fast.linears import glu_adapter_kernels  # Triton needs a GPU

    return glu_adapter_kernels.forward(gate, up, activation, a)


def backward_with_adapter(
    dh: Tensor,
    gate: Tensor,
    up: Tensor,
    activation: Activation,
    dgate: Tensor,
    dup: Tensor,
    du: Tensor | None,
    dtype: torch.dtype | None,
) -> Tensor | None:
    """Write dgate and dup (N, I); return dA (r, I) for dU (N, r), in `dtype` or that of dh.

    Where it is a product of its own, h overwrites dh. None without an adapter.
    """
    if du is None:
        glu_backward(dh, gate, up, activation, dgate, dup)
        return None
    if not fit_one_kernel(gate, up, du.shape[1], 1):
        glu_backward(dh, gate, up, activation, dgate, dup, h=dh)
        return a_gradient(du, dh, dtype)
    from sft_play.models.fast.linears import glu_adapter_kernels

    return glu_adapter_kernels.backward(dh, gate, up, activation, dgate, dup, du)


def fit_one_kernel(gate: Tensor, up: Tensor, rank: int, least_rows: int) -> bool:
    """Return whether one kernel computes h, or its gradient, and the adapter's product."""
    if not is_hopper(gate.device) or gate.element_size() != 2 or rank > LARGEST_RANK:
        return False
    return len(gate) >= least_rows and gate.stride(1) == up.stride(1) == 1
