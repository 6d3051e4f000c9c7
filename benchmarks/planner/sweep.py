"""What the planner chooses beside every other choice, in one process with one loaded model: python -m benchmarks.planner.sweep JOB.json

A smaller card is this one, held to less. For each, the plan chooses as if it were there, and then the probe of a run does, which
is held to it in earnest. Loads torch once the launcher's environment is there.
"""

import itertools
import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.planner.runs import Place, settings
from benchmarks.planner.search import (
    GRANULE,
    PRECISION,
    cut,
    fastest_that_fits,
    largest,
    step_speed,
)
from benchmarks.planner.workloads import SWEEPS, Sweep, Work
from sft_play import commands
from sft_play.plan import devices, launch
from sft_play.plan.layout import Layout
from sft_play.plan.memory import step_bytes
from sft_play.plan.resolve import resolve
from sft_play.plan.run_plan import PlannedRun, RunPlan
from sft_play.runs.files import write_json

if TYPE_CHECKING:
    from benchmarks.planner.harness import Harness
    from sft_play.training.probe import ProbeResult

GIB = 2**30
OPTIMIZER_STEPS = 3


@dataclass(frozen=True)
class Job:
    """What the parent process asks for."""

    sweep_name: str
    folder: Path
    out: Path
    on_cpu: bool

    @classmethod
    def read(cls, path: Path) -> "Job":
        facts = json.loads(path.read_text(encoding="utf-8"))
        return cls(facts["sweep_name"], Path(facts["folder"]), Path(facts["out"]), facts["on_cpu"])

    @property
    def sweep(self) -> Sweep:
        return SWEEPS[self.sweep_name]


@dataclass(frozen=True)
class Budget:
    """A card of so much memory, and what is chosen for it: by the plan, and by the probe where there is room for any step."""

    card_bytes: int | None  # None: the whole card
    planned: PlannedRun
    outcome: "ProbeResult | None"

    @property
    def choices(self) -> dict[str, tuple[int, int]]:
        """(rows of a micro-batch, checkpointed layers) by who chose it."""
        by = {"plan": self.planned.plan.layout}
        if self.outcome:
            by["probe"] = self.outcome.layout
        return {
            name: (layout.batch_size, layout.checkpointed_layers) for name, layout in by.items()
        }


def planner(job: Job) -> Callable[[int | None], PlannedRun]:
    """Return what plans the sweep's run for a card of so many bytes, None for what is free now."""
    sweep = job.sweep
    work = Work(
        sweep.name,
        sweep.shape,
        sweep.mode,
        "auto",
        steps=1,
        max_seq_len=sweep.max_seq_len,
        rows_per_step=sweep.rows_per_step,
    )
    words = settings(work, Place(job.folder, job.folder / "runs", 0, job.on_cpu))
    called = commands.call(
        "configs/base.yaml", [f"{name}={value}" for name, value in words.items()]
    )
    loaded, here = (
        commands.load_config(called),
        devices.detect("cpu" if job.on_cpu else "cuda", called.environ),
    )

    def plan(card_bytes: int | None) -> PlannedRun:
        hardware = here
        if card_bytes is not None:
            cards = tuple(
                replace(gpu, total_bytes=card_bytes, free_bytes=card_bytes) for gpu in here.gpus
            )
            hardware = replace(here, gpus=cards, ram_available_bytes=card_bytes)
        return resolve(
            loaded,
            called.invocation,
            hardware,
            called.environ,
            distributed=False,
            use_deepspeed=False,
        )

    return plan


def run(job: Job) -> dict[str, Any]:
    """Return every combination with its speed, and for each budget the choices, the best and the largest micro-batches that fit."""
    sweep, plan = job.sweep, planner(job)
    whole, cards = (
        plan(None),
        [None if gib is None else int(gib * GIB) for gib in sweep.budgets_gib],
    )
    plans = [plan(card_bytes) for card_bytes in cards]
    os.environ |= launch.launch_command(
        whole.plan.ranks, job.folder, os.environ
    ).env  # as a run has it
    from benchmarks.planner.harness import Harness

    harness = Harness(whole, job.folder / sweep.name)
    budgets = [
        Budget(card_bytes, planned, harness.probed(planned, card_bytes))
        for card_bytes, planned in zip(cards, plans, strict=True)
    ]
    optimizer_seconds = harness.warm_up(OPTIMIZER_STEPS)
    layers, layers_of_largest = (
        sorted({round(share * whole.plan.step.model.layers) for share in shares})
        for shares in (sweep.checkpointed, sweep.of_largest)
    )
    chosen = [pair for budget in budgets for pair in budget.choices.values()]
    pairs = dict.fromkeys([*itertools.product(sweep.batch_sizes, layers), *chosen])
    tried = {
        pair: combination(harness, whole.plan, sweep, *pair, optimizer_seconds) for pair in pairs
    }
    return {
        "status": "done",
        "layers": whole.plan.step.model.layers,
        "optimizer_seconds": optimizer_seconds,
        "combinations": list(tried.values()),
        "budgets": [
            of_budget(harness, budget, sweep, layers_of_largest, tried) for budget in budgets
        ],
    }


