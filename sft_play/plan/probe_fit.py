"""What two small measured steps say of a step of any size, what fits by that, and where it is remembered. No torch.

Legend: t tokens of a micro-batch, L checkpointed layers.
"""

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Self

from sft_play.errors import OutOfMemory
from sft_play.plan import batch
from sft_play.plan.memory import StepBytes, StepShape, begins_fullest, step_bytes
from sft_play.plan.model_shape import ModelShape
from sft_play.plan.sizing import Choice
from sft_play.runs.files import read_json, write_json

logger = logging.getLogger(__name__)

PACKAGE = Path(__file__).resolve().parents[1]
COMPUTING = (
    "models/**/*.py",
    "training/trainer.py",
    "training/dry_run.py",
)  # sources that decide what a step allocates
FRAGMENTATION = 0.03  # of what the allocator can have: pieces too small for any tensor. The rest of the plan's reserve is measured now
BY_TOKENS = ("forward", "backward")  # phases that grow with the tokens; the optimizer's does not
GIB = 2**30


@dataclass(frozen=True)
class Point:
    """The most that the allocator held, in bytes, in each phase of a measured step; the largest of all ranks."""

    tokens: int  # of a micro-batch on one rank
    checkpointed_layers: int
    accumulates: bool  # gradients of another micro-batch were there
    phases: Mapping[str, int]  # forward, backward, and optimizer where it was stepped

    @property
    def peak(self) -> int:
        return max(self.phases.values())


@dataclass(frozen=True)
class Line:
    """Bytes as fixed + slope x tokens."""

    fixed: float
    slope: float

    @classmethod
    def through(cls, one: tuple[int, int], other: tuple[int, int]) -> Self:
        """Return the line through two points (tokens, bytes); level where it would fall, or both have as many tokens."""
        width = other[0] - one[0]
        slope = max(0.0, (other[1] - one[1]) / width) if width else 0.0
        return cls(other[1] - slope * other[0], slope)


@dataclass(frozen=True)
class Fit:
    """The closed form of a step, corrected by two points with the same layers checkpointed.

    Forward and backward are lines in t, measured F + S t and in closed form f(L) + s(L) t. For other t and L
        bytes(t, L) = closed(t, L) + (F - f(L0)) + (S / s(L0) - 1) (closed(t, L) - f(L)),
    which is what was measured at both points and follows the closed form elsewhere. The optimizer's phase is moved by what
    it differs, the phases that no probe runs are left as they are. All with the context, which a point does not hold.
    """

    choice: Choice
    small: Point
    large: Point

    def phases(self, batch_size: int, checkpointed_layers: int) -> dict[str, int]:
        """Return the bytes of every phase of a step."""
        step, closed = (
            self.choice.step_of(batch_size, checkpointed_layers),
            self.choice.bytes_of(batch_size, checkpointed_layers),
        )
        found = {name: phase.total for name, phase in closed.phases.items()}
        for name in self.large.phases:
            found[name] += self._excess(name, step, found[name])
        if (
            "backward" in found
            and len(
                {
                    begins_fullest(self.choice.shape, each)
                    for each in (self._step_of(self.small), self._step_of(self.large), step)
                }
            )
            > 1
        ):
            # the points saw gradients where this step has activations, or the other way round; the forward pass saw those activations
            found["backward"] = (
                closed.phases["backward"].total + found["forward"] - closed.phases["forward"].total
            )
        return found

    def peak(self, batch_size: int, checkpointed_layers: int) -> int:
        """Return the bytes of the phase that needs most."""
        return max(self.phases(batch_size, checkpointed_layers).values())

    def _excess(self, name: str, step: StepShape, closed_bytes: int) -> int:
        """What was measured beyond the closed form in a phase, for `step`."""
        if name not in BY_TOKENS:
            return (
                max(self.small.phases[name], self.large.phases[name])
                + self._context
                - self._closed(name, self.large)
            )
        measured = Line.through(
            *(
                (point.tokens, point.phases[name] + self._context)
                for point in (self.small, self.large)
            )
        )
        closed = self._closed_line(name, self.large.checkpointed_layers, self.large.accumulates)
        of_step = self._closed_line(name, step.checkpointed_layers, step.accumulates)
        ratio = measured.slope / closed.slope if closed.slope else 1.0
        return round(measured.fixed - closed.fixed + (ratio - 1) * (closed_bytes - of_step.fixed))

    def _closed_line(self, name: str, checkpointed_layers: int, accumulates: bool) -> "Line":
        """The closed form between the two token counts, with other layers checkpointed."""
        points = (
            replace(point, checkpointed_layers=checkpointed_layers, accumulates=accumulates)
            for point in (self.small, self.large)
        )
        return Line.through(*((point.tokens, self._closed(name, point)) for point in points))

    def _closed(self, name: str, point: Point) -> int:
        """The closed form of a point."""
        return step_bytes(self.choice.shape, self._step_of(point)).phases[name].total

    def _step_of(self, point: Point) -> StepShape:
        """The step of a point: a row as long as it has tokens."""
        return replace(
            self.choice.step,
            seq_len=point.tokens,
            checkpointed_layers=point.checkpointed_layers,
            accumulates=point.accumulates,
        )

    @property
    def _context(self) -> int:
        return context_bytes(self.choice)


