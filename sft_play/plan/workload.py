"""A run's amount of training and output, and its speed and hours. Pure: no torch, no I/O."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

from sft_play.config.schedules import count_steps, options_of
from sft_play.config.schema import Config
from sft_play.config.sections.train import TrainSection
from sft_play.plan.memory import GIB, peak_bytes
from sft_play.plan.needs import may_be_float8
from sft_play.plan.recipe import RowFacts
from sft_play.plan.run_plan import PlannedRun, RunPlan
from sft_play.plan.speed import LABELLED, StepWork, predict
from sft_play.plan.step import StepSpec

# For English with vocabularies of at least 32,000 words; other languages need fewer
CHARACTERS_PER_TOKEN = 4
# The cost of rows with different lengths, measured with the real sampler on log-normal lengths
# (median 300, at most 2,048) and steps of 32 rows
PACKED = 1.07  # computed tokens per real token; in one row hardly any more
PADDED = 2.4  # the same, unpacked, is 1 + PADDED x (batch size / rows of a step)
# micro-batches of the fullest packed step, which all steps have, relative to those of the mean
FULLEST = 1.4


@dataclass(frozen=True)
class Counted:
    """Training samples of one epoch."""

    samples: int
    tokens: int
    labelled: float = LABELLED  # share of the tokens that have loss
    is_estimated: bool = False  # from some of the rows
    by_characters: bool = False  # estimated from characters, not by a tokenizer
    samples_per_row: float = 1.0
    distinct: float = 1.0  # share of the tokens without beginnings that samples of a row share

    @property
    def rows(self) -> int:
        return round(self.samples / self.samples_per_row)

    @classmethod
    def estimate(cls, facts: RowFacts, longest: int) -> Self:
        """Return the number of samples of rows in an epoch, each of at most `longest` tokens."""
        mean_tokens = sum(min(length, longest) for length in facts.lengths) / len(facts.lengths)
        samples = round(facts.rows * facts.samples_per_row)
        return cls(
            samples,
            round(samples * mean_tokens),
            facts.labelled or LABELLED,
            is_estimated=True,
            by_characters=facts.uncounted_because is not None,
            samples_per_row=facts.samples_per_row,
            distinct=facts.distinct,
        )


@dataclass(frozen=True)
class Workload:
    """A run's training data, and its time without evaluations, loading and saving."""

    rows: int  # of an epoch
    samples: int  # of an epoch
    tokens: int  # of an epoch
    is_estimated: bool
    by_characters: bool
    epochs: float
    steps: int
    # real ones of these rows, all ranks; None if the speed is not known
    tokens_per_second: float | None
    seconds: float | None
    gpu_hours: float | None
    warning: str | None = None
    conversations: str | None = None  # what rows of several samples cost


def epoch_rows(sources: Sequence[tuple[float, float | None]]) -> list[float]:
    """Return the rows of an epoch from each source of (rows, weight or None).

    Weights set the ratio of the sources. The one that is scarcest for its weight is read once and
    the others are repeated, as in the run.
    """
    if any(weight is None for _, weight in sources):
        return [rows for rows, _ in sources]
    most = max(rows / weight for rows, weight in sources)
    return [most * weight for _, weight in sources]


def workload(config: Config, plan: RunPlan, counted: Counted) -> Workload:
    """Return the workload of a plan for counted rows; there must be at least one row."""
    steps_per_epoch = math.ceil(counted.rows / plan.layout.rows_per_step)
    steps = _count_steps(config.train, steps_per_epoch)
    is_separate = config.train.share_prefixes is False or config.tuning.backend == "unsloth"
    share = 1.0 if is_separate else counted.distinct
    work = _mean_step(plan, replace(counted, tokens=round(counted.tokens * share)))
    speed = predict(plan.step, plan.layout, plan.card, plan.ranks.nodes, work)
    seconds = steps * speed.step_seconds if speed else None
    return Workload(
        rows=counted.rows,
        samples=counted.samples,
        tokens=counted.tokens,
        is_estimated=counted.is_estimated,
        by_characters=counted.by_characters,
        epochs=steps / steps_per_epoch,
        steps=steps,
        tokens_per_second=speed.tokens_per_second / share if speed else None,
        seconds=seconds,
        gpu_hours=seconds * plan.ranks.world_size / 3600 if seconds is not None else None,
        warning=schedule_warning(config.train, steps),
        conversations=describe_conversations(
            counted.rows, counted.samples, counted.tokens, round(counted.tokens * counted.distinct)
        ),
    )


