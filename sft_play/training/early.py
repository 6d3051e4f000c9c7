"""A rank that was started before its run is planned: it imports what takes seconds, and waits."""

import os
import sys

from sft_play import stops, timeline
from sft_play.evaluation import opener
from sft_play.training import peers


def wait(descriptor: int, parent: int) -> str:
    """Return the run folder that comes on a pipe, once everything is imported.

    Ends this process if none comes, and with the command that started it: it says why it failed.
    """
    stops.end_with_parent(parent=parent)
    opener.start()
    from sft_play.training import runtime, worker  # noqa: F401 - so that they are loaded

    timeline.note("imports")
    with os.fdopen(descriptor, encoding="utf-8") as pipe:
        folder = pipe.readline().removesuffix("\n")
    if not folder:
        sys.exit()
    stops.outlive_parent()
    peers.end_with_launcher()
    return folder
