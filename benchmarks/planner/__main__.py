"""What the planner predicts and what runs measure, and its choice among all choices, on one GPU.

make bench-plan                              runs, sweeps and the long run: 20 minutes on an H100
make bench-plan WORKS="8b-lora 8b-lora-ckpt" SECONDS=120
python -m benchmarks.planner --parts accuracy   one of the three parts; also sweep, long
python -m benchmarks.planner --gpus 2 --strategy fsdp --works 8b-full smollm3-3b-full
python -m benchmarks.planner --keep          continues an interrupted benchmark
python -m benchmarks.planner --toy           minutes on a CPU, to see that it works
python -m benchmarks.planner --report FILE   the page of a results file

Every run is a command of the command line, in a process of its own. Its result is written before
the next one starts.
"""

from __future__ import annotations

import json
import os
import sys

from benchmarks.command_line import added_variables, make_parser, open_results, parse
from benchmarks.inputs import make_model
from benchmarks.machine import ROOT
from benchmarks.planner.figures import SWEEPS, Sweep
from benchmarks.planner.runs import measure
from benchmarks.processes import clean_environment, fresh_folder, run_limited
from benchmarks.report import write_page
from benchmarks.results import Result
from benchmarks.runner import Benchmark, describe, log
from benchmarks.workloads import ARMS, OUR_ARM, Case, choose_workloads

FAMILIES = {"accuracy": "plan", "sweep": "sweep", "long": "plan-long"}  # by part


def main() -> None:
    """Run what was asked for, one after the other, and write the page."""
    parser = make_parser("planner", __doc__)
    parser.add_argument("--parts", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--gpus", type=int, default=1, help="for each run")
    parser.add_argument("--strategy", default="single", help="of several GPUs: fsdp, ddp, ...")
    args = parse(parser)
    results = open_results(args, "planner")
    if results is None:
        return
    benchmark = Benchmark(results, args.folder.resolve(), args.seconds, on_cpu=args.toy)
    families = [FAMILIES[part] for part in args.parts]
    for workload in choose_workloads(args.works, families, args.toy):
        name = workload.name
        known = results.find(name, OUR_ARM, args.gpus, args.strategy)
        if args.keep and known and known.counts:
            continue
        if name in SWEEPS:
            result = run_sweep(SWEEPS[name], benchmark)
        else:
            added = added_variables(args)
            case = Case(workload, ARMS[OUR_ARM], args.gpus, args.strategy, added)
            result = measure(benchmark, case)
        results.add(result)
        log(describe(result))
    write_page(results, args.docs)


def run_sweep(sweep: Sweep, benchmark: Benchmark) -> Result:
    """Run a sweep in a process of its own and return its result."""
    make_model(sweep.workload, benchmark.folder)  # before the time limit of the sweep starts
    folder = fresh_folder(benchmark.folder / sweep.name)
    command = [sys.executable, "-m", "benchmarks.planner.sweep", sweep.name, str(benchmark.folder)]
    environ = clean_environment(os.environ) | {"NUM_GPUS": "1"}
    if benchmark.on_cpu:
        environ["DEVICE"] = "cpu"
    ended = run_limited(command, folder / "log", benchmark.seconds, ROOT, environ)
    if ended.status != 0:
        cause = ended.cause
        return Result(sweep.name, OUR_ARM, status="failed", cause=cause, why_not=[cause])
    return Result(sweep.name, OUR_ARM, figures=json.loads((folder / "found.json").read_text()))


if __name__ == "__main__":
    main()
