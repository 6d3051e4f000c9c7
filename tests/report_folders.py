"""Run folders as a run leaves them, without a run."""

import json
from dataclasses import replace
from pathlib import Path

from sft_play.config import loader
from sft_play.config.schema import Config
from sft_play.runs.files import write_text
from sft_play.runs.folder import RunFolder
from sft_play.runs.report import (
    Check,
    LengthHistogram,
    LoggedStep,
    PhasePeaks,
    ReportedPeaks,
    RunReport,
)
from sft_play.runs.resumed import AskedRun

ROWS = 20
GIB = 2**30
SPLIT = {
    "rows_in": 30,
    "rows_used": 28,
    "samples": 28,
    "tokens": 2800,
    "trained_tokens": 900,
    "lost_trained_tokens": 0,
    "lost_fraction": 0.0,
    "dropped": {"too_long": 2},
    "shortened": {},
    "lengths": {"p50": 90, "p90": 120, "p99": 130, "max": 131},
}
DONE = RunReport(
    run="run",
    status="done",
    exit_class=0,
    world_size=1,
    strategy="single",
    device="cpu",
    backend="bnb",
    mode="lora",
    global_step=40,
    pid=1,
    started_at="2026-01-02T03:04:05+0000",
    versions={"torch": "2.13.0"},
    seconds={"train": 12.5, "total": 75.0},
    tokens_per_second=1234.0,
    peak_bytes=ReportedPeaks(predicted=2 * GIB, measured=GIB),
    memory=PhasePeaks(predicted={"load": GIB, "forward": 2 * GIB}, measured={"load": GIB}),
    metrics={
        "before": {"eval_loss": 3.5, "rougeL": 0.25},
        "after": {"eval_loss": 0.5, "rougeL": 0.75},
    },
    history=[
        LoggedStep(10, loss=2.0, learning_rate=1e-3, grad_norm=1.5),
        LoggedStep(20, loss=1.0, learning_rate=5e-4, grad_norm=0.5, tokens_per_second=1200.0),
        LoggedStep(20, eval_loss=1.25),
    ],
    checks=[Check("the saved weights are finite and equal those in memory", passed=True)],
    data={"train": {**SPLIT, "overlap": {"test": {"exact": 0, "normalized": 0}}}, "test": SPLIT},
    lengths={"train": LengthHistogram([0, 50, 100, 150], [4, 16, 8])},
)


def answer_lines(scores: list[float], text: str = "an answer", **more: object) -> str:
    """Return eval/<when>.jsonl of rows with these scores."""
    lines = []
    for number, score in enumerate(scores):
        values = {
            "origin": f"rows.jsonl:{number + 1}",
            "prompt": f"<|user|>question {number}<|assistant|>",
            "expected": f"expected {number}",
            "answer": text,
            "rougeL": score,
            "was_cut": False,
        }
        lines.append(json.dumps({**values, **more}) + "\n")
    return "".join(lines)


def loss_lines(nats: list[float], tokens: int = 10) -> str:
    """Return eval/<when>.losses.jsonl of rows of `tokens` tokens with these nats."""
    lines = []
    for number, row_nats in enumerate(nats):
        values = {"origin": f"rows.jsonl:{number + 1}", "nats": row_nats, "tokens": tokens}
        lines.append(json.dumps(values) + "\n")
    return "".join(lines)


def run_folder(
    path: Path,
    report: RunReport = DONE,
    before: str | None = None,
    after: str | None = None,
    overrides: tuple[str, ...] = ("train.learning_rate=0.001",),
) -> RunFolder:
    """Return a folder with run.json, settings, losses and answers; half of the rows improved by default."""
    folder = RunFolder(path)
    loaded = loader.load_merged(None, {}, overrides)
    folder.write_config(Config.model_validate(loaded.config.model_dump()))
    write_text(folder.path / "plan.json", "{}")
    AskedRun.of(loaded, "make train TRAIN_LEARNING_RATE=0.001").write(folder)
    folder.write_report(replace(report, run=folder.name))
    if before is None:
        before = answer_lines([0.25] * ROWS)
    if after is None:
        after = answer_lines([0.5, 1.0] * (ROWS // 2))
    write_text(folder.evaluation / "before.jsonl", before)
    write_text(folder.evaluation / "after.jsonl", after)
    for when in ("before", "after"):
        if "eval_loss" in report.scores(when):
            losses = [10 * report.scores(when)["eval_loss"]] * ROWS
            write_text(folder.evaluation / f"{when}.losses.jsonl", loss_lines(losses))
    return folder


def scored_lines(scores: dict[str, list[float]]) -> str:
    """Return eval/<when>.jsonl of rows with several scores."""
    lines = answer_lines(scores["rougeL"]).splitlines()
    values = [json.loads(line) for line in lines]
    for row, value in enumerate(values):
        value |= {name: of_rows[row] for name, of_rows in scores.items()}
    return "".join(json.dumps(value) + "\n" for value in values)
