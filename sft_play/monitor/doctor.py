"""`make doctor`: this host against what training needs, and the commands that fix it.

Imports none of the packages that it checks and reads no os.environ.
"""

import os
import re
import shutil
import socket
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from sft_play.config.backends import BNB, UNSLOTH
from sft_play.monitor.gpus import gib, link_lines, links, nvidia_driver
from sft_play.monitor.packages import (
    GPU_REQUIREMENTS,
    INSTALL,
    Finding,
    dotted,
    gpu_kernel_findings,
    nccl,
    optional_findings,
    package_findings,
    python_finding,
    torch_build,
    torch_findings,
)
from sft_play.plan.devices import Gpu, nvml_gpus
from sft_play.plan.warnings import slow_switches

NVIDIA_VENDOR = "0x10de"  # on the PCI bus
# two checkpoints in full mode of 1 B weights: 4 bytes a weight, 8 for Adam's two moments
LOW_DISK_BYTES = 2 * 12 * 10**9
SMALL_GPU_BYTES = 14.5 * 2**30  # cards sold as 16 GB have 14.56 GiB (T4) and more
SHOWN_VARIABLES = re.compile(
    r"CUDA_VISIBLE_DEVICES|CUDA_DEVICE_ORDER|CUDA_LAUNCH_BLOCKING|UNSLOTH_\w+|NCCL_\w+|GLOO_\w+|MASTER_(ADDR|PORT)|OMP_NUM_THREADS"
    r"|HF_HUB_OFFLINE"
)
SECRET_VARIABLES = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "WANDB_API_KEY")


def examine(
    project_root: Path, output_dir: Path, environ: Mapping[str, str], num_gpus: int | None = None
) -> list[Finding]:
    """Return every finding about this host.

    `output_dir`, where the runs go, need not exist yet. `num_gpus` is how many are asked for, None
    for all that are here.
    """
    gpus, reason = nvml_gpus(environ)
    build = torch_build()
    without_nccl = "not used: torch on a CPU talks through gloo"
    if build and build.cuda:
        without_nccl = "comes with torch"
    return [
        python_finding(sys.version_info[:2]),
        *package_findings(project_root / BNB.requirements),
        *optional_findings(project_root / UNSLOTH.requirements, bool(gpus)),
        *gpu_kernel_findings(project_root / GPU_REQUIREMENTS, bool(gpus)),
        *torch_findings(build, gpus, nvidia_driver()),
        gpu_finding(gpus, reason),
        *several_gpus_findings(gpus, num_gpus),
        *link_findings(gpus),
        Finding("ok", "nccl", nccl() or without_nccl),
        disk_finding(output_dir),
        *compiler_findings(environ),
        *network_findings(environ),
        environment_finding(environ),
        *switch_findings(environ),
    ]


def gpu_finding(
    gpus: tuple[Gpu, ...], reason: str | None, pci: Path = Path("/sys/bus/pci/devices")
) -> Finding:
    """Report the GPUs. None is fine, unless the PCI bus lists NVIDIA hardware: a warning."""
    if gpus:
        driver = nvidia_driver()
        found = f"{len(gpus)} x {', '.join(dict.fromkeys(gpu.name for gpu in gpus))}"
        if driver:
            found += f", driver {driver.version}, CUDA {dotted(driver.cuda)}"
        return Finding("ok", "gpu", found)
    vendors = [path.read_text().strip() for path in pci.glob("*/vendor")]
    if NVIDIA_VENDOR in vendors:
        found = f"NVIDIA hardware is here but cannot be used: {reason}"
        return Finding("warn", "gpu", found, "follow the advice, then type `make gpu-info`")
    return Finding("ok", "gpu", f"none, training runs on the CPU; {reason}")


def several_gpus_findings(gpus: tuple[Gpu, ...], num_gpus: int | None) -> Iterator[Finding]:
    """Report if training on several GPUs lacks some, or some have under 16 GB."""
    if num_gpus is not None and num_gpus > max(1, len(gpus)):
        fix = f"NUM_GPUS={max(1, len(gpus))}, or look for the others with `make gpu-info`"
        yield Finding("warn", "several GPUs", f"NUM_GPUS={num_gpus}, {len(gpus)} here", fix)
    small = [gpu for gpu in gpus[:num_gpus] if gpu.total_bytes < SMALL_GPU_BYTES]
    if len(gpus[:num_gpus]) > 1 and small:
        sizes = ", ".join(f"cuda:{gpu.index} has {gib(gpu.total_bytes)} GiB" for gpu in small)
        fix = "`make plan` shows what fits: TUNING_MODE=qlora, or ZeRO by `make train-deepspeed`"
        yield Finding("warn", "several GPUs", f"{sizes}; models of 7B need 16 GB on each", fix)


