"""The results as tables for docs/planner-<card>.md. Pure: no torch, no I/O."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from benchmarks.files import grid, number
from benchmarks.machine import GIB
from benchmarks.planner.results import (
    BudgetResult,
    CardChoice,
    Combination,
    Memory,
    PlannerResults,
    RunResult,
    SweepResult,
)
from benchmarks.planner.verdict import relative_error, spread
from benchmarks.planner.workloads import ACCURACY, LONG, SWEEPS, WORKLOADS, Workload
from benchmarks.speed.report import describe_machine
from benchmarks.speed.workloads import TOY
from sft_play.plan.memory import PHASES

HEAD = """# What the planner predicts, and what runs measure

{machine} Models have real shapes and random weights. Written by `make bench-plan`.

- **Off** is predicted / measured - 1: above 0 too much was predicted.
- **Measured** is the most that tensors took of the allocator's memory. It is what is predicted and
  what has to fit.
- **Reserved** also counts the gaps between tensors, which the allocator gives back where memory is
  short. Both include what the GPU holds for the process outside the allocator.
- **Closed form** is what `make plan` says. **Probe** is what the run says of the same step after it
  has measured two small ones.
- Tokens/s are those after the first step.
- Figures that are struck out do not count, for the reason beside them.
"""
PREDICTIONS = {"predicted": "closed form", "traced": "trace", "probed": "probe"}
CHOICE_GOAL = 0.97  # of the best speed
LARGEST_GOAL = 0.90  # of the most tokens
LAYERS = {
    "true": "all layers checkpointed",
    "false": "nothing checkpointed",
    "auto": "as planned",
}


def markdown(results: PlannerResults) -> str:
    """Return the whole document: runs, phases, sweeps, long runs, each where there are any."""
    runs = runs_of_part(results, ACCURACY)
    long_runs = runs_of_part(results, LONG)
    parts = [HEAD.format(machine=describe_machine(results.machine))]
    if runs:
        parts += ["## Memory and speed\n", runs_table(runs), *summary(runs.values())]
        parts += ["## By phase\n", phases_table(runs)]
    if long_runs:
        parts += ["## A long run on ragged rows\n", runs_table(long_runs)]
    for name in SWEEPS:
        if name in results.sweeps:
            parts += [f"## {describe_sweep(name)}\n", *sweep_tables(name, results.sweeps[name])]
    return "\n".join(part.rstrip("\n") + "\n" for part in parts)


def runs_of_part(results: PlannerResults, part: str) -> dict[str, RunResult]:
    """Return the results of one part in the order of its workloads."""
    names = [name for name, workload in WORKLOADS.items() if workload.part == part]
    return {name: results.runs[name] for name in names if name in results.runs}


def describe_workload(workload: Workload) -> str:
    """Return what a workload trains."""
    mode = workload.mode if workload.dtype == "auto" else f"{workload.mode} in {workload.dtype}"
    rows = "ragged rows of at most" if workload.is_ragged else "rows of"
    return f"{mode}, {LAYERS[workload.checkpointing]}, {rows} {workload.max_seq_len:,} tokens"


def prediction(result: RunResult, kind: str) -> Memory:
    """Return what one of PREDICTIONS says."""
    return getattr(result, kind)


def runs_table(runs: Mapping[str, RunResult]) -> str:
    """Return a line for each run: predicted and measured peak and speed."""
    kinds = []
    head = ["run", "micro-batch", "steps", "measured GiB"]
    for kind, title in PREDICTIONS.items():
        if any(prediction(result, kind).peak for result in runs.values()):
            kinds.append(kind)
            head += [f"{title} GiB", "off"]
    head += ["reserved GiB", "measured tokens/s", "predicted", "off", "as it ran"]
    rows = [run_row(name, result, kinds) for name, result in runs.items()]
    return grid(head, rows, text_columns=("run", "as it ran"))


def run_row(name: str, result: RunResult, kinds: Sequence[str]) -> list[str]:
    """Return the cells of a run, struck out where it does not count."""
    measured_peak = result.measured_peak
    figures = [gib(measured_peak)]
    for kind in kinds:
        peak = prediction(result, kind).peak
        figures += [gib(peak), percent(relative_error(peak, measured_peak))]
    measured = result.measured.tokens_per_second
    predicted = result.predicted.tokens_per_second
    figures += [
        gib(result.measured.peak),
        number(measured),
        number(predicted),
        percent(relative_error(predicted, measured)),
    ]
    if result.why_not:
        figures = [figure if figure == "-" else f"~~{figure}~~" for figure in figures]
    settings = result.settings
    return [
        name,
        str(settings.per_device_batch_size) if settings else "-",
        f"{result.steps} of {WORKLOADS[name].steps}",
        *figures,
        run_remark(name, result),
    ]


def run_remark(name: str, result: RunResult) -> str:
    """Return why a run does not count, why it was refused, or else what it trained."""
    if result.why_not:
        return "; ".join(result.why_not).replace("|", "/")
    if result.status == "refused":
        return f"refused, as it should be: {result.cause}".replace("|", "/")
    return describe_workload(WORKLOADS[name])


def summary(runs: Iterable[RunResult]) -> list[str]:
    """Return for each kind of prediction the errors of the runs that count."""
    counting = [result for result in runs if not result.why_not]
    errors = {}
    for kind, title in PREDICTIONS.items():
        errors[f"peak, {title}"] = [
            relative_error(prediction(result, kind).peak, result.measured_peak)
            for result in counting
        ]
    errors["tokens/s"] = [
        relative_error(result.predicted.tokens_per_second, result.measured.tokens_per_second)
        for result in counting
    ]
    lines = []
    for title, known in errors.items():
        found = spread(known)
        if found:
            low = percent(found.lowest)
            high = percent(found.highest)
            median = percent(found.median)
            lines.append(f"- {title}: {low} to {high}, median {median}, of {found.count} runs")
    return ["\n".join(lines)] if lines else []


def phases_table(runs: Mapping[str, RunResult]) -> str:
    """Return for each run that measured its phases their GiB and errors of predictions."""
    rows = []
    for name, result in runs.items():
        if result.measured.phases and not result.why_not:
            rows.append([name, *(phase_cell(result, phase) for phase in PHASES)])
    if not rows:
        return "No run measured its phases: that takes a GPU.\n"
    table = grid(["run", *PHASES], rows, text_columns=("run",))
    return f"GiB measured, then what closed form and probe are off.\n\n{table}"


def phase_cell(result: RunResult, phase: str) -> str:
    """Return what a phase took and what its predictions are off, the closed form's first."""
    measured = result.measured.phases.get(phase)
    if measured is None:
        return "-"
    parts = [gib(measured)]
    for predicted in (result.predicted, result.probed):
        error = relative_error(predicted.phases.get(phase), measured)
        if error is not None:
            parts.append(percent(error))
    return " ".join(parts)


