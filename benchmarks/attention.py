"""Attention of a layer on a GPU: FlashAttention 4 beside torch's own kernels.

python -m benchmarks.attention                   one Hopper GPU, a minute

8,192 tokens in bfloat16 (7,804 of the short documents), 32 query heads and 8 key heads. Where
FlashAttention 4 is not installed (python -m tools.install add requirements-hopper.txt), torch's
kernels are timed alone. TFLOP/s count the pairs of tokens of which one sees the other. The host's
time is what launching both passes takes it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.kernel_times import kernel_microseconds
from sft_play.models.fast.attention import flash4, kernels
from sft_play.models.fast.attention.reference import Scoring, attend_rows
from sft_play.models.fast.documents import Documents

HEADS, KEY_HEADS = 32, 8
WORKS = {
    "4 x 2,048": (2048,) * 4,
    "7 ragged documents": (3100, 1700, 1200, 900, 600, 450, 242),
    "34 short documents": tuple(60 + 340 * index // 33 for index in range(34)),
}
FEATURES = (128, 64)
LARGEST_GAP = 5e-2  # of outputs and gradients, over the largest number of each

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class Work(NamedTuple):
    """What is attended to."""

    name: str
    lengths: tuple[int, ...]
    features: int

    @property
    def flops(self) -> int:
        """Of a forward pass: two products for each pair of tokens of which one sees the other."""
        pairs = sum(length * (length + 1) // 2 for length in self.lengths)
        return 4 * pairs * HEADS * self.features


def main() -> None:
    """Print microseconds and TFLOP/s of forward and backward pass of each kernel."""
    if not torch.cuda.is_available():
        sys.exit("no NVIDIA GPU is here; these are kernels for one")
    flash4.choose(True)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    print(f"{'':25} {'kernel':20} {'forward':>20} {'backward':>20} {'host':>10}")
    for features in FEATURES:
        for name, lengths in WORKS.items():
            compare(Work(name, lengths, features))


def compare(work: Work) -> None:
    """Print a line for each kernel. Raises AssertionError where they do not agree."""
    draw = torch.Generator("cuda").manual_seed(0)
    inputs = []
    for heads in (HEADS, KEY_HEADS, KEY_HEADS):
        shape = (sum(work.lengths), heads, work.features)
        made = torch.randn(shape, generator=draw, device="cuda", dtype=torch.bfloat16)
        inputs.append(made.requires_grad_())
    grad = torch.randn(inputs[0].shape, generator=draw, device="cuda", dtype=torch.bfloat16)
    expected: list[Tensor] | None = None
    for kernel, attend in arms(work, inputs).items():
        out = attend(*inputs)
        results = [out.detach(), *torch.autograd.grad(out, inputs, grad)]
        expected = expected or results
        for one, two in zip(expected, results, strict=True):
            gap = float((one - two).abs().max() / one.abs().max())
            assert gap <= LARGEST_GAP, f"{work.name}: {kernel} differs by {gap:.1e}"
        forward, backward, host = measure(attend, inputs, grad)
        label = f"{work.name}, {work.features}"
        print(
            f"{label:25} {kernel:20} {spoken(forward, work.flops)} "
            f"{spoken(backward, 2.5 * work.flops)} {host:7.0f} us"
        )


def arms(work: Work, inputs: list[Tensor]) -> dict[str, Attend]:
    """Return the kernels that attend to documents of a work, by name."""
    scoring = Scoring(work.features**-0.5)
    starts = torch.tensor([0, *work.lengths], device="cuda").cumsum(0).int()
    documents = Documents(starts, max(work.lengths))
    are_rows = len(set(work.lengths)) == 1

    def rows(*of: Tensor) -> Tensor:
        split = (tensor.unflatten(0, (len(work.lengths), -1)) for tensor in of)
        return attend_rows(*split, scoring.scale).flatten(0, 1)

    def packed(*of: Tensor) -> Tensor:
        return kernels.attend_torch_varlen(*of, scoring, documents)

    def flash(*of: Tensor) -> Tensor:
        return flash4.attend(*of, scoring, documents)

    found: dict[str, Attend] = {"torch sdpa": rows} if are_rows else {}
    found["torch varlen"] = packed
    if flash4.takes(*inputs, scoring, documents):
        found["FlashAttention 4"] = flash
    return found


def measure(attend: Attend, inputs: list[Tensor], grad: Tensor) -> tuple[float, float, float]:
    """Return the microseconds of a forward and of a backward pass, and the host's for both."""
    out = attend(*inputs)
    forward = kernel_microseconds([lambda: attend(*inputs)])
    backward = kernel_microseconds(
        [lambda: torch.autograd.grad(out, inputs, grad, retain_graph=True)]
    )
    return forward[0], backward[0], forward[1] + backward[1]


def spoken(duration: float, flops: float) -> str:
    """Return microseconds and TFLOP/s in the width of a column."""
    return f"{duration:7.0f} us {flops / duration / 1e6:4.0f} TF/s"


if __name__ == "__main__":
    main()
