"""What publishing a checkpoint costs beside a plain save: `python -m benchmarks.sealing [FOLDER]`.

A checkpoint of a full run is written as Trainer writes it: the weights as safetensors, then Adam's
two moments by torch.save. The plain save ends where its files are on the disk (sync), since a
checkpoint that the next power cut takes is none; without the sync is printed beside it.
"""

import argparse
import os
import shutil
import tempfile
import time
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


class Seconds(NamedTuple):
    """What a save took."""

    save: float
    sync: float  # after it, of a plain one
    sealed: float  # save and seal of a sealed one

    @property
    def added(self) -> float:
        """What sealing adds to a save that reaches the disk, as a share of it."""
        return self.sealed / (self.save + self.sync) - 1


def measure(folder: Path, gigabytes: float, repeats: int) -> list[Seconds]:
    """Return the seconds of pairs of a plain and a sealed save, either one first in turn.

    One that is not measured comes before them: the system finds memory for the first pages.
    """
    tensors = 24
    numbers = int(gigabytes * GB / 4 / (1 + MOMENTS) / tensors)
    weights = {f"layer.{index}": torch.randn(numbers) for index in range(tensors)}
    moments = [torch.randn(numbers) for _ in range(tensors * MOMENTS)]

    def plain() -> list[float]:
        started = time.perf_counter()
        write(folder / "plain", weights, moments)
        written = time.perf_counter()
        sync(folder / "plain")
        synced = time.perf_counter()
        shutil.rmtree(folder / "plain")
        return [written - started, synced - written]

    def sealed() -> list[float]:
        staged = folder / checkpoints.STAGING / "checkpoint-1"
        started = time.perf_counter()
        write(staged, weights, moments)
        checkpoints.publish(staged, folder / "checkpoint-1")
        ended = time.perf_counter()
        assert seal.find_damage(folder / "checkpoint-1") is None
        shutil.rmtree(folder / "checkpoint-1")
        return [ended - started]

    found = []
    sealed()
    for number in range(repeats):
        order = (sealed, plain) if number % 2 else (plain, sealed)
        took = {save: save() for save in order}
        found.append(Seconds(*took[plain], *took[sealed]))
    return found


def main() -> None:
    """Print the median of each, and of what sealing adds in a pair."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", default=".", help="a folder on the disk to measure")
    parser.add_argument("--gigabytes", type=float, default=1.5, help="size of the checkpoint")
    parser.add_argument("--repeats", type=int, default=9)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=chosen.folder) as folder:
        pairs = measure(Path(folder), chosen.gigabytes, chosen.repeats)
    save, wait, sealed = (median(column) for column in zip(*pairs, strict=True))
    added = median(pair.added for pair in pairs)
    print(
        f"checkpoint {chosen.gigabytes:g} GB, {len(os.sched_getaffinity(0))} cores: "
        f"save {save:.2f} s, to the disk {wait:.2f} s more, sealed {sealed:.2f} s: "
        f"{added:+.0%} over a save that reaches the disk, {sealed / save - 1:+.0%} over one that "
        "need not"
    )


if __name__ == "__main__":
    main()
