"""Tables of what was promised of smaller cards beside what was measured. Loads no torch."""

from __future__ import annotations

from benchmarks.files import grid
from benchmarks.promised_hardware.cases import CASES, Case
from benchmarks.promised_hardware.results import Outcome, PromisedResults, Trained
from benchmarks.speed.report import describe_machine
from benchmarks.speed.verdict import MIN_FALL, fall
from sft_play.plan.cards import CARDS

PROMISED = (
    "model",
    "GPUs",
    "strategy",
    "rows of a step",
    "GiB a GPU",
    "planned",
    "promised",
    "tokens/s",
    "a GPU",
    "promised",
    "losses",
)
TOO_LARGE = (
    "model",
    "GPUs",
    "outcome",
    "rows of a step",
    "GiB reserved on each",
    "GiB a GPU",
    "planned",
    "tokens/s",
    "losses",
)


def markdown(results: PromisedResults) -> str:
    """Return both tables; a case that was not run is left out."""
    machine = describe_machine(results.machine).replace("on one", "on", 1)
    lines = [
        "# A guide's machines",
        "",
        f"`python -m benchmarks.promised_hardware` prints this page. {machine}",
        "",
        "Another process holds the rest of each GPU, so that a run finds the memory of the card "
        "named. The speed is that of the GPU it ran on, not of that card. Models have random "
        "weights. GiB a GPU count what lies outside torch's allocator, too; tokens/s are those of "
        "all GPUs from the second step on, in which layers may be recorded first.",
    ]
    promised = [case for case in CASES.values() if case.promise and results.of(case.name)]
    if promised:
        lines += ["", "## What a guide promises", "", table(results, promised)]
    small = [case for case in CASES.values() if not case.promise and results.of(case.name)]
    if small:
        lines += ["", "## Less memory than usual", "", table(results, small)]
    lines += ["", "## Commands", "", *commands(results)]
    return "\n".join(lines) + "\n"


def table(results: PromisedResults, cases: list[Case]) -> str:
    """Return a table of all outcomes of these cases, which have promises all or none."""
    cells, head = (promised_cells, PROMISED) if cases[0].promise else (small_cells, TOO_LARGE)
    outcomes = [(case, outcome) for case in cases for outcome in results.of(case.name)]
    rows = [cells(results, case, outcome) for case, outcome in outcomes]
    return grid(list(head), rows, head).rstrip("\n")


def promised_cells(results: PromisedResults, case: Case, outcome: Outcome) -> list[str]:
    """Return the cells of a row that a guide promises."""
    start = [model_words(case), gpu_words(results, case, outcome)]
    assert case.promise is not None
    memory = f"about {case.promise.gigabytes:g} GB"
    speed = f"about {case.promise.tokens_per_second:,.0f}"
    trained = outcome.trained
    if trained is None:
        return [*start, failed(outcome), "-", "-", "-", memory, "-", "-", speed, "-"]
    return [
        *start,
        trained.strategy,
        step_words(trained, outcome.gpus),
        f"{trained.measured_gib:.1f}",
        f"{trained.planned_gib:.1f}",
        memory,
        f"{trained.tokens_per_second:,.0f}",
        f"{trained.tokens_per_second / outcome.gpus:,.0f}",
        speed,
        losses(trained),
    ]


def small_cells(results: PromisedResults, case: Case, outcome: Outcome) -> list[str]:
    """Return the cells of a run that one GPU has no room for, or of its run on several."""
    start = [model_words(case), gpu_words(results, case, outcome)]
    trained = outcome.trained
    if trained is None:
        return [*start, failed(outcome), *["-"] * 6]
    return [
        *start,
        f"trained, {trained.strategy}",
        step_words(trained, outcome.gpus),
        ", ".join(f"{size:.2f}" for size in trained.reserved_gib),
        f"{trained.measured_gib:.2f}",
        f"{trained.planned_gib:.2f}",
        f"{trained.tokens_per_second:,.0f}",
        losses(trained),
    ]


def model_words(case: Case) -> str:
    """Return the model and its config."""
    mode = dict(case.variables).get("TUNING_MODE")
    given = f"{mode}, rows of {case.tokens:,} tokens" if mode else f"`{case.config}`"
    return f"{case.shape.rpartition('/')[2]}, {given}"


def gpu_words(results: PromisedResults, case: Case, outcome: Outcome) -> str:
    """Return how many GPUs, and what was left of each."""
    words = f"{outcome.gpus} x {results.machine.device}"
    if case.free_gib is None:
        return words
    words += f" held to {case.free_gib:.2f} GiB"
    return f"{words} (a {CARDS[case.card].name})" if case.card else words


def step_words(trained: Trained, gpus: int) -> str:
    """Return how an optimizer step is cut: micro-batch x GPUs x accumulation."""
    return f"{trained.batch_size} x {gpus} x {trained.micro_batches}"


def losses(trained: Trained) -> str:
    """Return the first loss and the last, and whether they tell what was learned."""
    words = f"{trained.losses[0]:.3f} to {trained.losses[-1]:.3f}"
    return words if fall(trained.losses) >= MIN_FALL else f"{words}: it tells too little"


def failed(outcome: Outcome) -> str:
    """Return why nothing was measured."""
    by_class = f", class {outcome.exit_class}" if outcome.exit_class else ""
    cause = (outcome.cause or "").replace("|", "/")
    return f"{outcome.status}{by_class}: {cause}"


def commands(results: PromisedResults) -> list[str]:
    """Return what was typed for each run."""
    lines = ["```bash"]
    for case in CASES.values():
        for outcome in results.of(case.name):
            lines.append(outcome.command)
    return [*lines, "```"]
