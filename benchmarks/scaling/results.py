"""The results file of `make bench-scaling`: an entry for each work, number of GPUs, strategy."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.machine import Machine
from benchmarks.speed.results import ArmResult
from benchmarks.speed.workloads import find_workload
from sft_play.runs.files import read_json, write_json

REFERENCE_ARM = "ours-bnb"


class Case(NamedTuple):
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


@dataclass
class ScalingResults:
    """All cases of a machine, written after each: an interrupted benchmark loses nothing."""

    path: Path
    machine: Machine
    gpus: int  # of the host
    found: dict[Case, ArmResult]

    @classmethod
    def read(cls, path: Path) -> ScalingResults:
        """Return the results of a file."""
        entry = read_json(path)
        found = {}
        for case in entry.pop("cases"):
            key = Case(**{name: case.pop(name) for name in Case._fields})
            found[key] = ArmResult.from_json(case)
        gpus = entry.pop("gpus")
        return cls(path, Machine(**entry), gpus, found)

    def write(self) -> None:
        """Write the file."""
        cases: list[dict[str, Any]] = []
        for case, result in sorted(self.found.items()):
            cases.append(case._asdict() | result.as_json())
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_json(self.path, asdict(self.machine) | {"gpus": self.gpus, "cases": cases})

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
