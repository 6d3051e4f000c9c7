"""Detect a host's hardware: the GPUs that CUDA shows, the CPU's cores, the available RAM.

Imports no torch and reads no os.environ: the caller passes the environment. pynvml and psutil
load when they are used.
"""

import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, NamedTuple

from sft_play.errors import EnvironmentFault
from sft_play.runs.metrics import GpuSample

GIB = 2**30
BF16_CAPABILITY = (8, 0)  # Ampere, the first with bfloat16 tensor cores


@dataclass(frozen=True)
class Gpu:
    """One GPU as a CUDA program sees it."""

    index: int  # of torch's cuda:index, not the number that nvidia-smi shows
    name: str
    total_bytes: int  # without the driver's reserve, as torch's total_memory
    free_bytes: int
    capability: tuple[int, int]
    uuid: str = ""

    @property
    def supports_bf16(self) -> bool:
        return self.capability >= BF16_CAPABILITY


@dataclass(frozen=True)
class Hardware:
    """The hardware of one host."""

    kind: Literal["cuda", "cpu"]
    gpus: tuple[Gpu, ...]  # empty if kind is cpu
    cpu_count: int  # cores that this process may run on
    ram_available_bytes: int

    @property
    def count(self) -> int:
        """Number of GPUs."""
        return len(self.gpus)

    @cached_property
    def supports_bf16(self) -> bool:
        """Whether every GPU computes in bfloat16 natively; False on a CPU."""
        return self.kind == "cuda" and all(gpu.supports_bf16 for gpu in self.gpus)


@dataclass(frozen=True)
class HostMemory:
    """RAM that this process can use: the host's, or the limit of a container if that is less."""

    total_bytes: int
    available_bytes: int


class GpuMemory(NamedTuple):
    """The memory of one GPU."""

    total_bytes: int
    free_bytes: int


class VisibleGpus(NamedTuple):
    """The GPUs that a CUDA program sees."""

    gpus: tuple[Gpu, ...]
    reason: str | None  # if there are none: why, and what to do


class NvmlUnavailable(EnvironmentFault):
    """NVML is not available; the text says why and what to do."""


def detect(device: Literal["auto", "cpu", "cuda"], environ: Mapping[str, str]) -> Hardware:
    """Return this host's hardware; auto selects its GPUs if it has any, otherwise its CPU.

    GPUs are numbered as NVML orders them, by PCI address. CUDA does the same under
    CUDA_DEVICE_ORDER=PCI_BUS_ID; its default, FASTEST_FIRST, differs only on a host whose GPUs are
    of several models.

    Raises: EnvironmentFault when device is cuda and no GPU can be used.
    """
    gpus, reason = VisibleGpus((), None) if device == "cpu" else nvml_gpus(environ)
    if device == "cuda" and not gpus:
        raise EnvironmentFault(
            f"DEVICE=cuda finds no GPU: {reason}; `make doctor` checks the rest, "
            "DEVICE=cpu trains without a GPU"
        )
    return Hardware("cuda" if gpus else "cpu", gpus, cpu_count(), host_memory().available_bytes)


def nvml_gpus(environ: Mapping[str, str]) -> VisibleGpus:
    """Return the GPUs that a CUDA program started in this environment sees.

    A card in MIG mode counts as one GPU unless CUDA_VISIBLE_DEVICES names its instances.
    """
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    try:
        with nvml_session() as nvml:
            count = nvml.nvmlDeviceGetCount()
            cards = [nvml.nvmlDeviceGetHandleByIndex(number) for number in range(count)]
            handles = _visible_handles(nvml, cards, visible)
            gpus = tuple(_gpu(nvml, index, handle) for index, handle in enumerate(handles))
    except NvmlUnavailable as error:
        return VisibleGpus((), str(error))
    reason = None
    if not cards:
        reason = (
            "the NVIDIA driver runs but lists no GPU; see `nvidia-smi`, and give a container its "
            "GPUs with --gpus all"
        )
    elif not gpus:
        reason = (
            f"CUDA_VISIBLE_DEVICES={visible} hides every GPU of this host ({len(cards)}); "
            "unset it, or name one: CUDA_VISIBLE_DEVICES=0"
        )
    return VisibleGpus(gpus, reason)


