"""The page docs/evidence/planner-<card>.md. Pure: no torch, no I/O."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from benchmarks.machine import GIB
from benchmarks.planner.figures import (
    SWEEPS,
    BudgetFigures,
    Combination,
    RunFigures,
    SweepFigures,
    figures_of,
)
from benchmarks.report import describe_machine, describe_workload, grid, number
from benchmarks.results import Result, Results
from benchmarks.workloads import OUR_ARM, WORKLOADS
from sft_play.plan.memory import PHASES

HEAD = """# What the planner predicts, and what runs measure

{machine} Models have real shapes and random weights. Written by `make bench-plan`.

- **Off** is predicted / measured - 1: above 0 too much was predicted.
- **Measured** is the most memory of the allocator that tensors used. This is what is predicted and
  what has to fit.
- **Reserved** also counts the gaps between tensors, which the allocator gives back if memory is
  short. Both include what the GPU stores for the process outside the allocator.
- **Closed form** is the prediction of `make plan`. **Probe** is the prediction of the run for the
  same step, after it has measured two small ones.
- Tokens/s are those after the first step.
- Figures that are struck out do not count, for the reason in their last column.
"""
PREDICTIONS = {"predicted": "closed form", "probed": "probe"}
CHOICE_GOAL = 0.97  # of the best speed
LARGEST_GOAL = 0.90  # of the most tokens


def markdown(results: Results) -> str:
    """Return the page: runs, phases, sweeps and long runs, each if there are any."""
    runs = runs_of_family(results, "plan")
    long_runs = runs_of_family(results, "plan-long")
    parts = [HEAD.format(machine=describe_machine(results.machine))]
    if runs:
        parts += ["## Memory and speed\n", runs_table(runs), *summary(runs)]
        parts += ["## By phase\n", phases_table(runs)]
    if long_runs:
        parts += ["## A long run on ragged rows\n", runs_table(long_runs)]
    for name in SWEEPS:
        found = results.find(name, OUR_ARM)
        if found:
            described = describe_workload(WORKLOADS[name])
            parts += [f"## The planner's choice: {described}\n", *sweep_tables(found)]
    return "\n".join(part.rstrip("\n") + "\n" for part in parts)


Runs = Sequence[tuple[Result, RunFigures]]


def runs_of_family(results: Results, family: str) -> Runs:
    """Return the results of a family of workloads, in the order of the table."""
    found = []
    for name, workload in WORKLOADS.items():
        result = results.find(name, OUR_ARM)
        if result and workload.family in (family, "named"):
            found.append((result, figures_of(result, RunFigures)))
    return found


def relative_error(predicted: float | None, measured: float | None) -> float | None:
    """Return predicted / measured - 1, above 0 if too much was predicted.

    None if one of them is missing.
    """
    if predicted is None or not measured:
        return None
    return predicted / measured - 1


def speed_error(found: RunFigures) -> float | None:
    """Return the error of the predicted tokens per second."""
    return relative_error(found.predicted.tokens_per_second, found.measured.tokens_per_second)


def runs_table(runs: Runs) -> str:
    """Return a line for each run: predicted and measured peak and speed."""
    kinds = []
    head = ["run", "micro-batch", "steps", "measured GiB"]
    for kind, title in PREDICTIONS.items():
        if any(getattr(found, kind).peak for _, found in runs):
            kinds.append(kind)
            head += [f"{title} GiB", "off"]
    head += ["reserved GiB", "measured tokens/s", "predicted", "off", "as it ran"]
    rows = [run_row(result, found, kinds) for result, found in runs]
    return grid(head, rows, ("run", "as it ran"))


def run_row(result: Result, found: RunFigures, kinds: Sequence[str]) -> list[str]:
    """Return the cells of a run, struck out if it does not count."""
    figures = [gib(found.measured_peak)]
    for kind in kinds:
        peak = getattr(found, kind).peak
        figures += [gib(peak), percent(relative_error(peak, found.measured_peak))]
    figures += [
        gib(found.measured.peak),
        number(found.measured.tokens_per_second),
        number(found.predicted.tokens_per_second),
        percent(speed_error(found)),
    ]
    if result.why_not:
        figures = [figure if figure == "-" else f"~~{figure}~~" for figure in figures]
    workload = WORKLOADS[result.workload]
    remark = describe_workload(workload)
    if result.status == "refused":
        remark = f"refused, as it should be: {result.cause}"
    if result.why_not:
        remark = "; ".join(result.why_not)
    return [
        result.workload,
        str(result.settings.get("batch_size", "-")),
        f"{found.steps} of {workload.steps}",
        *figures,
        remark.replace("|", "/"),
    ]


def summary(runs: Runs) -> list[str]:
    """Return for each kind of prediction the errors of the runs that count."""
    counting = [found for result, found in runs if not result.why_not]
    errors = {}
    for kind, title in PREDICTIONS.items():
        errors[f"peak, {title}"] = [
            relative_error(getattr(found, kind).peak, found.measured_peak) for found in counting
        ]
    errors["tokens/s"] = list(map(speed_error, counting))
    lines = []
    for title, each in errors.items():
        known = [error for error in each if error is not None]
        if known:
            low, high, middle = map(percent, (min(known), max(known), median(known)))
            lines.append(f"- {title}: {low} to {high}, median {middle}, of {len(known)} runs")
    return ["\n".join(lines)] if lines else []


def phases_table(runs: Runs) -> str:
    """Return for each run that measured its phases their GiB and the errors of predictions."""
    rows = []
    for result, found in runs:
        if found.measured.phases and not result.why_not:
            rows.append([result.workload, *(phase_cell(found, phase) for phase in PHASES)])
    if not rows:
        return "No run measured its phases: that needs a GPU.\n"
    table = grid(["run", *PHASES], rows, ("run",))
    return f"GiB measured, then the errors of closed form and probe.\n\n{table}"


def phase_cell(found: RunFigures, phase: str) -> str:
    """Return the GiB of a phase, and the errors of closed form and probe."""
    measured = found.measured.phases.get(phase)
    if measured is None:
        return "-"
    parts = [gib(measured)]
    for predicted in (found.predicted, found.probed):
        error = relative_error(predicted.phases.get(phase), measured)
        if error is not None:
            parts.append(percent(error))
    return " ".join(parts)


def sweep_tables(result: Result) -> list[str]:
    """Return the grid of speeds, the choices next to the fastest, and the largest micro-batches."""
    if result.status != "done":
        return [f"~~{result.workload}~~: {result.status}: {result.cause}\n"]
    found = figures_of(result, SweepFigures)
    return [combinations_table(found), choices_table(found.budgets), largest_table(found.budgets)]


def combinations_table(found: SweepFigures) -> str:
    """Return speed and memory by micro-batch and checkpointed layers."""
    tried = {(each.batch_size, each.checkpointed_layers): each for each in found.combinations}
    columns = sorted({layers for _, layers in tried})
    rows = []
    for batch in sorted({batch for batch, _ in tried}):
        cells = [combination_cell(tried.get((batch, layers))) for layers in columns]
        rows.append([str(batch), *cells])
    head = ["micro-batch", *(f"{layers} of {found.layers} layers" for layers in columns)]
    return (
        "Tokens/s of a complete optimizer step by micro-batch and checkpointed layers, "
        f"GiB reserved, and the error of the closed form.\n\n{grid(head, rows)}"
    )


def combination_cell(found: Combination | None) -> str:
    """Return speed and memory of a combination, "" if it was not tried."""
    if found is None:
        return ""
    if found.tokens_per_second is None:
        return "out of memory"
    if not found.peak_bytes:
        return number(found.tokens_per_second)
    error = percent(relative_error(found.predicted_bytes, found.peak_bytes))
    return f"{number(found.tokens_per_second)}, {gib(found.peak_bytes)} GiB, {error}"


def choices_table(budgets: Sequence[BudgetFigures]) -> str:
    """Return for each card what was chosen, what is fastest there, and their speeds."""
    rows = []
    for budget in budgets:
        best = ["nothing fits", "-"]
        if budget.best:
            best = [describe_step(budget.best), number(budget.best.tokens_per_second)]
        for name, choice in budget.choices.items():
            speed, share = number(choice.tokens_per_second), None
            if not choice.fits:
                speed = f"~~{speed}~~ does not fit" if budget.plan_fits else "refused"
            elif budget.best:
                share = choice.tokens_per_second / budget.best.tokens_per_second
            marked = mark_share(share, CHOICE_GOAL)
            rows.append([card(budget), name, describe_step(choice), speed, *best, marked])
    head = ["card", "by", "chosen", "tokens/s", "best", "its tokens/s", "of the best"]
    table = grid(head, rows, texts=("card", "by", "chosen", "best"))
    return (
        "Cards of the given memory; layers are those checkpointed; "
        f"the goal is {CHOICE_GOAL:.0%} of the best speed.\n\n{table}"
    )


def largest_table(budgets: Sequence[BudgetFigures]) -> str:
    """Return the most tokens of a micro-batch for each card and number of checkpointed layers."""
    rows = []
    for budget in budgets:
        for found in budget.largest:
            cells = [card(budget), str(found.checkpointed_layers), number(found.true)]
            for expected in (found.plan, found.probe):
                cells += expected_cells(expected, found.true)
            rows.append(cells)
    head = ["card", "checkpointed layers", "tokens that fit"]
    head += ["by the plan", "share", "by the probe", "share"]
    return (
        "The most tokens of one micro-batch, found by real out-of-memory errors; "
        f"the goal is {LARGEST_GOAL:.0%} of what fits, and never more.\n\n"
        f"{grid(head, rows, texts=('card',))}"
    )


def expected_cells(tokens: int | None, true: int) -> list[str]:
    """Return the cells of what was expected to fit, struck out if it does not fit."""
    if tokens is None:
        return ["-", "-"]
    cell = number(tokens) if tokens <= true else f"~~{number(tokens)}~~ does not fit"
    share = tokens / true if true else None
    return [cell, mark_share(share, LARGEST_GOAL)]


def card(budget: BudgetFigures) -> str:
    """Return the size of a card."""
    return f"{budget.gib:g} GiB" if budget.gib else "whole"


def describe_step(found: Combination) -> str:
    """Return a combination in words."""
    return f"{found.batch_size} rows, {found.checkpointed_layers} layers"


def mark_share(share: float | None, goal: float) -> str:
    """Return a share in percent, bold if it misses its goal or is above 100 %."""
    if share is None:
        return "-"
    return f"{share:.1%}" if goal <= share <= 1 else f"**{share:.1%}**"


def gib(size: int | None) -> str:
    """Return bytes as a cell."""
    return f"{size / GIB:.2f}" if size else "-"


def percent(value: float | None) -> str:
    """Return a deviation as a cell."""
    return number(value, "+.1%")
