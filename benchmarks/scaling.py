"""Training speed on one GPU and on several GPUs of the same host, by strategy.

make bench-scaling                               the default workloads and strategies
make bench-scaling WORKS=8b-lora-2048 GPUS="1 2" STRATEGIES="ddp fsdp" STEPS=20 SECONDS=300
python -m benchmarks.scaling --toy               two processes on a CPU, to see that it works
python -m benchmarks.scaling --report FILE       the page of a results file

Every workload runs with the same rows per step for each GPU (weak scaling) and with the same rows
per step in total (strong scaling). A speed counts if its loss follows that of one GPU on the same
rows. A workload with one row per step shares that row.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from benchmarks.command_line import make_parser, open_results, parse, run_cases, variable
from benchmarks.workloads import ARMS, OUR_ARM, WORKLOADS, Case
from sft_play.plan import devices

DEFAULT_WORKS = ["8b-lora-2048", "8b-ragged", "1b-lora-2048", "8b-qlora-2048", "8b-full-2048"]
# the last two run only when named; ep is for mixture-of-experts (MoE) models
STRATEGIES = ("ddp", "fsdp", "zero2", "zero3", "ep", "auto")
PEER = "unsloth-best"  # under torchrun, as DDP
TOY_WORK = "toy-fixed"


def parse_arguments() -> argparse.Namespace:
    """Return the options."""
    parser = make_parser("scaling", __doc__)
    add = parser.add_argument
    add("--gpus", nargs="+", type=int, default=list(map(int, variable("GPUS"))), help="e.g. 1 2")
    add("--strategies", nargs="+", default=variable("STRATEGIES"), choices=STRATEGIES)
    add("--weak", action="store_true", help="without strong scaling")
    add("--no-peer", action="store_true", help="without Unsloth")
    return parse(parser)


def choose_cases(args: argparse.Namespace, host_gpus: int) -> list[Case]:
    """Return cases on each number of GPUs, after the cases on one GPU that they need."""
    powers = [1 << power for power in range(1, host_gpus.bit_length())]
    cases: list[Case] = []
    for work in args.works or ([TOY_WORK] if args.toy else DEFAULT_WORKS):
        chosen: list[Case] = []
        for gpus in sorted(set(args.gpus) - {1}) or powers:
            chosen += cases_of(work, gpus, args)
        needed = [each for case in chosen for each in needed_by(case, work)]
        needed.sort(key=lambda case: case.workload.rows_per_step)
        cases += dict.fromkeys([*needed, *chosen])
    return cases


def needed_by(case: Case, work: str) -> list[Case]:
    """Return the cases on one GPU that give the loss and the speed to compare with."""
    own_rows = WORKLOADS[work]
    is_weak = case.workload.rows_per_step == own_rows.rows_per_step * case.gpus
    baseline = own_rows if is_weak else case.workload
    return [Case(case.workload, ARMS[OUR_ARM]), Case(baseline, case.arm)]


def cases_of(work: str, gpus: int, args: argparse.Namespace) -> Sequence[Case]:
    """Return the cases of a workload on several GPUs."""
    strategies = args.strategies or STRATEGIES[: 1 if args.toy else 4]
    workload = WORKLOADS[work]
    all_times = [gpus] if args.weak or workload.rows_per_step < gpus else [gpus, 1]
    if workload.rows_per_step == 1:
        all_times = [1]
    names = args.arms or [OUR_ARM]
    found = []
    for times in all_times:
        scaled = workload.scaled(times)
        for name in names:
            found += [Case(scaled, ARMS[name], gpus, strategy) for strategy in strategies]
        if not (args.no_peer or args.toy):
            found.append(Case(scaled, ARMS[PEER], gpus, "ddp"))
    return found


def main() -> None:
    """Run case by case, and write the page."""
    args = parse_arguments()
    results = open_results(args, "scaling")
    if results is None:
        return
    results.gpus = 2 if args.toy else len(devices.detect("auto", os.environ).gpus)
    if results.gpus < 2:
        sys.exit("one GPU is here; `python -m benchmarks.scaling --toy` runs two processes")
    run_cases(args, results, choose_cases(args, results.gpus), compares_gpus=True)


if __name__ == "__main__":
    main()
