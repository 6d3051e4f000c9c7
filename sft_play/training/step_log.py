"""Log the steps since the last log: speed, time by part, and each rank separately.

Every rank measures without waiting for a GPU; the values are gathered once per log.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.nn.parallel import DistributedDataParallel

from sft_play.runs.metrics import GpuSample
from sft_play.training.callbacks import EvalSpeedCallback
from sft_play.training.events import LogDetails
from sft_play.training.memory import MemoryMeter

WAITED = "step/communication_seconds"  # time spent waiting for gradients of other ranks
SAMPLED = {  # fields of GpuSample by the names of TensorBoard
    "util_percent": "busy_percent",
    "used_gib": "used_gib",
    "watts": "watts",
    "celsius": "celsius",
}
STEP_PARTS = ("data", "forward", "backward", "optimizer", "communication")


class Work(NamedTuple):
    """What a rank has trained up to a point in time, or between two."""

    seconds: float  # only of training steps
    steps: int
    tokens: int  # of the samples, without padding
    distinct: int  # without beginnings that were computed for another sample
    rows: int
    flops: float  # that the rows require at least; 0 if they are not counted

    def since(self, before: "Work") -> "Work":
        """Return the work between two points in time."""
        return Work._make(now - then for now, then in zip(self, before, strict=True))


@dataclass(frozen=True)
class RankLog:
    """What one rank measured since the last log."""

    loss: float  # its shares of the logged loss, summed over steps
    token_share: float  # of the labeled tokens of each step, summed over steps
    work: Work | None  # None before the second step
    seconds: dict[str, float]  # by part of a step
    memory: dict[str, float]  # GiB by kind
    gpus: tuple[GpuSample, ...]  # of all GPUs of its machine, on its first rank


@dataclass(frozen=True)
class LoggedSteps:
    """What is logged of the steps since the last log, over all ranks."""

    loss: float  # the mean over steps
    speed: dict[str, float]  # and how long ranks waited for each other
    details: LogDetails


class StepLog:
    """Measures the steps of this rank, and collects what the ranks measured at each log of a loss.

    Tokens per second count after the first step, which compiles and allocates. `tokens` is the
    number of real tokens that this rank has trained, counted on the CPU like `rows` and `flops`.
    `flops_of(lengths, labeled)` counts the FLOPs of documents. `peak_flops` is the card's FLOPS,
    None if not known. `mean_gpus` returns the mean load, since its last call, of the GPUs that
    this rank samples.
    """

    def __init__(
        self,
        evaluations: EvalSpeedCallback,
        memory: MemoryMeter,
        flops_of: Callable[[Sequence[int], int], float] | None = None,
        peak_flops: float | None = None,
        mean_gpus: Callable[[], Sequence[GpuSample]] = tuple,
    ):
        self.process = memory.process
        self.evaluations = evaluations
        self.memory = memory
        self.times = memory.times
        self.flops_of = flops_of
        self.peak_flops = peak_flops
        self.mean_gpus = mean_gpus
        self.tokens = self.distinct = 0
        self.rows = 0
        self.flops = 0.0
        self.steps = 0
        self.save_seconds = 0.0
        self.first_step_seconds = 0.0
        self._started_at = 0.0  # in seconds of `clock`, as in the three below
        self._first_step: Work | None = None
        self._last_step: Work | None = None
        self._last_log: Work | None = None
        self._logged_loss = 0.0  # summed over the steps that were logged
        self.reset()

    def reset(self, step: int = 0) -> None:
        """Forget the loss and the seconds before `step`: a probe's steps do not count."""
        # of this rank since the last log, times the ranks; it stays on the GPU
        self._loss = torch.tensor(0.0, device=self.process.device)
        self._loss_before = self._loss
        self._token_share = 0.0
        self.logged_step = step
        self.times.take()

    def clock(self) -> float:
        """Return the time in seconds, excluding evaluations and saves."""
        return time.perf_counter() - self.evaluations.seconds - self.save_seconds

    def on_train_begin(self, *_: Any) -> None:
        self._started_at = self.clock()

    def on_step_end(self, *_: Any) -> None:
        if self._first_step is None:
            self._first_step = self._mark()
            self.first_step_seconds = self._first_step.seconds - self._started_at

    def on_train_end(self, *_: Any) -> None:
        self._last_step = self._mark()

    def _mark(self) -> Work:
        """Return the work up to now, once the GPU has computed it."""
        if self.process.is_gpu:
            torch.cuda.synchronize(self.process.device)
        return self._counted()

    def _counted(self) -> Work:
        return Work(self.clock(), self.steps, self.tokens, self.distinct, self.rows, self.flops)

    @property
    def train_seconds(self) -> float:
        return self._last_step.seconds - self._started_at if self._last_step else 0.0

    def tokens_per_second(self) -> tuple[float, float] | None:
        """Return tokens and distinct tokens per second over all ranks, None for a run of one step.

        Every rank must call it.
        """
        if self._first_step is None or self._last_step is None:
            return None
        work = self._last_step.since(self._first_step)
        tokens, distinct = self.process.sum(work.tokens), self.process.sum(work.distinct)
        if tokens <= 0 or work.seconds <= 0:
            return None
        return tokens / work.seconds, distinct / work.seconds

    def add_rows(self, lengths: Sequence[int], labelled: int, shared: Sequence[int] = ()) -> None:
        """Count the samples of a step of this rank, by their tokens; `labelled` have a label.

        `shared` are beginnings that were computed for an earlier sample already.
        """
        self.steps += 1
        self.tokens += sum(lengths)
        self.distinct += sum(lengths) - sum(shared)
        self.rows += len(lengths)
        if self.flops_of is not None:
            self.flops += self.flops_of(lengths, labelled)
            if shared:
                self.flops -= self.flops_of(shared, 0)

    def start_step(self) -> None:
        """Start a step, which may be skipped later."""
        self._loss_before = self._loss.clone()

    def add_loss(self, loss: torch.Tensor, token_share: float) -> None:
        """Add a micro-batch's share of its step's loss times the ranks, and of its tokens."""
        self._loss += loss
        self._token_share += token_share

    def drop_step_unless(self, is_finite: torch.Tensor) -> None:
        """Drop the loss of this step unless the step counts; does not wait for a GPU."""
        self._loss = torch.where(is_finite, self._loss, self._loss_before)

    def total_loss(self) -> float:
        """Return the loss summed over all steps of this run."""
        return self._logged_loss + self._loss.item()

    def collect(self, step: int, model: torch.nn.Module) -> LoggedSteps:
        """Return the log values of the steps up to `step`. Every rank must call it.

        It waits for the GPU to have computed `step`.
        """
        steps = step - self.logged_step
        self.logged_step = step
        loss = self._loss.item() / self.process.world_size
        seconds = self.times.take() | unhidden_communication(model, steps)
        own = RankLog(
            loss=loss,
            token_share=self._token_share,
            work=self._work_since_log(),
            seconds={part: value / steps for part, value in seconds.items() if part in STEP_PARTS},
            memory=self.memory.gib_now(),
            gpus=tuple(self.mean_gpus()),
        )
        self._loss -= self._loss  # keeps NaN
        self._token_share = 0.0
        ranks = self.process.gather(own)
        summed_loss = torch.tensor([rank.loss for rank in ranks]).sum().item()
        self._logged_loss += summed_loss
        names = dict.fromkeys(part for rank in ranks for part in rank.seconds)
        parts = {  # of a step, as the mean over ranks
            f"step/{part}_seconds": sum(rank.seconds.get(part, 0.0) for rank in ranks) / len(ranks)
            for part in names
        }
        by_rank = losses_by_rank(ranks, steps) | parts
        by_rank |= gpu_values(ranks, self.process.device.type)
        by_rank["time/evaluation_seconds"] = self.evaluations.seconds
        by_rank["time/save_seconds"] = self.save_seconds
        waited = {WAITED: parts[WAITED]} if WAITED in parts else {}
        speed = waited | self._speed([rank.work for rank in ranks if rank.work is not None])
        gpus = tuple(sample for rank in ranks for sample in rank.gpus)
        return LoggedSteps(summed_loss / steps, speed, LogDetails(by_rank, gpus))

    def _work_since_log(self) -> Work | None:
        """Return the work of this rank since the last call; None for the first step.

        The loss of the last step was read, so the GPU has computed all counted work.
        """
        now = self._counted()
        before = self._last_log or self._first_step
        self._last_log = now
        if before is None or now.seconds <= before.seconds:
            return None
        return now.since(before)

    def _speed(self, works: Sequence[Work]) -> dict[str, float]:
        """Return the speed of all ranks, {} for the first step."""
        tokens = sum(work.tokens for work in works)
        if tokens <= 0:
            return {}
        seconds = max(work.seconds for work in works)
        speed = {
            "tokens_per_second": tokens / seconds,
            "samples_per_second": sum(work.rows for work in works) / seconds,
            "step_seconds": seconds / works[0].steps,
        }
        distinct = sum(work.distinct for work in works)
        if distinct < tokens:
            speed["distinct_tokens_per_second"] = distinct / seconds
        flops = sum(work.flops for work in works)
        if flops and self.peak_flops:
            speed["mfu"] = flops / seconds / (self.peak_flops * len(works))
        return speed


