"""The entry point of a rank.

Handles signals from the start, finds its place in the run, opens run.json, imports the
backend in the right order, and runs the worker. Slow imports are inside functions.
"""

import os
import sys
import threading
from pathlib import Path

from sft_play import stops, timeline
from sft_play.config import targets
from sft_play.config.backends import backend_of
from sft_play.errors import SftPlayError
from sft_play.evaluation import opener
from sft_play.masking import mask_secrets
from sft_play.plan.run_plan import PlannedRun
from sft_play.progress import go_on_without_output, guard_output
from sft_play.runs import lock
from sft_play.runs.folder import RunFolder
from sft_play.stops import StopSignals
from sft_play.training import peers
from sft_play.training.recorder import RunRecorder, log_thread_error


def run_worker(path: Path, may_fork: bool = False) -> int:
    """Run the worker on a run folder; return the exit class as the process's exit code.

    `may_fork` is True if this process does nothing else. Then the process that will open the saved
    weights may be forked from it.
    """
    folder = RunFolder(path)
    guard_output(targets.shown)
    go_on_without_output()
    threading.excepthook = log_thread_error
    stops.hold()  # until they can be recorded
    with StopSignals(is_rank=True) as signals:
        try:
            planned = PlannedRun.read(folder)
        except SftPlayError as error:  # no run folder, so the error cannot be recorded
            name = error.exit_class.name.lower()
            cause = mask_secrets(str(error))
            peers.print_in_torchrun(cause)
            sys.stderr.write(f"{cause}\nexit class {int(error.exit_class)} ({name})\n")
            return int(error.exit_class)
        if planned.plan.ranks.world_size > 1:
            peers.end_with_launcher()
        recorder = RunRecorder(folder, planned, peers.rank())
        signals.on_first = recorder.interrupt
        with recorder, lock.shared(path):
            signals.release()
            may_fork = may_fork and planned.config.train.reopen_saved is not False
            _run(planned, folder, recorder, signals, may_fork)
    return int(recorder.exit_class)


def _run(
    planned: PlannedRun,
    folder: RunFolder,
    recorder: RunRecorder,
    signals: StopSignals,
    may_fork: bool,
) -> None:
    is_patched = backend_of(planned.config).patches_transformers
    if may_fork and not is_patched and peers.rank() == 0:
        opener.fork_opener()  # first, because it must know nothing of the run
    else:
        opener.dismiss()
    from sft_play.training import runtime

    process = runtime.start_process(planned, folder)
    if is_patched:
        from sft_play.models import unsloth

        unsloth.import_first()  # before the worker imports transformers
    from sft_play.training import worker

    if not timeline.spans:
        timeline.note("imports")
    worker.run_training(planned, folder, process, recorder, signals)


def wait_for_folder(descriptor: int, parent: int) -> str:
    """Return the run folder that arrives on a pipe, once everything is imported.

    Ends this process if no folder arrives, or if the parent command ends: it reports the failure.
    """
    stops.end_with_parent(parent=parent)
    opener.fork_opener()
    from sft_play.training import runtime, worker  # noqa: F401 - so that they are loaded

    timeline.note("imports")
    with os.fdopen(descriptor, encoding="utf-8") as pipe:
        folder = pipe.readline().removesuffix("\n")
    if not folder:
        sys.exit()
    stops.outlive_parent()
    peers.end_with_launcher()
    return folder
