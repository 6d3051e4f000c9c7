"""Micro-batch, accumulation and checkpointing: chosen so that the step fits and the effective batch is kept. Pure."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from sft_play.errors import ConfigError, OutOfMemory

SATURATED_TOKENS = 8192  # of a micro-batch: beyond it an H200 gains under 3 % in speed
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


@dataclass(frozen=True)
class Chosen:
    """A step that fits: `batch_size` x `grad_accum` x world size = `effective_batch` rows."""

    batch_size: int
    grad_accum: int
    gradient_checkpointing: bool
    effective_batch: int


def choose(wanted: Wanted, peak_bytes: Callable[[int, bool], int], budget_bytes: int, device: str) -> Chosen:
    """Return the fastest step that fits in `budget_bytes`; an explicit value always survives.

    `peak_bytes(batch_size, gradient_checkpointing)` is the estimate; `device` is named in errors. In order of speed:
    the batch that saturates the device without checkpointing, down to a quarter of it, then with checkpointing down to 1.
    Where only an explicit accumulation keeps the effective batch from being reached, a default one gives way last of all.

    Raises: ConfigError when the numbers contradict each other; OutOfMemory when nothing fits.
    """
    effective = _effective(wanted)
    candidates = [candidate for sizes in _batch_sizes(wanted, effective) for candidate in _by_speed(sizes, wanted)]
    for size, used in candidates:
        if peak_bytes(size, used) <= budget_bytes:
            return _chosen(wanted, effective, size, used)
    size, used = candidates[-1]
    if isinstance(wanted.batch_size, int):
        return _chosen(wanted, effective, size, used)  # the user's number stands: the estimate is an estimate, and the plan warns
    rows = f"{size} rows, which train.grad_accum={wanted.grad_accum} calls for," if size > 1 else "1 row"
    raise OutOfMemory(
        f"train.batch_size=auto: even {rows} of {wanted.seq_len} tokens{' with checkpointing' if used else ''} needs "
        f"{peak_bytes(size, used) / GIB:.1f} GiB, {device} has {budget_bytes / GIB:.1f} GiB to give; try "
        f"{'TRAIN_GRAD_ACCUM=auto, ' if size > 1 else ''}TUNING_MODE=qlora, MODEL_MAX_SEQ_LEN={max(1, wanted.seq_len // 2)}, "
        f"make train-deepspeed on more GPUs, or TRAIN_BATCH_SIZE={size} to try it all the same"
    )


def _chosen(wanted: Wanted, effective: int, size: int, used: bool) -> Chosen:
    accum = wanted.grad_accum if isinstance(wanted.grad_accum, int) else effective // (size * wanted.world_size)
    return Chosen(size, accum, used, size * accum * wanted.world_size)


def _effective(wanted: Wanted) -> int:
    """Return the rows of an optimizer step that batch, accumulation and world size can make."""
    world, batch, accum = wanted.world_size, wanted.batch_size, wanted.grad_accum
    unit = world * (batch if isinstance(batch, int) else 1) * (accum if isinstance(accum, int) else 1)
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
        options = " or ".join(f"TRAIN_EFFECTIVE_BATCH_SIZE={value}" for value in (below, above) if value)
        raise ConfigError(f"train.effective_batch_size={wanted.effective_batch} is no multiple of {_arithmetic(batch, world, accum)}; set {options}")
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
    start = next((size for size in divisors if size >= _saturating(wanted)), share)  # the smallest that saturates
    return [[size for size in reversed(divisors) if size <= start]]


def _by_speed(sizes: list[int], wanted: Wanted) -> list[tuple[int, bool]]:
    """Return (size, checkpointing) in order of speed; recomputing beats batches under a quarter of what saturates the device."""
    checkpointing = [False, True] if wanted.gradient_checkpointing == "auto" else [wanted.gradient_checkpointing]
    return [(size, used) for used in checkpointing for size in sizes if used == checkpointing[-1] or 4 * size >= min(sizes[0], _saturating(wanted))]


def _saturating(wanted: Wanted) -> int:
    """Rows of SATURATED_TOKENS tokens."""
    return max(1, -(-SATURATED_TOKENS // wanted.seq_len))
