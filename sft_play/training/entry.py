"""Where a rank begins: finds its place, opens run.json, imports the backend in the right order, and runs the worker."""

from pathlib import Path

from sft_play.errors import ExitClass, SftPlayError
from sft_play.runs.folder import RunFolder
from sft_play.training import runtime
from sft_play.training.report import Report


def main(path: Path) -> int:
    """Run the worker on a run folder; return the exit class for the process."""
    folder = RunFolder(path)
    config, plan = folder.read_config(), folder.read_plan()
    report = Report(folder, plan, config.tuning.mode, config.tuning.backend, runtime.rank())
    try:
        with report:
            process = runtime.start(plan, folder)
            if config.tuning.backend == "unsloth":
                from sft_play.models import unsloth

                unsloth.import_first()  # it patches transformers, so it comes before the worker's imports
            from sft_play.training import worker

            worker.run(config, plan, folder, process, report)
    except SftPlayError as error:
        return int(error.exit_class)  # recorded and told by the report
    return int(ExitClass(report.facts["exit_class"]))
