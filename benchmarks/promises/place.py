"""The GPUs, the folder and the time of one piece of work, and the programs that it starts."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from benchmarks.machine import ROOT
from benchmarks.processes import clean_environment, run_limited
from benchmarks.results import Result, Results
from benchmarks.runner import with_repository

LOG_NUMBERS = count()


@dataclass(frozen=True, kw_only=True)
class Work:
    """An entry of works.yaml, which says what the fields mean."""

    name: str
    rows: tuple[int, ...]
    done: str
    shown_by: str
    gpus: int
    seconds: float
    host: int = 0
    on_cpu: bool = True
    environ: dict[str, str] = field(default_factory=dict)
    cases: tuple[str, ...] = ()


@dataclass(frozen=True)
class Place:
    """Where a piece of work runs."""

    work: Work
    gpus: list[str]  # entries of CUDA_VISIBLE_DEVICES; on a CPU an entry for each process
    folder: Path
    ends_at: float  # time.monotonic()
    on_cpu: bool

    def run(self, *words: object) -> str:
        """Return what a program printed. Raises RuntimeError if it fails."""
        environ = with_repository(clean_environment(os.environ)) | self.work.environ
        if self.gpus:
            environ["CUDA_VISIBLE_DEVICES"] = "" if self.on_cpu else ",".join(self.gpus)
        log = self.folder / f"{self.work.name}-{next(LOG_NUMBERS)}.log"
        seconds = max(0, self.ends_at - time.monotonic())
        ended = run_limited(list(map(str, words)), log, seconds, ROOT, environ)
        if ended.status != 0:
            raise RuntimeError(ended.cause)
        return log.read_text(encoding="utf-8", errors="replace")

    def train(self) -> dict[str, Result]:
        """Return the results of the cases, sorted by name, which must all be done."""
        path = self.folder / f"{self.work.name}.json"
        words = [*self.work.cases, "--folder", self.folder, "--results", path]
        toy = ["--toy"] if self.on_cpu else []
        self.run(sys.executable, "-m", "benchmarks.promised_hardware", *words, *toy)
        found = {each.workload: each for each in Results.read(path).results}
        causes = [each.cause for each in found.values() if each.status != "done"]
        assert not causes, causes
        return found

    def smi(self, query: str) -> list[list[str]]:
        """Return the cells of a query of nvidia-smi about these GPUs."""
        form = ("--format=csv,noheader,nounits", f"--id={','.join(self.gpus)}")
        printed = subprocess.check_output(["nvidia-smi", f"--query-{query}", *form], text=True)
        return [line.split(", ") for line in printed.splitlines()]
