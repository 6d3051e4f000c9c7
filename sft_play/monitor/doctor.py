"""What `make doctor` finds: this host and its packages against what training needs, each with the command that fixes it.

Imports none of the packages that it checks (versions come from their metadata) and reads no os.environ.
"""

import os
import re
import shutil
import socket
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from sft_play.errors import ExitClass
from sft_play.monitor.gpus import Driver, driver
from sft_play.monitor.installed import TorchBuild, installed_version, nccl, torch_build
from sft_play.monitor.links import link_lines, links
from sft_play.plan.devices import GIB, Gpu, nvml_gpus

Level = Literal["ok", "warn", "missing"]

PYTHONS = ((3, 11), (3, 12))
TORCH_RANGE = (
    ">=2.11,<2.14"  # GPU images bring 2.11, the CPU pin is 2.13: the code runs on all of them
)
INSTALL = "make -B install"  # -B: its stamp file is newer than a package that was changed by hand
TORCH_FIX = (
    "python -m pip install 'torch>=2.11,<2.14' --index-url https://download.pytorch.org/whl/cu130"
)
LOW_DISK_BYTES = (
    2 * 12 * 10**9
)  # two checkpoints in full mode of 1 B weights: 4 bytes a weight, 8 for Adam's two moments
SHOWN_VARIABLES = re.compile(
    r"CUDA_VISIBLE_DEVICES|CUDA_DEVICE_ORDER|NCCL_\w+|GLOO_\w+|MASTER_(ADDR|PORT)|OMP_NUM_THREADS|HF_HUB_OFFLINE"
)
SECRET_VARIABLES = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "WANDB_API_KEY")


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at; `fix` is what to type, empty where nothing needs fixing."""

    level: Level
    subject: str
    found: str
    fix: str = ""


def examine(project_root: Path, output_dir: Path, environ: Mapping[str, str]) -> list[Finding]:
    """Return every finding about this host; `output_dir` is where the runs go, it need not exist yet."""
    gpus, reason = nvml_gpus(environ)
    build = torch_build()
    return [
        python_finding(sys.version_info[:2]),
        *package_findings(project_root / "requirements.txt"),
        *optional_findings(project_root / "requirements-unsloth.txt", bool(gpus)),
        *torch_findings(build, gpus, driver()),
        gpu_finding(gpus, reason),
        *link_findings(gpus),
        nccl_finding(build),
        disk_finding(output_dir),
        *compiler_findings(environ),
        *network_findings(environ),
        environment_finding(environ),
    ]


def exit_class(findings: list[Finding]) -> ExitClass:
    """Return ENVIRONMENT when something is missing, else DONE; a warning does not fail."""
    return (
        ExitClass.ENVIRONMENT
        if any(finding.level == "missing" for finding in findings)
        else ExitClass.DONE
    )


def report_lines(findings: list[Finding]) -> list[str]:
    """Return the findings as aligned lines, each fix below its finding."""
    width = max((len(finding.subject) for finding in findings), default=0)
    lines = []
    for finding in findings:
        lines.append(f"{finding.level:<7}  {finding.subject:<{width}}  {finding.found}")
        if finding.fix:
            lines.append(f"{'':<7}  {'':<{width}}  fix: {finding.fix}")
    return lines


def python_finding(version: tuple[int, int]) -> Finding:
    """Compare the interpreter with the versions that the pins are resolved for."""
    level: Level = "ok" if version in PYTHONS else "warn" if version > PYTHONS[-1] else "missing"
    fix = (
        ""
        if level == "ok"
        else "install Python 3.11 or 3.12, then rm -r .venv && make install PYTHON=python3.12"
    )
    return Finding(level, "python", f"{version[0]}.{version[1]} at {sys.executable}", fix)


def package_findings(requirements: Path) -> list[Finding]:
    """Compare the installed packages with the pins: one finding for all that agree, one for each that does not."""
    if not requirements.exists():
        return [
            Finding(
                "missing",
                "packages",
                f"{requirements.name}: no such file in {requirements.parent}",
                f"git checkout {requirements.name}",
            )
        ]
    differing, agreeing = _compare(requirements, INSTALL)
    return [
        Finding("ok", "packages", f"{agreeing} installed as {requirements.name} pins them"),
        *differing,
    ]


def optional_findings(requirements: Path, has_gpu: bool) -> list[Finding]:
    """Report the Unsloth extra: without the package that its first line names it is not there, which is fine; half of it is not."""
    if not requirements.exists():
        return []
    differing, agreeing = _compare(requirements, "make install-unsloth")
    _, first_line = next(_requirement_lines(requirements), (0, ""))
    if any(
        finding.level == "missing" and re.match(rf"{finding.subject}\b", first_line)
        for finding in differing
    ):
        return [
            Finding(
                "ok",
                "unsloth",
                "not installed; optional, "
                + ("`make install-unsloth` adds it" if has_gpu else "of use on a GPU only"),
            )
        ]
    warnings = [
        Finding("warn", finding.subject, finding.found, finding.fix) for finding in differing
    ]
    return [
        Finding("ok", "unsloth", f"{agreeing} installed as {requirements.name} pins them"),
        *warnings,
    ]


def _compare(requirements: Path, install: str) -> tuple[list[Finding], int]:
    """Return a finding for each package that differs from its pin, and the number of those that agree; torch is judged apart."""
    from packaging.requirements import InvalidRequirement, Requirement

    differing, agreeing = [], 0
    for number, line in _requirement_lines(requirements):
        try:
            wanted = Requirement(line)
        except InvalidRequirement as error:
            reason = str(error).splitlines()[0]
            differing.append(
                Finding(
                    "warn",
                    requirements.name,
                    f"line {number}, {line!r}: {reason}",
                    f"correct {requirements.name}:{number}",
                )
            )
            continue
        if wanted.name.lower() == "torch" or (wanted.marker and not wanted.marker.evaluate()):
            continue
        version = installed_version(wanted.name)
        if version is None:
            differing.append(
                Finding(
                    "missing", wanted.name, f"not installed, the pin is {wanted.specifier}", install
                )
            )
        elif not wanted.specifier.contains(version, prereleases=True):
            differing.append(
                Finding("warn", wanted.name, f"{version}, the pin is {wanted.specifier}", install)
            )
        else:
            agreeing += 1
    return differing, agreeing


def _requirement_lines(requirements: Path) -> Iterator[tuple[int, str]]:
    """Yield (line number, requirement) without comments, pip's options (-r, -c, --hash=) and line continuations."""
    start, whole = 1, ""
    for number, line in enumerate(requirements.read_text(encoding="utf-8").splitlines(), 1):
        start = start if whole else number
        whole += line.removesuffix("\\")
        if line.endswith("\\"):
            continue
        text = re.sub(r"(^|\s)#.*", "", whole)
        text = re.sub(r"\s--\S.*", "", text).strip()
        if text and not text.startswith("-"):
            yield start, text
        whole = ""


