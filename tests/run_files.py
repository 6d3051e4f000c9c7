"""The files of a run as they stand on disk."""

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from sft_play.process_id import ProcessId
from sft_play.runs import lock
from sft_play.runs.folder import RunFolder

ROOT = Path(__file__).resolve().parents[1]


def run_json(folder: RunFolder) -> dict[str, Any]:
    """Return run.json."""
    return json.loads((folder.path / "run.json").read_text())


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
