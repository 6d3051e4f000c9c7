"""A command for a Python program that waits for it: asked in JSON, answered in a file.

Its own process, as under make: the program that asks keeps its memory, its threads and its signals.
What a command prints goes to standard output. Loads no torch at import.
"""

import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any

from sft_play import stops
from sft_play.commands import plan as planning
from sft_play.commands import preview as previews
from sft_play.commands.ask import Request
from sft_play.commands.call import Call, load_config, plan_run, read_call
from sft_play.commands.train import NOT_BEGUN, hand_over, prepare_run
from sft_play.errors import SftPlayError, StoppedOnRequest
from sft_play.masking import mask_secrets
from sft_play.progress import log_to_stderr
from sft_play.runs.files import write_json


def main() -> None:
    """Answer the request on the command line; an error of ours is an answer too."""
    stops.end_with_parent(stops.PARENT_GONE)  # else a restarted notebook leaves a GPU occupied
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
        write_json(answer, {"error": mask_secrets(str(error)), "exit_class": int(error.exit_class)})
        sys.exit(int(error.exit_class))


def _train(call: Call, request: Request, answer: Path) -> None:
    """Answer with the run's folder, and become its launcher. Raises: StoppedOnRequest."""
    with stops.StopSignals():
        try:
            folder, planned = prepare_run(
                call, request.distributed, request.deepspeed, request.backend
            )
            write_json(answer, {"folder": str(folder.path)})
            sys.stdout.flush()
            hand_over(folder, planned, call)
        except KeyboardInterrupt:
            raise StoppedOnRequest(NOT_BEGUN) from None


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