def torch_findings(
    build: TorchBuild | None, gpus: tuple[Gpu, ...], nvidia: Driver | None
) -> Iterator[Finding]:
    """HeldOutEvaluation torch: its version, whether it can use the GPUs that are here, whether the driver is new enough for it."""
    from packaging.specifiers import SpecifierSet

    if build is None:
        yield Finding("missing", "torch", "not installed", TORCH_FIX if gpus else INSTALL)
        return
    kind = f"built for CUDA {_dotted(build.cuda)}" if build.cuda else "a CPU build"
    if not SpecifierSet(TORCH_RANGE).contains(build.version, prereleases=True):
        yield Finding(
            "warn",
            "torch",
            f"{build.version}, {kind}; tested are {TORCH_RANGE}",
            TORCH_FIX if gpus else INSTALL,
        )
    elif gpus and not build.cuda:
        yield Finding(
            "warn",
            "torch",
            f"{build.version}, {kind}: it cannot use the {len(gpus)} GPU(s) of this host",
            TORCH_FIX,
        )
    else:
        yield Finding("ok", "torch", f"{build.version}, {kind}")
    if (
        build.cuda and nvidia and nvidia.cuda[0] < build.cuda[0]
    ):  # any driver of a CUDA major version runs all its minor ones
        found = f"driver {nvidia.version} runs CUDA up to {_dotted(nvidia.cuda)}, torch was built for {_dotted(build.cuda)}"
        yield Finding(
            "warn",
            "driver",
            found,
            f"update the driver, or install a torch built for CUDA {nvidia.cuda[0]}",
        )


def gpu_finding(
    gpus: tuple[Gpu, ...], reason: str | None, pci: Path = Path("/sys/bus/pci/devices")
) -> Finding:
    """Report the GPUs; none is fine on a host without NVIDIA hardware, and a warning where the PCI bus lists some."""
    if gpus:
        nvidia = driver()
        names = ", ".join(dict.fromkeys(gpu.name for gpu in gpus))
        return Finding(
            "ok",
            "gpu",
            f"{len(gpus)} x {names}"
            + (f", driver {nvidia.version}, CUDA {_dotted(nvidia.cuda)}" if nvidia else ""),
        )
    vendors = [path.read_text().strip() for path in pci.glob("*/vendor")]
    if "0x10de" in vendors:  # NVIDIA's PCI vendor id
        return Finding(
            "warn",
            "gpu",
            f"NVIDIA hardware is here but cannot be used: {reason}",
            "do what the line says, then `make gpu-info`",
        )
    return Finding("ok", "gpu", f"none, training runs on the CPU; {reason}")


