"""The files of a run as they stand on disk."""

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from sft_play.config.schema import env_name
from sft_play.process_id import ProcessId
from sft_play.runs import lock
from sft_play.runs.folder import RunFolder

ROOT = Path(__file__).resolve().parents[1]
# of a run of lora that saves a checkpoint halfway
FOUR_STEPS = {
    "train.max_steps": 4,
    "train.learning_rate": 0.01,
    "train.batch_size": "auto",
    "train.grad_accum": "auto",
    "train.effective_batch_size": 8,
    "train.save_strategy": "steps",
    "train.save_steps": 2,
    "train.eval_strategy": "no",
    "train.predict_with_generate": False,
    "train.lr_scheduler_type": "constant",
    "tuning.lora.dropout": 0.0,
    "tuning.mode": "lora",
}


def run_json(folder: RunFolder) -> dict[str, Any]:
    """Return run.json."""
    return json.loads((folder.path / "run.json").read_text())


def check_same_end(one: RunFolder, two: RunFolder) -> None:
    """Assert that the last two losses and the adapters of two runs are equal to the bit."""
    losses = [[entry["loss"] for entry in run_json(run)["loss"]][-2:] for run in (one, two)]
    assert losses[0] == losses[1]
    saved = [run.path / "adapter/adapter_model.safetensors" for run in (one, two)]
    assert saved[0].read_bytes() == saved[1].read_bytes()


def variables_of(settings: dict[str, object]) -> dict[str, str]:
    """Return settings as the environment names and spells them."""
    return {env_name(name): "null" if v is None else str(v) for name, v in settings.items()}


def plan_json(folder: RunFolder) -> dict[str, Any]:
    """Return plan.json."""
    return json.loads((folder.path / "plan.json").read_text())


GONE = replace(ProcessId.read(), pid=2**22 + 1)  # no process of Linux has this number


def write_holder(folder: Path, holder: ProcessId = GONE) -> None:
    """Write whose a run folder is, without a lock on it."""
    (folder / lock.NAME).write_text(json.dumps(asdict(holder)))


@contextlib.contextmanager
def held_by_another(folder: Path) -> Iterator[ProcessId]:
    """Let another process have the lock of a run folder, as a run that continues in it."""
    code = (
        "import sys; from pathlib import Path; from sft_play.runs import lock; "
        "lock.take(Path(sys.argv[1]), print); print('taken', flush=True); input()"
    )
    command = [sys.executable, "-c", code, str(folder)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, cwd=ROOT, **pipes) as other:
        while other.stdout.readline() not in (b"taken\n", b""):
            pass
        try:
            yield ProcessId.read(other.pid)
        finally:
            other.kill()
