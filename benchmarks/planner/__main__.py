"""What the planner predicts beside what runs measure, and its choice beside all others, on one GPU.

make bench-plan                              runs, sweeps and the long run: 20 minutes on an H100
make bench-plan WORKS="8b-lora 8b-lora-ckpt" SECONDS=120
python -m benchmarks.planner --accuracy      one part of the three; also --sweep, --long
python -m benchmarks.planner --keep          continues an interrupted benchmark
python -m benchmarks.planner --exact         also what the trace of `plan --exact` predicts
python -m benchmarks.planner --toy           minutes on a CPU, to see that it works
python -m benchmarks.planner --report FILE   tables of results that are there

Every run is the command line's own, in a process of its own. Its result is written before the next
begins.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from benchmarks.files import read_as, write_as
from benchmarks.machine import GIB, ROOT, repository_commit
from benchmarks.planner.report import markdown
from benchmarks.planner.results import PlannerResults, RunResult, SweepResult
from benchmarks.planner.runs import Place, measure
from benchmarks.planner.sweep import Job
from benchmarks.planner.verdict import find_faults
from benchmarks.planner.workloads import ACCURACY, LONG, PARTS, SWEEP, SWEEPS, WORKLOADS, Sweep
from benchmarks.processes import failure_cause, run_limited
from benchmarks.speed.samples import make_model
from benchmarks.speed.workloads import TOY

GPU_SECONDS = 240.0  # limit of one run or sweep
CPU_SECONDS = 1800.0


def make_parser() -> argparse.ArgumentParser:
    """Return the parser; some defaults come from the variables of `make bench-plan`."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.planner",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    variable = os.environ.get
    add("--works", nargs="+", metavar="WORK", default=variable("WORKS", "").split())
    descriptions = {
        ACCURACY: "the short runs",
        SWEEP: "the choice beside every other",
        LONG: "the long run",
    }
    for part, description in descriptions.items():
        add(
            f"--{part}",
            action="append_const",
            dest="parts",
            const=part,
            help=f"{description}; without such an option all parts",
        )
    add(
        "--seconds",
        type=float,
        default=float(variable("SECONDS", "0")),
        help="time limit of one run or sweep; 0 is 240, 1800 on a CPU",
    )
    add("--exact", action="store_true", help="ask for the trace's prediction, too")
    add("--toy", action="store_true", help="the tiny model, on the CPU")
    add("--keep", action="store_true", help="leave out what has a result that counts")
    add("--report", type=Path, metavar="FILE", help="run nothing: tables of results that are there")
    add(
        "--folder",
        type=Path,
        default=ROOT / "outputs" / "benchmarks" / "planner",
        help="of models and rows; models take much room",
    )
    add(
        "--results",
        type=Path,
        help="JSON file, which is added to (default benchmarks/results/planner-CARD.json)",
    )
    add("--docs", type=Path, help="folder of the tables (.md); by default that of the results")
    return parser


def parse_arguments() -> argparse.Namespace:
    """Return the options. Exits where a workload does not exist."""
    parser = make_parser()
    args = parser.parse_args()
    unknown = [name for name in args.works if name not in WORKLOADS and name not in SWEEPS]
    if unknown:
        parser.error(f"no work is called {', '.join(unknown)}; there are {', '.join(WORKLOADS)}")
    return args


def choose_names(args: argparse.Namespace) -> list[str]:
    """Return the runs and sweeps that are asked for, in the order of their tables."""
    if args.works:
        return args.works
    parts = args.parts or PARTS
    names = []
    for workload in WORKLOADS.values():
        is_toy = workload.name.startswith(TOY)
        if workload.part in parts and not workload.is_extra and is_toy == args.toy:
            names.append(workload.name)
    if SWEEP in parts:
        names += [sweep.name for sweep in SWEEPS.values() if (sweep.shape == TOY) == args.toy]
    return names


def main() -> None:
    """Run what was asked for, one after the other, and write the tables."""
    args = parse_arguments()
    if args.report:
        results = PlannerResults.read(args.report)
        results.write_page(markdown(results), args.docs)
        return
    # an exit kills the run in progress; it would hold the GPU
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    results = PlannerResults.on_this_machine(args.results, args.toy, "planner")
    folder = args.folder.resolve()
    seconds = args.seconds or (CPU_SECONDS if args.toy else GPU_SECONDS)
    place = Place(folder, folder / "runs", seconds, on_cpu=args.toy)
    for name in choose_names(args):
        if args.keep and results.counts(name):
            continue
        source = {"commit": repository_commit(), "versions": results.machine.versions}
        if name in SWEEPS:
            results.sweeps[name] = replace(run_sweep(SWEEPS[name], place), **source)
            summary = describe_sweep(name, results.sweeps[name])
        else:
            results.runs[name] = replace(run_workload(name, place, args.exact), **source)
            summary = describe_run(name, results.runs[name])
        results.write()
        print(summary, file=sys.stderr, flush=True)
    results.write_page(markdown(results), args.docs)


def run_workload(name: str, place: Place, with_trace: bool) -> RunResult:
    """Return the result of a run, with why it does not count."""
    workload = WORKLOADS[name]
    try:
        result = measure(workload, place, with_trace)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        result = RunResult("failed", cause=f"plan: {error}")
    return replace(result, why_not=find_faults(workload, result))


def run_sweep(sweep: Sweep, place: Place) -> SweepResult:
    """Run a sweep in a process of its own and return its result."""
    make_model(sweep.shape, place.folder)  # before the clock of the sweep's time limit starts
    folder = place.folder / sweep.name
    folder.mkdir(parents=True, exist_ok=True)
    job = Job(sweep.name, place.folder, folder / "found.json", place.on_cpu)
    job.out.unlink(missing_ok=True)
    write_as(folder / "job.json", job)
    command = [sys.executable, "-m", "benchmarks.planner.sweep", str(folder / "job.json")]
    status = run_limited(command, folder / "log", place.seconds, ROOT, place.environ)
    if job.out.exists():
        return read_as(SweepResult, job.out)
    cause = failure_cause(status, place.seconds, folder / "log")
    return SweepResult("failed", cause=cause, why_not=[cause])


def describe_fault(result: RunResult | SweepResult) -> str:
    """Return why a result does not count, "" where it does."""
    return f" DOES NOT COUNT: {'; '.join(result.why_not)}" if result.why_not else ""


def describe_sweep(name: str, result: SweepResult) -> str:
    """Return a sweep's result in one line."""
    return f"{name:<17} {result.status}{describe_fault(result)}"


def describe_run(name: str, result: RunResult) -> str:
    """Return a run's result in one line."""
    peaks = []
    for kind in ("predicted", "traced", "probed", "measured"):
        peak = getattr(result, kind).peak
        if peak:
            peaks.append(f"{kind}={peak / GIB:.2f}GiB")
    speed = result.measured.tokens_per_second or 0
    return (
        f"{name:<17} {result.status} steps={result.steps} {' '.join(peaks)} "
        f"tokens/s={speed:.0f} in {result.wall_seconds or 0:.0f} s{describe_fault(result)}"
    )


if __name__ == "__main__":
    main()