def combination(
    harness: "Harness",
    plan: RunPlan,
    sweep: Sweep,
    batch_size: int,
    layers: int,
    optimizer_seconds: float,
) -> dict[str, Any]:
    """Return what one combination takes in seconds and bytes, and what was predicted for it."""
    seconds, peak = harness.timed(batch_size, sweep.max_seq_len, layers) or (None, None)
    facts = {
        "batch_size": batch_size,
        "checkpointed_layers": layers,
        "micro_seconds": seconds,
        "peak_bytes": peak,
        "predicted_bytes": predicted(plan, batch_size, sweep.max_seq_len, layers),
    }
    speed = step_speed(facts, sweep.rows_per_step, sweep.max_seq_len, optimizer_seconds)
    say(
        sweep,
        f"batch={batch_size} layers={layers} {f'{speed:.0f} tokens/s' if speed else 'out of memory'}",
    )
    return {**facts, "tokens_per_second": speed}


def predicted(plan: RunPlan, rows: int, width: int, layers: int) -> int:
    """Return the peak in closed form, in bytes, of a step of several micro-batches."""
    layout = Layout(
        batch_size=rows,
        grad_accum=2,
        world_size=1,
        max_seq_len=width,
        checkpointed_layers=layers,
    )
    return step_bytes(plan.step, layout).predicted_peak


def of_budget(
    harness: "Harness",
    budget: Budget,
    sweep: Sweep,
    layers: list[int],
    tried: Mapping[tuple[int, int], dict[str, Any]],
) -> dict[str, Any]:
    """Return what was chosen for a card, what is best there, and how large micro-batches may be."""

    def fits(found: Mapping[str, Any]) -> bool:
        return budget.card_bytes is None or harness.fits(
            found["batch_size"], sweep.max_seq_len, found["checkpointed_layers"], budget.card_bytes
        )

    chosen = {by: tried[pair] for by, pair in budget.choices.items()}
    return {
        "gib": budget.card_bytes / GIB if budget.card_bytes else None,
        "plan_fits": budget.planned.plan.fits,
        "choices": {
            by: {**found, "fits": bool(found["tokens_per_second"]) and fits(found)}
            for by, found in chosen.items()
        },
        "best": fastest_that_fits(tried.values(), fits),
        "largest": [
            found for count in layers if (found := largest_of(harness, budget, sweep, count))
        ],
    }


def largest_of(
    harness: "Harness", budget: Budget, sweep: Sweep, layers: int
) -> dict[str, Any] | None:
    """Return the most tokens of a micro-batch that plan and probe take to fit, and that do; None where they are more than are tried."""

    def is_planned_to_fit(tokens: int) -> bool:
        return (
            predicted(budget.planned.plan, *cut(tokens, sweep.max_seq_len), layers)
            <= budget.planned.plan.budget_bytes
        )

    def does_fit(tokens: int) -> bool:
        return harness.fits(*cut(tokens, sweep.max_seq_len), layers, budget.card_bytes)

    most = 2 * sweep.most_tokens
    planned = largest(is_planned_to_fit, sweep.max_seq_len, most)
    if planned > sweep.most_tokens:
        return None
    probed = None
    if budget.outcome and budget.outcome.fit:
        probed = largest(
            lambda tokens: (
                probed_peak(budget.outcome, tokens, layers) <= budget.outcome.budget_bytes
            ),
            sweep.max_seq_len,
            most,
        )
    found = largest(does_fit, max(probed or planned, GRANULE), most, precision=PRECISION)
    say(
        sweep,
        f"card={budget.card_bytes or 0:.3g} layers={layers} plan={planned} probe={probed} true={found} tokens",
    )
    return {"checkpointed_layers": layers, "plan": planned, "probe": probed, "true": found}


def probed_peak(outcome: "ProbeResult", tokens: int, layers: int) -> int:
    """Return the peak by the probe's fit, in bytes, of micro-batches of any number of tokens, which it counts in rows."""
    layout = Layout(
        batch_size=max(1, tokens // GRANULE),
        grad_accum=2,
        world_size=1,
        max_seq_len=GRANULE,
        checkpointed_layers=layers,
    )
    return outcome.fit.peak(layout)


def say(sweep: Sweep, words: str) -> None:
    print(f"{sweep.name} {words}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    asked = Job.read(Path(sys.argv[1]))
    write_json(asked.out, run(asked))
