"""Predict steps of any size from two small measured steps, and cache the measurements. No torch.

Legend: t tokens of a micro-batch, L checkpointed layers.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Self

from sft_play.plan import counting
from sft_play.plan.batch import BatchRequest
from sft_play.plan.memory import StepBytes, is_fullest_at_begin, step_bytes
from sft_play.plan.step import Layout, StepSpec
from sft_play.runs.files import read_json, write_json

logger = logging.getLogger(__name__)

# Source files that affect the allocations of a step
COMPUTING = (
    "sft_kernels/**/*.py",
    "sft_play/models/**/*.py",
    *(f"sft_play/training/{name}.py" for name in ("loop", "batches", "dry_run")),
)
# Share of the allocator's memory: pieces too small for any tensor. The rest of the plan's reserve
# is measured now.
FRAGMENTATION = 0.03
BY_TOKENS = ("forward", "backward")  # phases that grow with the tokens; the optimizer's does not


@dataclass(frozen=True)
class ProbePoint:
    """Peak bytes of the allocator in each phase of a step, over all ranks."""

    tokens: int  # of a micro-batch on one rank
    checkpointed_layers: int
    accumulates: bool  # gradients of an earlier micro-batch were in memory
    phases: Mapping[str, int]  # forward, backward, and optimizer if it was stepped

    @property
    def peak(self) -> int:
        return max(self.phases.values())


@dataclass(frozen=True)
class ProbeReport:
    """The measurements of a probe before the first step, and the resulting choice."""

    points: tuple[ProbePoint, ...]  # the two that were fitted first, if there are two
    predicted_before: Mapping[str, int]  # bytes of each phase by the closed form
    predicted_after: Mapping[str, int] | None  # by what was measured; None without a GPU
    verified_bytes: int | None  # of the chosen step, measured; None if it was not
    seconds: float
    cached: bool  # points of an earlier probe were sufficient
    changed: bool  # a different batch was chosen than planned


@dataclass(frozen=True)
class LinearFit:
    """Bytes as fixed + slope x tokens."""

    fixed: float
    slope: float

    @classmethod
    def through(cls, tokens: Sequence[int], sizes: Sequence[int]) -> Self:
        """Return the line through two points.

        It is constant if it would fall, or if both points have the same number of tokens.
        """
        width = tokens[1] - tokens[0]
        slope = max(0.0, (sizes[1] - sizes[0]) / width) if width else 0.0
        return cls(sizes[1] - slope * tokens[1], slope)


@dataclass(frozen=True)
class MeasuredFit:
    """The closed form of a step, corrected by two points with the same layers checkpointed.

    Forward and backward are lines in t, measured F + S t and in closed form f(L) + s(L) t. For
    other t and L
        bytes(t, L) = closed(t, L) + (F - f(L0)) + (S / s(L0) - 1) (closed(t, L) - f(L)),
    which is exact at both points and follows the closed form elsewhere. The optimizer's
    phase is shifted by its difference. Phases that no probe runs are unchanged. All bytes
    include the context, which a point does not include.
    """

    step: StepSpec
    small: ProbePoint
    large: ProbePoint

    def phases(self, layout: Layout) -> dict[str, int]:
        """Return the bytes of every phase of a step."""
        closed = step_bytes(self.step, layout).totals()
        found = {**closed}
        for name in self.large.phases:
            found[name] += self._excess(name, layout, closed[name])
        layouts = [_one_row(point, point.tokens, layout.world_size) for point in self._points]
        moments = {is_fullest_at_begin(self.step, each) for each in (layout, *layouts)}
        if len(moments) > 1:
            # The points saw gradients if this step has activations, or the other way round; the
            # forward pass saw those activations.
            found["backward"] = closed["backward"] + found["forward"] - closed["forward"]
        return found

    def peak(self, layout: Layout) -> int:
        """Return the bytes of the phase that needs most."""
        return max(self.phases(layout).values())

    def memory(self, layout: Layout) -> StepBytes:
        """Return the bytes by component, with what was measured beyond them."""
        fitted = self.phases(layout)
        phases = dict(step_bytes(self.step, layout).phases)
        for name, phase in phases.items():
            phases[name] = replace(phase, measured_beyond=fitted[name] - phase.total)
        return StepBytes(phases)

    @property
    def _points(self) -> tuple[ProbePoint, ProbePoint]:
        return self.small, self.large

    def _excess(self, name: str, layout: Layout, closed_bytes: int) -> int:
        """Return the bytes measured beyond the closed form in a phase."""
        context = context_bytes(self.step, layout)
        measured = [point.phases[name] + context for point in self._points]
        closed_there = self._closed_at_points(name, self.large, layout.world_size)
        if name not in BY_TOKENS:
            return max(measured) - closed_there[1]
        tokens = [point.tokens for point in self._points]
        line, at_points = (
            LinearFit.through(tokens, measured),
            LinearFit.through(tokens, closed_there),
        )
        closed_here = self._closed_at_points(name, layout, layout.world_size)
        ratio = line.slope / at_points.slope if at_points.slope else 1.0
        scaled = (ratio - 1) * (closed_bytes - LinearFit.through(tokens, closed_here).fixed)
        return round(line.fixed - at_points.fixed + scaled)

    def _closed_at_points(self, name: str, like: ProbePoint | Layout, world_size: int) -> list[int]:
        """Return the closed form at the points' numbers of tokens, otherwise as `like`."""
        rows = [_one_row(like, point.tokens, world_size) for point in self._points]
        return [step_bytes(self.step, row).totals()[name] for row in rows]


