"""Findings about software: Python, the pinned packages and torch. Imports none of the packages."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from sft_play.config.backends import UNSLOTH
from sft_play.monitor.findings import Finding
from sft_play.monitor.gpus import Driver, dotted
from sft_play.monitor.installed import TorchBuild, installed_version
from sft_play.plan.devices import Gpu

PYTHONS = ((3, 11), (3, 12), (3, 13), (3, 14))  # as in tools/install
# GPU images bring 2.11, the CPU pin is 2.13: the code runs on all of them
TORCH_RANGE = ">=2.11,<2.14"
INSTALL = "make install"
GPU_REQUIREMENTS = "requirements-gpu.txt"
INSTALL_TORCH = (
    f"python -m pip install 'torch{TORCH_RANGE}' --index-url https://download.pytorch.org/whl/cu130"
)


class Requirement(NamedTuple):
    """One requirement of a requirements file."""

    line_number: int
    text: str


class Comparison(NamedTuple):
    """The installed packages against their pins."""

    differing: list[Finding]
    agreeing: int  # number of packages


def python_finding(version: tuple[int, int]) -> Finding:
    """Compare the interpreter with the versions that the pins are resolved for."""
    found = f"{dotted(version)} at {sys.executable}"
    if version in PYTHONS:
        return Finding("ok", "python", found)
    fix = "install Python 3.11 to 3.14, then make install PYTHON=python3.12"
    return Finding("warn" if version > PYTHONS[-1] else "missing", "python", found, fix)


def package_findings(requirements: Path) -> list[Finding]:
    """Compare the installed packages with the pins: one finding for all that agree, one for each
    that does not."""
    name = requirements.name
    if not requirements.exists():
        found = f"{name}: no such file in {requirements.parent}"
        return [Finding("missing", "packages", found, f"git checkout {name}")]
    differing, agreeing = _compare(requirements, INSTALL)
    return [Finding("ok", "packages", f"{agreeing} installed as {name} pins them"), *differing]


def optional_findings(requirements: Path, has_gpu: bool) -> list[Finding]:
    """Report the Unsloth extra.

    Without the package that the file names first it is not installed, which is fine. Installed in
    part, it is a warning.
    """
    if not requirements.exists():
        return []
    differing, agreeing = _compare(requirements, UNSLOTH.install_command)
    first = next(_read_requirements(requirements), Requirement(0, "")).text
    for finding in differing:
        if finding.level == "missing" and re.match(rf"{finding.subject}\b", first):
            hint = "of use on a GPU only"
            if has_gpu:
                hint = f"`{UNSLOTH.install_command}` adds it"
            return [Finding("ok", "unsloth", f"not installed; optional, {hint}")]
    return [
        Finding("ok", "unsloth", f"{agreeing} installed as {requirements.name} pins them"),
        *(Finding("warn", each.subject, each.found, each.fix) for each in differing),
    ]


def gpu_kernel_findings(requirements: Path, has_gpu: bool) -> list[Finding]:
    """Report the kernels that only models with linear attention or a state space need, on a GPU."""
    if not has_gpu or not requirements.exists():
        return []
    install = f"python -m tools.install add {requirements.name}"
    differing, agreeing = _compare(requirements, install)
    cost = "; without it models like Qwen3.5, Mamba 2 and their hybrids train many times slower"
    if not differing:
        return [Finding("ok", "kernels", f"{agreeing} installed as {requirements.name} pins them")]
    return [Finding("warn", each.subject, each.found + cost, each.fix) for each in differing]


def _compare(requirements: Path, install: str) -> Comparison:
    """Return how the installed packages agree with a requirements file; torch has its own check."""
    from packaging.requirements import InvalidRequirement
    from packaging.requirements import Requirement as Pin

    differing, agreeing = [], 0
    for number, text in _read_requirements(requirements):
        try:
            pin = Pin(text)
        except InvalidRequirement as error:
            found = f"line {number}, {text!r}: {str(error).splitlines()[0]}"
            fix = f"correct {requirements.name}:{number}"
            differing.append(Finding("warn", requirements.name, found, fix))
            continue
        if pin.name.lower() == "torch" or (pin.marker and not pin.marker.evaluate()):
            continue
        version = installed_version(pin.name)
        if version is None:
            found = f"not installed, the pin is {pin.specifier}"
            differing.append(Finding("missing", pin.name, found, install))
        elif not pin.specifier.contains(version, prereleases=True):
            found = f"{version}, the pin is {pin.specifier}"
            differing.append(Finding("warn", pin.name, found, install))
        else:
            agreeing += 1
    return Comparison(differing, agreeing)


def _read_requirements(requirements: Path) -> Iterator[Requirement]:
    """Yield requirements without comments, pip's options (-r, -c, --hash=) and continued lines."""
    start, whole = 1, ""
    for number, line in enumerate(requirements.read_text(encoding="utf-8").splitlines(), 1):
        start = start if whole else number
        whole += line.removesuffix("\\")
        if line.endswith("\\"):
            continue
        text = re.sub(r"(^|\s)#.*", "", whole)
        text = re.sub(r"\s--\S.*", "", text).strip()
        if text and not text.startswith("-"):
            yield Requirement(start, text)
        whole = ""


def torch_findings(
    build: TorchBuild | None, gpus: tuple[Gpu, ...], driver: Driver | None
) -> Iterator[Finding]:
    """Report torch: its version, whether it can use this host's GPUs, and whether the driver is new
    enough for it."""
    from packaging.specifiers import SpecifierSet

    install = INSTALL_TORCH if gpus else INSTALL
    if build is None:
        yield Finding("missing", "torch", "not installed", install)
        return
    found = f"{build.version}, {build.kind}"
    if not SpecifierSet(TORCH_RANGE).contains(build.version, prereleases=True):
        yield Finding("warn", "torch", f"{found}; tested are {TORCH_RANGE}", install)
    elif gpus and not build.cuda:
        found += f": it cannot use the {len(gpus)} GPU(s) of this host"
        yield Finding("warn", "torch", found, INSTALL_TORCH)
    else:
        yield Finding("ok", "torch", found)
    # a driver runs all minor versions of its CUDA major version
    if build.cuda and driver and driver.cuda[0] < build.cuda[0]:
        yield Finding(
            "warn",
            "driver",
            f"driver {driver.version} runs CUDA up to {dotted(driver.cuda)}, torch was built for "
            f"{dotted(build.cuda)}",
            "update the driver, or make install TORCH=cu126, a torch for CUDA 12",
        )
