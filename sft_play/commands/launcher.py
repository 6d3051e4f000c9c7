"""A launcher of ranks: while it starts, for seconds it handles no signal; and its last words.

Loads no torch.
"""

import atexit
import contextlib
import runpy
import sys
from pathlib import Path

from sft_play.commands.train import failure_recorded
from sft_play.errors import ExitClass
from sft_play.progress import visible
from sft_play.runs.folder import RunFolder, last_words
from sft_play.stops import StopSignals


def main(folder: str, module: str, *words: str) -> None:
    """Run a launcher's module. Once it has handlers of its own, it passes signals to its ranks.

    What it prints of a rank that failed says neither why nor what to type, so the run's own words
    follow it: at the exit, because Python prints an exception just before.
    """
    sys.argv = [module, *words]
    run = RunFolder(Path(folder))
    atexit.register(say_last_words, run)
    try:
        with StopSignals() as signals, failure_recorded(run):
            signals.release()
            runpy.run_module(module, run_name="__main__", alter_sys=True)
    except KeyboardInterrupt:
        sys.exit(int(ExitClass.STOPPED))


def say_last_words(run: RunFolder) -> None:
    """Print why a run has ended, where it did not end well."""
    words = last_words(run)
    if words is not None:
        with contextlib.suppress(OSError):  # the terminal is gone
            sys.stderr.write(f"\n{visible(words)}\n")
            sys.stderr.flush()
