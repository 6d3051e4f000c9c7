"""Versions of installed packages, from their metadata and files: none of them is imported."""

import re
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

NCCL_PACKAGES = ("nvidia-nccl-cu13", "nvidia-nccl-cu12")


@dataclass(frozen=True)
class TorchBuild:
    """The installed torch; `cuda` is the CUDA that it was built for, as (13, 0), None for a CPU build."""

    version: str
    cuda: tuple[int, int] | None


def installed_version(name: str) -> str | None:
    """Return the version of an installed package, or None."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def torch_build() -> TorchBuild | None:
    """Return the installed torch's version and CUDA from its files, or None where there is no torch."""
    try:
        distribution = metadata.distribution("torch")
    except metadata.PackageNotFoundError:
        return None
    version_file = Path(str(distribution.locate_file("torch/version.py")))
    return parse_torch_version(
        version_file.read_text(encoding="utf-8") if version_file.exists() else "",
        distribution.version,
    )


def parse_torch_version(text: str, version: str) -> TorchBuild:
    """Read torch/version.py; without it, the local part of the version tells: 2.11.0+cu130."""
    written = re.search(r"^cuda\b[^=\n]*=\s*['\"]([0-9]+)\.([0-9]+)", text, re.MULTILINE)
    local = re.search(r"\+cu([0-9]+)([0-9])$", version)
    match = written or (None if text else local)
    full = re.search(r"^__version__\s*=\s*['\"]([^'\"]+)", text, re.MULTILINE)
    return TorchBuild(
        full[1] if full else version, (int(match[1]), int(match[2])) if match else None
    )


def nccl() -> str | None:
    """Return NCCL's version and the package that it comes in, None where torch brings its own or uses none."""
    return next(
        (f"{version} ({name})" for name in NCCL_PACKAGES if (version := installed_version(name))),
        None,
    )
