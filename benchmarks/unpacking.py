"""Unpacking the 4-bit weights of a step of Llama 8B on a GPU: ours beside bitsandbytes'.

python -m benchmarks.unpacking                   one GPU, ten seconds

Both give the same bits, or this ends with an error. Weights take turns, so that none is read from
the cache. A step unpacks each weight of 32 layers for its forward and its backward pass.
"""

from __future__ import annotations

import sys
from functools import partial

import torch
from bitsandbytes.functional import dequantize_4bit, quantize_4bit

from benchmarks.kernel_times import kernel_microseconds

SHAPES = {(4096, 4096): 2, (1024, 4096): 2, (14336, 4096): 2, (4096, 14336): 1}  # of a layer
UNPACKED = 2 * 32  # times that each is unpacked in a step: both passes of 32 layers
CACHE_BYTES = 200e6  # of packed weights that take turns; an H200 caches 60 MB


def main() -> None:
    """Print the time of each shape, and that of a step."""
    if not torch.cuda.is_available():
        sys.exit("no NVIDIA GPU is here; ours is a kernel for one")
    from sft_play.models.fast.linears import four_bit_kernels  # Triton needs a GPU

    arms = {"bitsandbytes": dequantize_4bit, "ours": four_bit_kernels.unpack}
    step = dict.fromkeys(arms, 0.0)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    for shape, count in SHAPES.items():
        weight = torch.randn(shape, device="cuda", dtype=torch.bfloat16) * 0.02
        packed, state = quantize_4bit(weight, quant_type="nf4", compress_statistics=True)
        bits = [unpack(packed, state).view(torch.int16) for unpack in arms.values()]
        assert torch.equal(*bits), f"{shape}: other bits than bitsandbytes'"
        copies = max(2, int(CACHE_BYTES // packed.numel()))
        weights = [(packed.clone(), state) for _ in range(copies)]
        moved_bytes = weight.numel() * (0.5 + 2)
        for name, unpack in arms.items():
            time, _ = kernel_microseconds([partial(unpack, *weight) for weight in weights])
            step[name] += UNPACKED * count * time / 1e3
            print(f"{shape!s:14} {name:12} {time:7.1f} us {moved_bytes / time / 1e6:5.2f} TB/s")
    for name, milliseconds in step.items():
        print(f"a step         {name:12} {milliseconds:7.2f} ms")


if __name__ == "__main__":
    main()