def link_findings(gpus: tuple[Gpu, ...]) -> list[Finding]:
    """Report how several GPUs are connected; over PCIe alone, sharded training is slow."""
    found = links(gpus)
    fix = ""
    if not all(link.is_nvlink for link in found):
        fix = (
            "adapters and models that fit on one GPU: `make train-distributed` (DDP) rather than "
            "ZeRO-3"
        )
    return [Finding("warn" if fix else "ok", "links", line, fix) for line in link_lines(found)]


def disk_finding(output_dir: Path) -> Finding:
    """Report the free space where the runs go."""
    folder = output_dir.absolute()
    while not folder.exists():
        folder = folder.parent
    if not os.access(folder, os.W_OK):
        fix = f"chmod u+w {folder}, or TRAIN_OUTPUT_DIR=<a folder of yours>"
        return Finding("missing", "disk", f"{folder} cannot be written", fix)
    free_bytes = shutil.disk_usage(folder).free
    found = f"{gib(free_bytes)} GiB free in {folder}"
    if free_bytes >= LOW_DISK_BYTES:
        return Finding("ok", "disk", found)
    fix = (
        "delete old runs (`make runs` lists them), or TRAIN_OUTPUT_DIR=<a folder on a larger disk>"
    )
    return Finding("warn", "disk", found, fix)


def compiler_findings(
    environ: Mapping[str, str], python: str = sys.executable
) -> Iterator[Finding]:
    """Report g++ and ninja.

    DeepSpeed compiles an operator when it is first used, with the programs next to Python or on
    PATH.
    """
    search = os.pathsep.join([os.path.dirname(python), environ.get("PATH", os.defpath)])
    for program, fix in {"g++": "sudo apt-get install g++", "ninja": INSTALL}.items():
        path = shutil.which(program, path=search)
        if path:
            yield Finding("ok", program, path)
        else:
            found = "not on PATH; `make train-deepspeed` compiles with it"
            yield Finding("warn", program, found, fix)


def network_findings(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Report how several machines meet, if it is set: the interfaces and the master's name."""
    interfaces = [name for _, name in socket.if_nameindex()]
    for variable in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        value = environ.get(variable)
        if not value:
            continue
        if interfaces_of(value, interfaces):
            yield Finding("ok", variable, value)
        else:
            fix = f"export {variable}=<one of {', '.join(interfaces)}>"
            yield Finding("missing", variable, f"{value} names no interface here", fix)
    if address := environ.get("MASTER_ADDR"):
        try:
            socket.getaddrinfo(address, None)
            yield Finding("ok", "MASTER_ADDR", address)
        except (OSError, UnicodeError):  # UnicodeError: no host name at all
            fix = "MASTER_ADDR=<the first machine's name or IP address>"
            yield Finding("missing", "MASTER_ADDR", f"{address} does not resolve", fix)


def interfaces_of(value: str, interfaces: list[str]) -> list[str]:
    """Return the interfaces that NCCL_SOCKET_IFNAME selects: prefixes, `=` exact names, `^` others.

    Source: NCCL's documentation of NCCL_SOCKET_IFNAME.

    >>> interfaces_of("^docker,lo", ["lo", "eth0", "docker0"])
    ['eth0']
    """
    is_excluding = value.startswith("^")
    is_exact = value.lstrip("^").startswith("=")
    names = tuple(name for name in value.lstrip("^=").split(",") if name)
    if is_exact:
        named = {face for face in interfaces if face in names}
    else:
        named = {face for face in interfaces if face.startswith(names)}
    return [face for face in interfaces if (face in named) != is_excluding]


def environment_finding(environ: Mapping[str, str]) -> Finding:
    """Report the variables that steer training; of a secret, only that it is set."""
    names = filter(SHOWN_VARIABLES.fullmatch, sorted(environ))
    shown = [f"{name}={environ[name]}" for name in names]
    shown += [f"{name} is set" for name in SECRET_VARIABLES if environ.get(name)]
    found = ", ".join(shown) or "no variable of CUDA, NCCL or a hub is set"
    return Finding("ok", "environment", found)


def switch_findings(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Report variables that slow training, and one that only this program reads.

    `make plan` warns of those that a run does not read: that depends on its settings.
    """
    for sentence in slow_switches(environ):
        fix = f"unset {sentence.partition('=')[0]}"
        yield Finding("warn", "environment", sentence, fix)
    if environ.get("NCCL_TIMEOUT"):
        found = f"NCCL_TIMEOUT={environ['NCCL_TIMEOUT']}: no library reads it, here it sets "
        yield Finding("ok", "environment", found + "train.ddp_timeout")
