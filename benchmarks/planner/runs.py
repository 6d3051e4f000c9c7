"""One workload through the command line that a user types, and what plan.json and run.json say.

Loads no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from benchmarks.ours import gpu_variables, make_settings, print_plan
from benchmarks.planner.figures import Memory, RunFigures
from benchmarks.results import Result
from benchmarks.runner import Benchmark
from benchmarks.samples import make_inputs
from benchmarks.verdict import check_run
from benchmarks.workloads import Case
from sft_play.plan.memory import PHASES
from sft_play.plan.run_plan import RunPlan, read_plan
from sft_play.runs.folder import RunFolder
from sft_play.runs.report import RunReport


def measure(benchmark: Benchmark, case: Case) -> Result:
    """Plan a workload, run it, and return what was predicted and what was measured."""
    workload = case.workload
    inputs = make_inputs(workload, workload.steps, benchmark.folder)
    out = inputs.folder / case.arm.name
    settings = make_settings(case, inputs, out, workload.steps)
    settings |= gpu_variables(case)
    before = print_plan(settings)
    result = benchmark.run_ours(case, inputs, workload.steps)
    if result.status == "done":
        # the run has counted its rows, which were estimated before it
        before["workload"] = print_plan(settings).get("workload")
    folder = RunFolder(out / "run")
    trained = read_plan(folder) if (folder.path / "plan.json").exists() else None
    found = read_figures(before, trained, folder.read_report())
    settings = result.settings or {"batch_size": before["per_device_batch_size"]}
    result = replace(result, settings=settings, figures=result.figures | asdict(found))
    return replace(result, why_not=find_faults(case, result, found))


def find_faults(case: Case, result: Result, found: RunFigures) -> list[str]:
    """Return why a run does not count, [] if it counts.

    It counts if it trained every step to a finite loss, or if the plan refused what cannot fit.
    """
    if result.status == "refused" and case.may_be_refused:
        return []
    faults = check_run(case.workload, case.arm, result, reference=[])
    if result.status == "done" and found.steps != case.workload.steps:
        faults.append(f"{found.steps} steps of {case.workload.steps}")
    if result.status == "done" and not found.measured.peak:
        faults.append("its peak was not measured")
    return faults


def read_figures(
    before: Mapping[str, Any], trained: RunPlan | None, report: RunReport
) -> RunFigures:
    """Return predictions and measurements of a run.

    `before` is the output of `plan --json`, `trained` the plan of the run (None if it was refused),
    `report` its run.json. All predictions are of the step that was trained, which the probe may
    have changed. What was not predicted or measured is None.
    """
    was_changed = False
    if trained:
        chosen = (before["per_device_batch_size"], before["checkpointed_layers"])
        layout = trained.layout
        was_changed = chosen != (layout.batch_size, layout.checkpointed_layers)
    probe = trained.probe if trained else None
    phases = {} if was_changed else phase_bytes(before["phases"])
    if probe:
        phases = phase_bytes(probe.predicted_before)
    probed = phase_bytes(probe.predicted_after) if probe else {}
    return RunFigures(
        steps=report.global_step or 0,
        budget_bytes=before["budget_bytes"],
        predicted=Memory(largest(phases), phases, None if was_changed else predicted_speed(before)),
        probed=Memory(largest(probed), probed),
        measured=Memory(
            report.peak_bytes.measured if report.peak_bytes else None,
            phase_bytes(report.memory.measured if report.memory else None),
            report.tokens_per_second,
        ),
    )


def largest(phases: Mapping[str, int]) -> int | None:
    """Return the peak of all phases. None if no phase is known."""
    return max(phases.values(), default=None)


def predicted_speed(plan: Mapping[str, Any]) -> float | None:
    """Return the tokens per second that a plan predicts: of these rows, else of full rows."""
    for name in ("workload", "speed"):
        speed = (plan.get(name) or {}).get("tokens_per_second")
        if speed:
            return speed
    return None


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
