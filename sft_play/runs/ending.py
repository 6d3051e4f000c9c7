"""How a run has ended, for the last line that its user sees. Loads no torch."""

import time
from collections.abc import Mapping
from pathlib import Path

from sft_play.errors import ExitClass
from sft_play.runs.files import write_json
from sft_play.runs.folder import RunFolder

# Ends after which the newest checkpoint goes on, once what they name is mended
GOES_ON = (
    ExitClass.UNEXPECTED,
    ExitClass.ENVIRONMENT,
    ExitClass.DISK_FULL,
    ExitClass.PEER_LOST,
)
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"  # where torchrun, which accelerate starts, too, reads causes


def next_line(exit_class: ExitClass, cause: str, command: str | None) -> str:
    """Return the line with what to type next, '' where the cause says it or nothing is kept."""
    if exit_class not in GOES_ON or command is None or "RESUME" in cause:
        return ""
    return f"\ngo on with {command}"


def last_words(folder: RunFolder) -> str | None:
    """Return why a run did not end well, and what to type; None where it did, or says nothing."""
    report = folder.read_report()
    if report.status not in ("failed", "stopped") or not report.exit_class or not report.cause:
        return None
    exit_class = ExitClass(report.exit_class)
    place = f"exit class {int(exit_class)} ({exit_class.name.lower()}), {folder.path}"
    return f"{report.cause}\n{place}{next_line(exit_class, report.cause, report.next)}"


def tell_launcher(environ: Mapping[str, str], cause: str) -> None:
    """Write why this process ends where torchrun reads it, for the table that it prints last."""
    path = environ.get(ERROR_FILE)
    if path:
        when = {"timestamp": str(int(time.time()))}
        write_json(Path(path), {"message": {"message": cause, "extraInfo": when}})
