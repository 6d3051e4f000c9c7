"""What computes here: the GPUs that NVML lists and CUDA_VISIBLE_DEVICES lets through, the CPU's cores, the RAM that is left.

Imports no torch and reads no os.environ: the caller passes the environment in. pynvml and psutil load where they are used.
"""

import difflib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from sft_play.errors import ConfigError, EnvironmentFault
from sft_play.plan.cards import CARDS

GIB = 2**30
BF16_CAPABILITY = (8, 0)  # Ampere, the first with bfloat16 tensor cores


@dataclass(frozen=True)
class Gpu:
    """One GPU as a CUDA program sees it: `index` is torch's cuda:index, not the number that nvidia-smi shows."""

    index: int
    name: str
    total_bytes: int  # without what the driver keeps for itself, as torch's total_memory
    free_bytes: int
    capability: tuple[int, int]
    uuid: str = ""

    @property
    def supports_bf16(self) -> bool:
        return self.capability >= BF16_CAPABILITY


@dataclass(frozen=True)
class Hardware:
    """What one host trains with. `gpus` is empty where kind is cpu."""

    kind: Literal["cuda", "cpu"]
    gpus: tuple[Gpu, ...]
    cpu_count: int  # cores that this process may run on
    ram_available_bytes: int

    @property
    def count(self) -> int:
        """Number of GPUs."""
        return len(self.gpus)

    @property
    def supports_bf16(self) -> bool:
        """Whether every GPU computes in bfloat16 natively; False on a CPU."""
        return self.kind == "cuda" and all(gpu.supports_bf16 for gpu in self.gpus)


@dataclass(frozen=True)
class HostMemory:
    """RAM that this process can use; under a container's limit where that is smaller than the machine."""

    total_bytes: int
    available_bytes: int


class NvmlUnavailable(EnvironmentFault):
    """NVML cannot be asked; the text says why and what to do."""


def detect(device: Literal["auto", "cpu", "cuda"], environ: Mapping[str, str]) -> Hardware:
    """Return what this host trains with; auto is its GPUs where it has any, else its CPU.

    GPUs are numbered as NVML orders them, by PCI address. CUDA does the same under CUDA_DEVICE_ORDER=PCI_BUS_ID; its default,
    FASTEST_FIRST, differs only on a host whose GPUs are of several models.

    Raises: EnvironmentFault when device is cuda and no GPU can be used.
    """
    gpus, reason = ((), None) if device == "cpu" else nvml_gpus(environ)
    if device == "cuda" and not gpus:
        raise EnvironmentFault(
            f"DEVICE=cuda finds no GPU: {reason}; `make doctor` checks the rest, DEVICE=cpu trains without a GPU"
        )
    return Hardware("cuda" if gpus else "cpu", gpus, cpu_count(), host_memory().available_bytes)


def parse(words: str) -> Hardware:
    """Return the hardware that `2xH200`, `8xA100-80` or `2x24GiB` names; its GPUs are empty, its CPU and RAM are this host's.

    A size in GiB stands for a GPU of that much usable memory, capability 8.0.

    Raises: ConfigError for other words, with the nearest name.
    """
    match = re.fullmatch(r"\s*([0-9]{1,4})\s*[xX]\s*(\S.*?)\s*", words)
    count, word = (int(match[1]), match[2]) if match else (1, words.strip())
    size = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)GiB", word, re.IGNORECASE)
    if size and float(size[1]) > 0:
        name, total_gib, capability = f"GPU of {size[1]} GiB", float(size[1]), BF16_CAPABILITY
    elif _key(word) in CARDS:
        card = CARDS[_key(word)]
        name, total_gib, capability = card.name, card.gib, card.capability
    else:
        raise ConfigError(f"GPUS={words}: no GPU of that name; {_nearest(max(count, 1), word)}")
    if not match or count < 1:
        raise ConfigError(f"GPUS={words}: write how many of which GPU, such as GPUS=2x{word}")
    total_bytes = int(total_gib * GIB)
    gpus = tuple(Gpu(index, name, total_bytes, total_bytes, capability) for index in range(count))
    return Hardware("cuda", gpus, cpu_count(), host_memory().available_bytes)


