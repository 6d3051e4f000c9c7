"""The planner's choice among all choices: python -m benchmarks.planner.sweep NAME FOLDER

One process with one loaded model. A smaller card is this card with less memory: for each, the plan
chooses as if it were that card, then the probe of a run chooses within a real limit. Loads torch
only after the environment of the launcher is set.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.machine import GIB
from benchmarks.ours import make_settings
from benchmarks.planner.figures import (
    SWEEPS,
    BudgetFigures,
    CardChoice,
    Combination,
    LargestMicroBatch,
    Sweep,
    SweepFigures,
)
from benchmarks.planner.search import (
    GRANULE,
    PRECISION,
    cut,
    fastest_that_fits,
    find_largest,
    step_speed,
)
from benchmarks.results import write_as
from benchmarks.runner import log
from benchmarks.samples import make_inputs
from benchmarks.workloads import ARMS, OUR_ARM, Case
from sft_play.commands.call import load_config, read_call
from sft_play.plan import devices, launch
from sft_play.plan.memory import step_bytes
from sft_play.plan.resolve import resolve_plan
from sft_play.plan.run_plan import PlannedRun, RunPlan
from sft_play.plan.step import Layout

if TYPE_CHECKING:
    from benchmarks.planner.harness import Harness
    from sft_play.training.probe import ProbeResult

OPTIMIZER_STEPS = 3


StepChoice = tuple[int, int]  # rows of a micro-batch, and checkpointed layers


@dataclass(frozen=True)
class Budget:
    """A card of some memory, what the plan chooses for it, and what the probe chooses."""

    card_bytes: int | None  # None: the whole card
    planned: PlannedRun
    probed: ProbeResult | None  # None: the probe found no step that fits

    @property
    def choices(self) -> dict[str, StepChoice]:
        """What was chosen, by "plan" and "probe"."""
        layouts = {"plan": self.plan.layout}
        if self.probed:
            layouts["probe"] = self.probed.layout
        chosen = {}
        for name, layout in layouts.items():
            chosen[name] = (layout.batch_size, layout.checkpointed_layers)
        return chosen

    @property
    def plan(self) -> RunPlan:
        return self.planned.plan


def make_planner(sweep: Sweep, folder: Path) -> Callable[[int | None], PlannedRun]:
    """Return a function that plans the sweep's run for a card of so many bytes.

    None plans for what is free now.
    """
    workload = sweep.workload
    inputs = make_inputs(workload, workload.steps, folder)
    settings = make_settings(Case(workload, ARMS[OUR_ARM]), inputs, folder / "runs", steps=1)
    called = read_call(None, [], environ=dict(os.environ) | settings)
    loaded = load_config(called)
    here = devices.detect(os.environ.get("DEVICE", "cuda"), called.environ)

    def plan(card_bytes: int | None) -> PlannedRun:
        hardware = here
        if card_bytes is not None:
            sizes = {"total_bytes": card_bytes, "free_bytes": card_bytes}
            gpus = tuple(replace(gpu, **sizes) for gpu in here.gpus)
            hardware = replace(here, gpus=gpus, ram_available_bytes=card_bytes)
        return resolve_plan(
            loaded,
            called.invocation,
            hardware,
            called.environ,
            distributed=False,
            use_deepspeed=False,
        )

    return plan


def run(sweep: Sweep, folder: Path) -> SweepFigures:
    """Return the speed of every combination, and for each card what was chosen and is fastest."""
    plan = make_planner(sweep, folder)
    whole = plan(None)
    cards = [None if gib is None else int(gib * GIB) for gib in sweep.budgets_gib]
    plans = [plan(card_bytes) for card_bytes in cards]
    # the environment of a run, before torch is loaded
    os.environ |= launch.launch_command(whole.plan.ranks, folder, os.environ).env
    from benchmarks.planner.harness import Harness

    harness = Harness(whole, folder / sweep.name)
    budgets = []
    for card_bytes, planned in zip(cards, plans, strict=True):
        budgets.append(Budget(card_bytes, planned, harness.probed(planned, card_bytes)))
    optimizer_seconds = harness.warm_up(OPTIMIZER_STEPS)
    layers = whole.plan.step.model.layers
    tried = {}
    for choice in choices_to_try(sweep, layers, budgets):
        tried[choice] = time_choice(harness, whole.plan, sweep, choice, optimizer_seconds)
    return SweepFigures(
        layers=layers,
        optimizer_seconds=optimizer_seconds,
        combinations=list(tried.values()),
        budgets=[evaluate_budget(harness, budget, sweep, tried) for budget in budgets],
    )


def share_layers(shares: tuple[float, ...], layers: int) -> list[int]:
    """Return the layer counts of these shares, without duplicates."""
    return sorted({round(share * layers) for share in shares})


def choices_to_try(sweep: Sweep, layers: int, budgets: list[Budget]) -> list[StepChoice]:
    """Return the grid of the sweep, and the choices that are not in it."""
    counts = share_layers(sweep.checkpointed, layers)
    grid = itertools.product(sweep.batch_sizes, counts)
    chosen = [choice for budget in budgets for choice in budget.choices.values()]
    return list(dict.fromkeys([*grid, *chosen]))


def time_choice(
    harness: Harness, plan: RunPlan, sweep: Sweep, choice: StepChoice, optimizer_seconds: float
) -> Combination:
    """Return seconds and bytes of one combination, and what was predicted for it."""
    batch_size, layers = choice
    seconds, peak_bytes = harness.time(batch_size, sweep.max_seq_len, layers) or (None, None)
    speed = step_speed(
        seconds, batch_size, sweep.workload.rows_per_step, sweep.max_seq_len, optimizer_seconds
    )
    log(f"batch={batch_size} layers={layers} tokens/s={speed}")
    return Combination(
        batch_size=batch_size,
        checkpointed_layers=layers,
        micro_seconds=seconds,
        peak_bytes=peak_bytes,
        predicted_bytes=predicted_bytes(plan, batch_size, sweep.max_seq_len, layers),
        tokens_per_second=speed,
    )


def accumulating_layout(rows: int, width: int, layers: int) -> Layout:
    """Return the layout of a step of several micro-batches on one rank."""
    return Layout(rows, 2, world_size=1, max_seq_len=width, checkpointed_layers=layers)


def predicted_bytes(plan: RunPlan, rows: int, width: int, layers: int) -> int:
    """Return the peak in closed form, in bytes, of a step of several micro-batches."""
    return step_bytes(plan.step, accumulating_layout(rows, width, layers)).predicted_peak


def evaluate_budget(
    harness: Harness, budget: Budget, sweep: Sweep, tried: Mapping[StepChoice, Combination]
) -> BudgetFigures:
    """Return what was chosen for a card, what is fastest there, and the largest micro-batches."""

    def fits(found: Combination) -> bool:
        if budget.card_bytes is None:
            return True
        layers = found.checkpointed_layers
        return harness.fits(found.batch_size, sweep.max_seq_len, layers, budget.card_bytes)

    choices = {}
    for name, choice in budget.choices.items():
        chosen = tried[choice]
        is_true = bool(chosen.tokens_per_second) and fits(chosen)
        choices[name] = CardChoice(**vars(chosen), fits=is_true)
    best = fastest_that_fits(tried.values(), fits)
    largest = []
    for layers in share_layers(sweep.largest_checkpointed, budget.plan.step.model.layers):
        found = find_largest_micro_batch(harness, budget, sweep, layers)
        if found:
            largest.append(found)
    gib = budget.card_bytes / GIB if budget.card_bytes else None
    return BudgetFigures(gib, budget.plan.fits, choices, best, largest)


def find_largest_micro_batch(
    harness: Harness, budget: Budget, sweep: Sweep, layers: int
) -> LargestMicroBatch | None:
    """Return the most tokens of a micro-batch that plan and probe expect to fit, and that do fit.

    None if the plan expects more tokens than are tried.
    """

    def plan_fits(tokens: int) -> bool:
        bytes_needed = predicted_bytes(budget.plan, *cut(tokens, sweep.max_seq_len), layers)
        return bytes_needed <= budget.plan.budget_bytes

    def probe_fits(tokens: int) -> bool:
        return probed_bytes(budget.probed, tokens, layers) <= budget.probed.budget_bytes

    def does_fit(tokens: int) -> bool:
        return harness.fits(*cut(tokens, sweep.max_seq_len), layers, budget.card_bytes)

    most = 2 * sweep.most_tokens
    planned = find_largest(plan_fits, sweep.max_seq_len, most)
    if planned > sweep.most_tokens:
        return None
    probed = None
    if budget.probed and budget.probed.fit:
        probed = find_largest(probe_fits, sweep.max_seq_len, most)
    start = max(probed or planned, GRANULE)
    true = find_largest(does_fit, start, most, precision=PRECISION)
    log(f"card={budget.card_bytes} layers={layers} plan={planned} probe={probed} true={true}")
    return LargestMicroBatch(layers, plan=planned, probe=probed, true=true)


def probed_bytes(result: ProbeResult, tokens: int, layers: int) -> int:
    """Return the peak in bytes by the probe's fit, for a micro-batch of any number of tokens.

    The fit counts rows, so the tokens are cut into rows of GRANULE tokens.
    """
    return result.fit.peak(accumulating_layout(max(1, tokens // GRANULE), GRANULE, layers))


if __name__ == "__main__":
    folder = Path(sys.argv[2])
    found = run(SWEEPS[sys.argv[1]], folder)
    write_as(folder / sys.argv[1] / "found.json", found)
