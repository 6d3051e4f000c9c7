"""The results file of `make bench-plan`."""

from __future__ import annotations

from dataclasses import dataclass, field

from benchmarks.files import Results
from sft_play.plan.run_plan import RunPlan
from sft_play.plan.step import Layout

Versions = dict[str, str | None]


@dataclass(frozen=True)
class Memory:
    """Peak bytes of a run, in all and by phase; None and {} where nobody said."""

    peak: int | None = None
    phases: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class MemoryAndSpeed(Memory):
    """Peak bytes, and tokens a second after the first step."""

    tokens_per_second: float | None = None


@dataclass(frozen=True)
class ProbedMemory(Memory):
    """Peak bytes as a run's probe predicts them, and what the probe took."""

    seconds: float | None = None
    is_cached: bool | None = None


@dataclass(frozen=True)
class StepSettings:
    """How a run cut its optimizer step."""

    per_device_batch_size: int
    micro_batches: int
    checkpointed_layers: int
    packing: bool

    @classmethod
    def of(cls, plan: RunPlan) -> StepSettings:
        """Return the settings of a run's plan."""
        return cls(
            per_device_batch_size=plan.layout.batch_size,
            micro_batches=plan.layout.micro_batches,
            checkpointed_layers=plan.layout.checkpointed_layers,
            packing=plan.packing,
        )

    def is_same_step(self, layout: Layout) -> bool:
        """Return whether a layout has the same micro-batches and checkpointed layers."""
        chosen = (layout.batch_size, layout.checkpointed_layers)
        return chosen == (self.per_device_batch_size, self.checkpointed_layers)


@dataclass(frozen=True)
class RunResult:
    """What was predicted of a run and what it measured.

    All predictions are of the step that was trained.
    """

    status: str  # done, refused (by the plan), out of memory, failed
    cause: str | None = None
    steps: int = 0
    losses: list[float] = field(default_factory=list)
    settings: StepSettings | None = None
    budget_bytes: int | None = None
    predicted: MemoryAndSpeed = MemoryAndSpeed()  # closed form
    traced: Memory = Memory()
    probed: ProbedMemory = ProbedMemory()
    measured: MemoryAndSpeed = MemoryAndSpeed()
    wall_seconds: float | None = None
    why_not: list[str] = field(default_factory=list)  # why it does not count
    commit: str | None = None
    versions: Versions = field(default_factory=dict)

    @property
    def measured_peak(self) -> int | None:
        """The most bytes of any phase; what the process took in all where no phase was measured."""
        return max(self.measured.phases.values(), default=self.measured.peak)


@dataclass(frozen=True)
class Combination:
    """A micro-batch size with a number of checkpointed layers: measured and predicted."""

    batch_size: int
    checkpointed_layers: int
    micro_seconds: float | None  # of one micro-batch; None: out of memory
    peak_bytes: int | None  # None without a GPU
    predicted_bytes: int  # in closed form
    tokens_per_second: float | None  # of whole optimizer steps; None: out of memory


@dataclass(frozen=True)
class CardChoice(Combination):
    """A combination that plan or probe chose for a card."""

    fits: bool

    @classmethod
    def of(cls, combination: Combination, fits: bool) -> CardChoice:
        """Return a combination as a choice."""
        return cls(**vars(combination), fits=fits)


@dataclass(frozen=True)
class LargestMicroBatch:
    """The most tokens of a micro-batch that plan and probe expect to fit, and that do."""

    checkpointed_layers: int
    plan: int
    probe: int | None
    true: int


@dataclass(frozen=True)
class BudgetResult:
    """What was chosen for a card of some size, and what is best there."""

    gib: float | None  # None: the whole card
    plan_fits: bool
    choices: dict[str, CardChoice]  # by "plan" and "probe"
    best: Combination | None  # the fastest that fits
    largest: list[LargestMicroBatch]


@dataclass(frozen=True)
class SweepResult:
    """Every combination of a sweep, and what was chosen for each card."""

    status: str  # done or failed
    cause: str | None = None  # of a failure
    layers: int | None = None
    optimizer_seconds: float | None = None
    combinations: list[Combination] = field(default_factory=list)
    budgets: list[BudgetResult] = field(default_factory=list)
    why_not: list[str] = field(default_factory=list)
    commit: str | None = None
    versions: Versions = field(default_factory=dict)


@dataclass(kw_only=True)
class PlannerResults(Results):
    """Runs and sweeps of a machine."""

    runs: dict[str, RunResult] = field(default_factory=dict)
    sweeps: dict[str, SweepResult] = field(default_factory=dict)

    def counts(self, name: str) -> bool:
        """Return whether a run or sweep has a result that counts."""
        found = self.runs.get(name) or self.sweeps.get(name)
        return found is not None and not found.why_not
