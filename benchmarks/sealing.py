"""What publishing a checkpoint adds to a plain save: `python -m benchmarks.sealing [FOLDER]`.

The checkpoint of a full fine-tuning run is written as Trainer writes it: the weights as
safetensors, then Adam's two moments by torch.save. The plain save ends when its files are on the
disk (sync): a checkpoint that a power cut destroys is useless.

Plain and sealed saves alternate. Each starts with an idle disk (os.sync): otherwise it would wait
for the save before it. Both write the same bytes by the same code, and the time of that varies: on
a virtual machine 1.5 GB took 0.4 s to 3.9 s. So the seal is timed by itself, after the write, and
compared with the median write.
"""

import argparse
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
from safetensors.torch import save_file

from sft_play.runs import checkpoints, seal

GB = 1e9
MOMENTS = 2  # of Adam, in float32 as the weights here


def write(folder: Path, weights: dict[str, torch.Tensor], moments: list[torch.Tensor]) -> None:
    """Write weights and optimizer of a checkpoint."""
    folder.mkdir(parents=True)
    save_file(weights, folder / "model.safetensors")
    torch.save({"state": moments}, folder / "optimizer.pt")


def sync(folder: Path) -> None:
    """Write the files of a folder to the disk, one after the other."""
    for path in sorted(folder.iterdir()):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


class Pair(NamedTuple):
    """Seconds of a plain and of a sealed save."""

    plain_write: float
    sync: float
    sealed_write: float
    seal: float  # hashes, sync and the new name


def added(pairs: Sequence[Pair]) -> list[float]:
    """Return what sealing adds in each pair, as a fraction of a save that reaches the disk."""
    writes = [seconds for pair in pairs for seconds in (pair.plain_write, pair.sealed_write)]
    save = median(writes) + median(pair.sync for pair in pairs)
    return [(pair.seal - pair.sync) / save for pair in pairs]


def measure(folder: Path, gigabytes: float, repeats: int) -> list[Pair]:
    """Return the seconds of pairs of a plain and a sealed save. The first one alternates.

    One save comes before them that is not measured: the system allocates the first pages.
    """
    tensors = 24
    numbers = int(gigabytes * GB / 4 / (1 + MOMENTS) / tensors)
    weights = {f"layer.{index}": torch.randn(numbers) for index in range(tensors)}
    moments = [torch.randn(numbers) for _ in range(tensors * MOMENTS)]

    def save(written: Path, target: Path, publish: Callable[[], object]) -> tuple[float, float]:
        """Return the seconds of writing and of publishing."""
        os.sync()
        started = time.perf_counter()
        write(written, weights, moments)
        written_at = time.perf_counter()
        publish()
        ended = time.perf_counter()
        damage = None if target is plain else seal.find_damage(target)
        assert damage is None, damage
        shutil.rmtree(target)
        return written_at - started, ended - written_at

    plain, target = folder / "plain", folder / "checkpoint-1"
    staged = folder / checkpoints.STAGING / target.name
    saves = [
        lambda: save(plain, plain, lambda: sync(plain)),
        lambda: save(staged, target, lambda: checkpoints.publish(staged, target)),
    ]
    saves[1]()
    found = []
    for number in range(repeats):
        first = number % 2
        took = {kind: saves[kind]() for kind in (first, 1 - first)}
        found.append(Pair(*took[0], *took[1]))
    return found


def main() -> None:
    """Print the median of each part, and of what sealing adds."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", nargs="?", default=".", help="a folder on the disk to measure")
    parser.add_argument("--gigabytes", type=float, default=1.5, help="size of the checkpoint")
    parser.add_argument("--repeats", type=int, default=15)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        pairs = measure(Path(folder), args.gigabytes, args.repeats)
    shares = added(pairs)
    print(
        f"checkpoint {args.gigabytes:g} GB, {len(pairs)} pairs: sealing adds "
        f"{median(shares):+.0%} to a save that reaches the disk "
        f"({min(shares):+.0%} to {max(shares):+.0%})"
    )


if __name__ == "__main__":
    main()
