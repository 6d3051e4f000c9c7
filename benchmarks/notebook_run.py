"""Runs a notebook or its script in this process, and writes what each training step took.

python -m benchmarks.notebook_run notebook.ipynb|train.py FOLDER

After WARM_UP steps every process writes `ready-RANK` in FOLDER and waits there for the file `go`,
so that several runs load and compile side by side and are timed one after the other. Trained, it
writes `result-RANK.json` and waits for `end`. Unsloth is imported before transformers, as a
notebook does.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import time
from pathlib import Path
from typing import Any

WARM_UP = 3  # steps that compile
WAIT_SECONDS = 300.0  # for `go` and `end`; the benchmark is gone after that


def main() -> None:
    """Run the file that is named."""
    path, folder = map(Path, sys.argv[1:])
    import unsloth  # noqa: F401

    record_steps(folder)
    sys.path.insert(0, "")
    if path.suffix == ".py":
        runpy.run_path(str(path), run_name="__main__")
    else:
        run_cells(path.read_text(encoding="utf-8"))


def run_cells(text: str) -> None:
    """Run the code cells of a notebook one after the other."""
    from sft_play.notebooks import code as codes

    variables: dict[str, Any] = {"__name__": "__main__"}
    for number, cell in enumerate(json.loads(text)["cells"], 1):
        if cell["cell_type"] == "code":
            code = codes.parse(number, "".join(cell["source"]))
            exec(compile("\n".join(code.lines), f"cell {number}", "exec"), variables)


def record_steps(folder: Path) -> None:
    """Give every trainer a callback that writes result-RANK.json."""
    import torch
    from transformers import TrainerCallback, trainer

    rank = int(os.environ.get("RANK", 0))

    def synchronize() -> None:
        for index in range(torch.cuda.device_count()):
            if torch.cuda.memory_reserved(index):  # else this process has nothing there
                torch.cuda.synchronize(index)

    class Recorder(TrainerCallback):
        """Times the steps of a trainer."""

        def __init__(self) -> None:
            self.begun = 0.0
            self.step_seconds: list[float] = []

        def on_step_begin(self, args, state, control, **found: Any) -> None:
            synchronize()
            if state.global_step == WARM_UP:
                (folder / f"ready-{rank}").touch()
                wait_for(folder / "go")
            self.begun = time.perf_counter()

        def on_step_end(self, args, state, control, **found: Any) -> None:
            synchronize()
            self.step_seconds.append(time.perf_counter() - self.begun)

        def on_train_end(self, args, state, control, model=None, **found: Any) -> None:
            result = {
                "step_seconds": self.step_seconds,
                "losses": [log["loss"] for log in state.log_history if "loss" in log],
                "rows_per_step": args.train_batch_size
                * args.gradient_accumulation_steps
                * args.world_size,
                "world_size": args.world_size,
                "weights": weights_by_device(model),
                "peak_bytes": {
                    f"cuda:{index}": torch.cuda.max_memory_reserved(index)
                    for index in range(torch.cuda.device_count())
                },
                "program": program(),
            }
            part = folder / f"result-{rank}.part"
            part.write_text(json.dumps(result), encoding="utf-8")
            part.rename(folder / f"result-{rank}.json")
            wait_for(folder / "end")

    trainer.DEFAULT_CALLBACKS.append(Recorder)


def wait_for(path: Path) -> None:
    """Return when a file is there. Exits where it does not come."""
    end = time.monotonic() + WAIT_SECONDS
    while not path.exists():
        if time.monotonic() > end:
            sys.exit(f"{path} has not come in {WAIT_SECONDS:.0f} s")
        time.sleep(0.02)


def weights_by_device(model: Any) -> dict[str, int]:
    """Return how many weights lie on each device."""
    found: dict[str, int] = {}
    for weights in model.parameters():
        found[str(weights.device)] = found.get(str(weights.device), 0) + weights.numel()
    return found


def program() -> str:
    """Return which Unsloth ran: its version, or the stand-in of the tests."""
    import unsloth

    return getattr(unsloth, "__version__", "stand-in")


if __name__ == "__main__":
    main()
