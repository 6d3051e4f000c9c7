"""One workload through the command line that a user types, and what plan.json and run.json say.

Loads no torch.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from benchmarks.inputs import fixed_rows, ragged_rows
from benchmarks.machine import ROOT
from benchmarks.planner.results import (
    Memory,
    MemoryAndSpeed,
    ProbedMemory,
    RunResult,
    StepSettings,
)
from benchmarks.planner.workloads import HELD_OUT_ROWS, RAGGED_ROWS, Workload
from benchmarks.processes import clean_environment, last_words, run_limited
from benchmarks.speed.samples import TOY_MEDIAN, make_model
from benchmarks.speed.workloads import FULL_RATE, LORA_ALPHA, LORA_RANK, RAGGED_MEDIAN, SEED, TOY
from sft_play.errors import ExitClass
from sft_play.plan.memory import PHASES
from sft_play.plan.probe_fit import ProbeReport
from sft_play.plan.run_plan import RunPlan, read_plan
from sft_play.runs.folder import RunFolder
from sft_play.runs.report import RunReport

PLAN_SECONDS = 120.0  # limit of `plan`, which takes one or two, and some more with --exact
LORA_RATE = 2e-4


@dataclass(frozen=True)
class Place:
    """Where workloads are run, for how long, on what."""

    folder: Path  # of models and rows
    runs: Path  # of run folders, with the weights that a run saves
    seconds: float  # limit of one run
    on_cpu: bool

    @property
    def environ(self) -> dict[str, str]:
        """The caller's environment without settings of SFT-Play."""
        environ = clean_environment(os.environ)
        environ.pop("GPUS", None)
        environ.pop("EXACT", None)
        environ["NUM_GPUS"] = "1"
        if self.on_cpu:
            environ["DEVICE"] = "cpu"
        return environ


def measure(workload: Workload, place: Place, with_trace: bool = False) -> RunResult:
    """Plan a workload, run it, and return what was predicted and what was measured."""
    started = time.time()
    settings = run_settings(workload, place)
    before = print_plan(settings, place, ["--exact"] if with_trace else [])
    folder = place.runs / workload.name
    shutil.rmtree(folder, ignore_errors=True)
    place.runs.mkdir(parents=True, exist_ok=True)
    log = place.runs / f"{workload.name}.log"
    command = make_command("train", settings)
    status = run_limited(command, log, place.seconds, ROOT, place.environ)
    report = RunFolder(folder).read_report()
    trained = read_plan(RunFolder(folder)) if (folder / "plan.json").exists() else None
    # of full fine-tuning: as large as the base
    shutil.rmtree(folder / "model", ignore_errors=True)
    if report.status == "done":
        # the run has counted its rows, which were estimated before it
        before["workload"] = print_plan(settings, place).get("workload")
    return replace(
        read_result(before, trained, report, status),
        cause=read_cause(report, status, log, place.seconds),
        wall_seconds=round(time.time() - started, 1),
    )


def read_cause(report: RunReport, status: int | None, log: Path, seconds: float) -> str | None:
    """Return why a run is not done, None where it is."""
    if status == 0:
        return None
    if status is None:
        return f"not done within {seconds:.0f} s"
    return report.cause or last_words(log).partition(" exit class")[0]


def run_settings(workload: Workload, place: Place) -> dict[str, object]:
    """Return the settings of a run. The micro-batch is not among them: the plan chooses it."""
    rows = make_rows(workload, place.folder)
    model: str | Path = workload.shape  # a name is enough to refuse it
    if workload.fits or workload.shape == TOY:
        model = make_model(workload.shape, place.folder)
    return {
        "model.name": model,
        "model.max_seq_len": workload.max_seq_len,
        "model.dtype": workload.dtype,
        "tuning.mode": workload.mode,
        "tuning.lora.r": LORA_RANK,
        "tuning.lora.alpha": LORA_ALPHA,
        "data.train_path": rows / "rows.jsonl",
        "data.val_path": rows / "held-out.jsonl",
        "data.cache_dir": place.folder / "cache",
        "train.output_dir": place.runs,
        "train.run_name": workload.name,
        "train.effective_batch_size": workload.rows_per_step,
        "train.max_steps": workload.steps,
        "train.learning_rate": FULL_RATE if workload.mode == "full" else LORA_RATE,
        "train.seed": SEED,
        "train.gradient_checkpointing": workload.checkpointing,
        "train.logging_steps": workload.steps,
        "train.save_strategy": "no",
        "train.predict_with_generate": "false",
    }


def make_command(
    action: str, settings: Mapping[str, object], options: list[str] | None = None
) -> list[str]:
    """Return the command line of `plan` or `train`."""
    command = [sys.executable, "-m", "sft_play", action, "--config", "configs/base.yaml"]
    command += options or []
    for name, value in settings.items():
        command += ["--set", f"{name}={value}"]
    return command


