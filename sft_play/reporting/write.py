"""Write report.html and report.json of a run. Loads no torch."""

import logging
from dataclasses import asdict
from pathlib import Path

from sft_play.errors import first_line
from sft_play.reporting import charts
from sft_play.reporting.page import render
from sft_play.reporting.summary import RunSummary, read_summary
from sft_play.runs.files import write_json, write_text
from sft_play.runs.folder import RunFolder

logger = logging.getLogger(__name__)


def write_report(folder: RunFolder) -> Path:
    """Write what the folder of a run says of it; return the path of report.html."""
    summary = read_summary(folder)
    write_json(folder.path / "report.json", as_json(summary))
    path = folder.path / "report.html"
    write_text(path, report_page(summary))
    return path


def write_report_or_warn(folder: RunFolder) -> None:
    """Write the report of a run that has ended. A fault of it is one warning, and no error.

    The run's own end, and its exit class, must not depend on a page about it.
    """
    try:
        write_report(folder)
    except Exception as error:
        logger.warning(
            "%s cannot be written: %s; the run ended as run.json says",
            folder.path / "report.html",
            first_line(error),
            exc_info=logger.isEnabledFor(logging.DEBUG),
        )


def as_json(summary: RunSummary) -> dict[str, object]:
    """Return report.json: what the page shows, but for what run.json holds already."""
    values = asdict(summary)
    for name in ("report", "history", "lengths"):
        del values[name]
    for row, score in zip(values["scores"], summary.scores, strict=True):
        row["outcome"] = score.outcome
    return values


def report_page(summary: RunSummary) -> str:
    """Return the page of a run."""
    lengths = [
        charts.histogram(f"Lengths of {split} samples, tokens", histogram)
        for split, histogram in summary.lengths.items()
    ]
    return render(
        "report.html.j2",
        summary=summary,
        report=summary.report,
        curves=charts.history_charts([(summary.run, summary.history)]),
        lengths=[drawing for drawing in lengths if drawing is not None],
    )