def _key(word: str) -> str:
    """`RTX 4090` and `4090` are one card; `RTX 6000 Ada` is 6000-ADA."""
    return re.sub(
        r"^(?:NVIDIA|GEFORCE|TESLA|RTX|-)+", "", re.sub(r"[\s_]+", "-", word.upper())
    ).removesuffix("GB")


def _nearest(count: int, word: str) -> str:
    size = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)(?:G|GB)", word, re.IGNORECASE)
    if size and float(size[1]) > 0:
        return f"did you mean {count}x{size[1]}GiB?"
    near = [
        name for name in CARDS if name.startswith(f"{_key(word)}-")
    ] or difflib.get_close_matches(_key(word), CARDS, n=1)
    if near:
        return f"did you mean {' or '.join(f'{count}x{name}' for name in near)}?"
    return f"known are {', '.join(CARDS)}; any other goes by its memory, such as {count}x24GiB"


def nvml_gpus(environ: Mapping[str, str]) -> tuple[tuple[Gpu, ...], str | None]:
    """Return the GPUs that a CUDA program started in this environment sees; where there are none, also why and what to do.

    A card in MIG mode counts as one whole GPU unless CUDA_VISIBLE_DEVICES names its instances.
    """
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    try:
        with nvml_session() as nvml:
            cards = [
                nvml.nvmlDeviceGetHandleByIndex(number)
                for number in range(nvml.nvmlDeviceGetCount())
            ]
            gpus = tuple(
                _gpu(nvml, index, handle)
                for index, handle in enumerate(_visible_handles(nvml, cards, visible))
            )
    except NvmlUnavailable as error:
        return (), str(error)
    if gpus:
        return gpus, None
    if not cards:
        return (
            (),
            "the NVIDIA driver runs but lists no GPU; see `nvidia-smi`, and give a container its GPUs with --gpus all",
        )
    return (
        (),
        f"CUDA_VISIBLE_DEVICES={visible} hides every GPU of this host ({len(cards)}); unset it, or name one: CUDA_VISIBLE_DEVICES=0",
    )


@contextmanager
def nvml_session() -> Iterator[ModuleType]:
    """Yield pynvml, initialised. Raises NvmlUnavailable, also for NVML's errors inside the block."""
    try:
        import pynvml
    except ImportError:
        raise NvmlUnavailable(
            "the Python package nvidia-ml-py is not installed; run `make install`"
        ) from None
    try:
        # never shut down: without persistence mode the driver would let go of the GPUs and the next question wake them again
        pynvml.nvmlInit()
        yield pynvml
    except pynvml.NVMLError as error:
        raise NvmlUnavailable(_cure(pynvml, error)) from None


def _cure(nvml: ModuleType, error: Exception) -> str:
    cures = {
        nvml.NVML_ERROR_LIBRARY_NOT_FOUND: "no NVIDIA driver here (libnvidia-ml.so.1 not found); install the driver, or start the container with --gpus all",
        nvml.NVML_ERROR_DRIVER_NOT_LOADED: "the NVIDIA driver is installed but not loaded; try `sudo modprobe nvidia`, or reboot",
        nvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: "the NVIDIA driver was updated while the old one runs; reboot",
        nvml.NVML_ERROR_NO_PERMISSION: "no permission to open the NVIDIA driver; see `ls -l /dev/nvidia*`",
    }
    return cures.get(error.value, f"the NVIDIA driver answers '{error}'; see `nvidia-smi`")


def _visible_handles(nvml: ModuleType, cards: Sequence[Any], visible: str | None) -> list[Any]:
    """Return NVML's handles of what CUDA shows: whole cards, or the MIG instances that CUDA_VISIBLE_DEVICES names."""
    if visible is not None and visible.startswith("MIG-"):
        return [
            nvml.nvmlDeviceGetHandleByUUID(uuid)
            for uuid in visible.split(",")
            if uuid.startswith("MIG-")
        ]
    uuids = [nvml.nvmlDeviceGetUUID(card) for card in cards]
    return [cards[number] for number in visible_numbers(visible, uuids)]


