"""Installed software by its metadata and files: what `make doctor` and `make gpu-info` say of it.

Imports none of the packages that it looks at.
"""

import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from sft_play.config.backends import UNSLOTH
from sft_play.errors import EnvironmentFault, ExitClass
from sft_play.plan.devices import Gpu
from sft_play.runs.tables import aligned

PYTHONS = [(3, minor) for minor in range(11, 15)]  # as in tools/install
# GPU images bring 2.11, the CPU pin is 2.13: the code runs on all of them
TORCH_RANGE = ">=2.11,<2.14"
# Of a range: what requirements.lock pins, and what make test-newest ran last
TESTED = {"transformers": ["5.17.0", "5.24.0"]}
INSTALL = "make install"
GPU_REQUIREMENTS = "requirements-gpu.txt"
INSTALL_TORCH = (
    f"python -m pip install 'torch{TORCH_RANGE}' --index-url https://download.pytorch.org/whl/cu130"
)
NCCL_PACKAGES = ("nvidia-nccl-cu13", "nvidia-nccl-cu12")
# of a name in train.report_to; mlflow-skinny contains only the client
PACKAGES_OF_TRACKER = {"mlflow": ("mlflow", "mlflow-skinny")}  # else the package of its name


@dataclass(frozen=True)
class Finding:
    """One thing that was checked; `fix` is what to type, empty if nothing needs fixing."""

    level: Literal["ok", "warn", "missing"]
    subject: str
    found: str
    fix: str = ""


@dataclass(frozen=True)
class Driver:
    """The NVIDIA driver."""

    version: str
    cuda: tuple[int, int]  # the newest that it runs, as (13, 0)


@dataclass(frozen=True)
class TorchBuild:
    """The installed torch."""

    version: str
    cuda: tuple[int, int] | None  # that it was built for, as (13, 0); None: a CPU build

    @property
    def kind(self) -> str:
        """What it was built for, in words."""
        return f"built for CUDA {dotted(self.cuda)}" if self.cuda else "a CPU build"


def exit_class(findings: Iterable[Finding]) -> ExitClass:
    """Return ENVIRONMENT when something is missing, else DONE; a warning does not fail."""
    is_missing = any(finding.level == "missing" for finding in findings)
    return ExitClass.ENVIRONMENT if is_missing else ExitClass.DONE


def report_lines(findings: list[Finding]) -> list[str]:
    """Return the findings as aligned lines, each fix below its finding."""
    rows = []
    for finding in findings:
        rows.append((finding.level, finding.subject, finding.found))
        if finding.fix:
            rows.append(("", "", f"fix: {finding.fix}"))
    return aligned(rows, left=range(3))


def dotted(version: tuple[int, int]) -> str:
    """Return (13, 0) as 13.0."""
    return f"{version[0]}.{version[1]}"


def installed_version(name: str) -> str | None:
    """Return the version of an installed package, or None."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def require_trackers(names: Iterable[str]) -> None:
    """Raise EnvironmentFault for the first tracker whose package is not installed."""
    for name in names:
        if not any(map(installed_version, PACKAGES_OF_TRACKER.get(name, (name,)))):
            raise EnvironmentFault(
                f"train.report_to={name}: its package is not installed; type "
                f"{sys.executable} -m pip install {name}, or TRAIN_REPORT_TO=tensorboard"
            )


def nccl() -> str | None:
    """Return NCCL's version and package; None if torch brings its own or uses none."""
    versions = ((installed_version(name), name) for name in NCCL_PACKAGES)
    return next((f"{version} ({name})" for version, name in versions if version), None)


def torch_build() -> TorchBuild | None:
    """Return the build of the installed torch by its files, None if there is none."""
    version = installed_version("torch")
    if version is None:
        return None
    file = Path(str(metadata.distribution("torch").locate_file("torch/version.py")))
    return parse_torch_version(file.read_text(encoding="utf-8") if file.exists() else "", version)


def parse_torch_version(text: str, version: str) -> TorchBuild:
    """Return the build that torch/version.py describes.

    If `text` is empty, the local part of the distribution's version names the CUDA:
    2.11.0+cu130.
    """
    if text:
        cuda = re.search(r"^cuda\b[^=\n]*=\s*['\"]([0-9]+)\.([0-9]+)", text, re.MULTILINE)
    else:
        cuda = re.search(r"\+cu([0-9]+)([0-9])$", version)
    full = re.search(r"^__version__\s*=\s*['\"]([^'\"]+)", text, re.MULTILINE)
    return TorchBuild(full[1] if full else version, (int(cuda[1]), int(cuda[2])) if cuda else None)


def python_finding(version: tuple[int, int]) -> Finding:
    """Compare the interpreter with the versions that the pins are resolved for."""
    found = f"{dotted(version)} at {sys.executable}"
    if version in PYTHONS:
        return Finding("ok", "python", found)
    fix = "install Python 3.11 to 3.14, then make install PYTHON=python3.12"
    return Finding("warn" if version > PYTHONS[-1] else "missing", "python", found, fix)


