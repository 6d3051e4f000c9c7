"""What a person reads when a run ends. Facts in, lines out."""

from pathlib import Path
from typing import Any

from sft_play.evaluation.evaluator import Question
from sft_play.runs.folder import RunFolder
from sft_play.training.held_out import HeldOutEvaluation

SAMPLES = 3
WIDTH = 160  # characters of a sample's line


def summary_lines(
    facts: dict[str, Any], held_out: HeldOutEvaluation, folder: RunFolder, weights: Path
) -> list[str]:
    """Return the closing screen: scores before and after, sample answers, speed, and what to type next."""
    name = folder.name
    return [
        *score_lines(held_out),
        "",
        fact_line(facts),
        f"weights  {weights}",
        f"run      {folder.path}  (run.json, eval/, logs/, tb/)",
        str(facts["cause"])
        if facts["cause"]
        else f"next     make chat RUN={name} | make eval RUN={name} | make merge RUN={name}",
    ]


def score_lines(held_out: HeldOutEvaluation) -> list[str]:
    """Return the table of scores and three rows with the answers before and after; nothing where a run was stopped."""
    before, after = held_out.found.get("before"), held_out.found.get("after")
    if before is None or after is None:
        return []
    lines = [
        "",
        f"{'held-out rows':<16}{'before':>10}{'after':>10}",
        f"{'loss':<16}{before.eval_loss:>10.4f}{after.eval_loss:>10.4f}",
    ]
    if before.rouge_l is not None and after.rouge_l is not None:
        lines.append(f"{'ROUGE-L':<16}{before.rouge_l:>10.3f}{after.rouge_l:>10.3f}")
    for number in sample_indices(len(after.answers)):
        lines += [
            "",
            *_sample(
                held_out.evaluator.questions[number], before.answers[number], after.answers[number]
            ),
        ]
    return lines


def fact_line(facts: dict[str, Any]) -> str:
    """Return the run's end as one greppable line."""
    seconds, speed = facts["seconds"], facts["tokens_per_second"]
    peak, predicted = (facts["peak_bytes"][name] / 2**30 for name in ("measured", "predicted"))
    return (
        f"{facts['status']} steps={facts['global_step']} train_seconds={seconds['train']:.1f} total_seconds={seconds['total']:.1f} "
        f"tokens_per_second={f'{speed:.0f}' if speed else 'n/a'} peak={peak:.2f}GiB predicted={predicted:.2f}GiB "
        f"world={facts['world_size']} device={facts['device']}"
    )


def sample_indices(count: int) -> list[int]:
    """Return up to three rows, spread over the set."""
    return sorted({i * count // SAMPLES for i in range(SAMPLES)}) if count else []


def _sample(question: Question, before: str, after: str) -> list[str]:
    flat = " ".join(question.plain_prompt.split())
    asked = (
        flat if len(flat) <= WIDTH else f"...{flat[3 - WIDTH :]}"
    )  # the question stands at a prompt's end
    return [
        f"{name:<9}{text}"
        for name, text in (
            ("prompt", asked),
            ("expected", _short(question.expected)),
            ("before", _short(before)),
            ("after", _short(after)),
        )
    ]


def _short(text: str) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= WIDTH else flat[: WIDTH - 3] + "..."
