"""Data preparation beside TRL's: from a file of rows to samples with loss masks, nothing cached.

python benchmarks/preparation.py           seconds, and whether the samples are equal
python benchmarks/preparation.py ours      without TRL, which requirements-bench.txt installs
python benchmarks/preparation.py --memory --rows 1000000 ours ours-epoch     peak memory

Every arm is a process of its own, and the arms take turns.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.inputs import alpaca_rows
from benchmarks.machine import GIB, ROOT
from benchmarks.preparation_arms import ARMS, CORES, ArmReport, Memory

SAMPLE_SECONDS = 0.25  # between two readings of the memory
COMPARED = [name for name in ARMS if name != "ours-epoch"]  # that one reads what ours wrote
ARM_VARIABLES = {
    "HF_HUB_OFFLINE": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
}
Reports = dict[str, list[ArmReport]]  # of each arm, one for each turn


def run_arm(name: str, rows: Path, work: Path, watch_memory: bool) -> ArmReport:
    """Run an arm in a process of its own. Exits where it fails."""
    work.mkdir(parents=True, exist_ok=True)
    cache = {"HF_DATASETS_CACHE": str(work / "datasets")}
    command = [sys.executable, __file__, "--arm", name, "--work", str(work), str(rows)]
    load_before = os.getloadavg()[0]
    peak = Memory()
    began = time.perf_counter()
    with (work / "report.json").open("w") as out, (work / "log").open("w") as log:
        environ = {**os.environ, **ARM_VARIABLES, **cache}
        arm = subprocess.Popen(command, stdout=out, stderr=log, env=environ)
        while watch_memory and arm.poll() is None:
            peak = peak.max(Memory.of(psutil.Process(arm.pid)))
            time.sleep(SAMPLE_SECONDS)
        if arm.wait():
            sys.exit(f"{name} ended with {arm.returncode}:\n{(work / 'log').read_text()[-3000:]}")
    last_line = (work / "report.json").read_text().splitlines()[-1]
    return replace(
        ArmReport.from_json(json.loads(last_line)),
        process_seconds=time.perf_counter() - began,
        load_before=load_before,
        peak=peak if watch_memory else None,
    )


def compare(
    names: list[str], inputs: dict[str, Path], work: Path, repeats: int, watch_memory: bool
) -> Reports:
    """Run the arms in turns, with empty caches; ours-epoch reads what ours wrote in its turn."""
    reports: Reports = {name: [] for name in names}
    for turn in range(1, repeats + 1):
        with tempfile.TemporaryDirectory(dir=work) as folder:
            for name in names:
                own = Path(folder) / ("ours" if name == "ours-epoch" else name)
                report = run_arm(name, inputs[ARMS[name].rows], own, watch_memory)
                reports[name].append(report)
                print(f"{turn}/{repeats} {line(name, [report])}", file=sys.stderr, flush=True)
    return reports


def line(name: str, reports: list[ArmReport], reference: float | None = None) -> str:
    """Return an arm's row: medians, and how many times as long as `reference` it takes."""
    seconds = statistics.median(report.seconds for report in reports)
    cpu_seconds = statistics.median(report.cpu_seconds for report in reports)
    process_seconds = statistics.median(report.process_seconds for report in reports)
    last = reports[-1]
    ratio = f"{seconds / reference:.2f}" if reference else ""
    cells = [
        f"{name:<25} {seconds:>7.1f} {ratio:>6} {cpu_seconds:>7.1f} {process_seconds:>8.1f} ",
        f"{last.samples:>8} {last.tokens or 0:>10} {last.trained_tokens or 0:>10} ",
        f"{last.digest or '-':<16}",
    ]
    return " ".join(cells) + peak_cells(reports)


def peak_cells(reports: list[ArmReport]) -> str:
    """Return the peak memory of an arm, "" where it was not watched."""
    if reports[-1].peak is None:
        return ""
    peak = Memory()
    for report in reports:
        peak = peak.max(report.peak)
    return "".join(f"  {kind} {size / GIB:.2f} GiB" for kind, size in asdict(peak).items())


