"""What a gguf file says of a run's test rows, by llama-cpp-python: tokens, loss, answers, stops."""

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from sft_play.data.render import IGNORE_INDEX
from sft_play.data.splits import drawn, question_indices
from sft_play.data.store import Sample, Split
from sft_play.evaluation.scores import rouge
from sft_play.inference.gguf_tools import opened, require_bindings
from sft_play.runs.exports import LEAST_GAIN
from sft_play.runs.folder import RunFolder

MOST_TOKENS = 16_384  # of all scored rows: a CPU takes minutes for them with 8B
MOST_ROW_TOKENS = 1024
MOST_ANSWERS = 32
CHECKED_ROWS = 200  # for their tokens
LEAST_CONTEXT = 512
ROOM = 8  # tokens of the context beyond the longest row
LEAST_NATS = 0.02  # a gain below it says nothing
# Of llama.cpp, the most common first: other ones split text as one of these, or are rare
PRE_TOKENIZERS = (
    *("gpt-2", "llama-bpe", "qwen2", "starcoder", "qwen35", "deepseek-v3", "gpt-4o", "tekken"),
    *("deepseek-llm", "falcon", "chatglm-bpe", "default"),
)
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
class GgufScores:
    """What a gguf file says, beside the run's own scores of the same rows."""

    tokens: SameTokens
    eval_loss: float  # nats a token
    run_loss: float
    loss_before: float  # of the base
    rows: int
    rouge_l: float | None  # None where no answers were generated
    run_rouge_l: float | None
    answers: int
    ended: int  # answers that end with a stop
    run_ended: int

    @property
    def gain_kept(self) -> float:
        """The share of the run's gain over its base that is left; 1 is all of it."""
        gain = self.loss_before - self.run_loss
        return (self.loss_before - self.eval_loss) / gain if gain > LEAST_NATS else math.nan

    def line(self, name: str) -> str:
        """Return the line that is printed."""
        text = (
            f"{name} eval_loss={self.eval_loss:.4f} (run {self.run_loss:.4f}, {self.rows} rows) "
            f"gain kept={self.gain_kept:.3f} (at least {LEAST_GAIN}) "
            f"tokens={self.tokens.same}/{self.tokens.rows}"
        )
        if self.rouge_l is None:
            return text
        return (
            f"{text} rougeL={self.rouge_l:.3f} (run {self.run_rouge_l:.3f}) "
            f"ended={self.ended}/{self.answers} (run {self.run_ended})"
        )

    def faults(self) -> list[str]:
        """Return what is not as in the run."""
        found = []
        if math.isnan(self.gain_kept):
            if not self.eval_loss <= self.run_loss + LEAST_NATS:
                found.append(f"eval_loss={self.eval_loss:.4f} is above {self.run_loss:.4f}")
        elif not self.gain_kept >= LEAST_GAIN:
            found.append(f"it keeps {self.gain_kept:.3f} of the gain, less than {LEAST_GAIN}")
        if self.run_ended - self.ended > max(1, self.answers // 10):
            lost = self.run_ended - self.ended
            found.append(f"{lost} of {self.answers} answers run on behind the trained stop")
        return found

    def as_json(self) -> dict[str, Any]:
        """Return the facts for export.json."""
        gain = None if math.isnan(self.gain_kept) else self.gain_kept
        return {**asdict(self), "gain_kept": gain, "faults": self.faults()}


@dataclass(frozen=True)
class RowScore:
    """What the run's evaluations wrote of one row."""

    before: float  # nats of all its labels
    after: float
    labels: int


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
    """Yield texts of rows with their ids, where the tokenizer itself finds these ids again."""
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


def score_gguf(
    path: Path, folder: RunFolder, split: Split, tokenizer: PreTrainedTokenizerBase
) -> GgufScores | None:
    """Return what a gguf file says of a run's test rows; None where the run wrote no losses."""
    found = losses_of(folder, split)
    if found is None:
        return None
    scored, written = found
    chosen = chosen_rows(scored)
    tokens = same_tokens(path, split, tokenizer)
    longest = max(len(scored[index].ids) for index in chosen)
    labels = sum(written[index].labels for index in chosen)
    context = max(LEAST_CONTEXT, longest + ROOM)
    # on a GPU where llama-cpp-python was built for one
    with closing(opened(path, n_ctx=context, n_gpu_layers=-1, logits_all=True)) as model:
        nats = sum(nats_of(model, scored[index]) for index in chosen)
        answers = score_answers(model, folder, split, tokenizer)
    return GgufScores(
        tokens=tokens,
        eval_loss=nats / labels,
        run_loss=sum(written[index].after for index in chosen) / labels,
        loss_before=sum(written[index].before for index in chosen) / labels,
        rows=len(chosen),
        **answers,
    )


def losses_of(folder: RunFolder, split: Split) -> tuple[Split, list[RowScore]] | None:
    """Return the scored test rows with their losses before and after training, None if gone."""
    files = [folder.evaluation / f"{when}.losses.jsonl" for when in ("before", "after")]
    if not all(path.is_file() for path in files):
        return None
    before, after = ([json.loads(line) for line in path.open(encoding="utf-8")] for path in files)
    if not 0 < len(before) == len(after) <= len(split):
        return None
    scored = split.take(drawn(np.arange(len(split)), len(before)))
    return scored, [
        RowScore(first["nats"], last["nats"], last["tokens"])
        for first, last in zip(before, after, strict=True)
    ]


def chosen_rows(split: Split) -> list[int]:
    """Return the first rows that are not too long, of MOST_TOKENS together; at least one."""
    chosen: list[int] = []
    total = 0
    for index in range(len(split)):
        length = len(split[index].ids)
        if length <= MOST_ROW_TOKENS and total + length <= MOST_TOKENS:
            chosen.append(index)
            total += length
    return chosen or [0]


def nats_of(model: Any, sample: Sample) -> float:
    """Return the negative log-likelihood of a row's labels, nats."""
    model.reset()
    model.eval(sample.ids.tolist())
    positions = np.flatnonzero(sample.labels != IGNORE_INDEX)
    positions = positions[positions > 0]
    logits = np.asarray(model.scores[positions - 1], dtype=np.float64)  # (labels, vocabulary)
    logits -= logits.max(axis=1, keepdims=True)
    total = np.log(np.exp(logits).sum(axis=1))
    wanted = logits[np.arange(len(positions)), sample.labels[positions]]
    return float((total - wanted).sum())


def score_answers(
    model: Any, folder: RunFolder, split: Split, tokenizer: PreTrainedTokenizerBase
) -> dict[str, Any]:
    """Return ROUGE-L and stops of the file's answers and of the run's, to the same questions."""
    path = folder.evaluation / "after.jsonl"
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    written = [json.loads(line) for line in text.splitlines()]
    if not written:
        return {"rouge_l": None, "run_rouge_l": None, "answers": 0, "ended": 0, "run_ended": 0}
    asked = question_indices(split, folder.read_config().train.generation_max_rows)
    asked = drawn(asked, len(written))[:MOST_ANSWERS]
    written = written[:MOST_ANSWERS]
    limit = int(folder.read_report().scores("after")["max_new_tokens"])
    answers = []
    ended = 0
    for index in asked:
        ids, has_ended = answer_of(model, split[int(index)].prompt, limit)
        answers.append(tokenizer.decode(ids, skip_special_tokens=True).strip())
        ended += has_ended
    expected = [row["expected"] for row in written]
    return {
        "rouge_l": rouge("rougeL", answers, expected).estimate.mean,
        "run_rouge_l": rouge("rougeL", [row["answer"] for row in written], expected).estimate.mean,
        "answers": len(written),
        "ended": ended,
        "run_ended": sum(not row["was_cut"] for row in written),
    }


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
