"""Scores of a model on a fixed set of rows, equal for any batch size, padding and world size.

Rows are sorted and collated once and reused by every evaluation.
"""

import math
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase, StoppingCriteriaList

from sft_kernels.boundaries import Documents
from sft_kernels.install import fused_kernels_of
from sft_kernels.loss.head import fused_nll, is_loss_fused, nll_of_rows
from sft_kernels.loss.tokens import labelled
from sft_kernels.process import Process
from sft_play.config.metrics import ALWAYS
from sft_play.config.schema import TrainSection
from sft_play.data.batch import Batch
from sft_play.data.collate import ImageInputs, PadCollator, TrainRows, images_by_document
from sft_play.data.render import IGNORE_INDEX, TemplateSpace, template_space
from sft_play.data.rows import SHOWN_IMAGE, ImageFile, Message, PromptIds, Row
from sft_play.data.special_text import match_any
from sft_play.data.splits import drawn, question_indices
from sft_play.data.store import Split
from sft_play.errors import DivergedError
from sft_play.evaluation.generate import (
    GeneratedAnswer,
    Generator,
    StopWhen,
    room_for,
    split_batches,
    take_rank_share,
)
from sft_play.evaluation.scores import (
    Answered,
    GenerationScores,
    MetricScore,
    Question,
    RowLoss,
    Scores,
    score_answers,
)
from sft_play.models.context import ContextGroup
from sft_play.models.sharding import resharding
from sft_play.progress import Stage, watched_stage

Found = TypeVar("Found")
LONG_SECONDS = 20  # of generation, from which on its lines say what leaves it out


class EvaluationStopped(KeyboardInterrupt):
    """Raised on every rank if one of them was told to stop."""


class LossBatch(NamedTuple):
    """Padded rows with their labels, on the CPU; a filler has a negative index and no label."""

    indices: list[int]  # of the rows in the split
    tokens: list[int]  # labeled, of each row
    rows: Batch  # with the labeled tokens that this rank predicts in groups by row
    images: list[tuple[ImageFile, ...]]  # of each row; their pixels would be gigabytes