@contextmanager
def nvml_session() -> Iterator[ModuleType]:
    """Yield pynvml, initialized. Raises NvmlUnavailable, also for NVML errors inside the block."""
    try:
        import pynvml
    except ImportError:
        raise NvmlUnavailable(
            "the Python package nvidia-ml-py is not installed; run `make install`"
        ) from None
    try:
        # never shut down: without persistence mode the driver would then release the GPUs, and
        # the next query would have to initialize them again
        pynvml.nvmlInit()
        yield pynvml
    except pynvml.NVMLError as error:
        raise NvmlUnavailable(_cure(pynvml, error)) from None


def nvml_answer(nvml: ModuleType, question: str, *arguments: Any) -> Any:
    """Return NVML's answer, or None if this card, driver or container does not support it."""
    try:
        return getattr(nvml, question)(*arguments)
    except nvml.NVMLError:
        return None


def sample_gpus(uuid_of_rank: Mapping[int, str]) -> list[GpuSample]:
    """Return the current load of each rank's GPU.

    Raises: NvmlUnavailable.
    """
    samples = []
    with nvml_session() as nvml:
        for rank, uuid in uuid_of_rank.items():
            handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
            rates = nvml_answer(nvml, "nvmlDeviceGetUtilizationRates", handle)
            total_bytes, free_bytes = _gpu_memory(nvml, handle)
            milliwatts = nvml_answer(nvml, "nvmlDeviceGetPowerUsage", handle)
            celsius = nvml_answer(
                nvml, "nvmlDeviceGetTemperature", handle, nvml.NVML_TEMPERATURE_GPU
            )
            sample = GpuSample(
                rank=rank,
                busy_percent=rates and rates.gpu,
                used_gib=round((total_bytes - free_bytes) / GIB, 2),
                watts=None if milliwatts is None else round(milliwatts / 1000),
                celsius=celsius,
            )
            samples.append(sample)
    return samples


def _cure(nvml: ModuleType, error: Exception) -> str:
    cures = {
        nvml.NVML_ERROR_LIBRARY_NOT_FOUND: "no NVIDIA driver here (libnvidia-ml.so.1 not found); "
        "install the driver, or start the container with --gpus all",
        nvml.NVML_ERROR_DRIVER_NOT_LOADED: "the NVIDIA driver is installed but not loaded; "
        "try `sudo modprobe nvidia`, or reboot",
        nvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: "the NVIDIA driver was updated while the old one "
        "runs; reboot",
        nvml.NVML_ERROR_NO_PERMISSION: "no permission to open the NVIDIA driver; "
        "see `ls -l /dev/nvidia*`",
    }
    return cures.get(error.value, f"the NVIDIA driver answers '{error}'; see `nvidia-smi`")


def _visible_handles(nvml: ModuleType, cards: Sequence[Any], visible: str | None) -> list[Any]:
    """Return NVML's handles of what CUDA shows: cards, or MIG instances that `visible` names."""
    if visible is not None and visible.startswith("MIG-"):
        instances = [uuid for uuid in visible.split(",") if uuid.startswith("MIG-")]
        return [nvml.nvmlDeviceGetHandleByUUID(uuid) for uuid in instances]
    uuids = [nvml.nvmlDeviceGetUUID(card) for card in cards]
    return [cards[number] for number in visible_numbers(visible, uuids)]


def visible_numbers(visible: str | None, uuids: Sequence[str]) -> list[int]:
    """Return the indices of the host's GPUs that CUDA shows, in CUDA's order.

    `visible` is the value of CUDA_VISIBLE_DEVICES, None if it is not set. CUDA, and torch like
    it (torch.cuda._parse_visible_devices), parses numbers as strtoul does, so that `1a` is 1, and
    UUIDs by a prefix that only one GPU has. The first entry that names no GPU ends the list. A
    duplicate entry empties it.

    >>> visible_numbers("1,0,7,2", ["GPU-a", "GPU-b", "GPU-c"])
    [1, 0]
    """
    if visible is None:
        return list(range(len(uuids)))
    by_uuid = visible.startswith("GPU-")
    numbers: list[int] = []
    for entry in visible.split(","):
        if by_uuid:
            number = _find_uuid(entry, uuids)
        else:
            digits = re.match(r"\s*\+?([0-9]+)", entry)
            number = int(digits[1]) if digits else None
        if number is None or number >= len(uuids):
            break
        if number in numbers:
            return []
        numbers.append(number)
    return numbers


