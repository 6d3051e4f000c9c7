"""The run, device and prompts of eval, infer, chat and merge. Loads no torch."""

import sys
from collections.abc import Iterable

from sft_play.commands.call import read_call
from sft_play.config import loader
from sft_play.plan import devices
from sft_play.runs import folder as run_folders
from sft_play.runs.folder import RunFolder


def chosen_run() -> RunFolder:
    """Return the run that RUN names, or the latest."""
    called = read_call(None, ())
    return run_folders.find(called.output_dir, called.invocation.run)


def inference_device() -> str:
    """Return cuda or cpu, as DEVICE and the machine say."""
    called = read_call(None, ())
    return devices.detect(called.invocation.device, called.environ).kind


def prompts(given: str | None) -> Iterable[str]:
    """Return the questions of `infer`: the argument, PROMPT, or the lines of standard input."""
    asked = given or loader.environment().get("PROMPT")
    return [asked] if asked else (line.strip() for line in sys.stdin if line.strip())
