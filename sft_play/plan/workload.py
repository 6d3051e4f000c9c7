"""How much a run trains: rows, steps, tokens, hours. Pure: no torch, no I/O; the caller brings what was counted."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

from sft_play.plan.resolve import Plan
from sft_play.plan.speed import LABELLED, StepWork, predict

CHARACTERS_PER_TOKEN = (
    4  # of English under vocabularies of 32,000 words and more; others take fewer
)
# What ragged rows cost, by the real sampler on log-normal lengths (median 300, at most 2,048), steps of 32 rows
PACKED = 1.07  # tokens computed for each real one
PADDED = 2.4  # the same, unpacked, is 1 + PADDED x (batch size / rows of a step)
FULLEST = 1.4  # micro-batches that the fullest packed step takes, which all of them take, against those that the mean would


@dataclass(frozen=True)
class Counted:
    """Training samples of one epoch."""

    samples: int
    tokens: int
    labelled: float = LABELLED  # share of the tokens that have loss
    is_estimated: bool = False  # from the size of files, not by a tokenizer


@dataclass(frozen=True)
class Workload:
    """What a run trains, and how long that takes; evaluations, loading and saving are not counted."""

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

    def as_json(self) -> dict[str, float | int | bool | None]:
        """Return counts and seconds as plain numbers."""
        return asdict(self)


def estimated_tokens(characters: Iterable[int], max_seq_len: int) -> float:
    """Return the tokens of rows of so many characters, each row cut where the longest may end."""
    return sum(min(count / CHARACTERS_PER_TOKEN, max_seq_len) for count in characters)


def estimated(sources: Sequence[tuple[float, float, float | None]], held_out: float) -> Counted:
    """Return what sources of (rows, tokens of a row, weight or None) come to in an epoch, `held_out` of the rows evaluated on.

    Weights make the sources stand in their ratio, the scarcest for its weight whole and the others repeated, as the mix of the run does.
    """
    weights = [weight for _, _, weight in sources]
    most = max((rows / weight for rows, _, weight in sources if weight), default=0.0)
    taken = [
        most * weight if weight and None not in weights else rows for rows, _, weight in sources
    ]
    kept = 1 - held_out
    tokens = sum(rows * length for rows, (_, length, _) in zip(taken, sources, strict=True))
    return Counted(max(1, round(kept * sum(taken))), round(kept * tokens), is_estimated=True)


def workload(plan: Plan, counted: Counted) -> Workload:
    """Return what a plan makes of counted rows, which are at least one."""
    train = plan.config.train
    per_epoch = math.ceil(counted.samples / plan.chosen.effective_batch)
    steps = train.max_steps or math.ceil(train.epochs * per_epoch)
    found = predict(plan.shape, plan.step, _work(plan, counted), plan.card, plan.ranks.nodes)
    seconds = steps * found.step_seconds if found else None
    return Workload(
        samples=counted.samples,
        tokens=counted.tokens,
        is_estimated=counted.is_estimated,
        epochs=steps / per_epoch,
        steps=steps,
        tokens_per_second=found.tokens_per_second if found else None,
        seconds=seconds,
        gpu_hours=seconds * plan.ranks.world_size / 3600 if seconds is not None else None,
    )


def _work(plan: Plan, counted: Counted) -> StepWork:
    """The mean step of a rank."""
    chosen, world, mean = plan.chosen, plan.ranks.world_size, counted.tokens / counted.samples
    rows = min(chosen.effective_batch, counted.samples) / world
    room = chosen.batch_size * plan.config.model.max_seq_len
    if plan.packing:
        fewest = math.ceil(FULLEST * rows * mean / room)
        return StepWork(
            rows,
            mean,
            min(fewest, chosen.grad_accum),
            counted.labelled,
            PACKED if mean < 0.9 * plan.config.model.max_seq_len else 1.0,
        )
    longest = plan.config.model.max_seq_len / mean  # no row is padded further
    return StepWork(
        rows,
        mean,
        chosen.grad_accum,
        counted.labelled,
        min(longest, 1 + PADDED * chosen.batch_size / chosen.effective_batch),
    )
