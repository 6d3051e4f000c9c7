"""How GPUs reach each other and their host: NVLink, and the paths and lanes of PCIe.

Asks NVML, never torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from types import ModuleType
from typing import Any, NamedTuple

from sft_play.plan.devices import Gpu, answer, nvml_session


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
COLUMN = 8  # characters of a column of the table of links


@dataclass(frozen=True)
class Link:
    """How two GPUs, given by their indices, reach each other."""

    first: int
    second: int
    path: LinkPath

    @property
    def is_nvlink(self) -> bool:
        return self.path.words == "NVLink"


@dataclass(frozen=True)
class Slot:
    """The PCIe link of a GPU to its host; None for what NVML does not say."""

    generation: int | None  # the newest that both can do
    lanes: int | None  # in use
    max_lanes: int | None  # that both can do

    def __str__(self) -> str:
        if self.generation is None or self.lanes is None:
            return "unknown"
        lanes = f"{self.lanes}"
        if self.max_lanes and self.max_lanes > self.lanes:
            lanes = f"{self.lanes} of {self.max_lanes}"
        return f"generation {self.generation}, {lanes} lanes"


def links(gpus: tuple[Gpu, ...]) -> tuple[Link, ...]:
    """Return how each pair of GPUs is connected."""
    if len(gpus) < 2:
        return ()
    with nvml_session() as nvml:
        handles = {gpu.index: nvml.nvmlDeviceGetHandleByUUID(gpu.uuid) for gpu in gpus}
        return tuple(
            Link(first, second, _path(nvml, handles[first], handles[second]))
            for first, second in combinations(handles, 2)
        )


def slots(gpus: tuple[Gpu, ...]) -> tuple[Slot, ...]:
    """Return the PCIe link of each GPU. An idle GPU slows its link down, but keeps its lanes."""
    with nvml_session() as nvml:
        return tuple(_slot(nvml, nvml.nvmlDeviceGetHandleByUUID(gpu.uuid)) for gpu in gpus)


def link_lines(found: tuple[Link, ...]) -> list[str]:
    """Return one line where all pairs are connected alike, else one line a pair."""
    paths = {link.path.words for link in found}
    if len(paths) == 1:
        return [f"links: {paths.pop()} between {'the two' if len(found) == 1 else 'all'} GPUs"]
    return [f"link cuda:{link.first} - cuda:{link.second}: {link.path.words}" for link in found]


def matrix_lines(gpus: Sequence[Gpu], found: tuple[Link, ...], host: Sequence[Slot]) -> list[str]:
    """Return the links as a table: a row and a column for each GPU, and its PCIe link to the host.

    One GPU has its row and no column.
    """
    codes: dict[tuple[int, int], str] = {}
    for link in found:
        codes[link.first, link.second] = codes[link.second, link.first] = link.path.code
    columns = gpus if len(gpus) > 1 else ()
    lines = [_row("", [f"cuda:{gpu.index}" for gpu in columns], "PCIe to the host")]
    for gpu, slot in zip(gpus, host, strict=True):
        cells = [codes.get((gpu.index, other.index), "-") for other in columns]
        lines.append(_row(f"cuda:{gpu.index}", cells, str(slot)))
    if any(link.is_nvlink for link in found):
        generation = NVLINK_GENERATION.get(gpus[0].capability[0], "unknown")
        lines.append(f"NV18 is 18 NVLinks; those of {gpus[0].name} are of generation {generation}")
    return lines


def _row(name: str, cells: list[str], end: str) -> str:
    return "".join(f"{cell:<{COLUMN}}" for cell in (name, *cells)) + end


def _slot(nvml: ModuleType, handle: Any) -> Slot:
    return Slot(
        generation=answer(nvml, "nvmlDeviceGetMaxPcieLinkGeneration", handle),
        lanes=answer(nvml, "nvmlDeviceGetCurrPcieLinkWidth", handle),
        max_lanes=answer(nvml, "nvmlDeviceGetMaxPcieLinkWidth", handle),
    )


def _path(nvml: ModuleType, first: Any, second: Any) -> LinkPath:
    status = answer(nvml, "nvmlDeviceGetP2PStatus", first, second, nvml.NVML_P2P_CAPS_INDEX_NVLINK)
    if status == nvml.NVML_P2P_STATUS_OK:
        return LinkPath("NVLink", f"NV{_count_nvlinks(nvml, first, second) or '?'}")
    ancestor = answer(nvml, "nvmlDeviceGetTopologyCommonAncestor", first, second)
    return PCIE_PATHS.get(ancestor, UNKNOWN_PATH)


def _count_nvlinks(nvml: ModuleType, first: Any, second: Any) -> int:
    """Return how many NVLinks lead from one GPU to another.

    These are its direct ones, or all of its own where they lead to a switch.
    """
    other = answer(nvml, "nvmlDeviceGetPciInfo", second)
    active = direct = 0
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        if not answer(nvml, "nvmlDeviceGetNvLinkState", first, link):
            continue
        active += 1
        end = answer(nvml, "nvmlDeviceGetNvLinkRemotePciInfo", first, link)
        if other is not None and end is not None and end.busId == other.busId:
            direct += 1
    return direct or active
