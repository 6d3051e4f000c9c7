"""Run a command on GPUs with less free memory than they have, as on smaller cards.

python -m benchmarks.smaller_gpus --leave 23 make train-distributed CONFIG=configs/rtx4090_sli.yaml

A process beside the command holds the rest of every GPU that is visible until the command ends.
The program plans for what is free, as it does beside somebody else's run.
"""

import argparse
import subprocess
import sys
from collections.abc import Sequence

from benchmarks.machine import GIB

MARGIN = 1 << 27  # bytes: a context grows a little after it is made


def hold(free_gib: float) -> list[object]:
    """Return tensors that leave so much memory of each GPU free, in GiB.

    Exits where a GPU has less.
    """
    import torch

    tensors: list[object] = []
    for index in range(torch.cuda.device_count()):
        device = torch.device("cuda", index)
        torch.zeros(1, device=device)  # makes the context, which takes memory too
        free_bytes, _ = torch.cuda.mem_get_info(device)
        held_bytes = free_bytes - int(free_gib * GIB) - MARGIN
        if held_bytes < 0:
            sys.exit(f"GPU {index} has {free_bytes / GIB:.1f} GiB free; --leave takes less")
        tensors.append(torch.empty(held_bytes, dtype=torch.uint8, device=device))
        free_bytes, _ = torch.cuda.mem_get_info(device)
        print(f"GPU {index}: {free_bytes / GIB:.1f} GiB free", flush=True)
    if not tensors:
        sys.exit("no GPU is here")
    return tensors


def arguments(words: Sequence[str]) -> argparse.Namespace:
    """Return `leave`, GiB of each GPU, and `command`. Exits where one is missing."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--leave", type=float, required=True, help="GiB of each GPU")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    args = parser.parse_args(words)
    if args.command[:1] == ["--"]:
        args.command.pop(0)
    if not args.command:
        parser.error("name the command behind the GiB, such as --leave 23 make train")
    if not args.leave > 0:
        parser.error(f"--leave {args.leave:g}: write the GiB of a smaller card, such as 23")
    return args


def main() -> None:
    """Hold memory, run the command, and exit with its code."""
    args = arguments(sys.argv[1:])
    held = hold(args.leave)
    code = subprocess.run(args.command).returncode
    held.clear()
    sys.exit(code)


if __name__ == "__main__":
    main()
