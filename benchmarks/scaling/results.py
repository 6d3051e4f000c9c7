"""The results file of `make bench-scaling`: an entry for each work, number of GPUs, strategy."""

from __future__ import annotations

from dataclasses import dataclass, field

from benchmarks.files import Results
from benchmarks.speed.results import ArmResult
from benchmarks.speed.workloads import find_workload

REFERENCE_ARM = "ours-bnb"


@dataclass(frozen=True, order=True)
class Case:
    """A workload on some GPUs; `times` as many rows a step as on one GPU, or as many as there."""

    work: str
    arm: str
    strategy: str
    gpus: int
    times: int

    @property
    def is_weak(self) -> bool:
        """Return whether every GPU has as many rows as one alone."""
        return self.times == self.gpus

    @property
    def reference(self) -> Case:
        """Return the same rows on one GPU: whose loss this case must have."""
        return Case(self.work, REFERENCE_ARM, "single", 1, self.times)

    @property
    def baseline(self) -> Case:
        """Return the one GPU whose speed is multiplied: with its own program, and its own rows."""
        times = 1 if self.is_weak else self.times
        return Case(self.work, self.arm, "single", 1, times)

    @property
    def workload_name(self) -> str:
        return find_workload(self.work).scaled(self.times).name


@dataclass(frozen=True)
class CaseResult:
    """A case, and what it measured."""

    case: Case
    result: ArmResult


@dataclass(kw_only=True)
class ScalingResults(Results):
    """All cases of a host."""

    gpus: int = 0  # of the host
    cases: list[CaseResult] = field(default_factory=list)

    @property
    def found(self) -> dict[Case, ArmResult]:
        """The results by case."""
        return {each.case: each.result for each in self.cases}

    def add(self, case: Case, result: ArmResult) -> None:
        """Put a result in the place of an older one, and write the file."""
        found = self.found | {case: result}
        self.cases = [CaseResult(key, each) for key, each in sorted(found.items())]
        self.write()

    def speed(self, case: Case) -> float | None:
        """Return a case's real tokens a second; None where it has none that counts."""
        result = self.found.get(case)
        if result is None or result.run.measured is None or not result.verdict.counts:
            return None
        return result.run.measured.tokens_per_second

    def speedup(self, case: Case) -> float | None:
        """Return how many times as fast a case is as one GPU with the same program."""
        one = self.speed(case.baseline)
        own = self.speed(case)
        return own / one if own and one else None
