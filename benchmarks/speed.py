"""Training speed of SFT-Play and of other programs on the same rows, on one GPU.

make bench                                   every workload that fits on the card, every arm
make bench WORKS="8b-lora-2048 1b-ragged" ARMS="trl-packed ours-bnb" STEPS=20 SECONDS=300
python -m benchmarks.speed --list            workloads, and the arms that run on each by default
python -m benchmarks.speed --toy             minutes on a CPU, to see that it works
python -m benchmarks.speed --report FILE     the page of a results file

An arm is a program with its settings. Its speed counts if its loss follows a float32 run of
transformers and PEFT on the same rows, and all its adapters got a gradient.
"""

from __future__ import annotations

from benchmarks.command_line import make_parser, open_results, parse, run_cases
from benchmarks.workloads import ARMS, WORKLOADS, Case, choose_workloads


def main() -> None:
    """Run the arms of each workload, and write the page."""
    parser = make_parser("speed", __doc__)
    parser.add_argument("--list", action="store_true", help="list workloads and arms")
    args = parse(parser)
    if args.list:
        for workload in WORKLOADS.values():
            names = [arm.name for arm in ARMS.values() if arm.runs_by_default(workload)]
            print(f"{workload.name:<30} {' '.join(names)}")
        return
    results = open_results(args, "speed")
    if results is None:
        return
    cases = []
    for workload in choose_workloads(args.works, ["speed"], args.toy):
        for arm in ARMS.values():
            if arm.name in args.arms or (not args.arms and arm.runs_by_default(workload)):
                cases.append(Case(workload, arm))
    run_cases(args, results, cases)


if __name__ == "__main__":
    main()
