"""A command for a Python program that waits for it: asked in JSON, answered in a file.

Its own process, as under make: the program that asks keeps its memory, its threads and its signals.
What a command prints goes to standard output. Loads no torch at import.
"""

import contextlib
import ctypes
import io
import json
import signal
import sys
from pathlib import Path
from typing import Any

from sft_play.commands import plan as planning
from sft_play.commands import preview as previews
from sft_play.commands.ask import Request
from sft_play.commands.call import Call, load_config, plan_run, read_call
from sft_play.commands.train import prepare_run
from sft_play.errors import SftPlayError
from sft_play.plan import launch
from sft_play.progress import log_to_stderr
from sft_play.runs.files import write_json

PR_SET_PDEATHSIG = 1  # of Linux's prctl.h


def main() -> None:
    """Answer the request on the command line; an error of ours is an answer too."""
    _end_with_parent()
    log_to_stderr()
    answer = Path(sys.argv[2])
    request = Request(**json.loads(sys.argv[3]))
    try:
        call = read_call(request.config, request.overrides)
        if request.command == "plan":
            write_json(answer, _plan(call, request))
        elif request.command == "preview":
            write_json(answer, _preview(call, request))
        else:
            _train(call, request, answer)
    except SftPlayError as error:
        write_json(answer, {"error": str(error), "exit_class": int(error.exit_class)})
        sys.exit(int(error.exit_class))


def _end_with_parent() -> None:
    """Ask Linux for SIGTERM when the program that asked ends: a run then saves a checkpoint.

    It holds for what this process becomes, too. A restarted notebook else leaves a GPU occupied.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _train(call: Call, request: Request, answer: Path) -> None:
    """Answer with the run's folder, and become its launcher."""
    folder, planned = prepare_run(call, request.distributed, request.deepspeed, request.backend)
    write_json(answer, {"folder": str(folder.path)})
    sys.stdout.flush()
    launch.execute(planned.plan.launch, call.environ)


def _plan(call: Call, request: Request) -> dict[str, Any]:
    planned = planning.plan_for_display(call, request.distributed, request.deepspeed)
    as_json = planning.plan_text(call, planned, with_trace=False, as_json=True)
    return {
        "text": planning.plan_text(call, planned, with_trace=False, as_json=False),
        "fits": planned.plan.fits,
        "values": json.loads(as_json),
    }


def _preview(call: Call, request: Request) -> dict[str, Any]:
    loaded = load_config(call)
    planned = plan_run(call, loaded)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        page = previews.preview(planned, loaded.source, request.rows, None, no_color=True)
    return {"text": printed.getvalue(), "page": str(page)}