def _one_row(like: ProbePoint | Layout, tokens: int, world_size: int) -> Layout:
    """Return the layout of one row with all the tokens, which needs the bytes of several rows."""
    return Layout(1, 1 + like.accumulates, world_size, tokens, like.checkpointed_layers)


def memory_as_measured(
    step: StepSpec, layout: Layout, point: ProbePoint, used_bytes: int
) -> StepBytes:
    """Return the bytes of a step that was itself measured, at `point`.

    `used_bytes` is what the process used then, including the allocator's gaps and the actual
    context. The peak is at least that.
    """
    memory = MeasuredFit(step, point, point).memory(layout)
    missing = used_bytes - memory.predicted_peak
    if missing <= 0:
        return memory
    peak = memory.peak
    fuller = replace(peak, measured_beyond=peak.measured_beyond + missing)
    return StepBytes({**memory.phases, memory.peak_phase: fuller})


def context_bytes(step: StepSpec, layout: Layout) -> int:
    """Return the closed form's bytes outside the allocator."""
    return step_bytes(step, layout).peak.context


def budget_bytes(step: StepSpec, layout: Layout, allocatable_bytes: int) -> int:
    """Return the bytes that a rank may use, context included.

    `allocatable_bytes` is the total that the allocator can get.
    """
    return int(allocatable_bytes * (1 - FRAGMENTATION)) + context_bytes(step, layout)


def request_of_started_run(request: BatchRequest, planned: Layout) -> BatchRequest:
    """Return the possible choices once a run has started.

    Its effective batch is fixed. If a backend patched all layers while it loaded, whether they are
    checkpointed is fixed, too.
    """
    request = replace(request, effective_batch=planned.rows_per_step, is_effective_set=True)
    if request.recomputes_by_layer:
        return request
    return replace(request, gradient_checkpointing=planned.checkpointed_layers > 0)


def point_of(layout: Layout, points: Sequence[ProbePoint]) -> ProbePoint | None:
    """Return what was measured of a layout itself; None if it was not tried."""
    for point in points:
        is_same = point.checkpointed_layers == layout.checkpointed_layers
        if is_same and point.tokens == layout.tokens and point.accumulates >= layout.accumulates:
            return point
    return None


def is_known_to_fit(
    step: StepSpec, layout: Layout, points: Sequence[ProbePoint], budget: int
) -> bool:
    """Return whether a step that needs at least as much was measured, within the budget."""
    beside = context_bytes(step, layout)
    for point in points:
        needs_as_much = (
            point.tokens >= layout.tokens
            and point.checkpointed_layers <= layout.checkpointed_layers
            and point.accumulates >= layout.accumulates
        )
        if needs_as_much and point.peak + beside <= budget:
            return True
    return False


@cache
def digest_of_step() -> str:
    """Return the SHA-256 of the sources that compute a step."""
    return counting.digest_of_code(*COMPUTING)


def read_points(folder: Path, fingerprint: str) -> tuple[ProbePoint, ...]:
    """Return the points of an earlier probe, the two of its fit first; () if none can be read."""
    path = folder / f"{fingerprint}.json"
    try:
        return tuple(ProbePoint(**point) for point in read_json(path)["points"])
    except FileNotFoundError:
        return ()
    except (ValueError, KeyError, TypeError) as error:
        reason = f"{type(error).__name__}: {error}"
        logger.warning("%s: cannot be read (%s); measuring again", path, reason)
        return ()


def write_points(folder: Path, fingerprint: str, points: Sequence[ProbePoint]) -> None:
    """Cache the points of a probe, the two of its fit first."""
    write_json(folder / f"{fingerprint}.json", {"points": [asdict(point) for point in points]})
