"""The results file of `make bench`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from benchmarks.files import Results
from sft_play.runs.report import LoggedLoss


class TokenCount(NamedTuple):
    """Tokens of some rows, padding left out."""

    real: int
    trained: int  # those with a label


@dataclass(frozen=True)
class Measurement:
    """What a run that ended well measured."""

    seconds: float  # of the timed steps
    real_tokens: int  # of the timed steps, padding left out
    trained_tokens: int  # those of them with a label
    ready_seconds: float  # from the start of the process to the first timed step
    losses: list[LoggedLoss]
    least_grad_norm: float | None
    untrained: list[str]  # adapters that no gradient reached
    peak_reserved_gib: float
    peak_allocated_gib: float | None
    own_tokens_per_second: float | None = None  # by our own clock, from the second step on
    predicted_gib: float | None = None  # by our planner
    rows_used: int | None = None
    unhidden_communication: float | None = None  # share of a step, of several ranks

    @property
    def tokens_per_second(self) -> float:
        """Real tokens a second."""
        return self.real_tokens / self.seconds

    @property
    def trained_tokens_per_second(self) -> float:
        """Tokens with a label a second."""
        return self.trained_tokens / self.seconds


@dataclass(frozen=True)
class ArmRun:
    """One run of an arm: what it measured, or why it measured nothing."""

    status: str  # done, failed or out of memory
    started: float  # time.time() when its process was started
    settings: dict[str, object] = field(default_factory=dict)  # chosen by the arm
    error: str | None = None
    seconds_spent: float | None = None  # by a run that failed
    measured: Measurement | None = None  # of a run that is done


@dataclass(frozen=True)
class Verdict:
    """Whether a speed counts."""

    counts: bool
    why_not: list[str]
    off: float | None  # largest deviation from the reference's loss, as a fraction


@dataclass(frozen=True)
class PeakShares:
    """Operations a second that the workload needs, and their shares of the card's peaks."""

    flops_per_second: float | None = None
    mfu: float | None = None
    mfu_of_reached: float | None = None


@dataclass(frozen=True)
class ArmResult:
    """One arm's entry in the results file."""

    run: ArmRun
    verdict: Verdict
    shares: PeakShares
    timed_steps: int
    versions: dict[str, str | None]
    commit: str | None


@dataclass(frozen=True)
class Reference:
    """The loss of every step of a run in high precision."""

    precision: str
    made_of: dict[str, Any]  # what it was trained on; for anything else it is trained anew
    losses: list[float]


@dataclass
class WorkloadResults:
    """Results of the arms on one workload, and the reference that they are compared with."""

    arms: dict[str, ArmResult] = field(default_factory=dict)
    reference: Reference | None = None


@dataclass(kw_only=True)
class SpeedResults(Results):
    """All workloads of a machine."""

    works: dict[str, WorkloadResults] = field(default_factory=dict)

    def of(self, workload: str) -> WorkloadResults:
        """Return the results of a workload, to be changed in place."""
        return self.works.setdefault(workload, WorkloadResults())