def context_bytes(choice: Choice) -> int:
    """Return what the closed form counts for what lies outside the allocator."""
    return choice.bytes_of(1, 0).peak.context


def budget_bytes(choice: Choice, allocatable_bytes: int) -> int:
    """Return what a rank may take, context included, of which the allocator can have `allocatable_bytes` in all."""
    return int(allocatable_bytes * (1 - FRAGMENTATION)) + context_bytes(choice)


def to_choose_again(choice: Choice, effective_batch: int, checkpointed_layers: int) -> Choice:
    """Return what may be chosen once a run has begun: not its effective batch, nor how Unsloth checkpoints, which it patched in while it loaded."""
    wanted = replace(choice.wanted, effective_batch=effective_batch, is_effective_set=True)
    if not wanted.is_by_layer:
        wanted = replace(wanted, gradient_checkpointing=checkpointed_layers > 0)
    return replace(choice, wanted=wanted)


def is_known_to_fit(
    chosen: batch.Chosen, choice: Choice, points: Sequence[Point], budget: int
) -> bool:
    """Return whether a step that needs at least as much was measured, within the budget."""
    step = choice.step_of(chosen.batch_size, chosen.checkpointed_layers)
    tokens, accumulates = step.batch_size * step.seq_len, step.accumulates
    larger = [
        p
        for p in points
        if p.tokens >= tokens
        and p.checkpointed_layers <= chosen.checkpointed_layers
        and p.accumulates >= accumulates
    ]
    return any(point.peak + context_bytes(choice) <= budget for point in larger)


def no_room(fit: Fit, chosen: batch.Chosen, allowed: int, budget: int, device: str) -> OutOfMemory:
    """Return the error of a step that does not fit, with what to type for the same effective batch; tries have shown that no more than `allowed` is safe."""
    wanted = fit.choice.wanted
    try:
        fitting = batch.choose(
            replace(wanted, batch_size="auto", grad_accum="auto", gradient_checkpointing="auto"),
            fit.peak,
            allowed,
            device,
        )
        words = f"TRAIN_BATCH_SIZE={fitting.batch_size} TRAIN_GRAD_ACCUM={fitting.grad_accum}"
        words += (
            " TRAIN_GRADIENT_CHECKPOINTING=auto"
            if fitting.checkpointed_layers > chosen.checkpointed_layers
            else ""
        )
    except OutOfMemory:
        words = smaller(wanted.seq_len)
    needs = fit.peak(chosen.batch_size, chosen.checkpointed_layers)
    return OutOfMemory(
        f"train.batch_size={chosen.batch_size} does not fit: a step takes about {needs / GIB:.1f} GiB by what was measured before training, "
        f"and {device} has {budget / GIB:.1f} GiB; try {words}"
    )


def smaller(seq_len: int) -> str:
    """Return the words for a run whose single rows do not fit."""
    return f"TUNING_MODE=qlora, MODEL_MAX_SEQ_LEN={max(1, seq_len // 2)}, or make train-deepspeed on more GPUs"


def phases_json(fitted: Mapping[str, int], closed: StepBytes) -> dict[str, dict[str, int]]:
    """Return the phases of a plan.json whose sums are the fitted ones: what they differ by is a component of its own."""
    return {
        name: {
            **phase.as_json(),
            "measured_beyond": fitted[name] - phase.total,
            "total": fitted[name],
        }
        for name, phase in closed.phases.items()
    }


@dataclass(frozen=True)
class Subject:
    """All that a step's bytes follow from beside its tokens and checkpointed layers: points of an equal one hold."""

    shape: ModelShape
    step: StepShape  # mode, adapters, row length, optimizer, ranks, ZeRO stage
    tuning: Mapping[str, Any]
    model: Mapping[str, Any]
    precision: str
    packing: bool
    strategy: str
    deepspeed: Mapping[str, Any] | None
    ddp: Mapping[str, Any]
    fast_parts: Sequence[str]
    gpus: Sequence[tuple[str, int]]  # name and bytes of each rank's
    versions: Mapping[str, str]
    code: str

    def fingerprint(self) -> str:
        """Return the SHA-256 of its canonical JSON."""
        return hashlib.sha256(
            json.dumps(asdict(self), sort_keys=True, separators=(",", ":")).encode()
        ).hexdigest()


@cache
def digest_of_code() -> str:
    """Return the SHA-256 of the sources that compute a step."""
    paths = sorted(path for pattern in COMPUTING for path in PACKAGE.glob(pattern))
    total = hashlib.sha256()
    for path in paths:
        text = path.read_bytes()
        total.update(f"{path.relative_to(PACKAGE)}:{len(text)}:".encode() + text)
    return total.hexdigest()


def remembered(folder: Path, fingerprint: str) -> tuple[Point, ...]:
    """Return the points of an earlier probe, the two of its fit first; none where there was none, or its file is damaged."""
    path = folder / f"{fingerprint}.json"
    try:
        return tuple(Point(**point) for point in read_json(path)["points"])
    except FileNotFoundError:
        return ()
    except (ValueError, KeyError, TypeError) as error:
        logger.warning(
            "%s: cannot be read (%s: %s); measuring anew", path, type(error).__name__, error
        )
        return ()


def remember(folder: Path, fingerprint: str, points: Sequence[Point]) -> None:
    """Write the points of a probe, the two of its fit first."""
    write_json(folder / f"{fingerprint}.json", {"points": [asdict(point) for point in points]})
