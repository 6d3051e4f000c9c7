"""Training speed beside the peers', on the same rows: every arm a process of its own, every result written down at once.

make bench                                              all works that the card has room for, all arms
make bench WORKS="8b-lora-2048 1b-ragged" ARMS="trl-packed unsloth-best ours-bnb" STEPS=20 SECONDS=300
python -m benchmarks.speed --list                       works, arms, and which of them meet
python -m benchmarks.speed --toy                        minutes on a CPU, to see that it works
python -m benchmarks.speed --report FILE                tables and plot of results that are there

An arm's speed counts when its loss follows a float32 run of transformers and PEFT on the same rows, and all its adapters moved.
"""

import argparse
import os
import signal
import sys
from pathlib import Path

from benchmarks.speed.report import draw, markdown
from benchmarks.speed.runner import Bench, Results
from benchmarks.speed.samples import ROOT
from benchmarks.speed.workloads import ARMS, TOY, WORKS, meets


def arguments() -> argparse.Namespace:
    """Return what is asked for by options, or by the variables of `make bench`."""
    asked = os.environ.get
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.speed",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--works", nargs="+", choices=WORKS, metavar="WORK", default=asked("WORKS", "").split()
    )
    parser.add_argument(
        "--arms", nargs="+", choices=ARMS, metavar="ARM", default=asked("ARMS", "").split()
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=int(asked("STEPS", "0")),
        help="steps that are timed; 0: as many as the work says",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=float(asked("SECONDS", "600")),
        help="time limit of one arm's run",
    )
    parser.add_argument("--toy", action="store_true", help="the tiny model, on the CPU")
    parser.add_argument(
        "--references",
        action="store_true",
        help="train references alone: they are not timed, so that several may run at once",
    )
    parser.add_argument(
        "--unjudged",
        action="store_true",
        help="train no reference: without one that is there already, no speed counts",
    )
    parser.add_argument(
        "--keep", action="store_true", help="leave out arms that have a result that counts"
    )
    parser.add_argument("--list", action="store_true")
    parser.add_argument(
        "--report",
        type=Path,
        metavar="FILE",
        help="run nothing: tables and plot of results that are there",
    )
    parser.add_argument(
        "--folder",
        type=Path,
        default=ROOT / "outputs" / "benchmarks" / "speed",
        help="of models, rows and logs; models take much room",
    )
    parser.add_argument(
        "--results",
        type=Path,
        help="JSON file, which is added to (default benchmarks/results/speed-CARD.json)",
    )
    parser.add_argument(
        "--docs",
        type=Path,
        help="folder that gets the tables (.md) and the plot (.svg); by default that of the results",
    )
    args = parser.parse_args()
    if unknown := [
        name for name in (*args.works, *args.arms) if name not in WORKS and name not in ARMS
    ]:
        parser.error(f"no work or arm is called {', '.join(unknown)}; see --list")
    return args


def main() -> None:
    """Run what was asked for, work by work, and write the tables."""
    args = arguments()
    if args.list:
        for work in WORKS.values():
            print(
                f"{work.name:<15} {' '.join(arm.name for arm in ARMS.values() if meets(work, arm))}"
            )
        return
    if args.report:
        tell(Results.there(args.report), args.docs)
        return
    signal.signal(
        signal.SIGTERM, lambda number, frame: sys.exit(128 + number)
    )  # an exit ends the arm that runs; it would hold the GPU
    results = Results.to_be_measured_here(args.results, on_cpu=args.toy)
    bench = Bench(
        results,
        args.folder.resolve(),
        args.seconds,
        on_cpu=args.toy,
        steps=args.steps,
        keeps=args.keep,
        refers=not args.unjudged,
    )
    for name in args.works or [
        name for name, work in WORKS.items() if (work.shape == TOY) == args.toy
    ]:
        arms = (
            []
            if args.references
            else args.arms or [arm for arm in ARMS if meets(WORKS[name], ARMS[arm])]
        )
        bench.run(WORKS[name], [ARMS[arm] for arm in ARMS if arm in arms])
    tell(results, args.docs)


def tell(results: Results, folder: Path | None) -> None:
    """Print the tables, and write them and the plot into `folder`, by default that of the results."""
    table, beside = markdown(results.facts), (folder or results.path.parent) / results.path.stem
    beside.with_suffix(".md").write_text(table, encoding="utf-8")
    print(table)
    if _has_matplotlib():
        draw(results.facts, beside.with_suffix(".svg"))


def _has_matplotlib() -> bool:
    from importlib.util import find_spec

    if find_spec("matplotlib") is None:
        print("no plot: matplotlib is not installed (requirements-bench.txt)", file=sys.stderr)
        return False
    return True


if __name__ == "__main__":
    main()
