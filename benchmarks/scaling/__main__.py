"""Training speed on one GPU and on several of the same host, strategies beside each other.

make bench-scaling                               works and strategies that are there by default
make bench-scaling WORKS=8b-lora-2048 GPUS="1 2" STRATEGIES="ddp fsdp" STEPS=20 SECONDS=300
make bench-scaling WORKS="8b-recipe-2048 8b-recipe-1024"   a guide's recipes beside our choice
python -m benchmarks.scaling --toy               two processes on a CPU, to see that it works
python -m benchmarks.scaling --report FILE       tables and plot of results that are there

Every work runs with as many rows a step for each GPU (weak scaling) and with as many in all
(strong). A speed counts when its loss follows that of one GPU on the same rows.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.machine import ROOT, repository_commit
from benchmarks.scaling.report import draw, markdown
from benchmarks.scaling.results import REFERENCE_ARM, Case, ScalingResults
from benchmarks.speed.results import ArmResult, ArmRun, SpeedResults
from benchmarks.speed.runner import Benchmark, Options, describe, log, number_of_steps
from benchmarks.speed.samples import Samples, count_step_tokens, make_inputs
from benchmarks.speed.verdict import MAX_DEVIATION, MAX_ROUNDING, check_run
from benchmarks.speed.workloads import (
    ARMS,
    RECIPE_ARM,
    WARM_UP,
    WORKLOADS,
    Launch,
    find_workload,
)

DEFAULT_WORKS = ("8b-lora-2048", "8b-ragged", "1b-lora-2048", "8b-qlora-2048", "8b-full-2048")
STRATEGIES = ("ddp", "fsdp", "zero2", "zero3")
NAMED = ("ep",)  # run where they are named: for mixtures of experts
GRAPHS_ARM = "ours-graphs"
PEER = "unsloth-best"  # under torchrun, as DDP
TOY_WORK = "toy-fixed"


def main() -> None:
    """Run what was asked for, case by case, and write the tables."""
    args = parse_arguments()
    if args.report:
        results = ScalingResults.read(args.report)
        results.write_page(markdown(results), args.docs, draw)
        return
    # an exit kills the case that runs; it would hold the GPUs
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    results = results_of_this_machine(args)
    gpus = sorted({1, *args.gpus}) if args.gpus else powers_of_two(results.gpus)
    options = Options(args.seconds, on_cpu=args.toy, steps=args.steps)
    # of its parts, the reference and the verdict are another's here
    speed = SpeedResults(machine=results.machine, path=results.path)
    benchmark = Benchmark(speed, args.folder.resolve(), options)
    for case in choose_cases(args, gpus):
        if not (args.keep and results.speed(case)):
            run_case(benchmark, results, case)
    results.write_page(markdown(results), args.docs, draw)


def parse_arguments() -> argparse.Namespace:
    """Return the options; some defaults come from the variables of `make bench-scaling`."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.scaling",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    variable = os.environ.get
    add("--works", nargs="+", default=variable("WORKS", "").split())
    add("--gpus", nargs="+", default=variable("GPUS", "").split(), help="numbers, such as 1 2")
    add("--strategies", nargs="+", default=variable("STRATEGIES", "").split())
    add("--steps", type=number_of_steps, default=variable("STEPS", "0"), help="that are timed")
    add("--seconds", type=float, default=float(variable("SECONDS", "600")), help="of one case")
    add("--weak", action="store_true", help="leave strong scaling out")
    add("--no-peer", action="store_true", help="ours alone")
    add("--graphs", action="store_true", help="ours with TRAIN_CUDA_GRAPHS=true")
    add("--toy", action="store_true", help="the tiny model, two processes on the CPU")
    add("--keep", action="store_true", help="leave out cases that have a result that counts")
    add("--report", type=Path, metavar="FILE", help="run nothing")
    add("--folder", type=Path, default=ROOT / "outputs" / "benchmarks" / "scaling")
    add("--results", type=Path, help="default benchmarks/results/scaling-CARD.json")
    add("--docs", type=Path, help="folder of tables and plot; by default that of the results")
    args = parser.parse_args()
    for given, known in ((args.works, WORKLOADS), (args.strategies, (*STRATEGIES, *NAMED))):
        unknown = [name for name in given if name not in known]
        if unknown:
            parser.error(f"there is no {', '.join(unknown)}; there are {', '.join(known)}")
    for number in args.gpus:
        if not number.isdigit() or int(number) < 1:
            parser.error(f'GPUS: {number} is no number of GPUs; write such as GPUS="1 2"')
    args.gpus = [int(number) for number in args.gpus]
    return args


