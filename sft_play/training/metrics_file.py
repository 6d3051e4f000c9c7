"""Writes metrics.jsonl, which `make watch` follows: each log, and a sign of life in between."""

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from sft_play.runs import metrics
from sft_play.runs.metrics import GpuSample, MetricsLine, SampleAnswer

logger = logging.getLogger(__name__)

BEAT_SECONDS = 5.0  # between two signs of life


class MetricsFile(TrainerCallback):
    """Appends what is logged, and every BEAT_SECONDS the step and the load of the GPUs.

    The signs of life come from a thread, until `end`: they go on during evaluations
    and while a rank hangs. Without a `path`, as on other ranks than the main one, it does nothing.
    """

    def __init__(
        self,
        path: Path | None,
        latest_gpus: Callable[[], Sequence[GpuSample]] = tuple,
        gpus_of_log: Callable[[], Sequence[GpuSample]] = tuple,
    ):
        self.path = path
        self.latest_gpus = latest_gpus  # of this machine
        self.gpus_of_log = gpus_of_log  # of all machines, where there is a log of a loss
        self._state: Any = None  # the trainer's, from the begin of training on
        self._lock = threading.Lock()
        self._ended = threading.Event()

    def end(self) -> None:
        """Give no further sign of life."""
        self._ended.set()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Leave out the lines of steps that are taken again, and begin to write."""
        if self.path is None:
            return
        self._state = state
        metrics.forget_after(self.path, state.global_step)
        has_begun = self.path.exists()  # this run goes on in its folder
        for entry in [] if has_begun else state.log_history:  # of the run that it goes on from
            step = entry["step"]
            metrics.append(self.path, MetricsLine(step, state.max_steps, values=numbers_in(entry)))
        self._append(gpus=())
        threading.Thread(target=self._beat, name="metrics", daemon=True).start()

    def on_log(
        self,
        args: Any,
        state: Any,
        control: Any,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        """Write a line for a log."""
        logs = logs or {}
        if self.path is not None:
            gpus = self.gpus_of_log() if "loss" in logs else ()
            self._append(values=numbers_in(logs), gpus=tuple(gpus or self.latest_gpus()))

    def note_answers(self, rows: str, answers: Sequence[SampleAnswer], step: int) -> None:
        """Write some answers of an evaluation; `rows` names its split."""
        if self.path is not None and answers:
            self._append(answers=tuple(answers), gpus=())

    def _beat(self) -> None:
        while not self._ended.wait(BEAT_SECONDS):
            try:
                self._append(gpus=tuple(self.latest_gpus()))
            except OSError as error:  # a full disk ends the run elsewhere
                logger.warning("%s cannot be written: %s", self.path, error)
                return

    def _append(self, **said: Any) -> None:
        line = MetricsLine(
            step=self._state.global_step,
            steps=self._state.max_steps,
            time=round(time.time(), 1),
            **said,
        )
        with self._lock:
            metrics.append(self.path, line)


def numbers_in(logs: dict[str, Any]) -> dict[str, float]:
    """Return the finite numbers of a log, with as many digits as anyone reads."""
    return {
        name: float(f"{value:.6g}")
        for name, value in logs.items()
        if isinstance(value, int | float) and math.isfinite(value) and name != "step"
    }
