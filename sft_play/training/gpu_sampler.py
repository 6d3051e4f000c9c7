"""Samples the load of a machine's GPUs through NVML while the run goes on: one rank a machine."""

import itertools
import logging
import socket
import threading
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Self

import torch

from sft_play.plan.devices import NvmlUnavailable
from sft_play.plan.gpu_load import sample_gpus
from sft_play.process import Process
from sft_play.runs.metrics import GpuSample

logger = logging.getLogger(__name__)

SAMPLE_SECONDS = 2.0


class GpuSampler:
    """Reads the GPUs of some ranks every SAMPLE_SECONDS, between `begin` and `end`."""

    def __init__(self, uuid_of_rank: Mapping[int, str]):
        self.uuid_of_rank = uuid_of_rank
        self._latest: tuple[GpuSample, ...] = ()
        self._since_log: list[tuple[GpuSample, ...]] = []
        self._lock = threading.Lock()
        self._ended = threading.Event()

    @classmethod
    def of_machine(cls, process: Process) -> Self:
        """Return a sampler of all ranks' GPUs of this machine on its first rank, else of none.

        Every rank must call it.
        """
        own = []
        host = socket.gethostname()
        if process.device.type == "cuda":
            for device in process.devices:
                own.append((host, f"GPU-{torch.cuda.get_device_properties(device).uuid}"))
        found = list(itertools.chain.from_iterable(process.gather(own)))
        if process.local_rank != 0:
            return cls({})
        return cls({number: uuid for number, (there, uuid) in enumerate(found) if there == host})

    def begin(self) -> threading.Thread | None:
        """Begin to sample, and return the thread that does; None where there is no GPU."""
        if not self.uuid_of_rank:
            return None
        thread = threading.Thread(target=self._sample, name="gpus", daemon=True)
        thread.start()
        return thread

    def end(self) -> None:
        """Sample no more."""
        self._ended.set()

    def latest(self) -> Sequence[GpuSample]:
        """Return the last sample of each GPU; nothing before the first one."""
        return self._latest

    def mean_since_log(self) -> Sequence[GpuSample]:
        """Return the mean load since this was last called, and the most memory."""
        with self._lock:
            samples, self._since_log = self._since_log, []
        return tuple(map(_mean, zip(*samples, strict=True)))

    def _sample(self) -> None:
        while True:
            try:
                self._latest = tuple(sample_gpus(self.uuid_of_rank))
            except NvmlUnavailable as error:
                logger.warning("the load of the GPUs is not logged: %s", error)
                return
            with self._lock:
                self._since_log.append(self._latest)
            if self._ended.wait(SAMPLE_SECONDS):
                return


def _mean(samples: Sequence[GpuSample]) -> GpuSample:
    """Return one sample for those of one GPU; it keeps what every one of them has."""

    def known(name: str) -> list[float]:
        values = [getattr(sample, name) for sample in samples]
        return [] if None in values else values

    return GpuSample(
        rank=samples[0].rank,
        busy_percent=fmean(known("busy_percent")) if known("busy_percent") else None,
        used_gib=max(known("used_gib"), default=None),
        watts=fmean(known("watts")) if known("watts") else None,
        celsius=max(known("celsius"), default=None),
    )
