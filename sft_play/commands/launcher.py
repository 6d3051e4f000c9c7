"""A launcher of ranks while it starts: for seconds it handles no signal. Loads no torch."""

import runpy
import sys
from pathlib import Path

from sft_play.commands.train import NOT_BEGUN, failure_recorded
from sft_play.errors import ExitClass
from sft_play.runs.folder import RunFolder
from sft_play.stops import StopSignals


def main(folder: str, module: str, *words: str) -> None:
    """Run a launcher's module. Once it has handlers of its own, it passes signals to its ranks."""
    sys.argv = [module, *words]
    try:
        with StopSignals() as signals, failure_recorded(RunFolder(Path(folder))):
            signals.release()
            runpy.run_module(module, run_name="__main__", alter_sys=True)
    except KeyboardInterrupt:
        sys.stderr.write(f"{NOT_BEGUN}\n")
        sys.exit(int(ExitClass.STOPPED))
