"""Seconds of the parts of an optimizer step, without waiting for the GPU."""

import time
from collections import deque
from typing import NamedTuple

import torch

FOLD_AT = 256  # marks that are kept before those that the GPU has passed are added up


class _Mark(NamedTuple):
    """Where a part begins, and the one before it ends."""

    moment: "torch.cuda.Event | float"  # seconds on a CPU
    part: str | None


class StepTimes:
    """Adds up the seconds between marks in the GPU's own queue, or on the clock of a CPU.

    A part is one of the phases of MemoryMeter, which marks them: `backward` includes the
    collectives and the clipping of gradients, `optimizer` the step of torch's optimizer alone.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._is_gpu = device.type == "cuda"
        self._marks: deque[_Mark] = deque()
        self._seconds: dict[str, float] = {}

    def enter(self, part: str | None) -> None:
        """End the current part and begin `part`, or none."""
        moment: torch.cuda.Event | float = time.perf_counter()
        if self._is_gpu:
            moment = torch.cuda.Event(enable_timing=True)
            # another GPU may be the current one, and no time lies between marks on two
            moment.record(torch.cuda.current_stream(self._device))
        self._marks.append(_Mark(moment, part))
        if len(self._marks) >= FOLD_AT:
            self._fold()

    def add(self, part: str, seconds: float) -> None:
        """Add seconds of the CPU that were measured elsewhere."""
        self._seconds[part] = self._seconds.get(part, 0.0) + seconds

    def take(self) -> dict[str, float]:
        """Return the seconds between marks since this was last called, as far as they are over."""
        self._fold()
        seconds, self._seconds = self._seconds, {}
        return seconds

    def _fold(self) -> None:
        """Add up what lies between marks that the GPU has passed, and drop all but the last."""
        while len(self._marks) > 1:
            begin, end = self._marks[0], self._marks[1]
            if self._is_gpu and not end.moment.query():
                return
            if begin.part is not None:
                seconds = self._seconds.get(begin.part, 0.0) + self._between(begin, end)
                self._seconds[begin.part] = seconds
            self._marks.popleft()

    def _between(self, begin: _Mark, end: _Mark) -> float:
        if self._is_gpu:
            return begin.moment.elapsed_time(end.moment) / 1000  # which counts in milliseconds
        return end.moment - begin.moment
