"""How GPUs reach each other and their host: NVLink, and the paths and lanes of PCIe. Asks NVML, never torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from types import ModuleType
from typing import Any

from sft_play.plan.devices import Gpu, nvml_session

# NVML_TOPOLOGY_*: where the PCIe paths of two GPUs meet, with the words of `nvidia-smi topo -m`
_PCIE_PATHS = {
    0: ("on one board", "INT"),
    10: ("through one switch (PIX)", "PIX"),
    20: ("through several switches (PXB)", "PXB"),
    30: ("through a host bridge (PHB)", "PHB"),
    40: ("across one CPU's host bridges (NODE)", "NODE"),
    50: ("across CPU sockets (SYS)", "SYS"),
}
# of a chip's compute capability: drivers have numbered one generation in several ways (nvmlDeviceGetNvLinkVersion)
_NVLINK_GENERATION = {6: 1, 7: 2, 8: 3, 9: 4, 10: 5}


@dataclass(frozen=True)
class Link:
    """How two GPUs, named by their indices, reach each other: `NVLink`, or `PCIe through one switch (PIX)`."""

    first: int
    second: int
    path: str
    code: str  # as `nvidia-smi topo -m` writes it: NV18 for 18 NVLinks, PIX; ? where NVML does not say

    @property
    def is_nvlink(self) -> bool:
        return self.path == "NVLink"


@dataclass(frozen=True)
class Slot:
    """The PCIe link of a GPU to its host: the newest generation and most lanes of both, and the lanes in use."""

    generation: int | None
    lanes: int | None
    most_lanes: int | None

    def __str__(self) -> str:
        if self.generation is None or self.lanes is None:
            return "unknown"
        fewer = f" of {self.most_lanes}" if self.most_lanes and self.most_lanes > self.lanes else ""
        return f"generation {self.generation}, {self.lanes}{fewer} lanes"


def links(gpus: tuple[Gpu, ...]) -> tuple[Link, ...]:
    """Return how each pair of GPUs is connected; `unknown` where NVML does not say, as inside many virtual machines."""
    if len(gpus) < 2:
        return ()
    with nvml_session() as nvml:
        handles = {gpu.index: nvml.nvmlDeviceGetHandleByUUID(gpu.uuid) for gpu in gpus}
        return tuple(
            Link(a, b, *_path(nvml, handles[a], handles[b])) for a, b in combinations(handles, 2)
        )


def slots(gpus: tuple[Gpu, ...]) -> tuple[Slot, ...]:
    """Return the PCIe link of each GPU. An idle GPU slows its link down, but keeps its lanes."""
    questions = (
        "nvmlDeviceGetMaxPcieLinkGeneration",
        "nvmlDeviceGetCurrPcieLinkWidth",
        "nvmlDeviceGetMaxPcieLinkWidth",
    )
    with nvml_session() as nvml:
        handles = [nvml.nvmlDeviceGetHandleByUUID(gpu.uuid) for gpu in gpus]
        return tuple(
            Slot(*(answer(nvml, question, handle) for question in questions)) for handle in handles
        )


def link_lines(found: tuple[Link, ...]) -> list[str]:
    """Return one line where all pairs are connected alike, else one line a pair."""
    paths = {link.path for link in found}
    if len(paths) == 1:
        return [f"links: {paths.pop()} between {'the two' if len(found) == 1 else 'all'} GPUs"]
    return [f"link cuda:{link.first} - cuda:{link.second}: {link.path}" for link in found]


def matrix_lines(gpus: Sequence[Gpu], found: tuple[Link, ...], host: Sequence[Slot]) -> list[str]:
    """Return the links as a table: a row and a column a GPU, and each GPU's PCIe link to its host."""
    codes = {(link.first, link.second): link.code for link in found}
    names = [f"cuda:{gpu.index}" for gpu in gpus]
    rows = [
        f"{'':<8}" + "".join(f"{name:<8}" for name in names if len(names) > 1) + "PCIe to the host"
    ]
    for row, slot in zip(gpus, host, strict=True):
        cells = [
            "-"
            if row is column
            else codes[min(row.index, column.index), max(row.index, column.index)]
            for column in gpus
            if len(gpus) > 1
        ]
        rows.append(
            f"{f'cuda:{row.index}':<8}" + "".join(f"{cell:<8}" for cell in cells) + str(slot)
        )
    if any(link.is_nvlink for link in found):
        rows.append(
            f"NV18 is 18 NVLinks; those of {gpus[0].name} are of generation {_NVLINK_GENERATION.get(gpus[0].capability[0], 'unknown')}"
        )
    return rows


def answer(nvml: ModuleType, question: str, *arguments: Any) -> Any:
    """Return NVML's answer, or None where this card, driver or container does not give it."""
    try:
        return getattr(nvml, question)(*arguments)
    except nvml.NVMLError:
        return None


def _path(nvml: ModuleType, first: Any, second: Any) -> tuple[str, str]:
    status = answer(nvml, "nvmlDeviceGetP2PStatus", first, second, nvml.NVML_P2P_CAPS_INDEX_NVLINK)
    if status == nvml.NVML_P2P_STATUS_OK:
        return "NVLink", f"NV{_nvlinks(nvml, first, second) or '?'}"
    words, code = _PCIE_PATHS.get(
        answer(nvml, "nvmlDeviceGetTopologyCommonAncestor", first, second), (None, "?")
    )
    return (f"PCIe {words}" if words else "unknown"), code


def _nvlinks(nvml: ModuleType, first: Any, second: Any) -> int:
    """Return how many NVLinks lead from one GPU to another: straight, or all of its own where they go to a switch."""
    other = answer(nvml, "nvmlDeviceGetPciInfo", second)
    active = [
        link
        for link in range(nvml.NVML_NVLINK_MAX_LINKS)
        if answer(nvml, "nvmlDeviceGetNvLinkState", first, link)
    ]
    ends = [answer(nvml, "nvmlDeviceGetNvLinkRemotePciInfo", first, link) for link in active]
    straight = sum(
        other is not None and end is not None and end.busId == other.busId for end in ends
    )
    return straight or len(active)