def print_plan(
    settings: Mapping[str, object], place: Place, options: list[str] | None = None
) -> dict[str, Any]:
    """Return what `plan --json` says on this machine, also of a step that does not fit.

    Raises CalledProcessError where it says nothing.
    """
    done = subprocess.run(
        make_command("plan", settings, ["--json", *(options or [])]),
        cwd=ROOT,
        env=place.environ,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
        timeout=PLAN_SECONDS,
    )
    if done.returncode != ExitClass.OUT_OF_MEMORY:
        done.check_returncode()
    return json.loads(done.stdout)


def make_rows(workload: Workload, folder: Path) -> Path:
    """Return the folder of a workload's rows.jsonl and held-out.jsonl, made unless they exist.

    Workloads of one row length share them.
    """
    tokens = workload.max_seq_len if workload.fits else 64
    kind = "rows-ragged" if workload.is_ragged else "rows"
    made = folder / f"{kind}-{tokens}"
    if (made / "held-out.jsonl").exists():
        return made
    made.mkdir(parents=True, exist_ok=True)
    path = made / "all.jsonl"
    if workload.is_ragged:
        median = TOY_MEDIAN if workload.shape == TOY else RAGGED_MEDIAN
        ragged_rows(path, RAGGED_ROWS, median=median, most=tokens)
    else:
        fixed_rows(path, tokens, 16 * workload.rows_per_step)
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    (made / "rows.jsonl").write_text("".join(lines[:-HELD_OUT_ROWS]), encoding="utf-8")
    (made / "held-out.jsonl").write_text("".join(lines[-HELD_OUT_ROWS:]), encoding="utf-8")
    return made


def read_result(
    before: Mapping[str, Any],
    trained: RunPlan | None,
    report: RunReport,
    status: int | None,
) -> RunResult:
    """Return a run's result.

    `before` is what `plan --json` said, `trained` the plan of the run (None where it was refused),
    `report` its run.json and `status` that of its process. All predictions are of the step that was
    trained, which the probe may have changed; what nobody predicted or measured is None.
    """
    settings = StepSettings(**{each.name: before[each.name] for each in fields(StepSettings)})
    was_changed = False
    probe = None
    if trained:
        was_changed = not settings.is_same_step(trained.layout)
        settings = StepSettings.of(trained)
        probe = trained.probe
    return RunResult(
        status=read_status(report, status),
        steps=report.global_step or 0,
        losses=[logged.loss for logged in report.loss or []],
        settings=settings,
        budget_bytes=before["budget_bytes"],
        predicted=read_closed_form(before, probe, was_changed),
        traced=Memory() if was_changed else read_trace(before),
        probed=read_probe(probe),
        measured=MemoryAndSpeed(
            peak=report.peak_bytes.measured if report.peak_bytes else None,
            phases=phase_bytes(report.memory.measured if report.memory else None),
            tokens_per_second=report.tokens_per_second,
        ),
    )


def read_closed_form(
    before: Mapping[str, Any], probe: ProbeReport | None, was_changed: bool
) -> MemoryAndSpeed:
    """Return what the closed form says of the trained step, nothing where nobody asked it."""
    if probe:
        phases = phase_bytes(probe.predicted_before)
    else:
        phases = {} if was_changed else phase_bytes(before["phases"])
    speed = None if was_changed else predicted_speed(before)
    return MemoryAndSpeed(max(phases.values(), default=None), phases, speed)


def read_trace(before: Mapping[str, Any]) -> Memory:
    """Return what the trace predicted, where it was asked for."""
    phases = phase_bytes((before.get("exact") or {}).get("phases"))
    return Memory(max(phases.values(), default=None), phases)


def read_probe(probe: ProbeReport | None) -> ProbedMemory:
    """Return what the probe of a run predicted, where there was one."""
    if probe is None:
        return ProbedMemory()
    phases = phase_bytes(probe.predicted_after)
    peak = max(phases.values(), default=None)
    return ProbedMemory(peak, phases, probe.seconds, probe.cached)


def predicted_speed(plan: Mapping[str, Any]) -> float | None:
    """Return the tokens a second that a plan predicts: of these rows, else of full ones."""
    for name in ("workload", "speed"):
        speed = (plan.get(name) or {}).get("tokens_per_second")
        if speed:
            return speed
    return None


def read_status(report: RunReport, status: int | None) -> str:
    """Return done, refused (by the plan), out of memory, or failed."""
    if status == 0 and report.status == "done":
        return "done"
    if status == ExitClass.OUT_OF_MEMORY:
        return "refused" if report == RunReport() else "out of memory"
    return "failed"


def phase_bytes(phases: Mapping[str, Any] | None) -> dict[str, int]:
    """Return the bytes of the phases that are known, each a number or an object with a `total`.

    >>> phase_bytes({"load": 5, "forward": {"weights": 3, "total": 7}, "save": None})
    {'load': 5, 'forward': 7}
    """
    known = {}
    for name, found in (phases or {}).items():
        total = found["total"] if isinstance(found, Mapping) else found
        if name in PHASES and total is not None:
            known[name] = total
    return known