def _find_uuid(entry: str, uuids: Sequence[str]) -> int | None:
    """Return the index of the only GPU whose UUID starts with `entry`, else None."""
    if not entry.startswith("GPU-"):
        return None
    matching = [number for number, uuid in enumerate(uuids) if uuid.startswith(entry.strip())]
    return matching[0] if len(matching) == 1 else None


def _gpu(nvml: ModuleType, index: int, handle: Any) -> Gpu:
    uuid = nvml.nvmlDeviceGetUUID(handle)
    card = handle
    if uuid.startswith("MIG-"):
        card = nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle)
    memory = _gpu_memory(nvml, handle)
    return Gpu(
        index=index,
        name=nvml.nvmlDeviceGetName(handle),
        total_bytes=memory.total_bytes,
        free_bytes=memory.free_bytes,
        capability=tuple(nvml.nvmlDeviceGetCudaComputeCapability(card)),
        uuid=uuid,
    )


def _gpu_memory(nvml: ModuleType, handle: Any) -> GpuMemory:
    """Return the memory of a GPU as CUDA counts it.

    Version 2 of the answer names what the driver reserves, which to CUDA is neither total nor free.
    """
    try:
        memory = nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2)
        return GpuMemory(memory.total - memory.reserved, memory.free)
    except nvml.NVMLError_FunctionNotFound:  # a driver before 510 has version 1 only
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        return GpuMemory(memory.total, memory.free)
    except nvml.NVMLError_NotSupported:  # a GPU without separate memory (GB10) uses the host's
        host = host_memory()
        return GpuMemory(host.total_bytes, host.available_bytes)


def cpu_count(
    cgroups: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")
) -> int:
    """Return the number of cores that this process may use.

    These are the cores that it may run on, or the quota of its container or job if that is less.
    """
    cores = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    for quota in _cpu_quotas(cgroups, membership):
        cores = min(cores, max(1, math.ceil(quota)))
    return cores


def host_memory(
    cgroups: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")
) -> HostMemory:
    """Return the RAM of this host, or of the container or job that limits this process.

    Reads cgroups of version 1 and 2.
    """
    import psutil

    memory = psutil.virtual_memory()
    total_bytes = memory.total
    available_bytes = memory.available
    for limit in _cgroup_limits(cgroups, membership):
        total_bytes = min(total_bytes, limit.total_bytes)
        available_bytes = min(available_bytes, limit.available_bytes)
    return HostMemory(total_bytes, available_bytes)


# Memory cgroups of version 1 and of version 2: the files with the limit and the usage, and the
# line of memory.stat about the cache
MEMORY_FILES = (
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ("memory.max", "memory.current", "inactive_file"),
)


def _cgroup_limits(cgroups: Path, membership: Path) -> Iterator[HostMemory]:
    """Yield the limits of this process's memory cgroup and of all its parents."""
    for folder in _cgroup_folders("memory", cgroups, membership):
        for limit, used, cache in MEMORY_FILES:
            text = (folder / limit).read_text().strip() if (folder / limit).exists() else "max"
            if text == "max":
                continue
            lines = (folder / "memory.stat").read_text().splitlines()
            stat = dict(line.split() for line in lines)
            # unused file cache counts as used, but is freed first if memory runs short
            used_bytes = int((folder / used).read_text()) - int(stat.get(cache, 0))
            yield HostMemory(int(text), max(int(text) - used_bytes, 0))


def _cpu_quotas(cgroups: Path, membership: Path) -> Iterator[float]:
    """Yield the cores that every cgroup of this process may use at the same time."""
    for folder in _cgroup_folders("cpu", cgroups, membership):
        words = ()
        if (folder / "cpu.max").exists():
            words = (folder / "cpu.max").read_text().split()
        elif (folder / "cpu.cfs_quota_us").exists():
            names = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
            words = [(folder / name).read_text().strip() for name in names]
        if words and words[0] not in ("max", "-1"):
            yield int(words[0]) / int(words[1])


def _cgroup_folders(controller: str, cgroups: Path, membership: Path) -> Iterator[Path]:
    """Yield the folder of this process's cgroup for a controller, and those of all its parents."""
    lines = membership.read_text().splitlines() if membership.exists() else []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":  # version 2, for all controllers
            root = cgroups
        elif controller in controllers.split(","):
            root = cgroups / controller
        else:
            continue
        # inside a container `path` may be the host's: its folders then do not exist here
        own = root / path.lstrip("/")
        for folder in (own, *own.parents):
            if folder.is_relative_to(root):
                yield folder
