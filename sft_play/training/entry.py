"""Where a rank begins.

Finds its place, opens run.json, imports the backend in the right order, and runs the worker.
"""

import sys
from pathlib import Path

from sft_play.errors import SftPlayError
from sft_play.plan.run_plan import PlannedRun
from sft_play.runs.folder import RunFolder
from sft_play.training import runtime
from sft_play.training.recorder import RunRecorder


def main(path: Path) -> int:
    """Run the worker on a run folder; return the exit class for the process."""
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
        if planned.config.tuning.backend == "unsloth":
            from sft_play.models import unsloth

            unsloth.import_first()  # before the worker's imports: it patches transformers
        from sft_play.training import worker

        worker.run(planned, folder, process, recorder)
    return int(recorder.exit_class)
