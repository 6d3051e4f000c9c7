"""The run, device and prompts of eval, infer, chat and merge. Loads no torch."""

import sys
from collections.abc import Iterable, Sequence

from sft_play.commands.call import read_call
from sft_play.config import loader
from sft_play.plan import devices
from sft_play.runs import folder as run_folders
from sft_play.runs.folder import WEIGHTS, RunFolder


def chosen_run(weights: Sequence[str] = WEIGHTS) -> RunFolder:
    """Return the run that RUN names, or the latest that has one of these folders of weights.

    Which one that is, and which newer ones were skipped and why, goes to standard error.
    """
    called = read_call(None, ())
    if called.invocation.run:
        return run_folders.find(called.output_dir, called.invocation.run)
    latest = run_folders.latest_with_weights(called.output_dir, weights)
    for reason in latest.skipped:
        sys.stderr.write(f"skipped: {reason}\n")
    sys.stderr.write(f"run {latest.folder.path}, the latest with weights; RUN= chooses another\n")
    return latest.folder


def inference_device() -> str:
    """Return cuda or cpu, as DEVICE and the machine say."""
    called = read_call(None, ())
    return devices.detect(called.invocation.device, called.environ).kind


def prompts(given: str | None) -> Iterable[str]:
    """Return the questions of `infer`: the argument, PROMPT, or the lines of standard input."""
    asked = given or loader.environment().get("PROMPT")
    return [asked] if asked else (line.strip() for line in sys.stdin if line.strip())
