"""What a gguf file says of a run's test rows, by llama-cpp-python: tokens, loss, answers, stops."""

import math
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy
from transformers import PreTrainedTokenizerBase

from sft_play.data.render import IGNORE_INDEX
from sft_play.data.splits import drawn, question_indices
from sft_play.data.store import Sample, Split
from sft_play.evaluation.scores import rouge
from sft_play.inference.exported import Export
from sft_play.inference.gguf_tools import opened, require_bindings
from sft_play.inference.improvement import Losses, read_scored_rows
from sft_play.reporting.answers import read_answers
from sft_play.runs.exports import LEAST_GAIN
from sft_play.runs.files import Json

MOST_ANSWERS = 32
CHECKED_ROWS = 200  # for their tokens
LEAST_SAME_TOKENS = 0.95  # share of them that must have the tokens of training
LEAST_CONTEXT = 512
ROOM = 8  # tokens of the context beyond the longest row
# Of llama.cpp, the most common first: other ones split text as one of these, or are rare
PRE_TOKENIZERS = """
gpt-2 llama-bpe qwen2 starcoder qwen35 deepseek-v3 gpt-4o tekken deepseek-llm falcon chatglm-bpe
default
""".split()
PRE_TOKENIZER_KEY = "tokenizer.ggml.pre"


@dataclass(frozen=True)
class SameTokens:
    """How many texts a gguf file encodes as training did."""

    same: int
    rows: int

    @property
    def share(self) -> float:
        return self.same / max(1, self.rows)


@dataclass(frozen=True)
class GgufScores(Losses):
    """What a gguf file says, and the run's scores of the same rows."""

    tokens: SameTokens
    rouge_l: float | None = None  # None if no answers were generated
    run_rouge_l: float | None = None
    answers: int = 0
    ended: int = 0  # answers that end with a stop
    run_ended: int = 0

    def line(self, name: str) -> str:
        """Return the line that is printed."""
        text = (
            f"{name} {super().line()} (at least {LEAST_GAIN}) "
            f"tokens={self.tokens.same}/{self.tokens.rows}"
        )
        if self.rouge_l is None:
            return text
        return (
            f"{text} rougeL={self.rouge_l:.3f} (run {self.run_rouge_l:.3f}) "
            f"ended={self.ended}/{self.answers} (run {self.run_ended})"
        )

    def faults(self, least_gain: float = LEAST_GAIN) -> list[str]:
        """Return what is not as in the run."""
        found = super().faults(least_gain)
        if self.run_ended - self.ended > max(1, self.answers // 10):
            lost = self.run_ended - self.ended
            found.append(f"{lost} of {self.answers} answers run on behind the trained stop")
        if self.tokens.share < LEAST_SAME_TOKENS:
            other = self.tokens.rows - self.tokens.same
            found.append(f"llama.cpp gives other tokens in {other} of {self.tokens.rows} rows")
        return found

    def as_json(self) -> Json:
        """Return the facts for export.json."""
        gain = None if math.isnan(self.gain_kept) else self.gain_kept
        return {**asdict(self), "gain_kept": gain, "faults": self.faults()}


def same_tokens(
    path: Path, split: Split, tokenizer: PreTrainedTokenizerBase, pre_tokenizer: str | None = None
) -> SameTokens:
    """Return how many rows a gguf file encodes as training did, under another pre-tokenizer."""
    overrides = {PRE_TOKENIZER_KEY: pre_tokenizer} if pre_tokenizer else None
    pairs = list(texts_of(split, tokenizer))
    with closing(opened(path, vocab_only=True, kv_overrides=overrides)) as model:
        same = sum(
            model.tokenize(text.encode(), add_bos=False, special=True) == ids for text, ids in pairs
        )
    return SameTokens(same, len(pairs))


def texts_of(split: Split, tokenizer: PreTrainedTokenizerBase) -> Iterator[tuple[str, list[int]]]:
    """Yield texts of rows with their ids, if the tokenizer itself finds these ids again."""
    for index in range(min(len(split), CHECKED_ROWS)):
        ids = split[index].ids.tolist()
        text = tokenizer.decode(ids)
        if tokenizer(text, add_special_tokens=False)["input_ids"] == ids:
            yield text, ids


def best_pre_tokenizer(
    path: Path, split: Split, tokenizer: PreTrainedTokenizerBase
) -> tuple[str, SameTokens]:
    """Return llama.cpp's pre-tokenizer under which most rows have the tokens of training."""
    found = {name: same_tokens(path, split, tokenizer, name) for name in PRE_TOKENIZERS}
    best = max(found, key=lambda name: found[name].same)
    return best, found[best]


def score_gguf(path: Path, export: Export) -> GgufScores | None:
    """Return what a gguf file says of a run's test rows; None if the run wrote no losses."""
    found = read_scored_rows(export.run, export.data.test)
    if found is None:
        return None
    samples, written = found
    tokens = same_tokens(path, export.data.test, export.tokenizer)
    context = max(LEAST_CONTEXT, ROOM + max(len(sample.ids) for sample in samples))
    # on a GPU if llama-cpp-python was built for one
    with closing(opened(path, n_ctx=context, n_gpu_layers=-1, logits_all=True)) as model:
        nats = [nats_of(model, sample) for sample in samples]
        losses = Losses.of_table(np.column_stack([written, nats]))
        return with_answers(GgufScores(**vars(losses), tokens=tokens), model, export)


def nats_of(model: Any, sample: Sample) -> float:
    """Return the negative log-likelihood of a row's labels, nats."""
    model.reset()
    model.eval(sample.ids.tolist())
    positions = np.flatnonzero(sample.labels != IGNORE_INDEX)
    positions = positions[positions > 0]
    logits = torch.tensor(model.scores[positions - 1], dtype=torch.float64)  # (labels, vocabulary)
    labels = torch.tensor(sample.labels[positions], dtype=torch.int64)
    return cross_entropy(logits, labels, reduction="sum").item()


def with_answers(scores: GgufScores, model: Any, export: Export) -> GgufScores:
    """Return scores with ROUGE-L and stops of the file's answers and the run's, if it has any."""
    written = read_answers(export.run, "after")
    if not written:
        return scores
    split, answers = export.data.test, []
    asked = question_indices(split, export.config.train.generation_max_rows)
    asked = drawn(asked, len(written))[:MOST_ANSWERS]
    written = written[:MOST_ANSWERS]
    limit = int(export.run.read_report().scores("after")["max_new_tokens"])
    ended = 0
    for index in asked:
        ids, has_ended = answer_of(model, split[int(index)].prompt, limit)
        answers.append(export.tokenizer.decode(ids, skip_special_tokens=True).strip())
        ended += has_ended
    expected = [row.expected for row in written]
    return replace(
        scores,
        rouge_l=rouge("rougeL", answers, expected).estimate.mean,
        run_rouge_l=rouge("rougeL", [row.answer for row in written], expected).estimate.mean,
        answers=len(written),
        ended=ended,
        run_ended=sum(not row.was_cut for row in written),
    )


def answer_of(model: Any, prompt: Sequence[int], limit: int) -> tuple[list[int], bool]:
    """Return the greedy answer to a prompt, and whether llama.cpp ended it by itself."""
    library = require_bindings()
    found: list[int] = []
    limit = min(limit, model.n_ctx() - len(prompt) - 1)
    for token in model.generate(prompt, temp=0.0, repeat_penalty=1.0):
        if library.llama_vocab_is_eog(model._model.vocab, token):
            return found, True
        found.append(int(token))
        if len(found) >= limit:
            break
    return found, False