def link_findings(gpus: tuple[Gpu, ...]) -> Iterator[Finding]:
    """Report how several GPUs are connected; PCIe alone makes sharded training slow."""
    found = links(gpus)
    if not found:
        return
    slow = not all(link.is_nvlink for link in found)
    fix = (
        "adapters and models that fit on one GPU: `make train-distributed` (DDP) rather than ZeRO-3"
        if slow
        else ""
    )
    for line in link_lines(found):
        yield Finding("warn" if slow else "ok", "links", line, fix)


def nccl_finding(build: TorchBuild | None) -> Finding:
    """Report the library that GPUs talk through; a CPU build of torch uses gloo, which is part of it."""
    return Finding(
        "ok",
        "nccl",
        nccl()
        or (
            "comes with torch"
            if build and build.cuda
            else "not used: torch on a CPU talks through gloo"
        ),
    )


def disk_finding(output_dir: Path) -> Finding:
    """Report the free space where the runs go."""
    folder = output_dir.absolute()
    while not folder.exists():
        folder = folder.parent
    free_bytes = shutil.disk_usage(folder).free
    found = f"{free_bytes / GIB:.1f} GiB free in {folder}"
    fix = (
        "delete old runs (`make runs` lists them), or TRAIN_OUTPUT_DIR=<a folder on a larger disk>"
    )
    if not os.access(folder, os.W_OK):
        return Finding(
            "missing",
            "disk",
            f"{folder} cannot be written",
            f"chmod u+w {folder}, or TRAIN_OUTPUT_DIR=<a folder of yours>",
        )
    return (
        Finding("warn", "disk", found, fix)
        if free_bytes < LOW_DISK_BYTES
        else Finding("ok", "disk", found)
    )


def compiler_findings(environ: Mapping[str, str], python: str = sys.executable) -> list[Finding]:
    """Report g++ and ninja: DeepSpeed compiles an operator when it is first used, with the programs beside Python or on PATH."""
    search = os.pathsep.join([os.path.dirname(python), environ.get("PATH", os.defpath)])
    findings = []
    for program, fix in {"g++": "sudo apt-get install g++", "ninja": INSTALL}.items():
        path = shutil.which(program, path=search)
        if path:
            findings.append(Finding("ok", program, path))
        else:
            findings.append(
                Finding(
                    "warn", program, "not on PATH; `make train-deepspeed` compiles with it", fix
                )
            )
    return findings


def network_findings(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Report what several machines meet through, where it is set: the interfaces and the master's name."""
    interfaces = [name for _, name in socket.if_nameindex()]
    for variable in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        value = environ.get(variable)
        if not value:
            continue
        if interfaces_of(value, interfaces):
            yield Finding("ok", variable, value)
        else:
            yield Finding(
                "missing",
                variable,
                f"{value} names no interface here",
                f"export {variable}=<one of {', '.join(interfaces)}>",
            )
    if address := environ.get("MASTER_ADDR"):
        try:
            socket.getaddrinfo(address, None)
            yield Finding("ok", "MASTER_ADDR", address)
        except (OSError, UnicodeError):  # UnicodeError: no host name at all
            yield Finding(
                "missing",
                "MASTER_ADDR",
                f"{address} does not resolve",
                "MASTER_ADDR=<the first machine's name or IP address>",
            )


def interfaces_of(value: str, interfaces: list[str]) -> list[str]:
    """Return the interfaces that NCCL_SOCKET_IFNAME selects: prefixes, `=` exact names, `^` all others.

    Source: NCCL's documentation of NCCL_SOCKET_IFNAME.

    >>> interfaces_of("^docker,lo", ["lo", "eth0", "docker0"])
    ['eth0']
    """
    is_excluding, is_exact = value.startswith("^"), value.lstrip("^").startswith("=")
    names = [name for name in value.lstrip("^=").split(",") if name]
    selected = [
        face
        for face in interfaces
        if any(face == name if is_exact else face.startswith(name) for name in names)
    ]
    return [face for face in interfaces if (face in selected) != is_excluding]


def environment_finding(environ: Mapping[str, str]) -> Finding:
    """Report the variables that steer training; of a secret, only that it is set."""
    shown = [
        f"{name}={environ[name]}" for name in sorted(environ) if SHOWN_VARIABLES.fullmatch(name)
    ]
    shown += [f"{name} is set" for name in SECRET_VARIABLES if environ.get(name)]
    return Finding(
        "ok", "environment", ", ".join(shown) or "no variable of CUDA, NCCL or a hub is set"
    )


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"
