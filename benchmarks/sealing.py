"""What publishing a checkpoint costs beside a plain save: `python -m benchmarks.sealing [FOLDER]`.

A checkpoint of a full run is written as Trainer writes it: the weights as safetensors, then Adam's
two moments by torch.save. The plain save ends where its files are on the disk (sync), since a
checkpoint that the next power cut takes is none; without the sync is printed beside it.

Plain and sealed saves alternate, and the middle of the pairs counts. Each begins with an idle disk
(os.sync), or one save would wait for what the one before it has left to be written. Both write the
same bytes by the same code, and how long that takes says nothing of the seal: on a virtual machine,
which may have to fetch each page of its memory from the host, 1.5 GB took 0.4 s to 3.9 s. So what
sealing adds is measured where it works, after the write, and set beside the median write.
"""

import argparse
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
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
    """Bring the files of a folder to the disk, one after the other."""
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
    check: float  # reading it as a resume does, from memory


def to_disk(pairs: Sequence[Pair]) -> tuple[float, float]:
    """Return the median seconds of a write, of either kind, and of the sync after a plain one."""
    writes = [seconds for pair in pairs for seconds in (pair.plain_write, pair.sealed_write)]
    return median(writes), median(pair.sync for pair in pairs)


def added(pairs: Sequence[Pair]) -> list[float]:
    """Return what sealing adds in each pair, as a share of a save that reaches the disk."""
    save = sum(to_disk(pairs))
    return [(pair.seal - pair.sync) / save for pair in pairs]


def measure(folder: Path, gigabytes: float, repeats: int) -> list[Pair]:
    """Return the seconds of pairs of a plain and a sealed save, either one first in turn.

    One that is not measured comes before them: the system finds memory for the first pages.
    """
    tensors = 24
    numbers = int(gigabytes * GB / 4 / (1 + MOMENTS) / tensors)
    weights = {f"layer.{index}": torch.randn(numbers) for index in range(tensors)}
    moments = [torch.randn(numbers) for _ in range(tensors * MOMENTS)]

    def save(target: Path, *steps: Callable[[], None]) -> list[float]:
        """Return the seconds of writing and of each step after it."""
        os.sync()
        clock = [time.perf_counter()]
        write(target, weights, moments)
        clock.append(time.perf_counter())
        for step in steps:
            step()
            clock.append(time.perf_counter())
        return [after - before for before, after in pairwise(clock)]

    def plain() -> list[float]:
        took = save(folder / "plain", lambda: sync(folder / "plain"))
        shutil.rmtree(folder / "plain")
        return took

    def sealed() -> list[float]:
        staged = folder / checkpoints.STAGING / "checkpoint-1"
        target = folder / "checkpoint-1"
        took = save(staged, lambda: checkpoints.publish(staged, target), lambda: check(target))
        shutil.rmtree(target)
        return took

    found = []
    sealed()
    for number in range(repeats):
        order = (sealed, plain) if number % 2 else (plain, sealed)
        took = {kind: kind() for kind in order}
        found.append(Pair(*took[plain], *took[sealed]))
    return found


def check(folder: Path) -> None:
    """Read a sealed folder as a resume does."""
    damage = seal.find_damage(folder)
    assert damage is None, damage


def main() -> None:
    """Print the median of each, and of what sealing adds in a pair."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", default=".", help="a folder on the disk to measure")
    parser.add_argument("--gigabytes", type=float, default=1.5, help="size of the checkpoint")
    parser.add_argument("--repeats", type=int, default=15)
    chosen = parser.parse_args()
    load = os.getloadavg()[0]  # hashing waits where other programs have the cores
    with tempfile.TemporaryDirectory(dir=chosen.folder) as folder:
        pairs = measure(Path(folder), chosen.gigabytes, chosen.repeats)
    save, wait = to_disk(pairs)
    shares = added(pairs)
    sealing = median(pair.seal for pair in pairs)
    whole = median(
        (pair.sealed_write + pair.seal) / (pair.plain_write + pair.sync) - 1 for pair in pairs
    )
    print(
        f"checkpoint {chosen.gigabytes:g} GB, {len(os.sched_getaffinity(0))} cores, "
        f"load of others {load:.1f}, "
        f"{len(pairs)} pairs: write {save:.2f} s, sync {wait:.2f} s, seal with sync "
        f"{sealing:.2f} s: "
        f"{median(shares):+.0%} over a save that reaches the disk "
        f"({min(shares):+.0%} to {max(shares):+.0%}; with the noise of the writes {whole:+.0%}), "
        f"{sealing / save:+.0%} over one that need not; "
        f"checked in {median(pair.check for pair in pairs):.2f} s"
    )


if __name__ == "__main__":
    main()
