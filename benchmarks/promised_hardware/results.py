"""What became of each run, and the file that keeps it. Loads no torch."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.files import Results
from benchmarks.machine import GIB
from benchmarks.processes import failure_cause
from sft_play.plan.run_plan import PlannedRun
from sft_play.runs.folder import RunFolder

EXIT_CLASS = re.compile(r"exit class (\d+) \(\w+\)")


@dataclass(frozen=True)
class Trained:
    """What a run that ended well measured."""

    strategy: str
    batch_size: int  # rows of a micro-batch on each GPU
    micro_batches: int
    checkpointed_layers: int
    planned_gib: float  # on the fullest GPU, with what lies outside torch's allocator
    measured_gib: float
    reserved_gib: list[float]  # by torch's allocator, on each GPU
    tokens_per_second: float  # of all GPUs, from the second step on
    losses: list[float]  # of each step


@dataclass(frozen=True)
class Outcome:
    """One run of a case."""

    case: str
    gpus: int
    command: str  # behind what holds the memory
    status: str  # done, refused by the plan, failed, or out of time
    seconds: float  # of the whole command
    steps: int
    grad_accum: int | None = None  # None: the plan's choice
    exit_class: int | None = None
    cause: str | None = None
    trained: Trained | None = None
    commit: str | None = None


def read_outcome(status: int | None, seconds: float, out: Path) -> dict[str, Any]:
    """Return what an Outcome says of the run in `out`, by the names of its fields.

    `status` is that of `run_limited`, `seconds` its limit.
    """
    log = out / "log"
    folder = RunFolder(out / "run")
    report = folder.read_report()
    if status is None:
        return {"status": "out of time", "cause": failure_cause(None, seconds, log)}
    if report.status == "done":
        return {"status": "done", "exit_class": report.exit_class, "trained": measured(folder)}
    if report.cause is not None:
        return {"status": "failed", "exit_class": report.exit_class, "cause": report.cause}
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    for before, line in pairwise(lines):
        match = EXIT_CLASS.fullmatch(line.strip())
        if match:
            return {"status": "refused", "exit_class": int(match[1]), "cause": before.strip()}
    return {"status": "failed", "cause": failure_cause(status, seconds, log)}


def measured(folder: RunFolder) -> Trained:
    """Return what the run in a folder measured."""
    report = folder.read_report()
    plan = PlannedRun.read(folder).plan
    return Trained(
        strategy=report.strategy,
        batch_size=plan.layout.batch_size,
        micro_batches=plan.layout.micro_batches,
        checkpointed_layers=plan.layout.checkpointed_layers,
        planned_gib=report.peak_bytes.predicted / GIB,
        measured_gib=(report.peak_bytes.measured or report.peak_bytes.reserved) / GIB,
        reserved_gib=[rank.peak_bytes / GIB for rank in report.memory_by_rank],
        tokens_per_second=report.tokens_per_second,
        losses=[logged.loss for logged in report.loss],
    )


@dataclass(kw_only=True)
class PromisedResults(Results):
    """All outcomes of a machine."""

    outcomes: list[Outcome] = field(default_factory=list)

    def add(self, outcome: Outcome) -> None:
        """Put an outcome in the place of an older one, and write the file."""
        found = {(each.case, each.gpus): each for each in (*self.outcomes, outcome)}
        self.outcomes = [found[key] for key in sorted(found)]
        self.write()

    def of(self, case: str) -> list[Outcome]:
        """Return the outcomes of a case, fewest GPUs first."""
        return [outcome for outcome in self.outcomes if outcome.case == case]
