"""Scores on the held-out rows before and after training, and the summary at the end of a run."""

import contextlib
import logging
import math
from dataclasses import dataclass, field
from pathlib import Path

from sft_play import timeline
from sft_play.evaluation import measured
from sft_play.evaluation.evaluator import Evaluator
from sft_play.evaluation.scores import (
    GenerationScores,
    Scores,
    answers_jsonl,
    losses_jsonl,
)
from sft_play.models.delivered import as_trained
from sft_play.plan.devices import GIB
from sft_play.plan.speed import Speed
from sft_play.reporting.answers import title_of
from sft_play.runs.files import write_text
from sft_play.runs.folder import RunFolder
from sft_play.runs.metrics import SampleAnswer
from sft_play.runs.report import RunReport
from sft_play.training.events import sample_answers
from sft_play.training.loop import TrainingLoop
from sft_play.training.memory_lines import lines_after_training
from sft_play.training.recorder import RunRecorder

logger = logging.getLogger(__name__)

WIDTH = 160  # characters of a sample's line
FREE_SECONDS = 10.0  # for scores before training, however short the training is
TRAINING_PASSES = 3.0  # a training step takes as long as this many forward passes


@dataclass
class HeldOutEvaluation:
    """Scores the test rows; writes scores to run.json, and rows to eval/.

    Answers are written to <when>.jsonl, the loss of each row to <when>.losses.jsonl.
    """

    loop: TrainingLoop
    evaluator: Evaluator
    folder: RunFolder
    recorder: RunRecorder
    speed: Speed | None = None  # predicted training speed; None if the device is not known
    scores: dict[str, Scores] = field(default_factory=dict)  # by when

    def last_scores(self) -> dict[str, float]:
        """Return the scores after training by TensorBoard's names; {} without them."""
        after = self.scores.get("after")
        metrics = after.as_test_metrics() if after else {}
        return {name.replace("_", "/", 1): value for name, value in metrics.items()}

    def score(self, when: str) -> dict[str, float | int]:
        """Score the current model, and return the scores. Every rank must call it.

        `when` is "before", "after", or "resumed": at the checkpoint of a run whose base was not
        scored. Before training this is the published base model, even if training simulates
        rounding.
        """
        is_plain = when != "after"
        plain = as_trained(self.loop.engine.model) if is_plain else contextlib.nullcontext()
        with timeline.span(f"scores {when}"), plain:
            if is_plain:
                self.bound()
            scores = self.loop.score(self.evaluator)
        self.scores[when] = scores
        rows = len(self.evaluator.scored)
        found = scores.as_metrics() | {"rows": rows}
        metrics = self.recorder.report.metrics | {when: found}
        self.recorder.update(metrics=metrics, global_step=self.loop.state.global_step)
        self.loop.log_scores("test", self.evaluator, scores, scores.as_test_metrics())
        if self.recorder.rank != 0:
            return found
        answers = answers_jsonl(self.evaluator.questions, scores)
        write_text(self.folder.evaluation / f"{when}.jsonl", answers)
        losses = losses_jsonl(self.evaluator.scored, scores)
        write_text(self.folder.evaluation / f"{when}.losses.jsonl", losses)
        logger.info("%s %s rows=%d", when, scores.as_text(), rows)
        return found

    def bound(self) -> None:
        """Limit scoring to a sample if all rows would take too long. Every rank must call it.

        The limit is exceeded if it takes more than FREE_SECONDS, and both times together take more
        than train.eval_time_budget.
        """
        evaluator, loop = self.evaluator, self.loop
        budget = evaluator.train.eval_time_budget
        if budget is None:
            return
        layout, generates = loop.order.layout, evaluator.train.predict_with_generate
        model = loop.engine.model
        with loop.memory.phase("evaluation"), loop.speed.evaluating(model):
            token_seconds = measured.loss_seconds(evaluator, model) / layout.replicas
            loss_seconds = token_seconds * int(evaluator.split.lengths.sum())
            steps = loop.state.max_steps - loop.state.global_step
            tokens = steps * layout.rows_per_step * sum(loop.order.lengths) / loop.order.rows
            planned = TRAINING_PASSES * token_seconds * tokens
            if self.speed is not None:
                planned = tokens / self.speed.tokens_per_second
            seconds = max(FREE_SECONDS, budget * planned / 2)  # after training it takes as long
            share = min(1.0, seconds / (1 + generates) / loss_seconds)
            rows = math.ceil(share * len(evaluator.split))
            answers = all_answers = len(evaluator.question_indices) if generates else 0
            if all_answers:
                left = seconds - share * loss_seconds
                answers = measured.answers_within(evaluator, model, left, token_seconds)
        if share == 1.0 and answers == all_answers:
            return
        if self.recorder.rank == 0:
            logger.info(
                "the scores before and after training use %d of %d held-out rows and %d of %d "
                "answers: all would need more than %.0f s, and training needs about %.0f s "
                "(train.eval_time_budget=%g); TRAIN_EVAL_TIME_BUDGET=null scores all",
                rows,
                len(evaluator.split),
                answers,
                all_answers,
                seconds,
                planned,
                budget,
            )
        evaluator.limit(rows, answers)


