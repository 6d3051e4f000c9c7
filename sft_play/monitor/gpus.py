"""What a person reads about GPUs and memory: `make gpu-info` and `make memory-check` as lines of text.

Asks NVML and psutil, never torch; loads and prints nothing at import.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from types import ModuleType
from typing import Any

from sft_play.plan.devices import GIB, Gpu, NvmlUnavailable, cpu_count, host_memory, nvml_gpus, nvml_session

UNSLOTH_CAPABILITY = (7, 0)  # the least that Unsloth's documentation asks for
PROCESSES_SHOWN = 5

# NVML_TOPOLOGY_*: where the PCIe paths of two GPUs meet, in the words of `nvidia-smi topo -m`
_PCIE_PATHS = {
    0: "on one board",
    10: "through one switch (PIX)",
    20: "through several switches (PXB)",
    30: "through a host bridge (PHB)",
    40: "across one CPU's host bridges (NODE)",
    50: "across CPU sockets (SYS)",
}


@dataclass(frozen=True)
class Driver:
    """The NVIDIA driver; `cuda` is the newest CUDA that it runs, as (13, 0)."""

    version: str
    cuda: tuple[int, int]


@dataclass(frozen=True)
class Link:
    """How two GPUs, named by their indices, reach each other: `NVLink`, or `PCIe through one switch (PIX)`."""

    first: int
    second: int
    path: str

    @property
    def is_nvlink(self) -> bool:
        return self.path == "NVLink"


def gpu_info_lines(environ: Mapping[str, str]) -> list[str]:
    """Return what this host trains with, one fact a line; the first is always `Number of GPUs: N`."""
    gpus, reason = nvml_gpus(environ)
    host = host_memory()
    return [
        f"Number of GPUs: {len(gpus)}",
        *([f"no GPU: {reason}"] if reason else []),
        *map(_gpu_line, gpus),
        *_order_lines(gpus, environ),
        *_driver_lines(),
        *link_lines(links(gpus)),
        f"CPU: {cpu_count()} cores, {_gib(host.available_bytes)} of {_gib(host.total_bytes)} GiB RAM available",
        *_backend_lines(gpus),
    ]


def memory_check_lines(environ: Mapping[str, str]) -> list[str]:
    """Return who holds how much memory: on each GPU, or, on a host without one, the RAM of the Python processes."""
    gpus, reason = nvml_gpus(environ)
    host = host_memory()
    ram = f"RAM: {_gib(host.total_bytes - host.available_bytes)} of {_gib(host.total_bytes)} GiB used"
    if not gpus:
        return [ram, *_python_lines(), f"no GPU: {reason}"]
    try:
        with nvml_session() as nvml:
            return [*(line for gpu in gpus for line in _usage_lines(nvml, gpu)), ram]
    except NvmlUnavailable as error:  # a GPU can fall off the bus between two questions
        return [ram, f"GPUs: {error}"]


def driver() -> Driver | None:
    """Return the NVIDIA driver that answers on this host, or None."""
    try:
        with nvml_session() as nvml:
            cuda = nvml.nvmlSystemGetCudaDriverVersion()  # 13000 is 13.0
            return Driver(nvml.nvmlSystemGetDriverVersion(), (cuda // 1000, cuda % 1000 // 10))
    except NvmlUnavailable:
        return None


def links(gpus: tuple[Gpu, ...]) -> tuple[Link, ...]:
    """Return how each pair of GPUs is connected; `unknown` where NVML does not say, as inside many virtual machines."""
    if len(gpus) < 2:
        return ()
    with nvml_session() as nvml:
        handles = {gpu.index: nvml.nvmlDeviceGetHandleByUUID(gpu.uuid) for gpu in gpus}
        return tuple(Link(a, b, _path(nvml, handles[a], handles[b])) for a, b in combinations(handles, 2))


def link_lines(found: tuple[Link, ...]) -> list[str]:
    """Return one line where all pairs are connected alike, else one line a pair."""
    paths = {link.path for link in found}
    if len(paths) == 1:
        return [f"links: {paths.pop()} between {'the two' if len(found) == 1 else 'all'} GPUs"]
    return [f"link cuda:{link.first} - cuda:{link.second}: {link.path}" for link in found]


def _path(nvml: ModuleType, first: Any, second: Any) -> str:
    status = _answer(nvml, "nvmlDeviceGetP2PStatus", first, second, nvml.NVML_P2P_CAPS_INDEX_NVLINK)
    if status == nvml.NVML_P2P_STATUS_OK:
        return "NVLink"
    level = _answer(nvml, "nvmlDeviceGetTopologyCommonAncestor", first, second)
    return f"PCIe {_PCIE_PATHS[level]}" if level in _PCIE_PATHS else "unknown"


def _answer(nvml: ModuleType, question: str, *arguments: Any) -> Any:
    """Return NVML's answer, or None where this card, driver or container does not give it."""
    try:
        return getattr(nvml, question)(*arguments)
    except nvml.NVMLError:
        return None


