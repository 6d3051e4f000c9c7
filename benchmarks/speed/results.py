"""The results file of `make bench`: each part is a type that reads and writes its own JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.machine import Machine
from sft_play.runs.files import read_json, write_json
from sft_play.runs.report import LoggedLoss

OPTIONAL = {  # left out of the file where they are None
    "error",
    "seconds_spent",
    "own_tokens_per_second",
    "predicted_gib",
    "rows_used",
    "unhidden_communication",
    "flops_per_second",
    "mfu",
    "mfu_of_reached",
    "commit",
}


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

    @classmethod
    def from_json(cls, entry: dict[str, Any]) -> Measurement:
        """Return the measurement in a flat entry of the file."""
        losses = [LoggedLoss(**loss) for loss in entry["losses"]]
        return cls(**fields_of(cls, entry) | {"losses": losses})


@dataclass(frozen=True)
class ArmRun:
    """One run of an arm: what it measured, or why it measured nothing."""

    status: str  # done, failed or out of memory
    started: float  # time.time() when its process was started
    settings: dict[str, object] = field(default_factory=dict)  # chosen by the arm
    error: str | None = None
    seconds_spent: float | None = None  # by a run that failed
    measured: Measurement | None = None  # of a run that is done

    def as_json(self) -> dict[str, Any]:
        """Return the run and what it measured as one flat object."""
        entry = asdict(self)
        del entry["measured"]
        if self.measured:
            entry |= asdict(self.measured)
        return _without_optional(entry)

    @classmethod
    def from_json(cls, entry: dict[str, Any]) -> ArmRun:
        """Return what `as_json` wrote."""
        measured = Measurement.from_json(entry) if entry["status"] == "done" else None
        return cls(**fields_of(cls, entry) | {"measured": measured})


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

    def as_json(self) -> dict[str, Any]:
        """Return all parts as one flat object."""
        entry = self.run.as_json() | asdict(self.verdict) | asdict(self.shares)
        entry |= {
            "timed_steps": self.timed_steps,
            "versions": self.versions,
            "commit": self.commit,
        }
        return _without_optional(entry)

    @classmethod
    def from_json(cls, entry: dict[str, Any]) -> ArmResult:
        """Return what `as_json` wrote."""
        return cls(
            run=ArmRun.from_json(entry),
            verdict=Verdict(**fields_of(Verdict, entry)),
            shares=PeakShares(**fields_of(PeakShares, entry)),
            timed_steps=entry["timed_steps"],
            versions=entry["versions"],
            commit=entry.get("commit"),
        )


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

    def as_json(self) -> dict[str, Any]:
        """Return the workload's entry in the file."""
        arms = {name: arm.as_json() for name, arm in self.arms.items()}
        if self.reference is None:
            return {"arms": arms}
        return {"arms": arms, "reference": asdict(self.reference)}

    @classmethod
    def from_json(cls, entry: dict[str, Any]) -> WorkloadResults:
        """Return what `as_json` wrote."""
        arms = {name: ArmResult.from_json(arm) for name, arm in entry["arms"].items()}
        reference = Reference(**entry["reference"]) if "reference" in entry else None
        return cls(arms, reference)


@dataclass
class SpeedResults:
    """The results file, written after every arm, so that an interrupted benchmark loses nothing."""

    path: Path
    machine: Machine
    workloads: dict[str, WorkloadResults]

    @classmethod
    def read(cls, path: Path) -> SpeedResults:
        """Return the results of a file with the machine that they were measured on."""
        entry = read_json(path)
        workloads = {}
        for name, workload in entry.pop("works").items():
            workloads[name] = WorkloadResults.from_json(workload)
        return cls(path, Machine(**entry), workloads)

    @classmethod
    def on_this_machine(cls, path: Path | None, on_cpu: bool, name: str = "speed") -> SpeedResults:
        """Return results to add to: those of the file, by default the card's own, if it exists."""
        machine = Machine.here(on_cpu)
        path = path or machine.results_path(name)
        return cls(path, machine, cls.read(path).workloads if path.exists() else {})

    def of(self, workload: str) -> WorkloadResults:
        """Return the results of a workload, to be changed in place."""
        return self.workloads.setdefault(workload, WorkloadResults())

    def write(self) -> None:
        """Write the file."""
        works = {name: workload.as_json() for name, workload in self.workloads.items()}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_json(self.path, asdict(self.machine) | {"works": works})


def fields_of(kind: type, entry: dict[str, Any]) -> dict[str, Any]:
    """Return the values of a flat object that are fields of `kind`."""
    return {each.name: entry[each.name] for each in fields(kind) if each.name in entry}


def _without_optional(entry: dict[str, Any]) -> dict[str, Any]:
    kept = entry.items()
    return {name: value for name, value in kept if value is not None or name not in OPTIONAL}