def summary_lines(
    report: RunReport, held_out: HeldOutEvaluation, folder: RunFolder, weights: Path
) -> list[str]:
    """Return scores before and after, sample answers, speed, and the next command to type."""
    name = folder.name
    next_line = f"next     make chat RUN={name} | make eval RUN={name} | make merge RUN={name}"
    warning = [f"warning: {report.warning}"] if report.warning else []
    return [
        *score_lines(held_out),
        "",
        *lines_after_training(report),
        fact_line(report),
        f"weights  {weights}",
        f"run      {folder.path}  (run.json, eval/, logs/, tb/)",
        f"report   {folder.path / 'report.html'}",
        *warning,
        report.cause or next_line,
    ]


def score_lines(held_out: HeldOutEvaluation) -> list[str]:
    """Return the table of scores and three sample answers; nothing for a stopped run."""
    before = held_out.scores.get("before")
    after = held_out.scores.get("after")
    if before is None or after is None:
        return []
    lines = [
        "",
        f"{'held-out rows':<16}{'before':>10}{'after':>10}",
        f"{'loss':<16}{before.eval_loss:>10.4f}{after.eval_loss:>10.4f}",
        *(
            f"{f'loss, {name}':<16}{loss:>10.4f}{after.source_losses[name]:>10.4f}"
            for name, loss in before.source_losses.items()
        ),
    ]
    if before.generation is None or after.generation is None:
        return lines
    lines += _generation_lines(before.generation, after.generation)
    samples = (
        sample_answers(held_out.evaluator.questions, scores)
        for scores in (before.generation, after.generation)
    )
    for early, late in zip(*samples, strict=True):
        lines += ["", *_sample_lines(early, late.answer)]
    return lines


def _generation_lines(before: GenerationScores, after: GenerationScores) -> list[str]:
    """Return the rows of the table that are about generated answers."""
    lines = []
    for early, late in zip(before.scores, after.scores, strict=True):
        title = title_of(early.name)
        lines.append(f"{title:<16}{early.estimate.mean:>10.3f}{late.estimate.mean:>10.3f}")
    if not before.cut_answers and not after.cut_answers:
        return lines
    lines.append(f"{'cut answers':<16}{before.cut_answers:>10}{after.cut_answers:>10}")
    if after.cut_answers:
        limit = after.max_new_tokens
        lines.append(
            f"{after.cut_answers} of {len(after.answers)} answers did not end within {limit} "
            f"tokens; make eval TRAIN_GENERATION_MAX_NEW_TOKENS={2 * limit} scores longer ones"
        )
    return lines


def fact_line(report: RunReport) -> str:
    """Return the facts of the finished run as one greppable line."""
    speed = f"{report.tokens_per_second:.0f}" if report.tokens_per_second else "n/a"
    measured = report.peak_bytes.measured / GIB
    predicted = report.peak_bytes.predicted / GIB
    return (
        f"{report.status} steps={report.global_step} "
        f"train_seconds={report.seconds['train']:.1f} total_seconds={report.seconds['total']:.1f} "
        f"tokens_per_second={speed} peak={measured:.2f}GiB predicted={predicted:.2f}GiB "
        f"world={report.world_size} device={report.device}"
    )


def _sample_lines(before: SampleAnswer, after: str) -> list[str]:
    prompt = " ".join(before.prompt.split())
    if len(prompt) > WIDTH:  # keep the end, where the question is
        prompt = f"...{prompt[3 - WIDTH :]}"
    return [
        f"prompt   {prompt}",
        f"expected {_shorten(before.expected)}",
        f"before   {_shorten(before.answer)}",
        f"after    {_shorten(after)}",
    ]


def _shorten(text: str) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= WIDTH else flat[: WIDTH - 3] + "..."
