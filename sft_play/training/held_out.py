"""Scores on the held-out rows before and after training, and the summary at the end of a run."""

import contextlib
import logging
from dataclasses import dataclass, field
from pathlib import Path

from sft_play import timeline
from sft_play.evaluation.evaluator import Evaluator
from sft_play.evaluation.scores import GenerationScores, Scores, answers_jsonl, losses_jsonl
from sft_play.models.delivered import as_trained
from sft_play.plan.devices import GIB
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
LEAST_ROWS = 32  # that are scored, however short the training is, and answers
LEAST_ANSWERS = 8
GENERATED = 4  # tokens that are read as fast as one is generated: 2 on a CPU, 17 on an H200


@dataclass
class HeldOutEvaluation:
    """Scores the test rows; writes scores to run.json, and rows to eval/.

    Answers are written to <when>.jsonl, the loss of each row to <when>.losses.jsonl.
    """

    loop: TrainingLoop
    evaluator: Evaluator
    folder: RunFolder
    recorder: RunRecorder
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
        plain = contextlib.nullcontext()
        if when != "after":
            self.limit("scores before and after training", self.evaluator)
            plain = as_trained(self.loop.engine.model)
        with timeline.span(f"scores {when}"), plain:
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

    def limit_evaluations(self) -> None:
        """Choose the validation rows that are scored during training."""
        train, state = self.loop.settings, self.loop.state
        count = {"epoch": state.num_train_epochs, "steps": state.max_steps // train.eval_steps}
        if count := count.get(train.eval_strategy):
            self.limit("evaluations during training", self.loop.evaluator, count)

    def limit(self, title: str, evaluator: Evaluator, count: int = 1) -> None:
        """Score a random sample if all rows, `count` times, would need too many tokens.

        These are train.eval_token_share of the tokens that the whole schedule trains, so the sample
        is the same on any machine. A generated token counts as GENERATED that are read, and an
        answer has as many as its limit.
        """
        train, loop = evaluator.train, self.loop
        if train.eval_token_share is None:
            return
        epochs = loop.state.max_steps / loop.steps_per_epoch
        trained = epochs * sum(loop.order.lengths)
        tokens = train.eval_token_share * trained / count
        all_rows, row_tokens = len(evaluator.split), float(evaluator.split.lengths.mean())
        all_answers = len(evaluator.question_indices) if train.predict_with_generate else 0
        for_loss = tokens / 2 if all_answers else tokens
        rows = min(all_rows, max(LEAST_ROWS, int(for_loss / row_tokens)))
        answers = 0
        if all_answers:
            left = tokens - rows * row_tokens
            answer_tokens = GENERATED * train.generation_max_new_tokens
            answers = min(all_answers, max(LEAST_ANSWERS, int(left / answer_tokens)))
        if (rows, answers) == (all_rows, all_answers):
            return
        evaluator.limit(rows, answers)
        if self.recorder.rank == 0:
            logger.info(
                "%s use %d of %d rows%s: %g of the training's tokens, and at least %d rows and %d "
                "answers (train.eval_token_share); TRAIN_EVAL_TOKEN_SHARE=null scores all",
                title,
                rows,
                all_rows,
                f" and {answers} of {all_answers} answers" if all_answers else "",
                train.eval_token_share,
                LEAST_ROWS,
                LEAST_ANSWERS,
            )


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