@dataclass(eq=False)
class Evaluator:
    """Scores a model on one split. The ranks share its rows; each returns the same scores."""

    split: Split
    tokenizer: PreTrainedTokenizerBase
    train: TrainSection
    process: Process
    images: ImageInputs | None = None  # of rows that have some
    synced_gpus: bool = False  # see Generator, and the next
    saved_stops: tuple[int, ...] = ()
    memory_limit: Callable[[], int | None] = lambda: None  # bytes of its GPU for this process
    is_stopping: Callable[[], bool] | None = None  # whether this rank was asked to stop
    context: ContextGroup | None = None  # of ranks that share rows; with a fused loss

    def __post_init__(self) -> None:
        assert isinstance(self.train.eval_batch_size, int), "the plan resolves eval_batch_size"
        self.batch_size = self.train.eval_batch_size
        self.scored = self.split  # the rows whose loss counts: all, or a sample
        self.generator = Generator(
            self.tokenizer,
            self.train,
            self.process,
            self.synced_gpus,
            self.saved_stops,
            images=self.images,
        )

    @cached_property
    def question_indices(self) -> list[int]:
        """Return the samples whose answers the model generates."""
        return question_indices(self.split, self.train.generation_max_rows).tolist()

    @cached_property
    def questions(self) -> list[Question]:
        """Return the rows whose answers the model generates, in order."""
        return [self._question(index) for index in self.question_indices]

    def limit(self, rows: int, answers: int) -> None:
        """Score a sample from now on: the loss of so many rows, and so many answers."""
        self.scored = self.split.take(drawn(np.arange(len(self.split)), rows))
        self.question_indices = drawn(np.array(self.question_indices), answers).tolist()

    def score(self, model: torch.nn.Module) -> Scores:
        """Return the scores of `model`, which must be in evaluation mode.

        Raises: EvaluationStopped, on every rank, once `is_stopping` is true on one.
        """
        with resharding(model):
            started = time.perf_counter()
            row_losses = self.row_losses(model)
            loss = mean_loss(row_losses, model)
            of_sources = self._losses_of_sources(row_losses)
            loss_seconds = time.perf_counter() - started
            if not self.train.predict_with_generate or not self.question_indices:
                return Scores(loss, loss_seconds, None, row_losses, of_sources)
            answers = self.answers(model)
        generation = GenerationScores(
            scores=self._answer_scores(answers),
            answers=tuple(answers),
            max_new_tokens=self.train.generation_max_new_tokens,
            seconds=time.perf_counter() - started - loss_seconds,
        )
        return Scores(loss, loss_seconds, generation, row_losses, of_sources)

    def _losses_of_sources(self, rows: Sequence[RowLoss]) -> dict[str, float]:
        """Return the loss of the rows of each source by its name, {} if there is but one."""
        found: dict[str, list[RowLoss]] = {}
        for index, row in enumerate(rows):
            name = self.scored.source(index)
            if name is not None:
                found.setdefault(name, []).append(row)
        return {name: mean_loss(found[name]) for name in sorted(found)}

    def _answer_scores(self, answers: Sequence[GeneratedAnswer]) -> tuple[MetricScore, ...]:
        """Return ROUGE-L and the scores of train.metrics, those of rank 0.

        A function of the user's may be slow, or draw.
        """
        found = None
        if self.process.is_main:
            rows = zip(self.questions, answers, strict=True)
            answered = [Answered(row.plain_prompt, text.text, row.expected) for row, text in rows]
            metrics = dict.fromkeys((ALWAYS, *self.train.metrics))
            batch_rows = None if self.train.eval_do_concat_batches else self.batch_size
            found = score_answers(list(metrics), answered, batch_rows)
        return self.process.broadcast(found)

    @torch.no_grad()
    def row_losses(self, model: torch.nn.Module) -> tuple[RowLoss, ...]:
        """Return the loss of every row, in order, on every rank."""
        nats_of_batches = []
        stage = Stage("evaluating the loss", len(self.scored))
        with self.process.autocast(), watched_stage(stage, self.process.is_main):
            for batch in self._loss_batches:
                nats_of_batches.append(self.nats_of_rows(model, batch))
                self._advance(stage, self.batch_size)
        own: dict[int, RowLoss] = {}
        # moved to the CPU at the end: each move waits for the GPU
        for batch, nats in zip(self._loss_batches, nats_of_batches, strict=True):
            for index, row_nats, tokens in zip(
                batch.indices, nats.tolist(), batch.tokens, strict=True
            ):
                if index >= 0:
                    own[index] = RowLoss(row_nats, tokens)
        return tuple(self._in_order(own, len(self.scored)))

    def nats_of_rows(self, model: torch.nn.Module, batch: LossBatch) -> torch.Tensor:
        """Return the nats of each row of a batch, float32 (B,)."""
        rows = batch.rows
        if self.images is not None:
            rows = rows.with_inputs(self.images(batch.images, rows.ids))
        if self.context is not None:
            rows = self.context.shared(rows)
        elif self.images is None and "attention" in fused_kernels_of(model).on:
            count, width = rows.ids.shape  # padding on the right needs no mask
            rows = replace(rows, documents=Documents.of_lengths([width] * count))
        rows = rows.to(self.process.device, non_blocking=True)
        arguments = {**rows.arguments, "use_cache": False}
        if not is_loss_fused(model):
            return nll_of_rows(model(**arguments).logits, rows.labels)
        nll = fused_nll(model, model, arguments, rows.loss)
        return nll if self.context is None else self.context.add(nll)

    def answers(self, model: torch.nn.Module) -> list[GeneratedAnswer]:
        """Return the generated answers to the questions, in order, on every rank.

        Generated ids stay on the GPU for eval_accumulation_steps batches, because decoding
        synchronizes with it.
        """
        accumulation_steps = self.train.eval_accumulation_steps or 1
        own: dict[int, GeneratedAnswer] = {}
        pending: list[tuple[list[int], torch.Tensor]] = []  # numbers of questions, ids (B, N)
        # a batch may take minutes; bool() is False
        step = StopWhen(self.is_stopping or bool)
        stopping = StoppingCriteriaList([step])

        def pace() -> str:
            within = f"token {step.tokens} of at most {self.train.generation_max_new_tokens}"
            if stage.clock() - stage.started_at > LONG_SECONDS:
                within += "; TRAIN_PREDICT_WITH_GENERATE=false leaves answers out"
            return within

        stage = Stage("generating answers", len(self.question_indices), "answers", pace)
        with watched_stage(stage, self.process.is_main):
            for numbers, prompts in self._prompt_batches(model):
                for part, ids in self.generator.generate_or_halve(model, prompts, stopping):
                    pending.append((numbers[part], ids))
                if len(pending) >= accumulation_steps:
                    own |= self._decode(pending)
                    pending = []
                self._advance(stage, len(numbers))
        own |= self._decode(pending)
        return self._in_order(own, len(self.question_indices))

    def _in_order(self, own: dict[int, Found], count: int) -> list[Found]:
        """Return what all ranks found, by number. Every rank must call it."""
        found: dict[int, Found] = {}
        for found_by_rank in self.process.gather(own):
            found |= found_by_rank
        return [found[number] for number in range(count)]

    def _advance(self, stage: Stage, rows: int) -> None:
        """Count a batch of each rank: the ranks share the rows batch by batch."""
        if self.is_stopping is not None and self.process.max(int(self.is_stopping())):
            raise EvaluationStopped
        stage.advance(min(rows * self.process.world_size, stage.total - stage.done))

    def _decode(
        self, batches: Sequence[tuple[list[int], torch.Tensor]]
    ) -> dict[int, GeneratedAnswer]:
        """Return the generated answers by the number of their question, without fillers."""
        answers: dict[int, GeneratedAnswer] = {}
        for numbers, ids in batches:
            for number, answer in zip(numbers, self.generator.decode(ids), strict=True):
                if number >= 0:
                    answers[number] = answer
        return answers

    def _question(self, index: int) -> Question:
        sample = self.split[index]
        prompt = self._prompt_text(sample.prompt)
        # the answer of a row: its labeled ids, decoded as generated ids are
        labels = sample.labels[sample.answer_start :]
        ids = labels[labels != IGNORE_INDEX].tolist()
        return Question(
            origin=self.split.origin(index),
            prompt=prompt,
            plain_prompt=self._special_tokens.sub(" ", prompt).strip(),
            expected=self._space.without(self.tokenizer.decode(ids, skip_special_tokens=True)),
            images=tuple(image.name for image in sample.images),
        )

    def _prompt_text(self, prompt: PromptIds) -> str:
        """Return the text of a prompt, with SHOWN_IMAGE for the tokens of each image."""
        text = self.tokenizer.decode(prompt)
        if self.images is not None:
            asked = Row((Message("user", "", images=prompt.images),), "the prompt")
            for image in self.images.processor.write(asked).messages[0].images:
                text = text.replace(image.text.strip(), SHOWN_IMAGE, 1)
        return text

    @cached_property
    def _space(self) -> TemplateSpace:
        return template_space(self.tokenizer)

    @cached_property
    def _special_tokens(self) -> re.Pattern[str]:
        """What matches a special token: these may be all that separates two turns."""
        added = self.tokenizer.added_tokens_decoder.values()
        return match_any(token.content for token in added if token.special)

    @cached_property
    def _loss_batches(self) -> list[LossBatch]:
        """Return this rank's batches, longest rows first. Every rank has the same number."""
        return [self.loss_batch(indices) for indices in self.shares()]

    def shares(self) -> list[list[int]]:
        """Return the rows of this rank's batches."""
        batches = split_batches(self.scored.lengths, lambda _: self.batch_size)
        return take_rank_share(batches, self.process, self.context.size if self.context else 1)

    def loss_batch(self, indices: list[int]) -> LossBatch:
        """Return a batch of rows to score; a negative index is a filler."""
        rows = TrainRows(self.scored)
        sequences = [rows[index] for index in indices]
        batch = PadCollator(self.tokenizer.pad_token_id)(sequences)
        tokens = batch.labels[:, 1:].ne(IGNORE_INDEX).sum(dim=1).tolist()
        batch = replace(batch, loss=labelled(batch.labels)._replace(counts=tokens))
        if self.context is not None:
            batch = self.context.part.cut(batch)
        return LossBatch(indices, tokens, batch, images_by_document(sequences))

    def _prompt_batches(
        self, model: torch.nn.Module
    ) -> Iterator[tuple[list[int], list[list[int]]]]:
        """Yield this rank's batches, longest first: numbers of questions, and their prompts.

        Every rank has the same number of batches; a filler's number is negative.
        """
        prompts = [self.split[index].prompt for index in self.question_indices]
        lengths = [len(prompt) for prompt in prompts]
        every = split_batches(lengths, self.rows_at(model), self.process.world_size)
        for numbers in take_rank_share(every, self.process):
            # ~number is negative for a question, and the question's number for a filler
            yield numbers, [prompts[max(number, ~number)] for number in numbers]

    def rows_at(self, model: torch.nn.Module) -> Callable[[int], int]:
        """Return how many prompts of a number of tokens are answered at once, on every rank."""
        train = self.train
        if train.generation_batch_size is not None:
            return lambda _: train.generation_batch_size
        limit = self.memory_limit()
        room = room_for(model, self.process, train.generation_num_beams, limit)
        free_bytes = self.process.min(room.free_bytes)  # the ranks share the same batches
        room = replace(room, free_bytes=free_bytes)
        return lambda tokens: room.prompts(tokens, train.generation_max_new_tokens)


def mean_loss(rows: Sequence[RowLoss], model: torch.nn.Module | None = None) -> float:
    """Return nats per labeled token; the order of the rows does not matter.

    Raises: DivergedError when it is NaN or infinite, with a weight of `model` that is.
    """
    nats = math.fsum(row.nats for row in rows)
    tokens = sum(row.tokens for row in rows)
    if not math.isfinite(nats):
        reason = "the weights give no finite loss"
        for name, weight in model.named_parameters() if model is not None else ():
            if not weight.float().isfinite().all():
                reason = f"{name} has NaN or infinity"
        raise DivergedError(
            f"eval_loss={nats} over {tokens} tokens: {reason}. If nothing was trained yet, it is "
            "in the model's files: get the model again. Otherwise train again with a lower "
            "TRAIN_LEARNING_RATE"
        )
    return nats / tokens
