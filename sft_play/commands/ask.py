"""Run a command for a waiting Python program: the request is JSON, the answer is a file.

It runs in a separate process, as under make: the program keeps its memory, threads and
signals. The command's output goes to standard output. Loads no torch.
"""

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NoReturn

from sft_play import stops
from sft_play.commands import plan as planning
from sft_play.commands import rows as reading
from sft_play.commands.call import Call, load_config, plan_run, read_call
from sft_play.commands.train import NOT_BEGUN, hand_over, prepare_run
from sft_play.config.loader import PACKAGE, environment
from sft_play.errors import SftPlayError
from sft_play.masking import mask_secrets
from sft_play.progress import log_to_stderr
from sft_play.runs.files import Json, read_json, write_json

# May be started anywhere: a notebook's current folder may not be the project
PROGRAM = """
import sys
sys.path.insert(0, sys.argv[1])
from sft_play.commands.ask import main
main()
"""


@dataclass(frozen=True)
class CommandRequest:
    """A command and its options; make's variables are in the environment."""

    command: str  # train, plan or preview
    config: str | None = None
    overrides: tuple[str, ...] = ()  # values of --set
    distributed: bool = False
    deepspeed: bool = False
    backend: str | None = None
    rows: int = 3  # of a preview


@dataclass(frozen=True)
class CommandReply:
    """The answer of a command; missing parts are None."""

    path: str | None = None  # of the training run, or of a preview's page
    text: str | None = None  # of a plan or a preview
    fits: bool | None = None  # whether a plan fits
    values: Json | None = None  # of plan --json
    error: str | None = None
    exit_class: int | None = None  # of the error


def run_command(request: CommandRequest, variables: Mapping[str, str], quiet: bool) -> CommandReply:
    """Run a command to its end, print its lines unless `quiet`, and return its answer.

    KeyboardInterrupt stops it with a checkpoint, a second one kills it.
    Raises: SftPlayError if it ended without an answer.
    """
    with tempfile.TemporaryDirectory(prefix="sft_play-") as folder:
        answer = Path(folder) / "answer.json"
        asked, own_pid = json.dumps(asdict(request)), str(os.getpid())
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(PACKAGE.parent), str(answer), asked, own_pid],
            env={**environment(), **variables, "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,  # an interrupt reaches it once, through this process
        )
        try:
            _show(process, quiet)
        except KeyboardInterrupt:
            print("stopping with a checkpoint; interrupt again to kill the run", flush=True)
            process.send_signal(signal.SIGINT)
            try:
                _show(process, quiet)
            except KeyboardInterrupt:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                raise
        code = process.wait()
        if not answer.exists():
            raise SftPlayError(
                f"{request.command} ended with exit code {code}; the reason is above"
            )
        return CommandReply(**read_json(answer))


def _show(process: subprocess.Popen[str], quiet: bool) -> None:
    """Print the lines of a process until it ends."""
    for line in process.stdout:
        if not quiet:
            print(line, end="", flush=True)


def main() -> None:
    """Answer the request on the command line; one of our errors is also an answer."""
    answer, asked, parent = Path(sys.argv[2]), json.loads(sys.argv[3]), int(sys.argv[4])
    # otherwise a restarted notebook leaves a GPU occupied
    stops.end_with_parent(stops.PARENT_GONE, parent)
    log_to_stderr()
    request = CommandRequest(**asked)
    try:
        call = read_call(request.config, request.overrides)
        if request.command == "train":
            _train(call, request, answer)
        write_json(answer, _reply(call, request))
    except SftPlayError as error:
        reply = CommandReply(error=mask_secrets(str(error)), exit_class=int(error.exit_class))
        write_json(answer, reply)
        sys.exit(int(error.exit_class))


def _train(call: Call, request: CommandRequest, answer: Path) -> NoReturn:
    """Answer with the run's folder, and become its launcher. Raises: StoppedOnRequest."""
    with stops.stopped_with(NOT_BEGUN):
        folder, planned, early = prepare_run(
            call, request.distributed, request.deepspeed, request.backend
        )
        write_json(answer, CommandReply(path=str(folder.path)))
        sys.stdout.flush()
        hand_over(folder, planned, call, early)


def _reply(call: Call, request: CommandRequest) -> CommandReply:
    """Return the answer of plan or preview."""
    if request.command == "plan":
        planned = planning.plan_for_display(call, request.distributed, request.deepspeed)
        text = planning.plan_text(call, planned, as_json=False)
        values = json.loads(planning.plan_text(call, planned, as_json=True))
        return CommandReply(text=text, fits=planned.plan.fits, values=values)
    loaded = load_config(call)
    planned = plan_run(call, loaded)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        page = reading.preview(planned, loaded.source, request.rows, None, no_color=True)
    return CommandReply(text=printed.getvalue(), path=str(page))
