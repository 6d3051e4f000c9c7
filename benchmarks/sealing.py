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


def seconds_of(folder: Path, gigabytes: float) -> tuple[float, float, float]:
    """Return the seconds of a save, of the sync after it, and of a sealed save."""
    tensors = 24
    numbers = int(gigabytes * GB / 4 / (1 + MOMENTS) / tensors)
    weights = {f"layer.{index}": torch.randn(numbers) for index in range(tensors)}
    moments = [torch.randn(numbers) for _ in range(tensors * MOMENTS)]
    plain = folder / "plain"
    started = time.perf_counter()
    write(plain, weights, moments)
    written = time.perf_counter()
    sync(plain)
    synced = time.perf_counter()
    shutil.rmtree(plain)
    staged = folder / checkpoints.STAGING / "checkpoint-1"
    begun = time.perf_counter()
    write(staged, weights, moments)
    checkpoints.publish(staged, folder / "checkpoint-1")
    ended = time.perf_counter()
    assert seal.find_damage(folder / "checkpoint-1") is None
    shutil.rmtree(folder / "checkpoint-1")
    return written - started, synced - written, ended - begun


def main() -> None:
    """Print the least seconds of each, the least disturbed ones, and what sealing adds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", default=".", help="a folder on the disk to measure")
    parser.add_argument("--gigabytes", type=float, default=1.5, help="size of the checkpoint")
    parser.add_argument("--repeats", type=int, default=5)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=chosen.folder) as folder:
        runs = [seconds_of(Path(folder), chosen.gigabytes) for _ in range(chosen.repeats)]
    save, wait, sealed = (min(column) for column in zip(*runs, strict=True))
    added = sealed / (save + wait) - 1
    print(
        f"checkpoint {chosen.gigabytes:g} GB, {len(os.sched_getaffinity(0))} cores: "
        f"save {save:.2f} s, to the disk {wait:.2f} s more, sealed {sealed:.2f} s: "
        f"{added:+.0%} over a save that reaches the disk, {sealed / save - 1:+.0%} over one that "
        "need not"
    )


if __name__ == "__main__":
    main()