def results_of_this_machine(args: argparse.Namespace) -> ScalingResults:
    """Return the results to add to. Exits where there are not two GPUs."""
    gpus = 2 if args.toy else count_gpus()
    if gpus < 2:
        sys.exit(
            "one GPU is here; `python -m benchmarks.scaling --toy` runs two processes on the CPU"
        )
    results = ScalingResults.on_this_machine(args.results, args.toy, "scaling")
    results.gpus = gpus
    return results


def count_gpus() -> int:
    """Return how many GPUs nvidia-smi lists."""
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True)
    return len(listed.stdout.strip().splitlines())


def powers_of_two(most: int) -> list[int]:
    """Return 1, 2, 4, ... up to `most`."""
    return [1 << power for power in range(most.bit_length()) if 1 << power <= most]


def choose_cases(args: argparse.Namespace, gpus: Sequence[int]) -> Iterator[Case]:
    """Yield cases on each number of GPUs, after those on one that they are compared with."""
    works = args.works or ([TOY_WORK] if args.toy else DEFAULT_WORKS)
    for work in works:
        chosen: list[Case] = []
        for count in gpus:
            if count > 1:
                chosen += cases_of(work, count, args)
        needed: list[Case] = []
        for case in chosen:
            needed += [case.reference, case.baseline]
        yield from dict.fromkeys([*sorted(needed, key=lambda case: case.times), *chosen])


def cases_of(work: str, gpus: int, args: argparse.Namespace) -> Sequence[Case]:
    """Return the cases of a work on several GPUs."""
    strategies = args.strategies or (("ddp",) if args.toy else STRATEGIES)
    all_times = [gpus] if args.weak or WORKLOADS[work].rows_per_step < gpus else [gpus, 1]
    found = []
    for times in all_times:
        arm = GRAPHS_ARM if args.graphs else REFERENCE_ARM
        found += [Case(work, arm, strategy, gpus, times) for strategy in strategies]
        workload = WORKLOADS[work]
        if workload.recipe and times == gpus:  # which cuts the rows of each GPU
            found.append(Case(work, RECIPE_ARM, workload.recipe_strategy, gpus, times))
        if not (args.no_peer or args.toy):
            found.append(Case(work, PEER, "ddp", gpus, times))
    return found


def run_case(benchmark: Benchmark, results: ScalingResults, case: Case) -> None:
    """Run a case, and write what it measured."""
    workload = find_workload(case.workload_name)
    steps = benchmark.options.steps or workload.steps
    inputs = make_inputs(workload, steps, benchmark.folder)
    samples = Samples.read(inputs.samples)
    tokens = count_step_tokens(workload, samples, WARM_UP + steps)
    launch = Launch(case.gpus, case.strategy)
    own = replace(benchmark, options=replace(benchmark.options, launch=launch))
    arm = ARMS[case.arm]
    run = own.run_arm(workload, arm, inputs, steps)
    reference = run if case == case.reference else results.found[case.reference].run
    allowed = MAX_ROUNDING if arm.is_ours else MAX_DEVIATION
    result = ArmResult(
        run,
        check_run(workload, arm, run, every_loss(reference), tokens, allowed),
        own.peak_shares(workload, inputs, samples, run),
        timed_steps=steps,
        versions=results.machine.versions,
        commit=repository_commit(),
    )
    results.add(case, result)
    words = describe(result, arm)
    log(f"{case.workload_name:<24} {case.strategy:<7} x{case.gpus} {words}")


def every_loss(run: ArmRun) -> list[float]:
    """Return a loss for each step of a run that logged the mean of every WARM_UP steps."""
    if run.measured is None:
        return []
    return [logged.loss for logged in run.measured.losses for _ in range(WARM_UP)]


if __name__ == "__main__":
    main()
