"""The command line that speed, scaling, promised_hardware and planner share."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.machine import ROOT
from benchmarks.report import write_page
from benchmarks.results import Results
from benchmarks.runner import Benchmark
from benchmarks.workloads import ARMS, WORKLOADS, Case, Variable


def variable(name: str) -> list[str]:
    """Return the words of a variable of make."""
    return os.environ.get(name, "").split()


def make_parser(module: str, description: str | None) -> argparse.ArgumentParser:
    """Return the parser. Some defaults are variables of make."""
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{module}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--works", nargs="+", metavar="WORK", default=variable("WORKS"))
    add("--arms", nargs="+", metavar="ARM", default=variable("ARMS"))
    add(
        "--steps",
        type=int,
        default=int(os.environ.get("STEPS", "0")),
        help="timed steps; 0: as many as the workload says",
    )
    seconds = float(os.environ.get("SECONDS", "600"))
    add("--seconds", type=float, default=seconds, help="time limit of one run")
    add("--set", nargs="+", default=[], metavar="NAME=VALUE", help="variables of make, for ours")
    add("--toy", action="store_true", help="the tiny model, on the CPU")
    add("--keep", action="store_true", help="leave out what has a result that counts")
    add("--report", type=Path, metavar="FILE", help="run nothing; write the page of a results file")
    folder = ROOT / "outputs" / "benchmarks" / module
    add("--folder", type=Path, default=folder, help="of models, rows and logs; models are large")
    add("--results", type=Path, help="results file to add to, default benchmarks/results/")
    add("--docs", type=Path, help="folder of the page; default: the folder of the results")
    return parser


def parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Return the options. Exits if a name or a number is not possible."""
    args = parser.parse_args()
    for given, known in ((args.works, WORKLOADS), (args.arms, ARMS)):
        unknown = [name for name in given if name not in known]
        if unknown:
            parser.error(f"there is no {', '.join(unknown)}; there are {', '.join(known)}")
    for name in args.works:
        every = WORKLOADS[name].warm_up
        if args.steps < 0 or (every and args.steps % every):
            parser.error(
                f"STEPS={args.steps}: {name} logs a loss every {every} steps; write a multiple of "
                f"{every}, or 0 for as many as the workload says"
            )
    return args


def added_variables(args: argparse.Namespace) -> tuple[Variable, ...]:
    """Return the variables of make that the options add to a case."""
    added = [Variable(*word.split("=", 1)) for word in args.set]
    if args.toy:
        added.append(Variable("DEVICE", "cpu"))
    return tuple(added)


def open_results(args: argparse.Namespace, kind: str) -> Results | None:
    """Return the results to add to. With --report write their page and return None."""
    if args.report:
        write_page(Results.read(args.report), args.docs)
        return None
    # an exit kills the run in progress, which would occupy the GPU
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    return Results.on_this_machine(args.results, args.toy, kind)


def run_cases(
    args: argparse.Namespace, results: Results, cases: Sequence[Case], compares_gpus: bool = False
) -> None:
    """Run the cases, and write the page of all results."""
    benchmark = Benchmark(
        results,
        args.folder.resolve(),
        args.seconds,
        on_cpu=args.toy,
        steps=args.steps,
        keep=args.keep,
        compares_gpus=compares_gpus,
    )
    for case in cases:
        benchmark.run(case._replace(added=added_variables(args)))
    write_page(results, args.docs)
