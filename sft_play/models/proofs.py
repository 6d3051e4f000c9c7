"""Proofs of fused kernels, recorded for later starts.

A record is a file in the cache, with the largest difference that each proof found. Its name is a
digest of everything that the proofs depend on, and its seal is a digest of its contents. A record
is not used if a byte has changed, if it belongs to something else, or if another user may have
written it. Anyone who can write as this user can also change the kernels.
"""

import logging
import os
import re
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sft_kernels.process import Process
from sft_kernels.training_setup import TrainingSetup
from sft_play.data.files import digest_files
from sft_play.plan import counting
from sft_play.plan.counting import fingerprint
from sft_play.runs.files import read_json, write_json

logger = logging.getLogger(__name__)

OTHERS_WRITE = 0o022  # mode bits of a file that others than its owner may write

CPUS = Path("/proc/cpuinfo")
DRIVER = Path("/proc/driver/nvidia/version")

# Environment variables that may select other kernels
VARIABLES = re.compile(
    "(ATEN|BNB|CUBLAS|CUDA|CUDNN|DISABLE_AUTOTUNE|DNNL|FLA|FLCE|LIGER|MKL|NVIDIA|ONEDNN|PYTORCH"
    "|TORCH|TRITON)(_|$)"
)


@dataclass
class ProofStore:
    """The records in a folder, for a process with these environment variables."""

    folder: Path
    environ: Mapping[str, str]
    path: Path | None = None  # the record that this start reads and writes

    def take(self, setup: TrainingSetup) -> None:
        """Add earlier proofs to a setup, if every rank has them. Every rank must call it.

        Ranks gather sharded weights together, so either all of them prove a kernel or none does.
        """
        self.path = self.folder / f"{fingerprint(**facts_of(setup, self.environ))}.json"
        record = self._read()
        names = setup.process.gather(record and sorted(record["proofs"]))
        if record is None or names.count(names[0]) < len(names):
            return
        setup.proved.update(record["proofs"])
        logger.info(
            "fast path: %d proofs of %s are taken, largest difference %.1e; only outputs "
            "are compared now (%s)",
            len(setup.proved),
            record["when"],
            max(setup.proved.values()),
            self.path,
        )

    def _read(self) -> dict[str, Any] | None:
        """Return the record; None if there is no usable one."""
        try:
            status = self.path.stat()
            record = read_json(self.path)
            if status.st_uid not in (0, os.getuid()) or status.st_mode & OTHERS_WRITE:
                raise ValueError("another user may have written it")
            if record.pop("seal") != fingerprint(**record) or record["of"] != self.path.stem:
                raise ValueError("it is not as it was written here")
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            logger.warning("%s: not taken (%s); the kernels are proved again", self.path, error)
            return None
        return record

    def write(self, setup: TrainingSetup) -> None:
        """Write the new proofs, if they are the same on every rank. Every rank must call it."""
        names = setup.process.gather(sorted(setup.newly_proved))
        is_same = names.count(names[0]) == len(names)
        if not (self.path and names[0] and is_same) or setup.process.local_rank:
            return
        when = time.strftime("%Y-%m-%d %H:%M %Z")
        proofs = {**setup.proved, **setup.newly_proved}
        record = {"of": self.path.stem, "when": when, "proofs": proofs}
        try:
            write_json(self.path, {**record, "seal": fingerprint(**record)})
            self.path.chmod(0o600)
        except OSError as error:
            logger.warning("%s: %s; the next start proves the kernels again", self.path, error)


def facts_of(setup: TrainingSetup, environ: Mapping[str, str]) -> dict[str, Any]:
    """Return what proofs depend on; this excludes the weights and their source."""
    process = setup.process
    # FSDP and parametrizations create subclasses of the class that contains the code
    classes = {each for module in setup.base.modules() for each in type(module).__mro__}
    modules = {sys.modules.get(each.__module__) for each in classes}
    files = {getattr(module, "__file__", None) for module in modules} - {None}
    return {
        "layers": setup.proof_inputs.signature,
        "config": repr({**setup.base.config.to_dict(), "_name_or_path": None}),
        "rows": setup.proof_inputs.documents.boundaries.tolist(),
        "settings": [*setup.settings, setup.attention, setup.zero_stage],
        "numbers": [str(process.compute_dtype), torch.get_float32_matmul_precision()],
        "devices": describe_devices(process),
        "variables": {name: environ[name] for name in environ if VARIABLES.match(name)},
        "code": [counting.counting_versions(), digest_files(map(Path, sorted(files)))],
    }


def describe_devices(process: Process) -> list[Any]:
    """Return the driver and the GPU's name and capability, or the name of the CPU."""
    path = DRIVER if process.is_gpu else CPUS
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    system = re.findall("(?:NVRM version|model name).*", text)[:1]
    if not process.is_gpu:
        return system
    gpu = torch.cuda.get_device_properties(process.device)
    return [*system, (gpu.name, gpu.major, gpu.minor)]
