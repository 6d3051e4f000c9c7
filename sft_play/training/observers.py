"""What others see of a run while it trains: metrics.jsonl, trackers, and the load of its GPUs.

`make watch` follows metrics.jsonl: it has each log, and a sign of life in between. One rank of each
machine samples the machine's GPUs through NVML.
"""

import itertools
import logging
import math
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, Self

import torch
from transformers import TrainerCallback

from sft_play.plan.devices import NvmlUnavailable, sample_gpus
from sft_play.process import Process
from sft_play.runs import metrics
from sft_play.runs.metrics import GpuSample, MetricsLine, SampleAnswer
from sft_play.training.context import RunContext
from sft_play.training.step_trace import StepTrace
from sft_play.training.trackers import Trackers

if TYPE_CHECKING:
    from sft_play.training.trainer import SftTrainer

logger = logging.getLogger(__name__)

BEAT_SECONDS = 5.0  # between two signs of life


class MetricsFile(TrainerCallback):
    """Appends what is logged, and every BEAT_SECONDS the step and the load of the GPUs.

    The signs of life come from a thread, until `end`: they continue during evaluations
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
        self.gpus_of_log = gpus_of_log  # of all machines, if there is a log of a loss
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
        has_begun = self.path.exists()  # this run continues in its folder
        for entry in [] if has_begun else state.log_history:  # of the run that it continues from
            step = entry["step"]
            metrics.append(self.path, MetricsLine(step, state.max_steps, values=numbers_in(entry)))
        self._append(gpus=())
        threading.Thread(target=self._beat, name="metrics", daemon=True).start()

    def on_log(self, *_: Any, logs: dict[str, float], **__: Any) -> None:
        """Write a line for a log."""
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
        if process.is_gpu:
            for device in process.devices:
                own.append((host, f"GPU-{torch.cuda.get_device_properties(device).uuid}"))
        found = list(itertools.chain.from_iterable(process.gather(own)))
        if process.local_rank != 0:
            return cls({})
        return cls({number: uuid for number, (there, uuid) in enumerate(found) if there == host})

    def begin(self) -> threading.Thread | None:
        """Begin to sample, and return the thread that does; None if there is no GPU."""
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

    def over(name: str, reduce: Callable[[list[float]], float]) -> float | None:
        """Return one value for those of a field, None if a sample lacks it."""
        values = [getattr(sample, name) for sample in samples]
        return None if None in values else reduce(values)

    return GpuSample(
        rank=samples[0].rank,
        busy_percent=over("busy_percent", fmean),
        used_gib=over("used_gib", max),
        watts=over("watts", fmean),
        celsius=over("celsius", max),
    )


class Observers:
    """The context in which a run is trained: inside it, threads sample GPUs and write metrics."""

    def __init__(self, context: RunContext, opened: Sequence[TrainerCallback]):
        """`opened` are the trackers; every rank must call it, with none on other ranks than 0."""
        self.gpus = GpuSampler.of_machine(context.process)
        self.trackers = Trackers(opened)
        path = context.folder.metrics if context.process.is_main else None
        self.metrics_file = MetricsFile(path, self.gpus.latest)
        steps = context.config.train.profile_steps if context.process.is_main else 0
        self.trace = StepTrace(context.folder.trace, steps)

    def attach(self, trainer: "SftTrainer") -> None:
        """Show what the trainer logs. Call it before any callback that scores."""
        boards = [board.note_answers for board in self.trackers.boards]
        trainer.note_answers += [self.metrics_file.note_answers, *boards]
        trainer.add_callback(self.metrics_file)
        trainer.add_callback(self.trace)
        self.metrics_file.gpus_of_log = lambda: trainer.step_log.gpus
        self.trackers.more_values = lambda: trainer.step_log.by_rank

    def __enter__(self) -> Self:
        self.gpus.begin()
        return self

    def __exit__(self, *_: object) -> None:
        self.gpus.end()
        self.metrics_file.end()

    def close(self, settings: Mapping[str, Any], scores: Mapping[str, float]) -> None:
        """Show the settings next to the last scores, and end the trackers."""
        if scores:
            self.trackers.note_scores(settings, scores)
        self.trackers.close()
