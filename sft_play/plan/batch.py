"""Micro-batch, accumulation and checkpointing: chosen so that the step fits and the effective batch is kept. Pure."""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from sft_play.errors import ConfigError, OutOfMemory
from sft_play.plan.speed import OVERHEAD_TOKENS, RECOMPUTED

SATURATED_TOKENS, SATURATED_LOSS = (
    8192,
    0.03,
)  # of a micro-batch: beyond it an H200 gains under 3 % in speed
GIB = 2**30


@dataclass(frozen=True)
class Wanted:
    """What the user set, or `auto`."""

    batch_size: int | Literal["auto"]
    grad_accum: int | Literal["auto"]
    effective_batch: int
    is_effective_set: bool  # by the user; else it is a default that gives way
    gradient_checkpointing: bool | Literal["auto"]
    seq_len: int
    world_size: int
    layers: int  # of the model
    is_by_layer: bool = True  # else all layers are checkpointed or none
    fullest_step: int | None = (
        None  # whole sequences that the fullest packed step of all ranks takes; None: not packed, or not counted yet
    )


@dataclass(frozen=True)
class Chosen:
    """A step that fits: `batch_size` x `grad_accum` x world size = `effective_batch` rows, the first `checkpointed_layers` layers computed twice."""

    batch_size: int
    grad_accum: int
    checkpointed_layers: int
    layers: int
    effective_batch: int

    @property
    def checkpointing(self) -> Literal["none", "selective", "full"]:
        """What of the activations is computed again."""
        return (
            "full"
            if self.checkpointed_layers == self.layers
            else "selective"
            if self.checkpointed_layers
            else "none"
        )


def choose(
    wanted: Wanted, peak_bytes: Callable[[int, int], int], budget_bytes: int, device: str
) -> Chosen:
    """Return the fastest step that fits in `budget_bytes`; an explicit value always survives.

    `peak_bytes(batch_size, checkpointed_layers)` is the estimate; `device` is named in errors. Each micro-batch is tried with as
    few layers checkpointed as it fits with, and `_cost` decides among them. Where only an explicit accumulation keeps the
    effective batch from being reached, a default one gives way last of all.

    Raises: ConfigError when the numbers contradict each other; OutOfMemory when nothing fits.
    """
    effective, by_layers = _effective(wanted), _layers_to_try(wanted)
    groups = _batch_sizes(wanted, effective)
    for sizes in groups:
        fewest = {
            size: bisect_left(
                by_layers,
                True,
                key=lambda layers, size=size: peak_bytes(size, layers) <= budget_bytes,
            )
            for size in sizes
        }
        fitting = [
            (size, by_layers[number]) for size, number in fewest.items() if number < len(by_layers)
        ]
        if fitting:
            return _chosen(wanted, effective, *min(fitting, key=lambda step: _cost(*step, wanted)))
    least = smallest(wanted)
    size, layers = least.batch_size, least.checkpointed_layers
    if isinstance(wanted.batch_size, int):
        return least  # the user's number stands: the estimate is an estimate, and the plan warns
    rows = (
        f"{size} rows, which train.grad_accum={wanted.grad_accum} calls for,"
        if size > 1
        else "1 row"
    )
    raise OutOfMemory(
        f"train.batch_size=auto: even {rows} of {wanted.seq_len} tokens{' with checkpointing' if layers else ''} needs "
        f"{peak_bytes(size, layers) / GIB:.1f} GiB, {device} has {budget_bytes / GIB:.1f} GiB to give"
    )


def smallest(wanted: Wanted) -> Chosen:
    """Return the step that needs least of all that `wanted` allows."""
    effective = _effective(wanted)
    return _chosen(
        wanted, effective, _batch_sizes(wanted, effective)[-1][-1], _layers_to_try(wanted)[-1]
    )


