"""The machine that a benchmark measures on: device, versions, peak speeds. Loads no torch.

python -m benchmarks.machine      exits with an error if there is no NVIDIA GPU
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
    "torch transformers peft accelerate trl unsloth liger-kernel bitsandbytes xformers flash-attn"
).split()


@dataclass(frozen=True)
class Machine:
    """The machine that a results file was measured on."""

    device: str
    python: str
    versions: dict[str, str | None]  # of PACKAGES; None if one is not installed
    peak_flops: float | None  # FLOP/s of the data sheet
    reached_flops: float | None  # FLOP/s of a large matrix multiplication

    @classmethod
    def here(cls, on_cpu: bool) -> Machine:
        """Return this machine. Exits if a GPU is needed and there is none."""
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
        """Return the file of results of a kind (speed, planner) on this machine."""
        card = key_of(self.device) or self.device.replace(" ", "-")
        return ROOT / "benchmarks" / "results" / f"{kind}-{card.lower()}.json"


def gpu_name() -> str:
    """Return the name of the first GPU, from nvidia-smi. Exits if there is none."""
    if shutil.which("nvidia-smi") is None:
        sys.exit(
            "this machine has no NVIDIA GPU; `python -m benchmarks.speed --toy` tries the "
            "benchmark on the CPU, `python -m benchmarks.speed --report FILE` shows results"
        )
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    return found.stdout.splitlines()[0].strip()


def repository_commit() -> str | None:
    """Return the commit that is measured. None without git."""
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
