"""What the planner predicts beside what runs measure, and what it chooses beside every other choice, on one GPU.

make bench-plan                                         runs, sweeps and the long run: about twenty minutes on an H200
make bench-plan WORKS="8b-lora 8b-lora-ckpt" SECONDS=120
python -m benchmarks.planner --accuracy                 one part of the three; also --sweep, --long
python -m benchmarks.planner --keep                     goes on where a run was cut off
python -m benchmarks.planner --exact                    with what the trace of `plan --exact` says, seconds more a run
python -m benchmarks.planner --toy                      minutes on a CPU, to see that it works
python -m benchmarks.planner --report FILE              tables of results that are there

Every run is the command line's own, in a process of its own; its result is written before the next begins.
"""

import argparse
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.planner.report import markdown
from benchmarks.planner.runs import Place, failed, measure
from benchmarks.planner.verdict import why_not
from benchmarks.planner.workloads import ACCURACY, LONG, SWEEPS, WORKS, Sweep
from benchmarks.speed.ours import last_lines, limited, repository_commit
from benchmarks.speed.runner import Results
from benchmarks.speed.samples import ROOT, made_model
from benchmarks.speed.workloads import TOY
from sft_play.runs.files import read_json, write_json

SWEEP = "sweep"
SECONDS = {"gpu": 240.0, "cpu": 1800.0}
GIB = 2**30


def arguments() -> argparse.Namespace:
    """Return what is asked for by options, or by the variables of `make bench-plan`."""
    asked = os.environ.get
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.planner",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--works", nargs="+", metavar="WORK", default=asked("WORKS", "").split())
    for part, told in (
        (ACCURACY, "the short runs"),
        (SWEEP, "the choice beside every other"),
        (LONG, "the long run"),
    ):
        parser.add_argument(
            f"--{part}",
            action="append_const",
            dest="parts",
            const=part,
            help=f"{told}; without such an option all parts",
        )
    parser.add_argument(
        "--seconds",
        type=float,
        default=float(asked("SECONDS", "0")),
        help="time limit of one run or sweep; 0 is 240, 1800 on a CPU",
    )
    parser.add_argument("--exact", action="store_true", help="ask for the trace's prediction, too")
    parser.add_argument("--toy", action="store_true", help="the tiny model, on the CPU")
    parser.add_argument(
        "--keep", action="store_true", help="leave out what has a result that counts"
    )
    parser.add_argument("--list", action="store_true")
    parser.add_argument(
        "--report", type=Path, metavar="FILE", help="run nothing: tables of results that are there"
    )
    parser.add_argument(
        "--folder",
        type=Path,
        default=ROOT / "outputs" / "benchmarks" / "planner",
        help="of models and rows; models take much room",
    )
    parser.add_argument(
        "--runs",
        type=Path,
        help="folder of the runs, with the weights that they save (default runs in --folder)",
    )
    parser.add_argument(
        "--results",
        type=Path,
        help="JSON file, which is added to (default benchmarks/results/planner-CARD.json)",
    )
    parser.add_argument(
        "--docs",
        type=Path,
        help="folder that gets the tables (.md); by default that of the results",
    )
    args = parser.parse_args()
    if unknown := [name for name in args.works if name not in WORKS and name not in SWEEPS]:
        parser.error(f"no work is called {', '.join(unknown)}; see --list")
    return args


def names(args: argparse.Namespace) -> list[str]:
    """Return the works and sweeps that are asked for, in the order of their tables."""
    parts = args.parts or (ACCURACY, SWEEP, LONG)
    runs = [
        work.name
        for work in WORKS.values()
        if work.part in parts and not work.is_extra and work.name.startswith(TOY) == args.toy
    ]
    sweeps = [
        sweep.name
        for sweep in SWEEPS.values()
        if SWEEP in parts and (sweep.shape == TOY) == args.toy
    ]
    return args.works or [*runs, *sweeps]


def main() -> None:
    """Run what was asked for, one after the other, and write the tables."""
    args = arguments()
    if args.list:
        print("\n".join([*WORKS, *SWEEPS]))
        return
    if args.report:
        tell(Results.there(args.report), args.docs)
        return
    signal.signal(
        signal.SIGTERM, lambda number, frame: sys.exit(128 + number)
    )  # an exit ends the run that goes on; it would hold the GPU
    results = Results.to_be_measured_here(args.results, on_cpu=args.toy, kind="planner")
    folder = args.folder.resolve()
    seconds = args.seconds or SECONDS["cpu" if args.toy else "gpu"]
    place = Place(
        folder, args.runs.resolve() if args.runs else folder / "runs", seconds, on_cpu=args.toy
    )
    for name in names(args):
        there = results.facts.setdefault("sweeps", {}) if name in SWEEPS else results.facts["works"]
        if args.keep and name in there and not there[name]["why_not"]:
            continue
        facts = swept(SWEEPS[name], place) if name in SWEEPS else run(name, place, args.exact)
        there[name] = facts | {"commit": repository_commit(), "versions": results.facts["versions"]}
        results.write()
        print(line(name, facts), file=sys.stderr, flush=True)
    tell(results, args.docs)


def run(name: str, place: Place, with_trace: bool) -> dict[str, Any]:
    """Return the facts of a work, with why it does not count."""
    work = WORKS[name]
    try:
        facts = measure(work, place, with_trace)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        facts = failed(f"plan: {error}")
    return facts | {"why_not": why_not(work, facts)}


def swept(sweep: Sweep, place: Place) -> dict[str, Any]:
    """Run a sweep in a process of its own; return its facts, with why it does not count."""
    made_model(sweep.shape, place.folder)  # here, so that its limit is its own
    out = place.folder / sweep.name
    out.mkdir(parents=True, exist_ok=True)
    job, found, log = (out / name for name in ("job.json", "found.json", "log"))
    found.unlink(missing_ok=True)
    write_json(
        job,
        {
            "sweep_name": sweep.name,
            "folder": str(place.folder),
            "out": str(found),
            "on_cpu": place.on_cpu,
        },
    )
    status = limited(
        [sys.executable, "-m", "benchmarks.planner.sweep", str(job)],
        log,
        place.seconds,
        ROOT,
        place.environ,
    )
    if found.exists():
        return read_json(found) | {"why_not": []}
    cause = (
        f"not done within {place.seconds:.0f} s"
        if status is None
        else f"ended with {status}: {last_lines(log)}"
    )
    return {"status": "failed", "cause": cause, "why_not": [cause]}


def line(name: str, facts: dict[str, Any]) -> str:
    """Return a result in one line."""
    verdict = f" DOES NOT COUNT: {'; '.join(facts['why_not'])}" if facts["why_not"] else ""
    if name in SWEEPS:
        return f"{name:<17} {facts['status']}{verdict}"
    peaks = " ".join(
        f"{kind}={facts[kind]['peak'] / GIB:.2f}GiB"
        for kind in ("predicted", "traced", "probed", "measured")
        if facts[kind]["peak"]
    )
    speed = facts["measured"]["tokens_per_second"]
    return f"{name:<17} {facts['status']} steps={facts['steps']} {peaks} tokens/s={speed or 0:.0f} in {facts.get('wall_seconds', 0):.0f} s{verdict}"


def tell(results: Results, folder: Path | None) -> None:
    """Print the tables, and write them into `folder`, by default that of the results."""
    text, folder = markdown(results.facts), folder or results.path.parent
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{results.path.stem}.md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