def describe_sweep(name: str) -> str:
    """Return what a sweep tries."""
    sweep = SWEEPS[name]
    model = "the tiny model that ships" if sweep.shape == TOY else sweep.shape.rpartition("/")[2]
    rows = f"{sweep.rows_per_step} rows of {sweep.max_seq_len:,} tokens a step"
    return f"The planner's choice beside every other: {model}, {sweep.mode}, {rows}"


def sweep_tables(name: str, result: SweepResult) -> list[str]:
    """Return the grid of speeds, the choices beside the best, and the largest micro-batches."""
    if result.status != "done":
        return [f"~~{name}~~: {result.status}: {result.cause}\n"]
    return [
        combinations_table(result),
        choices_table(result.budgets),
        largest_table(result.budgets),
    ]


def combinations_table(result: SweepResult) -> str:
    """Return speed and memory by micro-batch and checkpointed layers."""
    tried = {(each.batch_size, each.checkpointed_layers): each for each in result.combinations}
    columns = sorted({layers for _, layers in tried})
    rows = []
    for batch in sorted({batch for batch, _ in tried}):
        cells = [combination_cell(tried.get((batch, layers))) for layers in columns]
        rows.append([str(batch), *cells])
    head = ["micro-batch", *(f"{layers} of {result.layers} layers" for layers in columns)]
    return (
        "Tokens/s of a whole optimizer step by micro-batch and checkpointed layers, "
        f"GiB reserved, and what the closed form is off.\n\n{grid(head, rows)}"
    )