def table(reports: Reports) -> list[str]:
    """Return the lines of the table, and whether the samples of the arms are equal."""
    reference = None
    if "ours" in reports:
        reference = statistics.median(report.seconds for report in reports["ours"])
    head = (
        f"{'arm':<25} {'seconds':>7} {'/ours':>6} {'cpu':>7} {'process':>8}  "
        f"{'samples':>8} {'tokens':>10} {'trained':>10}  ids and masks"
    )
    rows = [line(name, each, reference) for name, each in reports.items()]
    equal = "equal in every arm"
    if not have_equal_samples(reports):
        equal = "NOT EQUAL: the seconds do not count"
    return [head, *rows, f"ids, masks and counts: {equal}"]


def have_equal_samples(reports: Reports) -> bool:
    """Return whether all arms made the same ids and masks, as far as they tell."""
    digests = set()
    counts = set()
    for report in (report for each in reports.values() for report in each):
        if report.digest:
            digests.add(report.digest)
        if report.tokens is not None:
            counts.add((report.tokens, report.trained_tokens))
    return len(digests) <= 1 and len(counts) <= 1


def make_inputs(folder: Path, rows: int) -> dict[str, Path]:
    """Return the files of rows by their shape, made unless they exist."""
    shapes = ("alpaca", "messages", "completion")
    files = {shape: folder / f"{shape}-{rows}.jsonl" for shape in shapes}
    if all(path.exists() for path in files.values()):
        return files
    folder.mkdir(parents=True, exist_ok=True)
    alpaca_rows(files["alpaca"], files["messages"], rows)
    with (
        files["messages"].open(encoding="utf-8") as messages,
        files["completion"].open("w", encoding="utf-8") as completion,
    ):
        for text in messages:
            turns = json.loads(text)["messages"]
            row = {"prompt": turns[:1], "completion": turns[1:]}
            completion.write(json.dumps(row, ensure_ascii=False) + "\n")
    return files


def write_results(path: Path, rows: int, reports: Reports) -> None:
    """Write the reports of all arms."""
    arms = {name: [report.as_json() for report in each] for name, each in reports.items()}
    results = {"rows": rows, "cores": CORES, "arms": arms}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")


def make_parser() -> argparse.ArgumentParser:
    """Return the parser."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "names",
        nargs="*",
        metavar="arm",
        help=f"of {', '.join(ARMS)}; with none, all but ours-epoch",
    )
    add("--rows", type=int, default=52_002, help="as many as Alpaca has")
    add("--repeats", type=int, default=3)
    add(
        "--memory",
        action="store_true",
        help="sample the memory of every arm, once, which slows it a little",
    )
    add("--out", type=Path, default=ROOT / "benchmarks" / "results")
    add(
        "--work",
        type=Path,
        default=ROOT / "outputs" / "benchmarks",
        help="folder of rows, caches and samples",
    )
    add("--arm", choices=ARMS, help=argparse.SUPPRESS)
    return parser


def main() -> None:
    """Run one arm in this process, or all of them and print the table."""
    parser = make_parser()
    args = parser.parse_args()
    if args.arm:
        report = ARMS[args.arm].run(Path(args.names[0]), args.work)
        print("\n" + json.dumps(report.as_json()))
        return
    names = args.names or COMPARED
    unknown = set(names) - set(ARMS)
    if unknown:
        parser.error(f"no arm is called {', '.join(sorted(unknown))}; there are {', '.join(ARMS)}")
    if "ours-epoch" in names and "ours" not in names[: names.index("ours-epoch")]:
        parser.error("ours-epoch opens what ours made: name ours before it")
    inputs = make_inputs(args.work, args.rows)
    repeats = 1 if args.memory else args.repeats
    reports = compare(names, inputs, args.work, repeats, args.memory)
    kind = "memory" if args.memory else "seconds"
    write_results(args.out / f"preparation-{kind}-{args.rows}.json", args.rows, reports)
    print("\n".join(table(reports)))


if __name__ == "__main__":
    main()
