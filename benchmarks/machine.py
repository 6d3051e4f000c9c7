"""The machine that a benchmark measures on: device, versions, peak speeds. Loads no torch.

python -m benchmarks.machine      exits where no NVIDIA GPU is here, before anything is installed
"""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from sft_play.plan.cards import CARDS, MEASURED_FLOPS, key_of

ROOT = Path(__file__).resolve().parents[1]
GIB = 2**30
PACKAGES = (
    "torch",
    "transformers",
    "peft",
    "accelerate",
    "trl",
    "unsloth",
    "liger-kernel",
    "bitsandbytes",
    "xformers",
    "flash-attn",
)


@dataclass(frozen=True)
class Machine:
    """What the head of a results file says of the machine."""

    device: str
    python: str
    versions: dict[str, str | None]  # of PACKAGES, None where one is not installed
    peak_flops: float | None  # a second, by the data sheet
    reached_flops: float | None  # a second, by a matrix product that was timed

    @classmethod
    def here(cls, on_cpu: bool) -> Machine:
        """Return this machine. Exits where a GPU is asked for and there is none."""
        device = "CPU" if on_cpu else gpu_name()
        card = None if on_cpu else CARDS.get(key_of(device))
        return cls(
            device=device,
            python=platform.python_version(),
            versions={name: _version(name) for name in PACKAGES},
            peak_flops=card.flops if card else None,
            reached_flops=MEASURED_FLOPS.get(device),
        )

    def results_path(self, kind: str) -> Path:
        """Return where results of a kind (speed, planner) on this machine are kept."""
        card = key_of(self.device) or self.device.replace(" ", "-")
        return ROOT / "benchmarks" / "results" / f"{kind}-{card.lower()}.json"


def gpu_name() -> str:
    """Return what nvidia-smi calls the first GPU. Exits where there is none."""
    if shutil.which("nvidia-smi") is None:
        sys.exit(
            "no NVIDIA GPU is here to measure on; `python -m benchmarks.speed --toy` tries the "
            "benchmark on the CPU, `python -m benchmarks.speed --report FILE` shows results"
        )
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    return found.stdout.splitlines()[0].strip()


def repository_commit() -> str | None:
    """Return the commit of the tree that is measured, None where there is no git."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return found.stdout.strip() or None


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    gpu_name()
