"""A notebook in Unsloth's style on one GPU, and converted for two.

python -m benchmarks.notebook                    two GPUs, and Unsloth
python -m benchmarks.notebook --toy              the tiny model on the CPU, a stand-in for Unsloth

Three runs train on the same rows per step, one after the other: the notebook on one GPU; the output
of `make convert-notebook`, one process whose model is split over two GPUs; and its script under
torchrun, one process per GPU. The model is Llama 1B with random weights.
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.command_line import make_parser
from benchmarks.inputs import TINY, fixed_rows, make_model
from benchmarks.machine import ROOT
from benchmarks.processes import clean_environment, fresh_folder, run_limited
from benchmarks.runner import with_repository
from benchmarks.verdict import MAX_ROUNDING, MIN_FALL, deviation, fall
from benchmarks.workloads import LLAMA_1B, BaseModel
from notebook_converter import code as codes
from notebook_converter.convert import convert
from notebook_converter.script import export
from sft_play.commands.notebook import read_notebook
from sft_play.plan.ranks import visible_entries
from sft_play.runs.report import LoggedLoss

NOTEBOOK = ROOT / "tests" / "notebooks" / "tiny.ipynb"
STAND_INS = ROOT / "tests" / "stand_ins"
WARM_UP = 3  # steps that compile
ACCUMULATION = 4  # micro-batches per step on one GPU; half as many under torchrun
DATA_ROWS = 96


class Way(NamedTuple):
    """One way to run the notebook."""

    name: str
    gpus: int
    processes: int


WAYS = (Way("notebook", 1, 1), Way("split", 2, 1), Way("script", 2, 2))


def main() -> None:
    """Run the notebook in each way. Exits with 1 if a loss differs."""
    parser = make_parser("notebook", __doc__)
    parser.add_argument("--record", nargs=2, type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.steps = args.steps or 20
    if args.record:
        record(*args.record, args.steps)
        return
    folder, reference = args.folder.resolve(), []
    for way in WAYS:
        found = train(way, folder, args)
        losses = [LoggedLoss(*logged) for logged in found["losses"]]
        reference = reference or [logged.loss for logged in losses]
        words = " ".join(f"{logged.loss:.3f}" for logged in losses)
        print(f"{way.name}, {way.gpus} GPUs: {found['step_seconds']:.3f} s per step, loss {words}")
        off = deviation(losses, reference, 1)
        if off > MAX_ROUNDING or fall(reference) < MIN_FALL:
            sys.exit(f"off the notebook: {off:.2%}; the loss falls by {fall(reference):.0%}")


def train(way: Way, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Run the notebook in one way, and return what `write` wrote. Exits if it fails."""
    out = fresh_folder(folder / way.name)
    command = prepare(way, folder, out, args)
    environ = environment(way, args.toy)
    ended = run_limited(command, out / "log", args.seconds, out, environ)
    if ended.status != 0:
        sys.exit(f"{way.name}: {ended.cause}")
    for line in ended.log.read_text(encoding="utf-8", errors="replace").splitlines():
        if "GPU" in line:
            print(f"{way.name}: {line.strip()}")
    return json.loads((out / "result.json").read_text())


def prepare(way: Way, folder: Path, out: Path, args: argparse.Namespace) -> list[str]:
    """Write the files of a run, and return its command."""
    fixed_rows(out / "rows.jsonl", 64 if args.toy else 800, DATA_ROWS, as_messages=True)
    model = TINY if args.toy else make_model(BaseModel(shape=LLAMA_1B), folder)
    path = out / "notebook.ipynb"
    text = notebook_text(model, args, ACCUMULATION // way.processes)
    path.write_text(text, encoding="utf-8")
    launcher = []
    if way.name == "split":
        path.write_text(convert(read_notebook(path)).text, encoding="utf-8")
    if way.processes > 1:
        text, _ = export(read_notebook(path), out / "train.py")
        path = out / "train.py"
        path.write_text(text, encoding="utf-8")
        torchrun = ["torch.distributed.run", "--standalone"]
        launcher = ["-m", *torchrun, f"--nproc_per_node={way.processes}"]
    module = ["-m", "benchmarks.notebook", "--steps", str(args.steps), "--record"]
    return [sys.executable, *launcher, *module, str(path), str(out)]


def notebook_text(model: Path, args: argparse.Namespace, accumulation: int) -> str:
    """Return the notebook of the tests with another model, other rows and more steps."""
    changes = {
        "data/tiny_llama": str(model),
        "max_seq_length = 256": f"max_seq_length = {256 if args.toy else 1024}",
        "data/desk/train.jsonl": "rows.jsonl",
        "train[:24]": f"train[:{DATA_ROWS}]",
        "per_device_train_batch_size = 2": f"per_device_train_batch_size = {2 if args.toy else 8}",
        "gradient_accumulation_steps = 2": f"gradient_accumulation_steps = {accumulation}",
        "max_steps = 3": f"max_steps = {args.steps}",
        "learning_rate = 1e-3": f"learning_rate = {0.005 if args.toy else 0.001}",
        '\\"linear\\"': '\\"constant\\"',
    }
    text = NOTEBOOK.read_text(encoding="utf-8")
    for old, new in changes.items():
        assert text.count(old) == 1, f"{NOTEBOOK} has {text.count(old)} times {old}"
        text = text.replace(old, new)
    return text


def environment(way: Way, is_toy: bool) -> dict[str, str]:
    """Return the environment of a run: the GPUs that it sees, and a stand-in for Unsloth."""
    found = with_repository(clean_environment(os.environ)) | {"PYTHONUNBUFFERED": "1"}
    if is_toy:
        found["PYTHONPATH"] = f"{STAND_INS}{os.pathsep}{found['PYTHONPATH']}"
        return found | {"OMP_NUM_THREADS": "1"}
    visible = visible_entries(os.environ.get("CUDA_VISIBLE_DEVICES"), way.gpus)
    return found | {"CUDA_VISIBLE_DEVICES": ",".join(visible)}


def record(path: Path, folder: Path, steps: int) -> None:
    """Run a notebook or its script here, with a stopwatch in its trainer.

    Unsloth is imported before transformers, as in a notebook.
    """
    import torch
    import unsloth  # noqa: F401
    from transformers import trainer

    from benchmarks.stopwatch import Stopwatch

    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    stopwatch = Stopwatch(WARM_UP, steps, device)
    stopwatch.on_train_end = lambda *args, **kwargs: write(stopwatch, folder)
    trainer.DEFAULT_CALLBACKS.append(stopwatch)
    sys.path.insert(0, "")
    if path.suffix == ".py":
        runpy.run_path(str(path), run_name="__main__")
        return
    variables: dict[str, Any] = {"__name__": "__main__"}
    for cell in read_notebook(path).cells:
        if cell.kind == "code":
            code = codes.parse(cell.number, cell.source)
            exec(compile("\n".join(code.lines), f"cell {cell.number}", "exec"), variables)


def write(stopwatch: Any, folder: Path) -> None:
    """Write what the stopwatch of the first process measured."""
    first, last = stopwatch.marks[stopwatch.first], stopwatch.marks[stopwatch.last]
    seconds = (last.clock - first.clock) / (stopwatch.last - stopwatch.first)
    losses = [(logged.step, logged.loss) for logged in stopwatch.logged]
    if os.environ.get("RANK", "0") == "0":
        found = {"step_seconds": seconds, "losses": losses}
        (folder / "result.json").write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
