"""Where a rank begins: finds its place, opens run.json, imports the backend in the right order, and runs the worker."""

import sys
from pathlib import Path

from sft_play.errors import SftPlayError
from sft_play.plan.run_plan import PlannedRun
from sft_play.runs.folder import RunFolder
from sft_play.training import runtime
from sft_play.training.report import Report


def main(path: Path) -> int:
    """Run the worker on a run folder; return the exit class for the process."""
    folder = RunFolder(path)
    try:
        planned = PlannedRun.read(folder)
    except SftPlayError as error:  # no run folder, so nowhere to record it
        sys.stderr.write(
            f"{error}\nexit class {int(error.exit_class)} ({error.exit_class.name.lower()})\n"
        )
        return int(error.exit_class)
    config = planned.config
    plan = planned.plan
    report = Report(folder, plan, config.tuning.mode, config.tuning.backend, runtime.rank())
    with report:
        process = runtime.start(config, plan, folder)
        if config.tuning.backend == "unsloth":
            from sft_play.models import unsloth

            unsloth.import_first()  # it patches transformers, so it comes before the worker's imports
        from sft_play.training import worker

        worker.run(planned, folder, process, report)
    return int(report.exit_class)
