"""Machines of a guide, on larger GPUs whose memory is limited to that of the named cards.

python -m benchmarks.promised_hardware qwen-7b-4090          one case or several; default all
python -m benchmarks.promised_hardware gemma-27b-h100 --steps 5 --set TRAIN_GRAD_ACCUM=1
python -m benchmarks.promised_hardware --toy                 two processes on the CPU
python -m benchmarks.promised_hardware --report FILE         the page of a results file

The cases are the workloads of the family `hardware` in workloads.yaml. `make plan` plans them
without a GPU, e.g. `make plan CONFIG=configs/rtx4090_sli.yaml GPUS=2x23.77GiB`.
"""

from __future__ import annotations

from dataclasses import replace

from benchmarks.command_line import make_parser, open_results, parse, run_cases
from benchmarks.workloads import ARMS, OUR_ARM, TOY, Case, Workload, choose_workloads

TOY_TOKENS = dict.fromkeys(("tokens", "max_seq_len", "held_out_tokens"), 128)


def cases_of(workload: Workload) -> list[Case]:
    """Return the runs of a workload: first on one GPU, if that is tried."""
    arm, counts = ARMS[OUR_ARM], [workload.gpus]
    if workload.variables_on_one is not None and workload.gpus > 1:
        counts = [1, workload.gpus]
    return [Case(workload, arm, gpus, "single" if gpus == 1 else "auto") for gpus in counts]


def main() -> None:
    """Run the cases, and write the page."""
    parser = make_parser("promised_hardware", __doc__)
    parser.add_argument("cases", nargs="*", metavar="CASE", help="workloads, as with --works")
    args = parse(parser)
    results = open_results(args, "promised")
    if results is None:
        return
    results.gpus = 0  # the cases may run on hosts of several sizes
    workloads = choose_workloads(args.works + args.cases, ["hardware"], args.toy)
    if args.toy:
        workloads = [replace(each, shape=TOY, leave_gib=None, **TOY_TOKENS) for each in workloads]
    run_cases(args, results, [case for each in workloads for case in cases_of(each)])


if __name__ == "__main__":
    main()
