"""Gradients of the adapters of linears that share an input.

    dU_i = s_i dy_i B_i                  the gradient of x A_i^T
    dB_i = s_i dy_i^T (x A_i^T),         dA_i = dU_i^T x

dU_i and dB_i both read dy_i, which is all that takes time. On a Hopper GPU one pass computes both
(`adapter_kernels`) where the ranks of all linears are equal and small. Elsewhere they are products.

Legend: N tokens, `in` and `out` features, r rank, R the sum of the ranks of all linears.
"""

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from sft_play.models.fast.linears.products import MOST_SHARING, Adapters, FrozenLinear
from sft_play.plan.needs import HOPPER

# With 32, what a pass writes and adds up took as long on an H200 as reading dy again.
LARGEST_RANK = 16
ALIGNMENT = 16  # bytes that it loads at once


def rank_and_output_gradients(
    dy: Sequence[Tensor],
    xa: Tensor | None,
    linears: Sequence[FrozenLinear],
    adapters: Adapters,
    dtype: torch.dtype | None,
) -> tuple[Tensor | None, list[Tensor | None]]:
    """Return dU (N, R), and dB_i (out_i, r_i) in `dtype` or in that of dy; None without adapters.

    dy_i (N, out_i), xa (N, R).
    """
    if xa is None:
        return None, [None] * len(linears)
    own_dy, own_b = [], []
    for grad, b in zip(dy, adapters.b, strict=True):
        if b is not None:
            own_dy.append(grad)
            own_b.append(b)
    own = [linear for linear in linears if linear.rank]
    if fit_one_pass(own_dy, own_b, own):
        from sft_play.models.fast.linears import adapter_kernels  # Triton needs a GPU

        scale = own[0].scale
        du, db = adapter_kernels.rank_and_output_gradients(own_dy, own_b, xa, scale, dtype)
        own_db = db.split([grad.shape[1] for grad in own_dy])
    else:
        du = xa.new_empty(xa.shape)
        own_db = []
        for grad, b, linear in zip(own_dy, own_b, own, strict=True):
            own_xa = xa[:, linear.columns]
            du[:, linear.columns].addmm_(grad, b, beta=0, alpha=linear.scale)
            db = torch.empty_like(b).addmm_(grad.t(), own_xa, beta=0, alpha=linear.scale)
            own_db.append(db)
    remaining = iter(own_db)
    return du, [next(remaining) if linear.rank else None for linear in linears]


def fit_one_pass(
    dy: Sequence[Tensor], b: Sequence[Tensor], linears: Sequence[FrozenLinear]
) -> bool:
    """Return whether one pass over dy computes what it takes two products for, and sooner."""
    first = linears[0]
    if not is_hopper(dy[0].device) or dy[0].element_size() != 2:
        return False
    if len(linears) > MOST_SHARING or first.rank > LARGEST_RANK or not len(dy[0]):
        return False
    if any((linear.rank, linear.scale) != (first.rank, first.scale) for linear in linears):
        return False
    if any(grad.stride(1) != 1 for grad in dy) or not all(each.is_contiguous() for each in b):
        return False
    return all(tensor.data_ptr() % ALIGNMENT == 0 for tensor in (*dy, *b))


@cache
def is_hopper(device: torch.device) -> bool:
    """Return whether a device is a GPU for which the kernels of adapters are made."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == HOPPER


def adapter_gradients(
    x: Tensor,
    du: Tensor | None,
    db: Sequence[Tensor | None],
    linears: Sequence[FrozenLinear],
    dtype: torch.dtype | None,
) -> list[Tensor | None]:
    """Return dA_1 (r_1, in), dB_1 (out_1, r_1), dA_2, ... in `dtype`; x (N, in), du (N, R)."""
    if du is None:
        return [None, None] * len(linears)
    all_da = a_gradient(du, x, dtype).split([linear.rank for linear in linears])
    gradients: list[Tensor | None] = []
    for linear, da, each_db in zip(linears, all_da, db, strict=True):
        gradients += [da, each_db] if linear.rank else [None, None]
    return cast(gradients, dtype)


def a_gradient(du: Tensor, x: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Return dA (R, in) = dU^T x for dU (N, R) and x (N, in).

    In `dtype` where that is float32 and a GPU multiplies 16 bits: it adds in float32.
    """
    if x.is_cuda and len(x) and x.element_size() == 2 and dtype == torch.float32:
        return torch.mm(du.t(), x, out_dtype=dtype)
    return du.t() @ x


def cast(tensors: list[Tensor | None], dtype: torch.dtype | None) -> list[Tensor | None]:
    """Return tensors in a dtype; one kernel casts those of another."""
    others = {
        place: torch.empty_like(each, dtype=dtype)
        for place, each in enumerate(tensors)
        if each is not None and each.dtype != dtype
    }
    if others:
        torch._foreach_copy_(list(others.values()), [tensors[place] for place in others])
    return [others.get(place, each) for place, each in enumerate(tensors)]
