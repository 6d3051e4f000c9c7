"""Starts a command for a Python program, prints its lines, and returns its answer. No torch."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sft_play.config.loader import PROJECT_ROOT, environment
from sft_play.errors import SftPlayError

# Started anywhere: beside a notebook the project may not be the current folder
PROGRAM = """
import sys
sys.path.insert(0, sys.argv[1])
from sft_play.commands.child import main
main()
"""


@dataclass(frozen=True)
class Request:
    """A command and its options; make's variables are in the environment."""

    command: str  # train, plan or preview
    config: str | None = None
    overrides: tuple[str, ...] = ()  # words of --set
    distributed: bool = False
    deepspeed: bool = False
    backend: str | None = None
    rows: int = 3  # of a preview


class Child:
    """A command in a process of its own: this one keeps its memory, threads and signals."""

    def __init__(self, request: Request, variables: Mapping[str, str], answer: Path) -> None:
        """Start it; it answers in the file `answer`."""
        asked = json.dumps(asdict(request))
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(PROJECT_ROOT), str(answer), asked],
            env={**environment(), **variables, "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,  # an interrupt reaches it once, through this process
        )

    def show(self, quiet: bool) -> None:
        """Print its lines until it ends."""
        for line in self.process.stdout:
            if not quiet:
                print(line, end="", flush=True)

    def stop(self) -> None:
        """Ask it to end; a run that trains saves a checkpoint."""
        self.process.send_signal(signal.SIGINT)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)


def ask(request: Request, variables: Mapping[str, str], quiet: bool) -> dict[str, Any]:
    """Run a command to its end, print its lines unless `quiet`, and return its answer.

    KeyboardInterrupt stops it with a checkpoint, a second one kills it.
    Raises: SftPlayError where it ended without an answer.
    """
    with tempfile.TemporaryDirectory(prefix="sft_play-") as folder:
        answer = Path(folder) / "answer.json"
        child = Child(request, variables, answer)
        try:
            child.show(quiet)
        except KeyboardInterrupt:
            print("stopping with a checkpoint; interrupt again to kill the run", flush=True)
            child.stop()
            try:
                child.show(quiet)
            except KeyboardInterrupt:
                child.kill()
                raise
        code = child.process.wait()
        if not answer.exists():
            raise SftPlayError(f"{request.command} ended with exit code {code}; it says why above")
        return json.loads(answer.read_text(encoding="utf-8"))