def schedule_warning(train: TrainSection, steps: int) -> str | None:
    """Return a warning about a schedule that does not fit its run, None if it fits."""
    if train.warmup_steps > max(1, steps) and train.lr_scheduler_type != "constant":
        return (
            f"train.warmup_steps={train.warmup_steps:g} of {steps} steps: the run ends at "
            f"{100 * steps / train.warmup_steps:.0f} % of its learning rate; lower "
            "TRAIN_WARMUP_STEPS: TRAIN_WARMUP_STEPS=0.1 is a tenth of the run"
        )
    decay = options_of(train, steps).get("num_decay_steps", 0)
    warmup = count_steps(train.warmup_steps, steps)
    if decay and warmup + decay > steps + 1:  # both may be rounded up
        return (
            f"train.lr_scheduler_kwargs: {warmup} steps of warm-up and num_decay_steps={decay} are "
            f"more than the run's {steps} steps, so it starts in the middle of its decay; lower "
            "num_decay_steps (under 1 it is a fraction of the run)"
        )
    return None


def _count_steps(train: TrainSection, steps_per_epoch: int) -> int:
    return train.max_steps or math.ceil(train.epochs * steps_per_epoch)


def _mean_step(plan: RunPlan, counted: Counted) -> StepWork:
    """Return the mean step of a rank."""
    layout = plan.layout
    mean_tokens = counted.tokens / counted.samples
    rows = counted.samples_per_row * min(layout.rows_per_step, counted.rows) / layout.replicas
    most = math.ceil(layout.grad_accum * counted.samples_per_row)  # micro-batches
    if not plan.packing:
        longest = layout.max_seq_len / mean_tokens  # no row is padded further
        padding = min(longest, 1 + PADDED * layout.batch_size / layout.rows_per_step)
        return StepWork(rows, mean_tokens, most, counted.labelled, padding)
    capacity = layout.batch_size * layout.max_seq_len
    micro_batches = min(math.ceil(FULLEST * rows * mean_tokens / capacity), most)
    has_rows = mean_tokens < 0.9 * layout.max_seq_len and not layout.in_one_row
    padding = PACKED if has_rows else 1.0
    return StepWork(rows, mean_tokens, micro_batches, counted.labelled, padding)


SMALL_FILES_BYTES = 50 << 20  # tokenizer, logs, answers, curves; without weights


def checkpoint_bytes(step: StepSpec) -> int:
    """Return the bytes of a checkpoint of all ranks: trained weights and the optimizer's state."""
    return step.state_bytes + step.trained_weights * (step.trained_bytes + step.master_bytes)


def run_bytes(step: StepSpec, train: TrainSection, rows: int) -> int:
    """Return the maximum disk space of a run of so many training rows.

    That is the kept checkpoints, one more until it is complete, and the trained weights.
    """
    weights = step.trained_weights * step.trained_bytes
    checkpoints = _checkpoints(train, rows)
    return SMALL_FILES_BYTES + weights + checkpoints * checkpoint_bytes(step)


def _checkpoints(train: TrainSection, rows: int) -> int:
    """Return the maximum number of checkpoints on disk. A run that is stopped leaves one."""
    steps_per_epoch = math.ceil(rows / train.effective_batch_size)
    steps = _count_steps(train, steps_per_epoch)
    saved = 0
    if train.save_strategy == "steps":
        saved = steps // train.save_steps
    elif train.save_strategy == "epoch":
        saved = math.ceil(steps / steps_per_epoch)
    kept = saved if train.save_total_limit is None else min(saved, train.save_total_limit + 1)
    return max(1, kept)


# benchmarks.float8_quality on a CPU: SmolLM2 135M and the embedded model
FLOAT8_KL = "0.10 to 0.19"
FLOAT8_MEASURED = "8B on an H200: 1.4 times, in 37 GiB instead of 43"  # docs/evidence/speed-h200.md


