"""Outputs of a run while it trains: metrics.jsonl, trackers, GPU load, a trace of steps.

`make watch` follows metrics.jsonl, which contains each log and a heartbeat. One rank of each
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
from typing import Any, Self

import torch
from torch.profiler import profile, schedule
from transformers import TrainerCallback

from sft_kernels.process import Process
from sft_play.plan.devices import NvmlUnavailable, sample_gpus
from sft_play.runs import metrics
from sft_play.runs.files import rename
from sft_play.runs.metrics import GpuSample, MetricsLine
from sft_play.training.context import RunContext
from sft_play.training.events import LogDetails
from sft_play.training.state import Control, State
from sft_play.training.trackers import Trackers

logger = logging.getLogger(__name__)

BEAT_SECONDS = 5.0  # between two heartbeats


class MetricsFile:
    """Appends each log and, every BEAT_SECONDS, the step and the load of the GPUs.

    The heartbeats come from a thread until `stop`: they continue during evaluations and while a
    rank hangs. Without a `path`, i.e. on all ranks except the main one, it does nothing.
    """

    def __init__(self, path: Path | None, latest_gpus: Callable[[], Sequence[GpuSample]] = tuple):
        self.path = path
        self.latest_gpus = latest_gpus  # of this machine
        self._state = State()  # the loop's, from the start of training on
        self._lock = threading.Lock()
        self._ended = threading.Event()

    def stop(self) -> None:
        """Stop the heartbeats."""
        self._ended.set()

    def start(self, state: State) -> None:
        """Drop the lines of steps that will run again, and start writing."""
        if self.path is None:
            return
        self._state = state
        metrics.forget_after(self.path, state.global_step)
        has_begun = self.path.exists()  # this run continues in its folder
        for entry in [] if has_begun else state.log_history:  # logs of the resumed run
            step = entry["step"]
            metrics.append(self.path, MetricsLine(step, state.max_steps, values=numbers_in(entry)))
        self._append(gpus=())
        threading.Thread(target=self._beat, name="metrics", daemon=True).start()

    def on_log(self, *_: Any, logs: dict[str, float], details: LogDetails) -> None:
        """Write a line for a log, after one for the answers of an evaluation."""
        if self.path is None:
            return
        if details.answers:
            self._append(answers=details.answers, gpus=())
        self._append(values=numbers_in(logs), gpus=tuple(details.gpus or self.latest_gpus()))

    def _beat(self) -> None:
        while not self._ended.wait(BEAT_SECONDS):
            try:
                self._append(gpus=tuple(self.latest_gpus()))
            except OSError as error:  # a full disk ends the run elsewhere in the code
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
    """Return the finite numbers of a log, rounded to useful digits."""
    return {
        name: float(f"{value:.6g}")
        for name, value in logs.items()
        if isinstance(value, int | float) and math.isfinite(value) and name != "step"
    }


SAMPLE_SECONDS = 2.0


class GpuSampler:
    """Reads the GPUs of some ranks every SAMPLE_SECONDS, between `start` and `stop`."""

    def __init__(self, uuid_of_rank: Mapping[int, str]):
        self.uuid_of_rank = uuid_of_rank
        self._latest: tuple[GpuSample, ...] = ()
        self._since_log: list[tuple[GpuSample, ...]] = []
        self._lock = threading.Lock()
        self._ended = threading.Event()

    @classmethod
    def of_machine(cls, process: Process) -> Self:
        """Return a sampler of this machine's GPUs on its first rank, otherwise an empty one.

        Every rank must call it.
        """
        host = socket.gethostname()
        devices = process.devices if process.is_gpu else ()
        own = [(host, f"GPU-{torch.cuda.get_device_properties(each).uuid}") for each in devices]
        found = list(itertools.chain.from_iterable(process.gather(own)))
        if process.local_rank != 0:
            return cls({})
        return cls({number: uuid for number, (there, uuid) in enumerate(found) if there == host})

    def start(self) -> threading.Thread | None:
        """Start to sample, and return the thread; None if there is no GPU."""
        if not self.uuid_of_rank:
            return None
        thread = threading.Thread(target=self._sample, name="gpus", daemon=True)
        thread.start()
        return thread

    def stop(self) -> None:
        """Stop sampling."""
        self._ended.set()

    def latest(self) -> Sequence[GpuSample]:
        """Return the last sample of each GPU; nothing before the first one."""
        return self._latest

    def mean_since_log(self) -> Sequence[GpuSample]:
        """Return the mean load since the last call, and the peak memory."""
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
    """Return one sample that averages those of one GPU; a field that any of them lacks is None."""

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


FIRST_STEP = 6  # kernels are chosen and compiled in earlier steps


class StepTrace:
    """Records `steps` steps of this process from FIRST_STEP on; 0 records nothing."""

    def __init__(self, path: Path, steps: int):
        self.path = path
        self.steps = steps
        cycle = schedule(skip_first=FIRST_STEP - 2, wait=0, warmup=1, active=steps or 1, repeat=1)
        self.profiler = profile(schedule=cycle, on_trace_ready=self._write) if steps else None

    def on_train_begin(self, *_: Any) -> None:
        """Start the profiler; it records nothing before FIRST_STEP."""
        if self.profiler is not None:
            self.profiler.start()

    def on_step_end(self, *_: Any) -> None:
        """Count a step."""
        if self.profiler is not None:
            self.profiler.step()

    def on_train_end(self, state: State, control: Control) -> None:
        """Write the steps that were recorded, and warn if there are none."""
        profiler, self.profiler = self.profiler, None
        if profiler is None:
            return
        profiler.stop()
        if profiler.step_num < FIRST_STEP:
            logger.warning(
                "train.profile_steps=%d: nothing was recorded. This process trained %d steps, and "
                "records from its step %d on: type TRAIN_MAX_STEPS=%d.",
                self.steps,
                profiler.step_num,
                FIRST_STEP,
                state.global_step - profiler.step_num + FIRST_STEP + self.steps - 1,
            )

    def _write(self, profiler: profile) -> None:
        if profiler.step_num < FIRST_STEP:
            return  # training ended while FIRST_STEP was about to start
        self.path.parent.mkdir(exist_ok=True)
        temporary = self.path.with_name(f".{self.path.name}")
        temporary.unlink(missing_ok=True)  # a link would be followed
        profiler.export_chrome_trace(str(temporary))
        rename(temporary, self.path)
        logger.info("trace of %d training steps: %s", self.steps, self.path)


class Observers:
    """The context in which a run trains: inside it, threads sample GPUs and write metrics."""

    def __init__(self, context: RunContext, opened: Sequence[TrainerCallback]):
        """`opened` are the trackers. Every rank must call it; all ranks except 0 pass none."""
        self.gpus = GpuSampler.of_machine(context.process)
        self.trackers = Trackers(opened)
        path = context.folder.metrics if context.process.is_main else None
        self.metrics_file = MetricsFile(path, self.gpus.latest)
        steps = context.config.train.profile_steps if context.process.is_main else 0
        self.trace = StepTrace(context.folder.trace, steps)

    def __enter__(self) -> Self:
        self.gpus.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.gpus.stop()
        self.metrics_file.stop()

    def close(self, settings: Mapping[str, Any], scores: Mapping[str, float]) -> None:
        """Show the settings with the last scores, and end the trackers."""
        if scores:
            self.trackers.note_scores(settings, scores)
        self.trackers.close()
