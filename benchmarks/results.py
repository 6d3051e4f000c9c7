"""What a benchmark measured: one Result per run, and the file that stores the results of a machine.

Loads no torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Self, TypeVar

from pydantic import Field, TypeAdapter

from benchmarks.machine import Machine, repository_commit
from sft_play.runs.files import write_json
from sft_play.runs.report import LoggedLoss

T = TypeVar("T")


@dataclass(frozen=True)
class Result:
    """One run of an arm: what it measured, or why it measured nothing."""

    workload: str
    arm: str
    gpus: int = 1
    strategy: str = "single"
    status: str = "done"  # done, refused (by the plan), out of memory, out of time or failed
    cause: str | None = None  # if it is not done
    tokens_per_second: float | None = None  # of all GPUs, without padding
    peak_gib: float | None = None  # reserved by torch's allocator on the fullest GPU
    planned_gib: float | None = None
    losses: list[LoggedLoss] = field(default_factory=list)
    off: float | None = None  # largest deviation from the loss of the reference, as a fraction
    why_not: list[str] = field(default_factory=list)  # reasons not to count it
    settings: dict[str, Any] = field(default_factory=dict)  # chosen by the program
    figures: dict[str, Any] = field(default_factory=dict)  # what else was measured
    commit: str | None = None
    versions: dict[str, str | None] = field(default_factory=dict)

    @property
    def key(self) -> tuple[str, str, int, str]:
        """What was run. A new result replaces the one with the same key."""
        return (self.workload, self.arm, self.gpus, self.strategy)

    @property
    def counts(self) -> bool:
        """Whether the run was measured, or refused as expected, and nothing speaks against it."""
        return self.status in ("done", "refused") and not self.why_not

    def figure(self, name: str) -> Any:
        """Return a figure by its name; None if it was not measured."""
        return self.figures.get(name)


@dataclass(frozen=True)
class Reference:
    """The loss of every step of a run in high precision."""

    precision: str
    made_of: dict[str, Any]  # what it was trained on; if that changes, it is trained again
    losses: list[float]


@dataclass(kw_only=True)
class Results:
    """Results of a machine. The file is written after each, so an interruption loses nothing."""

    machine: Machine
    gpus: int = 1  # of the host
    references: dict[str, Reference] = field(default_factory=dict)  # by workload
    results: list[Result] = field(default_factory=list)
    path: Annotated[Path, Field(exclude=True)] = Path()

    @classmethod
    def read(cls, path: Path) -> Self:
        """Return the results of a file."""
        results = read_as(cls, path)
        results.path = path
        return results

    @classmethod
    def on_this_machine(cls, path: Path | None, on_cpu: bool, kind: str) -> Self:
        """Return the results to add to: those of the file, by default the file of the card."""
        machine = Machine.here(on_cpu)
        path = path or machine.results_path(kind)
        results = cls.read(path) if path.exists() else cls(machine=machine)
        results.machine, results.path = machine, path
        return results

    @property
    def kind(self) -> str:
        """The benchmark: the file's name up to the card."""
        return self.path.stem.partition("-")[0]

    def find(
        self, workload: str, arm: str, gpus: int = 1, strategy: str = "single"
    ) -> Result | None:
        """Return a result by its key."""
        key = (workload, arm, gpus, strategy)
        return next((result for result in self.results if result.key == key), None)

    def add(self, result: Result) -> None:
        """Add a result, with the commit and the versions, and write the file."""
        result = replace(result, commit=repository_commit(), versions=self.machine.versions)
        found = {each.key: each for each in (*self.results, result)}
        self.results = [found[key] for key in sorted(found)]
        self.write()

    def write(self) -> None:
        """Write the file."""
        write_as(self.path, self)


def read_as(kind: type[T], path: Path) -> T:
    """Return what `write_as` wrote."""
    return TypeAdapter(kind).validate_json(path.read_bytes())


def write_as(path: Path, value: Any) -> None:
    """Write a dataclass as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, TypeAdapter(type(value)).dump_python(value, mode="json"))