def describe_speed(plan: RunPlan) -> str:
    """Return how fast a run is if its rows are full, and how reliable the estimate is."""
    speed = plan.speed
    if speed is None:
        if plan.ranks.device == "cpu":
            return "not known on a CPU"
        if not plan.step.is_half:
            return "not known in float32"
        return f"not known: {plan.gpus} is no card whose data sheet is known here"
    world_size = plan.ranks.world_size
    share = ""
    if world_size > 1:
        share = f" ({speed.tokens_per_second / world_size:,.0f} per GPU)"
    waiting = speed.collective_seconds / speed.step_seconds
    waits = f", {waiting:.0%} of it waiting for other GPUs" if waiting > 0.005 else ""
    unmeasured = _unmeasured(plan.step)
    about = ""
    rate = speed.tokens_per_second
    if unmeasured:
        about = f"roughly, as {unmeasured}: about "
        rate = float(f"{rate:.2g}")
    return (
        f"{about}{rate:,.0f} tokens/s{share} if rows are full, "
        f"MFU {speed.mfu:.0%}; a step takes {_duration(speed.step_seconds)}{waits}"
    )


def describe_float8(planned: PlannedRun) -> str | None:
    """Return the effect of a float8 base and its known quality, None if it does not apply."""
    plan = planned.plan
    if plan.zero_stage or plan.speed is None or not may_be_float8(planned.config, plan.card):
        return None
    step = replace(plan.step, is_float8=True)
    peak = peak_bytes(step, plan.layout)
    speed = plan.speed_of(step, plan.layout)
    faster = speed.tokens_per_second / plan.speed.tokens_per_second
    return (
        f"TUNING_BASE_DTYPE=float8 is expected to train {faster:.1f} times as fast in "
        f"{peak / GIB:.1f} GiB ({FLOAT8_MEASURED}); its KL to the base is {FLOAT8_KL} of NF4's "
        "(docs/adapters.md)"
    )


def _unmeasured(step: StepSpec) -> str | None:
    """Return why a speed estimate is rough, None if similar runs were measured."""
    model = step.model
    if model.guess is not None:
        return "the model's layers are not known"
    if step.is_float8 and not step.is_fast:
        return "no run over a float8 base without fused kernels was measured"
    if model.structure is None:
        return None
    if model.structure.experts and (step.is_full or not step.is_fast):
        return "no such run of a model with experts was measured"
    if model.structure.recurrent_layers:
        return "only one model with recurrent layers was measured"
    return None if step.is_fast else "no run of such a model without fused kernels was measured"


def describe_run(workload: Workload | str) -> str:
    """Return how long a run takes; `workload` may be why that is not known."""
    if isinstance(workload, str):
        return f"length not known: {workload}"
    counted = "estimated from some rows" if workload.is_estimated else "counted"
    if workload.by_characters:
        counted = "estimated from the characters of some rows"
    plural = "" if workload.epochs == 1 else "s"
    text = (
        f"{workload.steps:,} steps: {workload.epochs:.3g} epoch{plural} of "
        f"{workload.rows:,} rows and {workload.tokens:,} tokens ({counted})"
    )
    if workload.seconds is None or workload.gpu_hours is None:
        return text
    return (
        f"{text}; {_duration(workload.seconds)} of training, {workload.gpu_hours:.2f} GPU-hours, "
        f"{workload.tokens_per_second:,.0f} tokens/s on these rows"
    )


def describe_conversations(rows: int, samples: int, tokens: int, distinct: int) -> str | None:
    """Return why rows are several samples, and what that costs; None if no tokens are shared.

    `distinct` counts the beginnings that samples of a row share once.
    """
    if distinct == tokens:
        return None
    return (
        f"{rows:,} rows are {samples:,} samples, because the chat template writes "
        f"earlier answers differently, e.g. without their reasoning: {tokens:,} tokens, of which "
        f"{distinct:,} are different; all samples of a row are in one optimizer step"
    )


def _duration(seconds: float) -> str:
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes = math.ceil(seconds / 60)
    if minutes < 120:
        return f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60} min"
