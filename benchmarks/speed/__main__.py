"""Training speed beside other programs', on the same rows, every arm in a process of its own.

make bench                                   all workloads that the card has room for, all arms
make bench WORKS="8b-lora-2048 1b-ragged" ARMS="trl-packed ours-bnb" STEPS=20 SECONDS=300
python -m benchmarks.speed --list            workloads, and the arms that run on each by default
python -m benchmarks.speed --toy             minutes on a CPU, to see that it works
python -m benchmarks.speed --report FILE     tables and plot of results that are there

An arm is a program with its settings. Its speed counts when its loss follows a float32 run of
transformers and PEFT on the same rows, and all its adapters moved.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from contextlib import nullcontext
from pathlib import Path

from benchmarks.machine import ROOT
from benchmarks.processes import busy_cores
from benchmarks.speed.report import draw, markdown
from benchmarks.speed.results import SpeedResults
from benchmarks.speed.runner import Benchmark, Options, number_of_steps
from benchmarks.speed.workloads import ARMS, TOY, WORKLOADS, Arm, Workload, runs_by_default


def make_parser() -> argparse.ArgumentParser:
    """Return the parser; some defaults come from the variables of `make bench`."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.speed",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    variable = os.environ.get
    add("--works", nargs="+", metavar="WORK", default=variable("WORKS", "").split())
    add("--arms", nargs="+", metavar="ARM", default=variable("ARMS", "").split())
    add(
        "--steps",
        type=number_of_steps,
        default=variable("STEPS", "0"),
        help="steps that are timed; 0: as many as the workload says",
    )
    add(
        "--seconds",
        type=float,
        default=float(variable("SECONDS", "600")),
        help="time limit of one arm's run",
    )
    add("--toy", action="store_true", help="the tiny model, on the CPU")
    add(
        "--busy",
        action="store_true",
        help="keep every core busy with other processes; results go to speed-busy-CARD.json",
    )
    add("--keep", action="store_true", help="leave out arms that have a result that counts")
    add("--list", action="store_true", help="list workloads and arms")
    _add_files(parser)
    return parser


def _add_files(parser: argparse.ArgumentParser) -> None:
    """Add the options that name files and folders."""
    add = parser.add_argument
    add(
        "--report",
        type=Path,
        metavar="FILE",
        help="run nothing: tables and plot of results that are there",
    )
    add(
        "--folder",
        type=Path,
        default=ROOT / "outputs" / "benchmarks" / "speed",
        help="of models, rows and logs; models take much room",
    )
    add(
        "--results",
        type=Path,
        help="JSON file, which is added to (default benchmarks/results/speed-CARD.json)",
    )
    add(
        "--docs",
        type=Path,
        help="folder of the tables (.md) and the plot (.svg); by default that of the results",
    )


def parse_arguments() -> argparse.Namespace:
    """Return the options. Exits where a workload or an arm does not exist."""
    parser = make_parser()
    args = parser.parse_args()
    unknown = [name for name in args.works if name not in WORKLOADS]
    unknown += [name for name in args.arms if name not in ARMS]
    if unknown:
        parser.error(f"no work or arm is called {', '.join(unknown)}; see --list")
    return args


def choose_workloads(args: argparse.Namespace) -> list[Workload]:
    """Return the workloads that are named, else the toys or all others without a recipe."""
    if args.works:
        return [WORKLOADS[name] for name in args.works]
    usual = [workload for workload in WORKLOADS.values() if not workload.recipe]
    return [workload for workload in usual if (workload.shape == TOY) == args.toy]


def choose_arms(args: argparse.Namespace, workload: Workload) -> list[Arm]:
    """Return the arms that are named, else those that run on the workload by default."""
    if args.arms:
        return [arm for arm in ARMS.values() if arm.name in args.arms]
    return [arm for arm in ARMS.values() if runs_by_default(workload, arm)]


def main() -> None:
    """Run what was asked for, workload by workload, and write the tables."""
    args = parse_arguments()
    if args.list:
        list_workloads()
        return
    if args.report:
        results = SpeedResults.read(args.report)
        results.write_page(markdown(results), args.docs, draw)
        return
    # an exit kills the arm that runs; it would hold the GPU
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    name = "speed-busy" if args.busy else "speed"
    results = SpeedResults.on_this_machine(args.results, args.toy, name)
    options = Options(
        seconds=args.seconds,
        on_cpu=args.toy,
        steps=args.steps,
        keep=args.keep,
    )
    benchmark = Benchmark(results, args.folder.resolve(), options)
    with busy_cores() if args.busy else nullcontext():
        for workload in choose_workloads(args):
            benchmark.run(workload, choose_arms(args, workload))
    results.write_page(markdown(results), args.docs, draw)


def list_workloads() -> None:
    """Print each workload with the arms that run on it by default."""
    for workload in WORKLOADS.values():
        arms = [arm.name for arm in ARMS.values() if runs_by_default(workload, arm)]
        print(f"{workload.name:<15} {' '.join(arms)}")


if __name__ == "__main__":
    main()
