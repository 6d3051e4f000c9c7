"""Rows of docs/evidence/promises.md that only GPUs can show, on a host of two or four.

python -m benchmarks.promises --gpus 2            every row
python -m benchmarks.promises --rows 30 56        the work that shows one of them
python -m benchmarks.promises --toy               what two processes of a CPU can try

Work on fewer GPUs than the host has runs next to other work. Each piece of work has a time limit,
and a failure of one does not stop another. Logs are in --folder; `make docs` reads the results.
On a host without a network, in at most ten minutes:

export PYTHONPYCACHEPREFIX=$(mktemp -d)
python -m benchmarks.promises --gpus 4 --seconds 560 --folder /dev/shm/promises
"""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from queue import Queue

from benchmarks.command_line import make_parser, parse
from benchmarks.inputs import make_model
from benchmarks.promises import rows
from benchmarks.promises.place import Place, Work
from benchmarks.results import Result, Results
from benchmarks.runner import log
from benchmarks.workloads import WORKLOADS, read_table
from sft_play.plan.ranks import visible_entries


def main() -> None:
    """Start each piece of work once GPUs are free for it, and write what each row showed."""
    parser = make_parser("promises", __doc__)
    parser.add_argument("--rows", nargs="+", type=int, metavar="ROW")
    parser.add_argument("--gpus", type=int, default=2)
    args = parse(parser)
    args.folder = args.folder.resolve()
    args.folder.mkdir(parents=True, exist_ok=True)
    results = Results.on_this_machine(args.results, args.toy, "promises")
    free, writing, ends_at = Queue[str](), threading.Lock(), time.monotonic() + args.seconds
    if not args.toy:  # work that runs next to other work would draw the same model
        make_model(WORKLOADS["1b-one"], args.folder)
    for entry in visible_entries(os.environ.get("CUDA_VISIBLE_DEVICES"), args.gpus):
        free.put(entry)

    def do(work: Work, gpus: list[str]) -> None:
        limit = min(ends_at, time.monotonic() + work.seconds)
        findings = show(Place(work, gpus, args.folder, limit, args.toy))
        for gpu in gpus:
            free.put(gpu)
        with writing:
            for row, (seen, shown) in findings.items():
                figures = {"done": work.done, "seen": str(seen)}
                status = "done" if shown else "failed"
                results.add(Result(str(row), work.name, args.gpus, status=status, figures=figures))
                log(f"| {row} | {work.done} | {seen} | {'shown' if shown else 'not shown'} |")

    done = []
    with ThreadPoolExecutor() as threads:
        for work in read_table("promises/works.yaml", Work).values():
            is_asked = not args.rows or {*args.rows} & {*work.rows}
            if is_asked and work.host <= args.gpus and (work.on_cpu or not args.toy):
                gpus = [free.get() for _ in range(min(work.gpus, args.gpus))]
                done.append(threads.submit(do, work, gpus))
    for each in done:
        each.result()  # raises what kept a finding from being written


def show(place: Place) -> rows.Findings:
    """Do a piece of work. If it fails, that is what was seen of each row."""
    try:
        return getattr(rows, place.work.shown_by)(place)
    except Exception as error:  # noqa: BLE001 the rest of the work goes on
        return dict.fromkeys(place.work.rows, (f"{type(error).__name__}: {error}", False))


if __name__ == "__main__":
    main()
