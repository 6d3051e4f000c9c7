"""NVML without a GPU: pynvml with planted answers, for tests of what asks it."""

import sys
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from sft_play.plan.devices import GIB

NO_DRIVER = {"init_error": pynvml.NVML_ERROR_LIBRARY_NOT_FOUND}


class FakeNvml:
    """pynvml with planted answers: its constants and exceptions are the real module's."""

    def __init__(
        self,
        *cards: SimpleNamespace,
        init_error: int | None = None,
        driver: str = "580.95.05",
        cuda: int = 13000,
    ) -> None:
        self.cards = cards
        self.init_error = init_error
        self.driver = driver
        self.cuda = cuda

    def __getattr__(self, name: str) -> Any:
        if name.startswith("nvml") and name[4:5].isupper():
            return self._unanswered
        return getattr(pynvml, name)

    def _unanswered(self, *_: Any) -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    def nvmlInit(self) -> None:
        if self.init_error is not None:
            raise pynvml.NVMLError(self.init_error)

    def nvmlSystemGetDriverVersion(self) -> str:
        return self.driver

    def nvmlSystemGetCudaDriverVersion(self) -> int:
        return self.cuda

    def nvmlDeviceGetCount(self) -> int:
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, number: int) -> SimpleNamespace:
        return self.cards[number]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> SimpleNamespace:
        return next(
            handle
            for card in self.cards
            for handle in (card, *card.instances)
            if handle.uuid == uuid
        )

    def nvmlDeviceGetUUID(self, handle: SimpleNamespace) -> str:
        return handle.uuid

    def nvmlDeviceGetName(self, handle: SimpleNamespace) -> str:
        return handle.name

    def nvmlDeviceGetCudaComputeCapability(self, handle: SimpleNamespace) -> list[int]:
        return list(handle.capability)

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(
        self, handle: SimpleNamespace
    ) -> SimpleNamespace:
        return next(card for card in self.cards if handle in card.instances)

    def nvmlDeviceGetMemoryInfo(
        self, handle: SimpleNamespace, version: int | None = None
    ) -> SimpleNamespace:
        if handle.memory_version == 0:
            self._unanswered()
        if version and handle.memory_version < 2:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
        return SimpleNamespace(
            total=handle.total,
            reserved=handle.reserved,
            free=handle.total - handle.reserved - handle.used,
        )

    def nvmlDeviceGetUtilizationRates(self, handle: SimpleNamespace) -> SimpleNamespace:
        if handle.busy is None:
            self._unanswered()
        return SimpleNamespace(gpu=handle.busy)

    def nvmlDeviceGetComputeRunningProcesses(
        self, handle: SimpleNamespace
    ) -> list[SimpleNamespace]:
        return [
            SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in handle.processes.items()
        ]

    def nvmlDeviceGetPowerUsage(self, handle: SimpleNamespace) -> int:
        return self._known(handle.watts) * 1000

    def nvmlDeviceGetEnforcedPowerLimit(self, handle: SimpleNamespace) -> int:
        return self._known(handle.most_watts) * 1000

    def nvmlDeviceGetTemperature(self, handle: SimpleNamespace, sensor: int) -> int:
        assert sensor == pynvml.NVML_TEMPERATURE_GPU
        return self._known(handle.celsius)

    def nvmlDeviceGetMaxPcieLinkGeneration(self, handle: SimpleNamespace) -> int:
        return self._known(handle.pcie)[0]

    def nvmlDeviceGetCurrPcieLinkWidth(self, handle: SimpleNamespace) -> int:
        return self._known(handle.pcie)[1]

    def nvmlDeviceGetMaxPcieLinkWidth(self, handle: SimpleNamespace) -> int:
        return self._known(handle.pcie)[2]

    def nvmlDeviceGetPciInfo(self, handle: SimpleNamespace) -> SimpleNamespace:
        return SimpleNamespace(busId=handle.uuid)  # one card, one bus id

    def nvmlDeviceGetNvLinkState(self, handle: SimpleNamespace, link: int) -> bool:
        return link < len(self._known(handle.link_ends))

    def nvmlDeviceGetNvLinkRemotePciInfo(
        self, handle: SimpleNamespace, link: int
    ) -> SimpleNamespace:
        return SimpleNamespace(busId=handle.link_ends[link])

    def _known(self, value: Any) -> Any:
        return self._unanswered() if value is None else value

    def nvmlDeviceGetP2PStatus(
        self, first: SimpleNamespace, second: SimpleNamespace, question: int
    ) -> int:
        assert question == pynvml.NVML_P2P_CAPS_INDEX_NVLINK
        return (
            pynvml.NVML_P2P_STATUS_OK
            if second.uuid in first.nvlinked
            else pynvml.NVML_P2P_STATUS_NOT_SUPPORTED
        )

    def nvmlDeviceGetTopologyCommonAncestor(
        self, first: SimpleNamespace, second: SimpleNamespace
    ) -> int:
        if first.level is None:
            self._unanswered()
        return first.level


def card(uuid: str = "GPU-aaaa1111", **changes: Any) -> SimpleNamespace:
    """An H200 as NVML describes it, 10 GiB of it in use."""
    values = {
        "name": "NVIDIA H200",
        "capability": (9, 0),
        "total": 140 * GIB,
        "reserved": GIB,
        "used": 10 * GIB,
        "memory_version": 2,
        "busy": 97,
        "watts": None,
        "most_watts": None,
        "celsius": None,
        "processes": {},
        "pcie": None,
        "nvlinked": (),
        "link_ends": None,
        "level": pynvml.NVML_TOPOLOGY_SYSTEM,
        "instances": [],
    }
    return SimpleNamespace(uuid=uuid, **(values | changes))


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch):
    """A function that puts cards, or NVML's refusal, into this host."""

    def plant_cards(*cards: SimpleNamespace, **changes: Any) -> None:
        monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(*cards, **changes))

    return plant_cards