def combination_cell(found: Combination | None) -> str:
    """Return speed and memory of a combination; "" where it was not tried."""
    if found is None:
        return ""
    if found.tokens_per_second is None:
        return "out of memory"
    if not found.peak_bytes:
        return number(found.tokens_per_second)
    error = percent(relative_error(found.predicted_bytes, found.peak_bytes))
    return f"{number(found.tokens_per_second)}, {gib(found.peak_bytes)} GiB, {error}"


def choices_table(budgets: Sequence[BudgetResult]) -> str:
    """Return for each card and choice what was chosen, what is best there, and their speeds."""
    rows = []
    for budget in budgets:
        for name, choice in budget.choices.items():
            rows.append(choice_row(budget, name, choice))
    head = ["card", "by", "chosen", "tokens/s", "best", "its tokens/s", "of the best"]
    table = grid(head, rows, text_columns=("card", "by", "chosen", "best"))
    return (
        "Cards of the given memory; layers are those checkpointed; "
        f"the goal is {CHOICE_GOAL:.0%} of the best speed.\n\n{table}"
    )


def choice_row(budget: BudgetResult, name: str, choice: CardChoice) -> list[str]:
    """Return the cells of one choice."""
    speed = number(choice.tokens_per_second)
    if not budget.plan_fits and not choice.fits:
        speed = "refused"
    elif not choice.fits:
        speed = f"~~{speed}~~ does not fit"
    best = ["nothing fits", "-"]
    if budget.best:
        best = [describe_step(budget.best), number(budget.best.tokens_per_second)]
    share = share_of_best(choice, budget.best)
    return [
        card(budget),
        name,
        describe_step(choice),
        speed,
        *best,
        mark_share(share, CHOICE_GOAL),
    ]


def share_of_best(choice: CardChoice, best: Combination | None) -> float | None:
    """Return a choice's speed as a share of the best one's, None where one does not fit."""
    if not choice.fits or best is None:
        return None
    return choice.tokens_per_second / best.tokens_per_second


def largest_table(budgets: Sequence[BudgetResult]) -> str:
    """Return the most tokens of a micro-batch for each card and number of checkpointed layers."""
    rows = []
    for budget in budgets:
        for found in budget.largest:
            rows.append([
                card(budget),
                str(found.checkpointed_layers),
                number(found.true),
                *expected_cells(found.plan, found.true),
                *expected_cells(found.probe, found.true),
            ])  # fmt: skip
    head = ["card", "checkpointed layers", "tokens that fit"]
    head += ["by the plan", "share", "by the probe", "share"]
    return (
        "The most tokens of one micro-batch, found by real out-of-memory errors; "
        f"the goal is {LARGEST_GOAL:.0%} of what fits, and never more.\n\n"
        f"{grid(head, rows, text_columns=('card',))}"
    )


def expected_cells(tokens: int | None, true: int) -> list[str]:
    """Return the cells of what was expected to fit, struck out where it does not."""
    if tokens is None:
        return ["-", "-"]
    cell = number(tokens) if tokens <= true else f"~~{number(tokens)}~~ does not fit"
    share = tokens / true if true else None
    return [cell, mark_share(share, LARGEST_GOAL)]


def card(budget: BudgetResult) -> str:
    """Return the size of a card."""
    return f"{budget.gib:g} GiB" if budget.gib else "whole"


def describe_step(found: Combination) -> str:
    """Return a combination in words."""
    return f"{found.batch_size} rows, {found.checkpointed_layers} layers"


def mark_share(share: float | None, goal: float) -> str:
    """Return a share in percent, bold where it misses its goal or is more than all."""
    if share is None:
        return "-"
    return f"{share:.1%}" if goal <= share <= 1 else f"**{share:.1%}**"


def gib(size: int | None) -> str:
    """Return bytes as a cell."""
    return f"{size / GIB:.2f}" if size else "-"


def percent(value: float | None) -> str:
    """Return a deviation as a cell."""
    return number(value, "+.1%")
