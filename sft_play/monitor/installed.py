"""Versions of installed packages, from their metadata and files: imports none of them."""

import re
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

NCCL_PACKAGES = ("nvidia-nccl-cu13", "nvidia-nccl-cu12")


@dataclass(frozen=True)
class TorchBuild:
    """The installed torch."""

    version: str
    cuda: tuple[int, int] | None  # that it was built for, as (13, 0); None: a CPU build

    @property
    def kind(self) -> str:
        """What it was built for, in words."""
        return f"built for CUDA {self.cuda[0]}.{self.cuda[1]}" if self.cuda else "a CPU build"


def installed_version(name: str) -> str | None:
    """Return the version of an installed package, or None."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def torch_build() -> TorchBuild | None:
    """Return the build of the installed torch by its files, None where there is none."""
    try:
        distribution = metadata.distribution("torch")
    except metadata.PackageNotFoundError:
        return None
    file = Path(str(distribution.locate_file("torch/version.py")))
    text = file.read_text(encoding="utf-8") if file.exists() else ""
    return parse_torch_version(text, distribution.version)


def parse_torch_version(text: str, version: str) -> TorchBuild:
    """Return the build that torch/version.py describes.

    Where `text` is empty, the local part of the distribution's version names the CUDA:
    2.11.0+cu130.
    """
    if text:
        cuda = re.search(r"^cuda\b[^=\n]*=\s*['\"]([0-9]+)\.([0-9]+)", text, re.MULTILINE)
    else:
        cuda = re.search(r"\+cu([0-9]+)([0-9])$", version)
    full = re.search(r"^__version__\s*=\s*['\"]([^'\"]+)", text, re.MULTILINE)
    return TorchBuild(
        version=full[1] if full else version,
        cuda=(int(cuda[1]), int(cuda[2])) if cuda else None,
    )


def nccl() -> str | None:
    """Return NCCL's version and package; None where torch brings its own or uses none."""
    for name in NCCL_PACKAGES:
        if version := installed_version(name):
            return f"{version} ({name})"
    return None