def package_findings(requirements: Path) -> list[Finding]:
    """Compare the installed packages with the pins."""
    if requirements.exists():
        return _compare(requirements, "packages", INSTALL)
    found = f"{requirements.name}: no such file in {requirements.parent}"
    return [Finding("missing", "packages", found, f"git checkout {requirements.name}")]


def optional_findings(requirements: Path, has_gpu: bool) -> list[Finding]:
    """Report the Unsloth extra.

    Without the package that the file names first it is not installed, which is fine. Installed in
    part, it is a warning.
    """
    if not requirements.exists():
        return []
    summary, *differing = _compare(requirements, "unsloth", UNSLOTH.install_command)
    _, first = next(_read_requirements(requirements), (0, ""))
    for finding in differing:
        if finding.level == "missing" and re.match(rf"{finding.subject}\b", first):
            hint = f"`{finding.fix}` adds it" if has_gpu else "useful only on a GPU"
            return [Finding("ok", "unsloth", f"not installed; optional, {hint}")]
    return [summary, *(replace(finding, level="warn") for finding in differing)]


def gpu_kernel_findings(requirements: Path, has_gpu: bool) -> list[Finding]:
    """Report the kernels that only models with linear attention or a state space need, on a GPU."""
    if not has_gpu or not requirements.exists():
        return []
    install = f"python -m tools.install add {requirements.name}"
    summary, *differing = _compare(requirements, "kernels", install)
    cost = "; without it models like Qwen3.5, Mamba 2 and their hybrids train many times slower"
    slower = [replace(each, level="warn", found=each.found + cost) for each in differing]
    return slower or [summary]


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
        yield Finding("warn", "torch", f"{found}, not tested: tested is {TORCH_RANGE}", install)
    elif gpus and not build.cuda:
        found += f": it cannot use the {len(gpus)} GPU(s) of this host"
        yield Finding("warn", "torch", found, install)
    else:
        yield Finding("ok", "torch", found)
    # a driver runs all minor versions of its CUDA major version
    if build.cuda and driver and driver.cuda[0] < build.cuda[0]:
        found = (
            f"driver {driver.version} runs CUDA up to {dotted(driver.cuda)}, torch was built for "
            f"{dotted(build.cuda)}"
        )
        fix = "update the driver, or make install TORCH=cu126, a torch for CUDA 12"
        yield Finding("warn", "driver", found, fix)


def _compare(requirements: Path, subject: str, install: str) -> list[Finding]:
    """Return one finding for all packages that agree with their pins, and one for each other.

    torch has a check of its own.
    """
    from packaging.requirements import InvalidRequirement, Requirement

    name = requirements.name
    differing, tested, chosen = [], 0, ""
    for number, text in _read_requirements(requirements):
        try:
            pin = Requirement(text)
        except InvalidRequirement as error:
            found = f"line {number}, {text!r}: {str(error).splitlines()[0]}"
            differing.append(Finding("warn", name, found, f"correct {name}:{number}"))
            continue
        if pin.name.lower() == "torch" or (pin.marker and not pin.marker.evaluate()):
            continue
        version = installed_version(pin.name)
        if version is None:
            found = f"not installed, the pin is {pin.specifier}"
            differing.append(Finding("missing", pin.name, found, install))
        elif reason := why_not_tested(pin, version):
            differing.append(Finding("warn", pin.name, f"{version}, {reason}", install))
        else:
            tested += 1
            if pin.name in TESTED:
                chosen = f"; {pin.name} {version}"
    summary = Finding("ok", subject, f"{tested} tested versions, as {name} pins them{chosen}")
    return [summary, *differing]


def why_not_tested(pin: Any, version: str) -> str | None:
    """Return whether a version is newer than the tested ones of a Requirement; None if tested.

    A range without a list of tested versions has been tested as a whole.
    """
    from packaging.version import Version

    tested = TESTED.get(pin.name) or [
        each.version for each in pin.specifier if each.operator == "=="
    ]
    if version in tested or (not tested and pin.specifier.contains(version, prereleases=True)):
        return None
    is_newer = tested and Version(version) > max(map(Version, tested))
    kind = "newer than tested" if is_newer else "not tested"
    return f"{kind}: tested is {' and '.join(tested) or pin.specifier}"


def _read_requirements(requirements: Path) -> Iterator[tuple[int, str]]:
    """Yield line numbers and requirements, without comments and pip's options (-r, -c, --hash=)."""
    start, text = 1, ""
    for number, line in enumerate(requirements.read_text(encoding="utf-8").splitlines(), 1):
        start = start if text else number
        text += line.removesuffix("\\")
        if line.endswith("\\"):
            continue
        text = re.sub(r"(^|\s)(#|--\S).*", "", text).strip()
        if text and not text.startswith("-"):
            yield start, text
        text = ""