def losses_by_rank(ranks: Sequence[RankLog], steps: int) -> dict[str, float]:
    """Return the mean loss of each rank's tokens, and their share of the steps' tokens.

    The means weighted by the shares add up to the logged loss. {} for one rank.
    """
    if len(ranks) == 1:
        return {}
    values = {}
    for number, rank in enumerate(ranks):
        values[f"token_share/rank_{number}"] = rank.token_share / steps
        if rank.token_share > 0:
            values[f"loss/rank_{number}"] = rank.loss / rank.token_share
    return values


def gpu_values(ranks: Sequence[RankLog], device: str) -> dict[str, float]:
    """Return memory by rank, and the load of its GPU, as `gpu/0/util_percent`."""
    group = "gpu" if device == "cuda" else "process"
    values = {}
    for number, rank in enumerate(ranks):
        for name, size in rank.memory.items():
            values[f"{group}/{number}/{name}"] = size
        for sample in rank.gpus:
            for name, field in SAMPLED.items():
                value = getattr(sample, field)
                if value is not None:  # NVML does not report all values
                    values[f"{group}/{sample.rank}/{name}"] = value
    return values


def unhidden_communication(model: torch.nn.Module, steps: int) -> dict[str, float]:
    """Return the seconds that `steps` waited for gradients of other ranks.

    DDP measures the first steps and then one in a hundred; {} before that and for other engines.
    """
    if not isinstance(model, DistributedDataParallel):
        return {}
    timed = model._get_ddp_logging_data()  # in nanoseconds; reading it does not wait
    communication = timed.get("avg_backward_comm_time", 0)
    hidden = timed.get("avg_backward_compute_comm_overlap_time", 0)
    if not communication:
        return {}
    return {"communication": steps * max(0, communication - hidden) / 1e9}
