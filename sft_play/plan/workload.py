"""How much a run trains: rows, steps, tokens, hours. Pure: no torch, no I/O."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sft_play.config.schema import Config
from sft_play.plan.run_plan import RunPlan
from sft_play.plan.speed import LABELLED, StepWork, predict

# Of English under vocabularies of 32,000 words and more; others take fewer
CHARACTERS_PER_TOKEN = 4
# What ragged rows cost, by the real sampler on log-normal lengths (median 300, at most 2,048) and
# steps of 32 rows
PACKED = 1.07  # tokens computed for each real one; in one row hardly any
PADDED = 2.4  # the same, unpacked, is 1 + PADDED x (batch size / rows of a step)
FULLEST = (
    1.4  # micro-batches of the fullest packed step, which all steps take, over those of the mean
)


@dataclass(frozen=True)
class Counted:
    """Training samples of one epoch."""

    samples: int
    tokens: int
    labelled: float = LABELLED  # share of the tokens that have loss
    is_estimated: bool = False  # from the size of files, not by a tokenizer


@dataclass(frozen=True)
class Workload:
    """What a run trains, and how long that takes, without evaluations, loading and saving."""

    samples: int  # of an epoch
    tokens: int  # of an epoch
    is_estimated: bool
    epochs: float
    steps: int
    tokens_per_second: (
        float | None
    )  # real ones of these rows, all ranks; None where the speed is not known
    seconds: float | None
    gpu_hours: float | None


def estimated_tokens(characters: Iterable[int], max_seq_len: int) -> float:
    """Return the tokens of rows of so many characters, each row cut where the longest may end."""
    return sum(min(count / CHARACTERS_PER_TOKEN, max_seq_len) for count in characters)


def estimated(sources: Sequence[tuple[float, float, float | None]], held_out: float) -> Counted:
    """Return what sources of (rows, tokens of a row, weight or None) come to in an epoch.

    `held_out` is the share of the rows that are evaluated on. Weights set the ratio of the sources:
    the one that is scarcest for its weight is whole and the others are repeated, as the run mixes
    them.
    """
    weights = [weight for _, _, weight in sources]
    most = max((rows / weight for rows, _, weight in sources if weight), default=0.0)
    taken = [
        most * weight if weight and None not in weights else rows for rows, _, weight in sources
    ]
    kept = 1 - held_out
    tokens = sum(rows * length for rows, (_, length, _) in zip(taken, sources, strict=True))
    return Counted(max(1, round(kept * sum(taken))), round(kept * tokens), is_estimated=True)


def workload(config: Config, plan: RunPlan, counted: Counted) -> Workload:
    """Return what a plan makes of counted rows, of which there is at least one."""
    train = config.train
    steps_per_epoch = math.ceil(counted.samples / plan.layout.rows_per_step)
    steps = train.max_steps or math.ceil(train.epochs * steps_per_epoch)
    work = _mean_step(plan, counted)
    speed = predict(plan.step, plan.layout, work, plan.card, plan.ranks.nodes)
    seconds = steps * speed.step_seconds if speed else None
    return Workload(
        samples=counted.samples,
        tokens=counted.tokens,
        is_estimated=counted.is_estimated,
        epochs=steps / steps_per_epoch,
        steps=steps,
        tokens_per_second=speed.tokens_per_second if speed else None,
        seconds=seconds,
        gpu_hours=seconds * plan.ranks.world_size / 3600 if seconds is not None else None,
    )


def _mean_step(plan: RunPlan, counted: Counted) -> StepWork:
    """Return the mean step of a rank."""
    layout = plan.layout
    mean_tokens = counted.tokens / counted.samples
    rows = min(layout.rows_per_step, counted.samples) / layout.world_size
    if not plan.packing:
        longest = layout.max_seq_len / mean_tokens  # no row is padded further
        padding = min(longest, 1 + PADDED * layout.batch_size / layout.rows_per_step)
        return StepWork(rows, mean_tokens, layout.grad_accum, counted.labelled, padding)
    capacity = layout.batch_size * layout.max_seq_len
    micro_batches = min(math.ceil(FULLEST * rows * mean_tokens / capacity), layout.grad_accum)
    has_rows = mean_tokens < 0.9 * layout.max_seq_len and not layout.in_one_row
    padding = PACKED if has_rows else 1.0
    return StepWork(rows, mean_tokens, micro_batches, counted.labelled, padding)
