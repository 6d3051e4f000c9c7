"""`make gpu-info`: this host's GPUs, and how they reach each other and their host.

Asks NVML, never torch.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from types import ModuleType
from typing import Any, NamedTuple

from sft_play.config.backends import UNSLOTH
from sft_play.monitor.packages import Driver, dotted, nccl, torch_build
from sft_play.plan.devices import (
    GIB,
    Gpu,
    NvmlUnavailable,
    cpu_count,
    host_memory,
    nvml_answer,
    nvml_gpus,
    nvml_session,
)
from sft_play.runs.files import Json
from sft_play.runs.tables import aligned

NF4_CAPABILITY = (6, 0)  # the least that bitsandbytes' documentation asks for


class LinkPath(NamedTuple):
    """The connection of two GPUs."""

    words: str  # `NVLink`, or `PCIe through one switch (PIX)`
    code: str  # as `nvidia-smi topo -m` writes it: NV18 for 18 NVLinks, PIX


UNKNOWN_PATH = LinkPath("unknown", "?")  # NVML does not say, as inside many virtual machines
# NVML_TOPOLOGY_*: where the PCIe paths of two GPUs meet, in the words of `nvidia-smi topo -m`
PCIE_PATHS = {
    0: LinkPath("PCIe on one board", "INT"),
    10: LinkPath("PCIe through one switch (PIX)", "PIX"),
    20: LinkPath("PCIe through several switches (PXB)", "PXB"),
    30: LinkPath("PCIe through a host bridge (PHB)", "PHB"),
    40: LinkPath("PCIe across one CPU's host bridges (NODE)", "NODE"),
    50: LinkPath("PCIe across CPU sockets (SYS)", "SYS"),
}
# by the major compute capability of the chip: drivers have numbered one generation in several ways
# (nvmlDeviceGetNvLinkVersion)
NVLINK_GENERATION = {6: 1, 7: 2, 8: 3, 9: 4, 10: 5}
ABILITIES_OF_CPU = [
    "precision: float32, and bfloat16 if TRAIN_BF16=true asks for it; NF4 weights under qlora",
    "bnb backend on the CPU: lora, qlora, full in float32",
    "unsloth backend: not here, it needs an NVIDIA GPU",
]


@dataclass(frozen=True)
class Link:
    """How two GPUs, given by their indices, reach each other."""

    first: int
    second: int
    path: LinkPath

    @property
    def is_nvlink(self) -> bool:
        return self.path.words == "NVLink"


def gpu_info_lines(environ: Mapping[str, str]) -> list[str]:
    """Return what this host trains with, one fact a line; the first is `Number of GPUs: N`."""
    gpus, reason = nvml_gpus(environ)
    host = host_memory()
    lines = [f"Number of GPUs: {len(gpus)}"]
    if reason:
        lines.append(f"no GPU: {reason}")
    for gpu in gpus:
        lines.append(
            f"cuda:{gpu.index} {gpu.name}: {gib(gpu.free_bytes)} of {gib(gpu.total_bytes)} GiB "
            f"free, capability {dotted(gpu.capability)}, "
            f"bf16 {'yes' if gpu.supports_bf16 else 'no'}"
        )
    lines += _order_lines(gpus, environ)
    if gpus:
        lines += _connection_lines(gpus)
    ram = f"{gib(host.available_bytes)} of {gib(host.total_bytes)} GiB RAM available"
    lines += [f"CPU: {cpu_count()} cores, {ram}", _torch_line()]
    return lines + (_ability_lines(gpus) if gpus else ABILITIES_OF_CPU)


def gpu_facts(environ: Mapping[str, str]) -> Json:
    """Return what this host trains with, for programs; `reason` says why there is no GPU."""
    gpus, reason = nvml_gpus(environ)
    return {
        "gpus": [{**asdict(gpu), "bf16": gpu.supports_bf16} for gpu in gpus],
        "reason": reason,
        "cpu_count": cpu_count(),
        "ram": asdict(host_memory()),
    }


def nvidia_driver() -> Driver | None:
    """Return the NVIDIA driver that answers on this host, or None."""
    try:
        with nvml_session() as nvml:
            cuda = nvml.nvmlSystemGetCudaDriverVersion()  # 13000 is 13.0
            return Driver(nvml.nvmlSystemGetDriverVersion(), (cuda // 1000, cuda % 1000 // 10))
    except NvmlUnavailable:
        return None


def gib(size_bytes: int) -> str:
    """Return bytes as GiB with one decimal."""
    return f"{size_bytes / GIB:.1f}"


def links(gpus: Sequence[Gpu]) -> list[Link]:
    """Return how each pair of GPUs is connected."""
    if len(gpus) < 2:
        return []
    with nvml_session() as nvml:
        handles = {gpu.index: nvml.nvmlDeviceGetHandleByUUID(gpu.uuid) for gpu in gpus}
        return [
            Link(first, second, _path(nvml, handles[first], handles[second]))
            for first, second in combinations(handles, 2)
        ]


def link_lines(found: Sequence[Link]) -> list[str]:
    """Return one line if all pairs are connected alike, else one line a pair."""
    paths = {link.path.words for link in found}
    if len(paths) == 1:
        return [f"links: {paths.pop()} between {'the two' if len(found) == 1 else 'all'} GPUs"]
    return [f"link cuda:{link.first} - cuda:{link.second}: {link.path.words}" for link in found]


def _order_lines(gpus: tuple[Gpu, ...], environ: Mapping[str, str]) -> Iterator[str]:
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        yield f"CUDA_VISIBLE_DEVICES={visible} is set: cuda:0 is the first GPU that it names"
    if len({gpu.name for gpu in gpus}) > 1 and environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        yield (
            "GPUs of several models: CUDA counts the fastest first, this list goes by PCI address; "
            "set CUDA_DEVICE_ORDER=PCI_BUS_ID"
        )


def _connection_lines(gpus: tuple[Gpu, ...]) -> Iterator[str]:
    """Yield the driver, the links, and these as a table with each GPU's PCIe link to the host.

    One GPU has its row and no column.
    """
    driver = nvidia_driver()
    if driver:
        yield f"driver: {driver.version}, runs CUDA up to {dotted(driver.cuda)}"
    found = links(gpus)
    yield from link_lines(found)
    codes: dict[tuple[int, int], str] = {}
    for link in found:
        codes[link.first, link.second] = codes[link.second, link.first] = link.path.code
    columns = gpus if found else ()
    rows = [["", *(f"cuda:{gpu.index}" for gpu in columns), "PCIe to the host"]]
    with nvml_session() as nvml:
        for gpu in gpus:
            cells = [codes.get((gpu.index, other.index), "-") for other in columns]
            slot = _slot_words(nvml, nvml.nvmlDeviceGetHandleByUUID(gpu.uuid))
            rows.append([f"cuda:{gpu.index}", *cells, slot])
    yield from aligned(rows, left=range(len(rows[0])))
    if any(link.is_nvlink for link in found):
        generation = NVLINK_GENERATION.get(gpus[0].capability[0], "unknown")
        yield f"NV18 is 18 NVLinks; those of {gpus[0].name} are of generation {generation}"


def _slot_words(nvml: ModuleType, handle: Any) -> str:
    """Return the PCIe link of a GPU: an idle one slows its link down, but keeps its lanes."""
    generation = nvml_answer(nvml, "nvmlDeviceGetMaxPcieLinkGeneration", handle)
    lanes = nvml_answer(nvml, "nvmlDeviceGetCurrPcieLinkWidth", handle)
    most = nvml_answer(nvml, "nvmlDeviceGetMaxPcieLinkWidth", handle)
    if generation is None or lanes is None:
        return "unknown"
    of_most = f" of {most}" if most and most > lanes else ""
    return f"generation {generation}, {lanes}{of_most} lanes"


def _path(nvml: ModuleType, first: Any, second: Any) -> LinkPath:
    status = nvml_answer(
        nvml, "nvmlDeviceGetP2PStatus", first, second, nvml.NVML_P2P_CAPS_INDEX_NVLINK
    )
    if status == nvml.NVML_P2P_STATUS_OK:
        return LinkPath("NVLink", f"NV{_count_nvlinks(nvml, first, second) or '?'}")
    ancestor = nvml_answer(nvml, "nvmlDeviceGetTopologyCommonAncestor", first, second)
    return PCIE_PATHS.get(ancestor, UNKNOWN_PATH)


def _count_nvlinks(nvml: ModuleType, first: Any, second: Any) -> int:
    """Return how many NVLinks lead from one GPU to another.

    These are its direct ones, or all of its own if they lead to a switch.
    """
    other = nvml_answer(nvml, "nvmlDeviceGetPciInfo", second)
    active = direct = 0
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        if not nvml_answer(nvml, "nvmlDeviceGetNvLinkState", first, link):
            continue
        active += 1
        end = nvml_answer(nvml, "nvmlDeviceGetNvLinkRemotePciInfo", first, link)
        if other is not None and end is not None and end.busId == other.busId:
            direct += 1
    return direct or active


def _torch_line() -> str:
    build = torch_build()
    if build is None:
        return "torch: not installed; run `make install`"
    line = f"torch: {build.version}, {build.kind}"
    return f"{line}, NCCL {nccl() or 'of its own'}" if build.cuda else line


def _ability_lines(gpus: tuple[Gpu, ...]) -> list[str]:
    """Return the number types and the backends that run on all of the GPUs."""
    lowest = min(gpu.capability for gpu in gpus)
    has_bf16 = all(gpu.supports_bf16 for gpu in gpus)
    types = "bfloat16, float16, float32" if has_bf16 else "float16, float32"
    nf4 = "NF4 weights under qlora"
    if lowest < NF4_CAPABILITY:
        nf4 = f"no NF4, which needs capability {dotted(NF4_CAPABILITY)}"
    unsloth = " on the GPU: lora, qlora, full; `make doctor` shows whether it is installed"
    if lowest < UNSLOTH.min_capability:
        needed = dotted(UNSLOTH.min_capability)
        unsloth = f": not here, it needs capability {needed} and finds {dotted(lowest)}"
    return [
        f"precision: {types}; {nf4}",
        f"bnb backend on the GPU: lora, qlora, full in {'bfloat16' if has_bf16 else 'float16'}",
        f"unsloth backend{unsloth}",
    ]
