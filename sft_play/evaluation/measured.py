"""How many held-out rows and answers can be scored in a limited time, from measured batches."""

import math
import time
from dataclasses import replace

import numpy as np
import torch
from transformers import StoppingCriteriaList

from sft_play.evaluation.evaluator import Evaluator
from sft_play.evaluation.generate import StopWhen
from sft_play.models.sharding import resharding

SLOW_SECONDS = 1.0  # of a batch on a CPU: loading kernels for the first one hardly counts
TIMED_TOKENS = 8  # of the answers that are generated to measure how long complete ones take
READING_SHARE = 0.1  # of the time limit, in which measured answers may read their prompts


@torch.no_grad()
def loss_seconds(evaluator: Evaluator, model: torch.nn.Module) -> float:
    """Return the seconds that the slowest rank needs for the loss of one of its tokens.

    They are measured on one batch, on a CPU on one row. Every rank must call it.
    """
    process, split = evaluator.process, evaluator.split
    shares = evaluator.shares()
    indices = shares[len(shares) // 2]  # of usual length: the longest rows come first
    if not process.is_gpu:  # as many tokens a second as in a batch
        indices = indices[:1]
    batch = evaluator.loss_batch(indices)
    tokens = sum(int(split.lengths[max(index, ~index)]) for index in indices)
    seconds = 0.0
    with resharding(model), process.autocast():
        for _ in range(2):  # the first one loads kernels
            started = time.perf_counter()
            evaluator.nats_of_rows(model, batch).tolist()
            seconds = process.max(time.perf_counter() - started)
            if seconds > SLOW_SECONDS and not process.is_gpu:
                break
    return seconds / process.min(tokens)


def answers_within(
    evaluator: Evaluator, model: torch.nn.Module, seconds: float, token_seconds: float
) -> int:
    """Return how many answers need at most `seconds`, by the first tokens of some.

    A prompt's token needs `token_seconds`. Every rank must call it.
    """
    process, indices = evaluator.process, evaluator.question_indices
    total, ranks = len(indices), process.world_size
    longest = max(len(evaluator.split[index].prompt) for index in indices)
    readable = int(READING_SHARE * seconds / (longest * token_seconds))
    rows = min(math.ceil(total / ranks), evaluator.rows_at(model)(longest), max(1, readable))
    if process.is_gpu:
        _answer_seconds(evaluator, model, 1)  # the first answer loads kernels
    started = time.perf_counter()
    while rows:
        of_batch = _answer_seconds(evaluator, model, rows)
        left = seconds - process.max(time.perf_counter() - started)
        if of_batch <= left:
            return min(total, int(ranks * rows * left / of_batch))
        rows = int(rows * max(0.0, left) / of_batch)
    return 0


def _answer_seconds(evaluator: Evaluator, model: torch.nn.Module, rows: int) -> float:
    """Return the seconds of a batch of the longest answers, by those of its first tokens."""
    times = [time.perf_counter()]
    train = evaluator.train
    timed = train.changed({"generation_max_new_tokens": TIMED_TOKENS})
    prompts = [evaluator.split[index].prompt for index in evaluator.question_indices[:rows]]
    # noting a time returns None, which ends no answer
    note = StopWhen(lambda: bool(times.append(time.perf_counter())))
    generator = replace(evaluator.generator, train=timed)
    generator.generate_or_halve(model, prompts, StoppingCriteriaList([note]))
    reading, *rest = np.diff(times).tolist()
    each = sum(rest) / len(rest) if rest else reading
    return evaluator.process.max(reading + train.generation_max_new_tokens * each)
