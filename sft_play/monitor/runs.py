"""The lines of `make runs`. Loads no torch."""

from pathlib import Path

from sft_play.runs import metrics
from sft_play.runs.folder import RunFolder, listing
from sft_play.runs.report import RunReport, recorded_scores

KILLED = "killed before it could write why; dmesg names what was killed for memory"


def run_table(output_dir: Path) -> list[str]:
    """Return a line for each run below `output_dir`, oldest first."""
    folders = listing(output_dir)
    if not folders:
        return [f"{output_dir} holds no run yet; make train makes one"]
    width = max(len(folder.name) for folder in folders)
    return [_run_line(folder, width) for folder in folders]


def _run_line(folder: RunFolder, width: int) -> str:
    """Return name, status, steps and scores of a run."""
    report = folder.read_report()
    after = (report.metrics or {}).get("after", {})
    words = [score.words() for score in recorded_scores(after)]
    if "eval_loss" in after:
        words.insert(0, f"eval_loss={after['eval_loss']:.4f}")
    scores = " ".join(words)
    mode = f"{report.mode or '-'}/{report.backend or '-'}"
    cause = (report.cause or report.warning or "").partition("\n")[0]
    if report.state == "died" and not cause:
        cause = KILLED
    facts = f"world={report.world_size or '-'} step={_step(folder, report)} {scores} {cause}"
    if report.state in ("failed", "died", "stopped") and report.next and "RESUME" not in cause:
        facts += f"; go on with {report.next}"
    elif report.state == "died":
        facts += "; nothing is kept: the same command starts it anew"
    return f"{folder.name:<{width}}  {report.state:<8} {mode:<13} {facts}".rstrip()


def _step(folder: RunFolder, report: RunReport) -> int:
    """Return the last step that a run is known to have reached, also of one that was killed."""
    reached = report.global_step or 0
    if report.state == "died":
        reached = max([reached, *(line.step for line in metrics.read(folder.metrics).lines)])
    return reached
