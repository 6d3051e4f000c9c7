"""Gradients of a step's adapters, dU = s dy B and dB = s dy^T (x A^T): in one pass over dy.

python -m benchmarks.adapter_gradients           Llama 8B and 1B on a Hopper GPU, half a minute

Beside them the two products, with dU copied to where the next product reads it, and the time that
reading dy once takes at the GPU's full bandwidth. Both give the same numbers within what bfloat16
rounds, or this ends with an error. Matrices take turns, so that none is read from the cache.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import torch

from benchmarks.kernel_times import kernel_microseconds
from sft_play.models.fast.linears import adapter_gradients
from sft_play.models.fast.linears.adapter_gradients import rank_and_output_gradients
from sft_play.models.fast.linears.products import Adapters, FrozenLinear
from sft_play.plan.recurrent import HOPPER

TOKENS = 8192
# of a layer: features of the outputs of linears that share an input, and how often there are such
MODELS = {
    "8B": (32, {(4096, 1024, 1024): 1, (4096,): 2, (14336, 14336): 1}),
    "1B": (16, {(2048, 512, 512): 1, (2048,): 2, (8192, 8192): 1}),
}
ROOM = 64  # beside the rows of dy
BYTES_PER_SECOND = 4.8e12  # of an H200
LARGEST_GAP = 0.02
TURNS = 3


def two_products(*arguments: Any) -> Any:
    """Compute the same without the pass."""
    fits = adapter_gradients.fit_one_pass
    adapter_gradients.fit_one_pass = lambda *_: False
    try:
        return rank_and_output_gradients(*arguments)
    finally:
        adapter_gradients.fit_one_pass = fits


def inputs_of(outs: tuple[int, ...], rank: int) -> tuple[Any, ...]:
    """Return random arguments of rank_and_output_gradients."""
    gpu: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    dy = [torch.randn(TOKENS, out + ROOM, **gpu)[:, :out] for out in outs]
    b = tuple(torch.randn(out, rank, **gpu) for out in outs)
    xa = torch.randn(TOKENS, rank * len(outs), **gpu)
    linears = [FrozenLinear(b[0], None, 2.0, rank) for _ in outs]
    assert adapter_gradients.fit_one_pass(dy, b, linears), "not computed in one pass"
    return dy, xa, linears, Adapters(xa, b), torch.float32, True


def gap(one: Any, other: Any) -> float:
    """Return the largest difference of dU and dB, relative to the largest number."""
    pairs = [(one[0], other[0]), *zip(one[1], other[1], strict=True)]
    gaps = [(a.float() - b.float()).abs().max() / b.abs().max() for a, b in pairs]
    return max(each.item() for each in gaps)


def main() -> None:
    """Print the time of each shape, and that of a step."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != HOPPER:
        sys.exit("no Hopper GPU is here; the pass is a kernel for one")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {TOKENS} tokens")
    for model, (layers, shapes) in MODELS.items():
        for rank in (8, 16):
            totals = [0.0, 0.0]
            for outs, count in shapes.items():
                inputs = [inputs_of(outs, rank) for _ in range(TURNS)]
                largest = gap(rank_and_output_gradients(*inputs[0]), two_products(*inputs[0]))
                assert largest <= LARGEST_GAP, f"{outs}: both ways differ by {largest:.3f}"
                times = []
                for index, work in enumerate((two_products, rank_and_output_gradients)):
                    time, _ = kernel_microseconds([partial(work, *each) for each in inputs])
                    times.append(time)
                    totals[index] += layers * count * time / 1e3
                least = sum(outs) * TOKENS * 2 / BYTES_PER_SECOND * 1e6
                print(
                    f"{model} rank {rank} {outs!s:18} products {times[0]:6.1f} us, "
                    f"one pass {times[1]:6.1f} us, reading dy {least:5.1f} us"
                )
                del inputs
            print(
                f"{model} rank {rank} {'a step':18} products {totals[0]:6.2f} ms, "
                f"one pass {totals[1]:6.2f} ms"
            )


if __name__ == "__main__":
    main()
