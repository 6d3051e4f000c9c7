"""Scores of a model on a fixed set of rows: loss and generated answers, equal for any batch size, padding and rank count.

Rows are rendered, sorted and collated once and reused by every evaluation. Legend: B rows of a batch, T tokens.
"""

import math
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import distributed

from sft_play.config.schema import TrainSection
from sft_play.data.collate import PadCollator, TrainRows, labelled
from sft_play.data.render import IGNORE_INDEX, stop_ids
from sft_play.data.store import Sample, Split
from sft_play.errors import DivergedError
from sft_play.evaluation.metrics import rouge_l
from sft_play.models.fast.loss import fused_nll, is_loss_fused
from sft_play.models.losses import labelled_tokens, summed_nll
from sft_play.process import Process


@dataclass(frozen=True)
class Scores:
    """What one evaluation found; `answers` are those to the first rows of the set, in order."""

    eval_loss: float  # nats per labelled token
    rouge_l: float | None  # None without generation
    answers: tuple[str, ...]
    loss_seconds: float
    generation_seconds: float

    def as_metrics(self) -> dict[str, float]:
        """Return the scalars under the names of run.json."""
        metrics = {"eval_loss": self.eval_loss, "eval_loss_seconds": self.loss_seconds}
        if self.rouge_l is not None:
            metrics |= {"rougeL": self.rouge_l, "generation_seconds": self.generation_seconds}
        return metrics


@dataclass(frozen=True)
class Question:
    """A row that is generated for: its `file:line`, the prompt as the model gets it and without special tokens, and the answer in the row."""

    origin: str
    prompt: str
    words: str
    expected: str


