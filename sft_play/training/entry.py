"""The entry point of a rank.

Finds its process in the run, opens run.json, imports the backend in the right order, and runs the
worker.
"""

import sys
from pathlib import Path

from sft_play.config.backends import backend_of
from sft_play.errors import SftPlayError
from sft_play.plan.run_plan import PlannedRun
from sft_play.runs.folder import RunFolder
from sft_play.training import runtime
from sft_play.training.recorder import RunRecorder


def main(path: Path) -> int:
    """Run the worker on a run folder; return the exit class as the process's exit code."""
    folder = RunFolder(path)
    try:
        planned = PlannedRun.read(folder)
    except SftPlayError as error:  # no run folder, so nowhere to record it
        name = error.exit_class.name.lower()
        sys.stderr.write(f"{error}\nexit class {int(error.exit_class)} ({name})\n")
        return int(error.exit_class)
    recorder = RunRecorder(folder, planned, runtime.rank())
    with recorder:
        process = runtime.start(planned, folder)
        if backend_of(planned.config).patches_transformers:
            from sft_play.models import unsloth

            unsloth.import_first()  # before the worker imports transformers
        from sft_play.training import worker

        worker.run(planned, folder, process, recorder)
    return int(recorder.exit_class)