def pack_into(fullest_step: int, batch_size: int, world_size: int) -> tuple[int, int]:
    """Return (micro-batches of each rank, sequences of each) of packed steps: as few as hold the fullest, and then no larger than that takes.

    >>> pack_into(9, batch_size=4, world_size=1)  # three of 3, where two of 4 do not do and a third of 4 would stay empty
    (3, 3)
    """
    number = -(-fullest_step // (batch_size * world_size))
    return number, -(-fullest_step // (number * world_size))


def micro_batches(wanted: Wanted, batch_size: int) -> int:
    """Return how many micro-batches of up to `batch_size` rows each rank trains in a step."""
    if wanted.fullest_step is not None:
        return pack_into(wanted.fullest_step, batch_size, wanted.world_size)[0]
    return _chosen(wanted, _effective(wanted), batch_size, 0).grad_accum


def _tokens(wanted: Wanted, batch_size: int) -> float:
    """Return the tokens of a micro-batch, of the fullest step where rows are packed."""
    if wanted.fullest_step is None:
        return batch_size * wanted.seq_len
    return (
        wanted.fullest_step
        * wanted.seq_len
        / (micro_batches(wanted, batch_size) * wanted.world_size)
    )


def sequences(wanted: Wanted, batch_size: int) -> int:
    """Return how many sequences a micro-batch of up to `batch_size` rows has at most."""
    return (
        batch_size
        if wanted.fullest_step is None
        else pack_into(wanted.fullest_step, batch_size, wanted.world_size)[1]
    )


def _layers_to_try(wanted: Wanted) -> list[int]:
    """Numbers of checkpointed layers, fewest first. True is all of them, as transformers has it."""
    if wanted.gradient_checkpointing == "auto":
        return list(range(wanted.layers + 1)) if wanted.is_by_layer else [0, wanted.layers]
    return [wanted.layers if wanted.gradient_checkpointing else 0]


def _cost(size: int, checkpointed_layers: int, wanted: Wanted) -> float:
    """Return what a row costs against one in a step of whole efficiency."""
    return (1 + RECOMPUTED * checkpointed_layers / wanted.layers) * (
        1 + OVERHEAD_TOKENS / _tokens(wanted, size)
    )


def _chosen(wanted: Wanted, effective: int, size: int, layers: int) -> Chosen:
    accum = (
        wanted.grad_accum
        if isinstance(wanted.grad_accum, int)
        else effective // (size * wanted.world_size)
    )
    return Chosen(size, accum, layers, wanted.layers, size * accum * wanted.world_size)


def _effective(wanted: Wanted) -> int:
    """Return the rows of an optimizer step that batch, accumulation and world size can make."""
    world, batch, accum = wanted.world_size, wanted.batch_size, wanted.grad_accum
    unit = (
        world * (batch if isinstance(batch, int) else 1) * (accum if isinstance(accum, int) else 1)
    )
    if isinstance(batch, int) and isinstance(accum, int):
        if wanted.is_effective_set and unit != wanted.effective_batch:
            raise ConfigError(
                f"{_arithmetic(batch, world, accum)} = {unit}, but train.effective_batch_size={wanted.effective_batch}; set one of the three to auto"
            )
        return unit
    if wanted.effective_batch % unit == 0:
        return wanted.effective_batch
    below, above = wanted.effective_batch // unit * unit, -(-wanted.effective_batch // unit) * unit
    if wanted.is_effective_set:
        options = " or ".join(
            f"TRAIN_EFFECTIVE_BATCH_SIZE={value}" for value in (below, above) if value
        )
        raise ConfigError(
            f"train.effective_batch_size={wanted.effective_batch} is no multiple of {_arithmetic(batch, world, accum)}; set {options}"
        )
    return above


def _arithmetic(batch: int | str, world: int, accum: int | str) -> str:
    factors = [f"train.batch_size={batch}"] if isinstance(batch, int) else []
    factors += [f"{world} ranks"] if world > 1 else []
    factors += [f"train.grad_accum={accum}"] if isinstance(accum, int) else []
    return " x ".join(factors)


def _batch_sizes(wanted: Wanted, effective: int) -> list[list[int]]:
    """Return the micro-batches to try, largest first: those that keep the effective batch, then one by one those by which it gives way."""
    if isinstance(wanted.batch_size, int):
        return [[wanted.batch_size]]
    share = effective // wanted.world_size
    if isinstance(wanted.grad_accum, int):
        keeping = share // wanted.grad_accum
        return [[size] for size in range(keeping, 0, -1)][: 1 if wanted.is_effective_set else None]
    divisors = [size for size in range(1, share + 1) if share % size == 0]
    enough = _saturating_tokens(max(_tokens(wanted, size) for size in divisors))
    start = next(size for size in divisors if _tokens(wanted, size) >= enough)
    return [[size for size in reversed(divisors) if size <= start]]


def _saturating_tokens(most: float) -> float:
    """Return the tokens of a micro-batch that is fast enough: SATURATED_TOKENS, or where a step has few, what is within 3 % of its `most` at once.

    1 + OVERHEAD / t <= (1 + loss) (1 + OVERHEAD / most), for t.
    """
    return min(
        SATURATED_TOKENS,
        OVERHEAD_TOKENS / (SATURATED_LOSS + (1 + SATURATED_LOSS) * OVERHEAD_TOKENS / most),
    )
