"""The results as tables for docs/planner-<card>.md. Pure: no torch, no I/O."""

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.planner.verdict import error, spread
from benchmarks.planner.workloads import ACCURACY, LONG, SWEEPS, WORKS, Work
from benchmarks.speed.report import machine
from benchmarks.speed.workloads import TOY
from sft_play.plan.memory import PHASES

GIB = 2**30
HEAD = """# What the planner predicts, and what runs measure

{machine} Models have random weights of the real shapes. Written by `make bench-plan`.

**Off** is predicted / measured - 1: above 0 too much was predicted. **Measured** is the most that the allocator gave out, which is what is predicted
and what must find room; **reserved** is what it had taken for that, the gaps between tensors included, which it gives back where room is short. Both
have in them what the GPU holds for the process outside the allocator. **Closed form** is what `make plan` says, **probe** what the run says of the same
step once it has measured two small ones; tokens/s are those behind the first step. Figures that are struck out do not count, for the reason beside them.
"""
PREDICTIONS = {"predicted": "closed form", "traced": "trace", "probed": "probe"}
GOALS = {"choice": 0.97, "largest": 0.90}  # of the best speed, of the most tokens


def markdown(results: Mapping[str, Any]) -> str:
    """Return the whole document: runs, phases, sweeps, long runs, each where there are any."""
    works = {name: results["works"][name] for name in WORKS if name in results["works"]}
    runs, long_runs = (
        {name: facts for name, facts in works.items() if WORKS[name].part == part}
        for part in (ACCURACY, LONG)
    )
    sweeps = {
        name: results.get("sweeps", {})[name]
        for name in SWEEPS
        if name in results.get("sweeps", {})
    }
    parts = [HEAD.format(machine=machine(results))]
    if runs:
        parts += [
            "## Memory and speed\n",
            table(runs),
            *summary(runs),
            "## By phase\n",
            by_phase(runs),
        ]
    if long_runs:
        parts += ["## A long run on ragged rows\n", table(long_runs)]
    for name, facts in sweeps.items():
        parts += [f"## {described_sweep(name)}\n", *sweep_tables(name, facts)]
    return "\n".join(part.rstrip("\n") + "\n" for part in parts)


def described(work: Work) -> str:
    """Return what a work trains."""
    layers = {
        "true": "all layers checkpointed",
        "false": "nothing checkpointed",
        "auto": "as planned",
    }[work.checkpointing]
    rows = (
        f"ragged rows of at most {work.max_seq_len:,}"
        if work.is_ragged
        else f"rows of {work.max_seq_len:,}"
    )
    return (
        f"{work.mode}{f' in {work.dtype}' if work.dtype != 'auto' else ''}, {layers}, {rows} tokens"
    )


