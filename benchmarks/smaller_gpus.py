"""Run a command on GPUs with less free memory than they have, as on smaller cards.

python -m benchmarks.smaller_gpus 23 make train-distributed CONFIG=configs/rtx4090_sli.yaml

Until the command ends, another process occupies the rest of every visible GPU. If a GPU has this
memory itself, to 1 GiB, none of it is occupied. The program plans for what is free.
"""

import subprocess
import sys

from benchmarks.machine import GIB
from benchmarks.workloads import MARGIN_GIB


def hold(free_gib: float) -> list[object]:
    """Return tensors that leave only `free_gib` of each GPU free. Exits if a GPU has less."""
    import torch

    tensors: list[object] = []
    for index in range(torch.cuda.device_count()):
        device = torch.device("cuda", index)
        torch.zeros(1, device=device)  # makes the context, which takes memory too
        free_bytes, total_bytes = torch.cuda.mem_get_info(device)
        if abs(total_bytes - free_gib * GIB) < GIB:  # it is such a card itself
            continue
        held_bytes = free_bytes - int((free_gib + MARGIN_GIB) * GIB)
        if held_bytes < 0:
            sys.exit(f"GPU {index} has {free_bytes / GIB:.1f} GiB free; leave less")
        tensors.append(torch.empty(held_bytes, dtype=torch.uint8, device=device))
    if not torch.cuda.is_available():
        sys.exit("this machine has no GPU")
    return tensors


def main() -> None:
    """Occupy memory, run the command, and exit with its code."""
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    held = hold(float(sys.argv[1]))
    code = subprocess.run(sys.argv[2:]).returncode
    held.clear()
    sys.exit(code)


if __name__ == "__main__":
    main()
