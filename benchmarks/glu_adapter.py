"""A gated MLP's h, and its gradients, with the products of down's adapter: in one kernel each.

python -m benchmarks.glu_adapter           Llama 8B's and 1B's MLPs on a Hopper GPU, some seconds

Beside them the kernels without the products, and the products by themselves, as other GPUs compute
them. Both give the same numbers within what bfloat16 rounds, or this ends with an error.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from sft_play.models.fast.linears.room import empty_with_room

from benchmarks.kernel_times import kernel_microseconds
from sft_play.models.fast.linears.adapter_gradients import a_gradient
from sft_play.models.fast.linears.glu import (
    LEAST_ROWS,
    backward_with_adapter,
    fit_one_kernel,
    forward_with_adapter,
    glu_backward,
    glu_forward,
)
from sft_play.plan.recurrent import HOPPER

TOKENS, RANK, ROOM = 8192, 16, 64
MODELS = {"8B": (32, 14336), "1B": (16, 8192)}  # layers, features
LARGEST_GAP = 0.02


def works_of(features: int) -> dict[str, tuple[Callable[[], Any], Callable[[], Any]]]:
    """Return the forward and backward pass of random numbers: apart, and in one kernel each."""
    gpu: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    gate, up, dh = (torch.randn(TOKENS, features, **gpu) for _ in range(3))
    grads = [empty_with_room(dh.shape, ROOM, dh) for _ in range(2)]
    a, du = torch.randn(RANK, features, **gpu), torch.randn(TOKENS, RANK, **gpu)
    overwritten = dh.clone()  # what it becomes is as good for a time
    assert fit_one_kernel(gate, up, RANK, LEAST_ROWS), "not computed in one kernel"

    def forward_apart() -> torch.Tensor:
        return glu_forward(gate, up, "silu", ROOM) @ a.t()

    def forward() -> torch.Tensor:
        return forward_with_adapter(gate, up, "silu", a, ROOM)[1]

    def backward_apart() -> torch.Tensor:
        glu_backward(overwritten, gate, up, "silu", *grads, h=overwritten)
        return a_gradient(du, overwritten, torch.float32)

    def backward() -> torch.Tensor:
        return backward_with_adapter(dh, gate, up, "silu", *grads, du, torch.float32)

    return {"forward": (forward_apart, forward), "backward": (backward_apart, backward)}


def main() -> None:
    """Print the time of each pass, and that of a step."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != HOPPER:
        sys.exit("no Hopper GPU is here; the kernels are for one")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {TOKENS} tokens")
    for model, (layers, features) in MODELS.items():
        totals = [0.0, 0.0]
        for name, works in works_of(features).items():
            one, other = (work().float() for work in works)
            gap = ((one - other).abs().max() / one.abs().max()).item()
            assert gap <= LARGEST_GAP, f"{name}: both ways differ by {gap:.3f}"
            times = [kernel_microseconds([work])[0] for work in works]
            totals = [
                total + layers * each / 1e3 for total, each in zip(totals, times, strict=True)
            ]
            print(f"{model} {name:8} apart {times[0]:6.1f} us, one kernel {times[1]:6.1f} us")
        print(f"{model} {'a step':8} apart {totals[0]:6.2f} ms, one kernel {totals[1]:6.2f} ms")


if __name__ == "__main__":
    main()
