"""What `make bench-plan` measures beyond a Result. `Result.figures` stores it."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TypeVar

from pydantic import TypeAdapter

from benchmarks.results import Result
from benchmarks.workloads import WORKLOADS, Workload, read_table

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """A workload whose combinations of micro-batch size and checkpointed layers are all timed."""

    name: str  # also of the workload
    budgets_gib: tuple[float | None, ...]  # memory of the card; None: all of it
    batch_sizes: tuple[int, ...] = (1, 2, 4, 8, 16)
    checkpointed: tuple[float, ...] = (0, 0.25, 0.5, 1)  # fractions of the layers
    # fractions for which the largest micro-batch is searched
    largest_checkpointed: tuple[float, ...] = (0, 0.5)
    # If the plan expects more tokens to fit, no largest micro-batch is searched: it takes too long.
    most_tokens: int = 65536

    @property
    def workload(self) -> Workload:
        return WORKLOADS[self.name]

    @property
    def max_seq_len(self) -> int:
        return self.workload.max_seq_len


SWEEPS = read_table("planner/sweeps.yaml", Sweep)


@dataclass(frozen=True)
class Memory:
    """Peak bytes of a run, in total and by phase, and its speed. None and {} if unknown."""

    peak: int | None = None
    phases: dict[str, int] = field(default_factory=dict)
    tokens_per_second: float | None = None  # after the first step


@dataclass(frozen=True)
class RunFigures:
    """What was predicted of a run and what it measured.

    All predictions are of the step that was trained.
    """

    steps: int = 0
    budget_bytes: int | None = None
    predicted: Memory = Memory()  # closed form
    probed: Memory = Memory()
    measured: Memory = Memory()

    @property
    def measured_peak(self) -> int | None:
        """The most bytes of any phase; those of the process if no phase was measured."""
        return max(self.measured.phases.values(), default=self.measured.peak)


@dataclass(frozen=True)
class Combination:
    """A micro-batch size with a number of checkpointed layers: measured and predicted."""

    batch_size: int
    checkpointed_layers: int
    micro_seconds: float | None  # of one micro-batch; None: out of memory
    peak_bytes: int | None  # None without a GPU
    predicted_bytes: int  # in closed form
    tokens_per_second: float | None  # of complete optimizer steps; None: out of memory


@dataclass(frozen=True)
class CardChoice(Combination):
    """A combination that the plan or the probe chose for a card."""

    fits: bool


@dataclass(frozen=True)
class LargestMicroBatch:
    """The most tokens of a micro-batch that plan and probe expect to fit, and that do fit."""

    checkpointed_layers: int
    plan: int
    probe: int | None
    true: int


@dataclass(frozen=True)
class BudgetFigures:
    """What was chosen for a card of some size, and what is fastest there."""

    gib: float | None  # None: all memory of the card
    plan_fits: bool
    choices: dict[str, CardChoice]  # by "plan" and "probe"
    best: Combination | None  # the fastest that fits
    largest: list[LargestMicroBatch]


@dataclass(frozen=True)
class SweepFigures:
    """Every combination of a sweep, and what was chosen for each card."""

    layers: int
    optimizer_seconds: float
    combinations: list[Combination]
    budgets: list[BudgetFigures]


def figures_of(result: Result, kind: type[T]) -> T:
    """Return the figures of a result as a RunFigures or SweepFigures."""
    names = [each.name for each in fields(kind)]
    known = {name: result.figures[name] for name in names if name in result.figures}
    return TypeAdapter(kind).validate_python(known)