def _gpu_line(gpu: Gpu) -> str:
    memory = f"{_gib(gpu.free_bytes)} of {_gib(gpu.total_bytes)} GiB free"
    return f"cuda:{gpu.index} {gpu.name}: {memory}, capability {_dotted(gpu.capability)}, bf16 {'yes' if gpu.supports_bf16 else 'no'}"


def _order_lines(gpus: tuple[Gpu, ...], environ: Mapping[str, str]) -> Iterator[str]:
    if "CUDA_VISIBLE_DEVICES" in environ:
        yield f"CUDA_VISIBLE_DEVICES={environ['CUDA_VISIBLE_DEVICES']} is set: cuda:0 is the first GPU that it names"
    if len({gpu.name for gpu in gpus}) > 1 and environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        yield "GPUs of several models: CUDA counts the fastest first, this list goes by PCI address; set CUDA_DEVICE_ORDER=PCI_BUS_ID"


def _driver_lines() -> list[str]:
    found = driver()
    return [f"driver: {found.version}, runs CUDA up to {_dotted(found.cuda)}"] if found else []


def _backend_lines(gpus: tuple[Gpu, ...]) -> list[str]:
    on_cpu = "bnb backend on the CPU: lora, qlora, full in float32"
    if not gpus:
        return [on_cpu, "unsloth backend: not here, it needs an NVIDIA GPU"]
    on_gpu = f"bnb backend on the GPU: lora, qlora, full in {'bfloat16' if all(gpu.supports_bf16 for gpu in gpus) else 'float16'}"
    slowest = min(gpu.capability for gpu in gpus)
    if slowest < UNSLOTH_CAPABILITY:
        return [on_gpu, f"unsloth backend: not here, it needs capability {_dotted(UNSLOTH_CAPABILITY)} and finds {_dotted(slowest)}"]
    return [on_gpu, "unsloth backend on the GPU: lora, qlora, full; `make doctor` says whether it is installed"]


def _usage_lines(nvml: ModuleType, gpu: Gpu) -> Iterator[str]:
    handle = nvml.nvmlDeviceGetHandleByUUID(gpu.uuid)
    rates = _answer(nvml, "nvmlDeviceGetUtilizationRates", handle)
    busy = f"{rates.gpu} % busy" if rates else "utilisation not available"
    yield f"cuda:{gpu.index} {gpu.name}: {_gib(gpu.total_bytes - gpu.free_bytes)} of {_gib(gpu.total_bytes)} GiB used, {busy}"
    processes = {
        process.pid: process.usedGpuMemory
        for question in ("nvmlDeviceGetGraphicsRunningProcesses", "nvmlDeviceGetComputeRunningProcesses")
        for process in _answer(nvml, question, handle) or []
    }
    for pid, used_bytes in sorted(processes.items(), key=lambda item: -(item[1] or 0)):
        yield f"  pid {pid} {_process_name(pid)}: {f'{_gib(used_bytes)} GiB' if used_bytes is not None else 'memory not available'}"


def _process_name(pid: int) -> str:
    import psutil

    try:
        process = psutil.Process(pid)
        return _program(process.name(), process.cmdline())
    except psutil.NoSuchProcess:
        return "(of another container)"
    except psutil.AccessDenied:
        return "(of another user)"


def _python_lines() -> list[str]:
    """Return the Python processes with the largest resident memory."""
    import psutil

    found = [process.info for process in psutil.process_iter(["pid", "name", "cmdline", "memory_info"])]
    # a process that is another user's answers None
    pythons = [info for info in found if (info["name"] or "").startswith("python") and info["memory_info"]]
    pythons.sort(key=lambda info: -info["memory_info"].rss)
    return [f"  pid {info['pid']} {_program(info['name'], info['cmdline'] or [])}: {_gib(info['memory_info'].rss)} GiB" for info in pythons[:PROCESSES_SHOWN]]


def _program(name: str, command: list[str]) -> str:
    """Return `python train.py` or `python -m sft_play`: no further arguments, which may hold a secret."""
    words = iter(command[1:])
    for word in words:
        if word in ("-X", "-W"):
            next(words, None)
        elif word == "-m":
            return f"{name} -m {next(words, '')}"
        elif word == "-c":
            return f"{name} -c"
        elif not word.startswith("-"):
            return f"{name} {Path(word).name}" if name.startswith("python") else name
    return name


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / GIB:.1f}"