def table(runs: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a line a run: predicted and measured peak and speed."""
    kinds = [kind for kind in PREDICTIONS if any(facts[kind]["peak"] for facts in runs.values())]
    titles = [title for kind in kinds for title in (f"{PREDICTIONS[kind]} GiB", "off")]
    head = [
        "run",
        "micro-batch",
        "steps",
        "measured GiB",
        *titles,
        "reserved GiB",
        "measured tokens/s",
        "predicted",
        "off",
        "as it ran",
    ]
    return grid(
        head, [row(name, facts, kinds) for name, facts in runs.items()], words=("run", "as it ran")
    )


def grid(head: Sequence[str], rows: Sequence[Sequence[str]], words: Sequence[str] = ()) -> str:
    """Return a table whose columns are numbers, but for those that `words` names."""
    rule = ["---" if title in words else "--:" for title in head]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (head, rule, *rows))


def row(name: str, facts: Mapping[str, Any], kinds: Sequence[str]) -> list[str]:
    """Return the cells of a run, struck out where it does not count."""
    measured, peak = facts["measured"], measured_peak(facts)
    figures = [gib(peak)]
    for kind in kinds:
        figures += [gib(facts[kind]["peak"]), percent(error(facts[kind]["peak"], peak))]
    speeds = measured["tokens_per_second"], facts["predicted"]["tokens_per_second"]
    figures += [gib(measured["peak"]), *map(number, speeds), percent(error(speeds[1], speeds[0]))]
    if facts["why_not"]:
        figures = [figure if figure == "-" else f"~~{figure}~~" for figure in figures]
    told = (
        "; ".join(facts["why_not"]).replace("|", "/")
        if facts["why_not"]
        else refused(facts) or described(WORKS[name])
    )
    return [
        name,
        str(facts["settings"].get("per_device_batch_size", "-")),
        f"{facts['steps']} of {WORKS[name].steps}",
        *figures,
        told,
    ]


def measured_peak(facts: Mapping[str, Any]) -> int | None:
    """Return the most bytes of any phase; what the process took in all where no phase was measured."""
    return max(facts["measured"]["phases"].values(), default=facts["measured"]["peak"])


def refused(facts: Mapping[str, Any]) -> str:
    """Return what the plan said of a run that it refused, "" where it did not."""
    return (
        f"refused, as it should be: {facts['cause']}".replace("|", "/")
        if facts["status"] == "refused"
        else ""
    )


def summary(runs: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return a line for each kind of prediction: from the lowest to the highest error, over the runs that count."""
    counted = [facts for facts in runs.values() if not facts["why_not"]]
    errors = {
        f"peak, {told}": [error(facts[kind]["peak"], measured_peak(facts)) for facts in counted]
        for kind, told in PREDICTIONS.items()
    }
    errors["tokens/s"] = [
        error(facts["predicted"]["tokens_per_second"], facts["measured"]["tokens_per_second"])
        for facts in counted
    ]
    lines = []
    for told, found in errors.items():
        if three := spread(found):
            low, middle, high = map(percent, three)
            lines.append(
                f"- {told}: {low} to {high}, median {middle}, of {sum(one is not None for one in found)} runs"
            )
    return ["\n".join(lines)] if lines else []


def by_phase(runs: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a line a run that measured its phases: GiB, and what closed form and probe are off."""
    counted = {
        name: facts
        for name, facts in runs.items()
        if facts["measured"]["phases"] and not facts["why_not"]
    }
    if not counted:
        return "No run measured its phases: that takes a GPU.\n"
    rows = [
        [name, *(phase_cell(facts, phase) for phase in PHASES)] for name, facts in counted.items()
    ]
    return "GiB measured, then what closed form and probe are off.\n\n" + grid(
        ["run", *PHASES], rows, words=["run"]
    )


def phase_cell(facts: Mapping[str, Any], phase: str) -> str:
    """Return what a phase took and what its predictions are off, the closed form's first."""
    measured = facts["measured"]["phases"].get(phase)
    if measured is None:
        return "-"
    errors = [error(facts[kind]["phases"].get(phase), measured) for kind in ("predicted", "probed")]
    return " ".join([gib(measured), *(percent(one) for one in errors if one is not None)])


def described_sweep(name: str) -> str:
    """Return what a sweep goes through."""
    sweep = SWEEPS[name]
    model = "the tiny model that ships" if sweep.shape == TOY else sweep.shape.rpartition("/")[2]
    return f"The choice beside every other: {model}, {sweep.mode}, {sweep.rows_per_step} rows of {sweep.max_seq_len:,} tokens a step"


def sweep_tables(name: str, facts: Mapping[str, Any]) -> list[str]:
    """Return the grid of speeds, the choices beside the best, and the largest micro-batches."""
    if facts["status"] != "done":
        return [f"~~{name}~~: {facts['status']}: {facts['cause']}\n"]
    tried = {(one["batch_size"], one["checkpointed_layers"]): one for one in facts["combinations"]}
    columns = sorted({layers for _, layers in tried})
    head = ["micro-batch", *(f"{layers} of {facts['layers']} layers" for layers in columns)]
    rows = [
        [str(batch), *(combination_cell(tried.get((batch, layers))) for layers in columns)]
        for batch in sorted({batch for batch, _ in tried})
    ]
    told = "Tokens/s of a whole optimizer step by micro-batch and checkpointed layers, GiB reserved, and what the closed form is off.\n\n"
    return [told + grid(head, rows), choices(facts), largest(facts)]


def combination_cell(found: Mapping[str, Any] | None) -> str:
    """Return speed and memory of a combination; "" where it was not tried."""
    if found is None:
        return ""
    if found["tokens_per_second"] is None:
        return "out of memory"
    parts = [number(found["tokens_per_second"])]
    if found["peak_bytes"]:
        parts += [
            f"{gib(found['peak_bytes'])} GiB",
            percent(error(found["predicted_bytes"], found["peak_bytes"])),
        ]
    return ", ".join(parts)


def choices(facts: Mapping[str, Any]) -> str:
    """Return a line for each card and choice: what was chosen, what is best there, and their speeds."""
    rows = []
    for budget in facts["budgets"]:
        for by, chosen in budget["choices"].items():
            best, speed = budget["best"], number(chosen["tokens_per_second"])
            if not chosen["fits"]:
                speed = f"~~{speed}~~ does not fit" if budget["plan_fits"] else "refused"
            of_best = (
                [step(best), number(best["tokens_per_second"])] if best else ["nothing fits", "-"]
            )
            rows.append(
                [
                    card(budget),
                    by,
                    step(chosen),
                    speed,
                    *of_best,
                    marked(share_of_best(chosen, best), GOALS["choice"]),
                ]
            )
    told = f"A card of so much memory; layers are those checkpointed; the goal is {GOALS['choice']:.0%} of the best speed.\n\n"
    return told + grid(
        ["card", "by", "chosen", "tokens/s", "best", "its tokens/s", "of the best"],
        rows,
        words=("card", "by", "chosen", "best"),
    )


def share_of_best(chosen: Mapping[str, Any], best: Mapping[str, Any] | None) -> float | None:
    """Return a choice's speed as a share of the best one's; None where it does not fit, or nothing does."""
    return (
        chosen["tokens_per_second"] / best["tokens_per_second"] if chosen["fits"] and best else None
    )


def largest(facts: Mapping[str, Any]) -> str:
    """Return a line for each card and number of checkpointed layers: the most tokens that plan and probe take to fit, and that do."""
    rows = []
    for budget in facts["budgets"]:
        for found in budget["largest"]:
            of_both = [
                cell for by in ("plan", "probe") for cell in deemed(found[by], found["true"])
            ]
            rows.append(
                [card(budget), str(found["checkpointed_layers"]), number(found["true"]), *of_both]
            )
    told = f"The most tokens of one micro-batch, by real out-of-memory errors; the goal is {GOALS['largest']:.0%} of what fits, and never more.\n\n"
    return told + grid(
        [
            "card",
            "checkpointed layers",
            "tokens that fit",
            "by the plan",
            "share",
            "by the probe",
            "share",
        ],
        rows,
        words=["card"],
    )


def deemed(tokens: int | None, true: int) -> list[str]:
    """Return the cells of what was taken to fit, struck out where it does not."""
    if tokens is None:
        return ["-", "-"]
    return [
        number(tokens) if tokens <= true else f"~~{number(tokens)}~~ does not fit",
        marked(tokens / true if true else None, GOALS["largest"]),
    ]


def card(budget: Mapping[str, Any]) -> str:
    return f"{budget['gib']:g} GiB" if budget["gib"] else "whole"


def step(found: Mapping[str, Any]) -> str:
    return f"{found['batch_size']} rows, {found['checkpointed_layers']} layers"


def marked(share: float | None, goal: float) -> str:
    """Return a share in percent, bold where it misses its goal or is more than all."""
    if share is None:
        return "-"
    return f"{share:.1%}" if goal <= share <= 1 else f"**{share:.1%}**"


def gib(size: int | None) -> str:
    return f"{size / GIB:.2f}" if size else "-"


def number(value: float | None) -> str:
    return f"{value:,.0f}" if value is not None else "-"


def percent(value: float | None) -> str:
    return f"{value:+.1%}" if value is not None else "-"
