"""A notebook in Unsloth's style, on one GPU as it is, and converted on two.

python -m benchmarks.notebook                    two GPUs, Unsloth where it is installed
python -m benchmarks.notebook --toy              the tiny model, a stand-in for Unsloth, the CPU

Three runs train on the same rows a step, one after the other: the notebook on one GPU; what
`make convert-notebook` makes of it, one process whose model is split over two GPUs; and the script
of it under torchrun, a process a GPU. The model is Llama 1B's shape with random weights. Printed
are the seconds of a step, memory and load of each GPU, and losses.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import runpy
import shutil
import statistics
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.files import grid
from benchmarks.inputs import TINY, fixed_rows
from benchmarks.machine import GIB, ROOT, Machine, repository_commit
from benchmarks.processes import clean_environment, failure_cause, run_limited
from benchmarks.speed.samples import make_model
from benchmarks.speed.verdict import MAX_ROUNDING, MIN_FALL, fall
from benchmarks.speed.workloads import LLAMA_1B
from sft_play.notebooks import code as codes
from sft_play.notebooks import document as documents
from sft_play.notebooks.convert import convert
from sft_play.notebooks.script import export
from sft_play.plan import devices
from sft_play.runs.files import write_json

NOTEBOOK = ROOT / "tests" / "notebooks" / "tiny.ipynb"
STAND_INS = ROOT / "tests" / "stand_ins"
WARM_UP = 3  # steps that compile
ACCUMULATION = 4  # micro-batches of a step on one GPU; half of it under torchrun
DATA_ROWS = 96
SAID_OF_GPUS = re.compile(r"GPU \d|Detected \d|Using device_map|Single GPU|Total across|Effective")


@dataclass(frozen=True)
class Size:
    """What the notebook trains."""

    model: Path
    tokens: int  # of a row, before the template of the notebook
    max_seq_length: int
    rows: int  # of a micro-batch
    steps: int
    learning_rate: float


@dataclass
class Run:
    """One way to run the notebook."""

    name: str
    gpus: int
    processes: int
    step_seconds: float = 0.0  # median
    rows_per_step: int = 0
    losses: list[float] = field(default_factory=list)
    weights: dict[str, int] = field(default_factory=dict)  # on each device
    peak_gib: dict[str, float] = field(default_factory=dict)  # reserved on each GPU
    busy_percent: list[float] = field(default_factory=list)  # of each GPU, while it trained
    printed: list[str] = field(default_factory=list)  # what it says of GPUs itself
    error: str | None = None


def main() -> None:
    """Run the notebook in its three ways, and print them beside each other."""
    args = parse_arguments()
    if args.record:
        record(*args.record)
        return
    gpus = () if args.toy else devices.detect("auto", os.environ).gpus
    if not args.toy and len(gpus) < 2:
        sys.exit(
            f"visible GPUs: {len(gpus)}; two are needed; "
            "`python -m benchmarks.notebook --toy` runs on the CPU"
        )
    folder = args.folder.resolve()
    size = Size(TINY, 64, 256, 2, args.steps, 5e-3)
    if not args.toy:
        size = Size(make_model(LLAMA_1B, folder), 800, 1024, 8, args.steps, 1e-3)
    runs = [Run("notebook", 1, 1), Run("split", 2, 1), Run("script", 2, 2)]
    for run in runs:
        train(run, size, folder / "runs" / run.name, args)
        print("\n".join([f"{run.name} prints:", *run.printed, ""]))
    print(table(runs))
    faults = find_faults(runs, on_cpu=args.toy)
    print("\n".join(["", *faults]) if faults else "\nall as it should be")
    machine = Machine.here(args.toy)
    found = {"machine": asdict(machine), "commit": repository_commit(), "faults": faults}
    path = args.results or machine.results_path("notebook")
    write_json(path, found | {"runs": [asdict(run) for run in runs]})
    sys.exit(1 if faults else 0)


def parse_arguments() -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.notebook",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--toy", action="store_true", help="the tiny model on the CPU")
    add("--stand-in", action="store_true", help="for Unsloth, also where that is installed")
    add("--steps", type=int, default=20)
    add("--seconds", type=float, default=150, help="limit of one run")
    add("--folder", type=Path, default=ROOT / "outputs" / "benchmarks" / "notebook")
    add("--results", type=Path, help="default benchmarks/results/notebook-CARD.json")
    add("--record", nargs=2, type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.steps <= WARM_UP:
        parser.error(f"--steps {args.steps}: write more than the {WARM_UP} that compile")
    args.stand_in = args.stand_in or args.toy or find_spec("unsloth") is None
    return args


def train(run: Run, size: Size, out: Path, args: argparse.Namespace) -> None:
    """Run the notebook in one way, and read what it wrote, or why it failed."""
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    log = out / "log"
    command, environ = prepare(run, size, out), environment(run, args, os.environ)
    status = run_limited(command, log, args.seconds, out, environ)
    for line in log.read_text(encoding="utf-8", errors="replace").splitlines():
        if SAID_OF_GPUS.match(line.strip()):
            run.printed.append(line.strip())
    if status != 0:
        run.error = failure_cause(status, args.seconds, log)
        return
    results = [json.loads(path.read_text()) for path in sorted(out.glob("result-*.json"))]
    timed = [result["step_seconds"][WARM_UP:] for result in results]
    run.step_seconds = statistics.median(map(max, zip(*timed, strict=True)))
    run.rows_per_step = results[0]["rows_per_step"]
    run.losses = results[0]["losses"]
    run.busy_percent = results[0]["busy_percent"]
    for result in results:
        for device, weights in result["weights"].items():
            run.weights[device] = run.weights.get(device, 0) + weights
        for device, peak in result["peak_bytes"].items():
            run.peak_gib[device] = max(run.peak_gib.get(device, 0.0), peak / GIB)


def prepare(run: Run, size: Size, out: Path) -> list[str]:
    """Write the files of a run, and return its command."""
    fixed_rows(out / "rows.jsonl", size.tokens, DATA_ROWS)
    with (out / "messages.jsonl").open("w", encoding="utf-8") as file:
        for line in (out / "rows.jsonl").read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            turns = [{"role": "user", "content": row["question"]}]
            turns.append({"role": "assistant", "content": row["answer"]})
            file.write(json.dumps({"messages": turns}) + "\n")
    path = out / "notebook.ipynb"
    path.write_text(notebook_text(size, ACCUMULATION // run.processes), encoding="utf-8")
    launcher = []
    if run.name == "split":
        path.write_text(convert(documents.read(path)).text, encoding="utf-8")
    if run.processes > 1:
        text, _ = export(documents.read(path), out / "train.py")
        path = out / "train.py"
        path.write_text(text, encoding="utf-8")
        torchrun = ["torch.distributed.run", "--standalone"]
        launcher = ["-m", *torchrun, f"--nproc_per_node={run.processes}"]
    module = ["-m", "benchmarks.notebook", "--record", str(path), str(out)]
    return [sys.executable, *launcher, *module]


def notebook_text(size: Size, accumulation: int) -> str:
    """Return the notebook of the tests with another model, other rows and more steps."""
    changes = {
        "data/tiny_llama": str(size.model),
        "max_seq_length = 256": f"max_seq_length = {size.max_seq_length}",
        "data/desk/train.jsonl": "messages.jsonl",
        "train[:24]": f"train[:{DATA_ROWS}]",
        "per_device_train_batch_size = 2": f"per_device_train_batch_size = {size.rows}",
        "gradient_accumulation_steps = 2": f"gradient_accumulation_steps = {accumulation}",
        "max_steps = 3": f"max_steps = {size.steps}",
        "learning_rate = 1e-3": f"learning_rate = {size.learning_rate:g}",
        '\\"linear\\"': '\\"constant\\"',
    }
    text = NOTEBOOK.read_text(encoding="utf-8")
    for old, new in changes.items():
        assert text.count(old) == 1, f"{NOTEBOOK} has {text.count(old)} times {old}"
        text = text.replace(old, new)
    return text


def environment(run: Run, args: argparse.Namespace, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a run: which GPUs it sees, and which Unsloth."""
    paths = [str(STAND_INS)] if args.stand_in else []
    found = clean_environment(environ) | {
        "PYTHONPATH": os.pathsep.join([*paths, str(ROOT), environ.get("PYTHONPATH", "")]),
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if args.toy:
        return found | {"OMP_NUM_THREADS": "1"}
    visible = (environ.get("CUDA_VISIBLE_DEVICES") or "0,1").split(",")
    return found | {"CUDA_VISIBLE_DEVICES": ",".join(visible[: run.gpus])}


def record(path: Path, folder: Path) -> None:
    """Run a notebook or its script here; each process writes what its trainer's steps took.

    Unsloth is imported before transformers, as a notebook does.
    """
    import unsloth  # noqa: F401
    from transformers import trainer

    from benchmarks.notebook_recorder import Recorder

    trainer.DEFAULT_CALLBACKS.append(Recorder)
    os.environ["BENCHMARK_FOLDER"] = str(folder)
    sys.path.insert(0, "")
    if path.suffix == ".py":
        runpy.run_path(str(path), run_name="__main__")
        return
    variables: dict[str, Any] = {"__name__": "__main__"}
    for cell in documents.read(path).cells:
        if cell.kind == "code":
            code = codes.parse(cell.number, cell.source)
            exec(compile("\n".join(code.lines), f"cell {cell.number}", "exec"), variables)


def find_faults(runs: list[Run], on_cpu: bool) -> list[str]:
    """Return what is not as the guide says."""
    faults = [f"{run.name}: {run.error}" for run in runs if run.error]
    if faults:
        return faults
    alone, split, script = runs
    for run in runs:
        if run.rows_per_step != alone.rows_per_step:
            faults.append(f"{run.name}: {run.rows_per_step} rows a step, not {alone.rows_per_step}")
        pairs = list(zip(run.losses, alone.losses, strict=True))
        off = max(abs(own - other) / abs(other) for own, other in pairs)
        if off > MAX_ROUNDING:
            faults.append(f"{run.name}: a loss is {off:.1%} off that of the notebook")
    fallen = fall(alone.losses)
    if fallen < MIN_FALL:
        faults.append(f"notebook: its loss falls by {fallen:.0%}, of {MIN_FALL:.0%}")
    if on_cpu:
        return faults
    if len(split.weights) != 2:
        faults.append(f"split: its weights lie on {', '.join(split.weights)}")
    for run in (split, script):
        idle = [str(index) for index, load in enumerate(run.busy_percent) if load < 1]
        if idle:
            faults.append(f"{run.name}: GPU {' and '.join(idle)} did nothing")
    if script.step_seconds >= alone.step_seconds:
        faults.append("script: two GPUs are no faster than one")
    return faults


def table(runs: list[Run]) -> str:
    """Return the runs beside each other."""
    head = ["run", "GPUs", "processes", "rows a step", "seconds a step", "GiB reserved"]
    head += ["GPUs' load", "weights", "losses"]
    rows = []
    for run in runs:
        figures = [str(figure) for figure in (run.gpus, run.processes, run.rows_per_step)]
        words = [
            ", ".join(f"{device} {peak:.2f}" for device, peak in sorted(run.peak_gib.items())),
            ", ".join(f"{load:.0f}%" for load in run.busy_percent),
            ", ".join(f"{device} {count:,}" for device, count in sorted(run.weights.items())),
            " ".join(f"{loss:.3f}" for loss in run.losses),
        ]
        rows.append([run.name, *figures, f"{run.step_seconds:.3f}", *words])
    return grid(head, rows, ("run", *head[-4:]))


if __name__ == "__main__":
    main()