class Evaluator:
    """Evaluates on one split; every rank takes its share of the rows and all of them return the same scores."""

    def __init__(
        self,
        split: Split,
        tokenizer: Any,
        train: TrainSection,
        process: Process,
        synced_gpus: bool = False,
    ):
        self.split, self.tokenizer, self.train, self.process = split, tokenizer, train, process
        self.synced_gpus = (
            synced_gpus  # ZeRO-3: every rank takes part in every forward pass of a generation
        )
        assert isinstance(train.eval_batch_size, int), "the plan resolves eval_batch_size"
        self.batch_size = train.eval_batch_size

    @cached_property
    def asked(self) -> list[int]:
        """The first samples that end in an answer to a prompt: those that are generated for."""
        return np.flatnonzero(self.split.records["answer_start"])[
            : self.train.generation_max_rows
        ].tolist()

    @cached_property
    def questions(self) -> list[Question]:
        """What is asked, in order."""
        samples = [self.split[index] for index in self.asked]
        return [
            Question(
                self.split.origin(index),
                self.tokenizer.decode(sample.prompt),
                self._words(sample.prompt),
                self._answer(sample),
            )
            for index, sample in zip(self.asked, samples, strict=True)
        ]

    def score(self, model: torch.nn.Module) -> Scores:
        """Return the scores of `model`, which the caller has put in evaluation mode."""
        with self.process.autocast():
            return self._score(model)

    def _score(self, model: torch.nn.Module) -> Scores:
        started = time.perf_counter()
        loss = self.loss(model)
        loss_seconds = time.perf_counter() - started
        if not self.train.predict_with_generate or not self.asked:
            return Scores(loss, None, (), loss_seconds, 0.0)
        answers = self.answers(model)
        references = [question.expected for question in self.questions]
        score = rouge_l(
            answers, references, None if self.train.eval_do_concat_batches else self.batch_size
        )
        return Scores(
            loss, score, tuple(answers), loss_seconds, time.perf_counter() - started - loss_seconds
        )

    @torch.no_grad()
    def loss(self, model: torch.nn.Module) -> float:
        """Return the mean negative log-likelihood in nats: summed over all labelled tokens of all ranks, divided once.

        Raises: DivergedError, on every rank, when it is no number.
        """
        total, is_fused = (
            torch.zeros(2, dtype=torch.float64, device=self.process.device),
            is_loss_fused(model),
        )  # nats, tokens
        for batch in self._loss_batches:
            batch = {
                name: tensor.to(self.process.device, non_blocking=True)
                for name, tensor in batch.items()
            }
            labels, positions, targets = (
                batch.pop(name) for name in ("labels", "positions", "targets")
            )
            inputs = {**batch, "use_cache": False}
            nll = (
                fused_nll(model, model, inputs, positions, targets)
                if is_fused
                else summed_nll(model(**inputs).logits, labels)
            )
            total += torch.stack([nll.double(), labelled_tokens(labels).double()])
        if self.process.world_size > 1:
            distributed.all_reduce(total)
        nats, tokens = total.tolist()
        if not math.isfinite(nats):
            raise DivergedError(
                f"eval_loss={nats} over {tokens:.0f} tokens: the weights give no finite loss; train anew with a lower TRAIN_LEARNING_RATE"
            )
        return nats / tokens

    @torch.no_grad()
    def answers(self, model: torch.nn.Module) -> list[str]:
        """Return the generated answers to the first rows of the split, in order, on every rank."""
        found: list[tuple[int, str]] = []
        waiting: list[tuple[Sequence[int], torch.Tensor]] = []
        for indices, prompts in self._prompt_batches:
            generated = model.generate(
                input_ids=prompts["input_ids"].to(self.process.device),
                attention_mask=prompts["attention_mask"].to(self.process.device),
                max_new_tokens=self.train.generation_max_new_tokens,
                num_beams=self.train.generation_num_beams,
                do_sample=False,
                temperature=None,
                top_p=None,
                top_k=None,
                use_cache=True,
                eos_token_id=sorted(stop_ids(self.tokenizer)),
                pad_token_id=self.tokenizer.pad_token_id,
                synced_gpus=self.synced_gpus,
            )
            waiting.append(
                (indices, generated[:, prompts["input_ids"].shape[1] :])
            )  # the prompt is cut off
            if len(waiting) >= (self.train.eval_accumulation_steps or 1):
                found += self._decoded(waiting)
                waiting = []
        found += self._decoded(waiting)
        by_index = dict(pair for share in self.process.gather(found) for pair in share)
        return [by_index[index] for index in range(len(self.asked))]

    def _decoded(self, waiting: list[tuple[Sequence[int], torch.Tensor]]) -> list[tuple[int, str]]:
        """Move generated ids to the CPU and decode them; fillers (negative indices) are dropped."""
        found = []
        for indices, ids in waiting:
            texts = self.tokenizer.batch_decode(ids.cpu(), skip_special_tokens=True)
            found += [
                (index, text.strip())
                for index, text in zip(indices, texts, strict=True)
                if index >= 0
            ]
        return found

    def _answer(self, sample: Sample) -> str:
        """Return what the model should generate: the labelled ids, decoded as generated ones are."""
        labels = sample.labels[sample.answer_start :]
        return self._text(labels[labels != IGNORE_INDEX])

    def _words(self, prompt: list[int]) -> str:
        """Return a prompt with a blank for each special token, which may be all that stands between two turns."""
        special = [
            token.content for token in self.tokenizer.added_tokens_decoder.values() if token.special
        ]
        return re.sub(
            "|".join(map(re.escape, special)) or r"\Z", " ", self.tokenizer.decode(prompt)
        ).strip()

    def _text(self, ids: np.ndarray) -> str:
        return self.tokenizer.decode(ids.tolist(), skip_special_tokens=True).strip()

    @cached_property
    def _loss_batches(self) -> list[dict[str, torch.Tensor]]:
        """This rank's batches, longest rows first; every rank has equally many."""
        rows, collate = TrainRows(self.split), PadCollator(self.tokenizer.pad_token_id)
        order = sorted(range(len(rows)), key=lambda i: (-self.split.lengths[i], i))
        batches = [collate([rows[i] for i in indices]) for indices in self._share(order)]
        return [
            {**batch, **dict(zip(("positions", "targets"), labelled(batch["labels"]), strict=True))}
            for batch in batches
        ]

    @cached_property
    def _prompt_batches(self) -> list[tuple[list[int], dict[str, torch.Tensor]]]:
        """This rank's (row indices, left-padded prompts), longest first; every rank has equally many."""
        prompts = [self.split[index].prompt for index in self.asked]
        order = sorted(range(len(prompts)), key=lambda i: (-len(prompts[i]), i))
        return [
            (
                indices,
                _left_padded(
                    [prompts[i if i >= 0 else ~i] for i in indices], self.tokenizer.pad_token_id
                ),
            )
            for indices in self._share(order)
        ]

    def _share(self, order: list[int]) -> list[list[int]]:
        """Cut `order` into batches and take this rank's; missing batches are one filler `~index` each."""
        batches = [
            order[start : start + self.batch_size]
            for start in range(0, len(order), self.batch_size)
        ]
        batches += [[~order[-1]]] * (-len(batches) % self.process.world_size)
        return batches[self.process.rank :: self.process.world_size]


def _left_padded(prompts: Sequence[Sequence[int]], pad_id: int) -> dict[str, torch.Tensor]:
    """Return input_ids and attention_mask, each (B, T): generation continues at the right edge."""
    width = max(map(len, prompts))
    return {
        "input_ids": torch.tensor([[pad_id] * (width - len(ids)) + list(ids) for ids in prompts]),
        "attention_mask": torch.tensor(
            [[0] * (width - len(ids)) + [1] * len(ids) for ids in prompts]
        ),
    }