def visible_numbers(visible: str | None, uuids: Sequence[str]) -> list[int]:
    """Return which of a host's GPUs CUDA shows, and in which order, for a value of CUDA_VISIBLE_DEVICES (None: not set).

    As CUDA reads it, and torch after it (torch.cuda._parse_visible_devices): numbers by strtoul, so that `1a` is 1, or UUIDs by a
    prefix that only one GPU has; the first entry that names no GPU ends the list, and an entry that comes twice empties it.

    >>> visible_numbers("1,0,7,2", ["GPU-a", "GPU-b", "GPU-c"])
    [1, 0]
    """
    if visible is None:
        return list(range(len(uuids)))
    numbers: list[int] = []
    for entry in visible.split(","):
        if visible.startswith("GPU-"):
            matching = [
                number
                for number, uuid in enumerate(uuids)
                if entry.startswith("GPU-") and uuid.startswith(entry.strip())
            ]
        else:
            digits = re.match(r"\s*\+?([0-9]+)", entry)
            matching = [int(digits[1])] if digits and int(digits[1]) < len(uuids) else []
        if len(matching) != 1:
            break
        if matching[0] in numbers:
            return []
        numbers += matching
    return numbers


def _gpu(nvml: ModuleType, index: int, handle: Any) -> Gpu:
    is_instance = nvml.nvmlDeviceGetUUID(handle).startswith("MIG-")
    card = nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle) if is_instance else handle
    total_bytes, free_bytes = _memory_bytes(nvml, handle)
    return Gpu(
        index=index,
        name=nvml.nvmlDeviceGetName(handle),
        total_bytes=total_bytes,
        free_bytes=free_bytes,
        capability=tuple(nvml.nvmlDeviceGetCudaComputeCapability(card)),
        uuid=nvml.nvmlDeviceGetUUID(handle),
    )


def _memory_bytes(nvml: ModuleType, handle: Any) -> tuple[int, int]:
    """Return (total, free). Version 2 of the answer names what the driver reserves, which CUDA counts neither as total nor as free."""
    try:
        memory = nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2)
        return memory.total - memory.reserved, memory.free
    except nvml.NVMLError_FunctionNotFound:  # a driver before 510 has version 1 only
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        return memory.total, memory.free
    except (
        nvml.NVMLError_NotSupported
    ):  # a GPU without memory of its own (GB10) computes in the host's
        host = host_memory()
        return host.total_bytes, host.available_bytes


def cpu_count() -> int:
    """Return the number of cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def host_memory(
    cgroups: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")
) -> HostMemory:
    """Return the RAM of this host, or of the container or job that limits this process (cgroup v1 and v2)."""
    import psutil

    memory = psutil.virtual_memory()
    total_bytes, available_bytes = memory.total, memory.available
    for limit_bytes, used_bytes in _cgroup_limits(cgroups, membership):
        total_bytes = min(total_bytes, limit_bytes)
        available_bytes = min(available_bytes, max(limit_bytes - used_bytes, 0))
    return HostMemory(total_bytes, available_bytes)


def _cgroup_limits(cgroups: Path, membership: Path) -> Iterator[tuple[int, int]]:
    """Yield (limit, used) in bytes of every memory cgroup around this process: its own and all above it."""
    lines = membership.read_text().splitlines() if membership.exists() else []
    for controllers, path in (line.split(":", 2)[1:] for line in lines):
        if controllers == "":  # v2
            root, names = cgroups, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            root, names = (
                cgroups / "memory",
                ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
            )
        else:
            continue
        own = root / path.lstrip("/")
        for folder in (
            own,
            *own.parents,
        ):  # inside a container `path` may be the host's: its folders then do not exist here
            if folder.is_relative_to(root) and (folder / names[0]).exists():
                yield from _limit(folder, *names)


def _limit(
    folder: Path, limit_name: str, used_name: str, cache_name: str
) -> Iterator[tuple[int, int]]:
    limit = (folder / limit_name).read_text().strip()
    if limit == "max":
        return
    stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    # file cache that nobody uses counts as used but goes first when memory runs short
    yield int(limit), int((folder / used_name).read_text()) - int(stat.get(cache_name, 0))
