"""The rows of a workload: a text file for SFT-Play, and the same rows tokenized for the others.

The tokenized rows are in the order of SFT-Play's steps. Loads no CUDA.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.inputs import WordCount, chat_rows, fixed_rows, image_rows, make_model, ragged_rows
from benchmarks.workloads import NO_REFERENCE, SEED, TOY, Workload

HELD_OUT_ROWS = 4


class TokenCount(NamedTuple):
    """Tokens of some rows, without padding."""

    real: int
    labelled: int


@dataclass(frozen=True)
class Inputs:
    """Files of a workload: the model, the rows, and the rows that are held out."""

    folder: Path
    model: str | Path

    @property
    def rows(self) -> Path:
        return self.folder / "rows.jsonl"

    @property
    def held_out(self) -> Path:
        return self.folder / "held-out.jsonl"

    @property
    def samples(self) -> Path:
        """The tokenized rows; only workloads with a reference and chats have them."""
        return self.folder / "samples.npz"

    @property
    def adapters(self) -> Path:
        """LoRA weights of the first program that ran; the others start from them."""
        return self.folder / "adapters.safetensors"


@dataclass(frozen=True)
class Samples:
    """All rows one after the other, in the order of the steps, and the length of each."""

    ids: np.ndarray  # (all tokens,) int32
    labelled: np.ndarray  # (all tokens,) bool
    lengths: np.ndarray  # (rows,) int64

    @classmethod
    def read(cls, path: Path) -> Samples:
        with np.load(path) as arrays:
            return cls(arrays["ids"], arrays["labelled"], arrays["lengths"])

    def row(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the token ids (T,) of a row, and which of them have a label, (T,) bool."""
        end = int(self.lengths[: index + 1].sum())
        start = end - int(self.lengths[index])
        return self.ids[start:end], self.labelled[start:end]

    def step_tokens(self, rows_per_step: int) -> list[TokenCount]:
        """Return the tokens of each optimizer step."""
        ends = np.cumsum(self.lengths)[rows_per_step - 1 :: rows_per_step].tolist()
        counts = []
        for start, end in zip([0, *ends], ends, strict=False):
            counts.append(TokenCount(end - start, int(self.labelled[start:end].sum())))
        return counts


def make_inputs(workload: Workload, steps: int, folder: Path) -> Inputs:
    """Return the files for `steps` optimizer steps. Files that exist are kept."""
    model: str | Path = workload.shape  # a name is enough for a plan that must refuse it
    if workload.fits or workload.shape == TOY:
        model = make_model(workload, folder)
    inputs = Inputs(folder / f"{workload.name}-{steps}", model)
    has_samples = workload.reference != NO_REFERENCE or workload.answers
    if not (inputs.samples if has_samples else inputs.held_out).exists():  # written last
        inputs.folder.mkdir(parents=True, exist_ok=True)
        rows = min(steps, workload.distinct_steps or steps) * workload.rows_per_step
        _write_rows(workload, rows, inputs)
        fixed_rows(inputs.held_out, workload.held_out_tokens, HELD_OUT_ROWS, seed=1)
        if has_samples:
            _write_samples(workload, rows, inputs)
    return inputs


def _write_rows(workload: Workload, rows: int, inputs: Inputs) -> None:
    if workload.with_images:
        image_rows(inputs.folder, rows)
    elif workload.answers:
        words = {name: WordCount(n, 0.3, 2 * n) for name, n in workload.chat_words.items()}
        chat_rows(inputs.rows, rows, answers=[workload.answers], words=words)
    elif workload.tokens is None:
        most = workload.max_seq_len
        ragged_rows(inputs.rows, rows, median=workload.median, least=24, most=most)
    else:
        fixed_rows(inputs.rows, workload.tokens, rows)


def _write_samples(workload: Workload, rows: int, inputs: Inputs) -> None:
    """Tokenize the rows in their order; write them so that SFT-Play shuffles them into it."""
    from sft_play.data.order import steps

    tokenize = _tokenize_in_one_pass if workload.answers else _tokenize
    samples = tokenize(workload, inputs)
    assert len(samples.lengths) == rows, "a row was dropped"
    assert samples.lengths.max() <= workload.max_seq_len, "a row was cut"
    lines = inputs.rows.read_text(encoding="utf-8").splitlines(keepends=True)
    drawn = [row for step in steps(rows, workload.rows_per_step, SEED, epoch=0) for row in step]
    shuffled = [""] * rows
    for line, row in zip(lines, drawn, strict=True):
        shuffled[row] = line
    inputs.rows.write_text("".join(shuffled), encoding="utf-8")
    np.savez(inputs.samples, **vars(samples))


def _tokenize_in_one_pass(workload: Workload, inputs: Inputs) -> Samples:
    """Return each chat as TRL tokenizes it with `assistant_only_loss`: all answers at once."""
    from transformers import AutoTokenizer
    from trl.chat_template_utils import qwen3_training_chat_template

    tokenizer = AutoTokenizer.from_pretrained(inputs.model)
    lines = inputs.rows.read_text(encoding="utf-8").splitlines()
    found = tokenizer.apply_chat_template(
        [json.loads(line)["messages"] for line in lines],
        chat_template=qwen3_training_chat_template,
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    ids, masks = found["input_ids"], found["assistant_masks"]
    arrays = np.concatenate(ids), np.concatenate(masks).astype(bool)
    return Samples(*arrays, np.array(list(map(len, ids))))


def _tokenize(workload: Workload, inputs: Inputs) -> Samples:
    """Return the rows as the data preparation of SFT-Play tokenizes them."""
    from sft_play.config.schema import Config
    from sft_play.data.pipeline import build_run_data
    from sft_play.data.tokenizer import load_tokenizer

    config = Config(
        model={"name": str(inputs.model), "max_seq_len": workload.max_seq_len},
        data={
            "train_path": str(inputs.rows),
            "val_path": str(inputs.held_out),
            "cache_dir": str(inputs.folder / "cache"),
        },
    )
    (store,) = build_run_data(config, load_tokenizer(config)).train.stores
    samples = list(map(store.__getitem__, range(len(store))))
    labels = np.concatenate([sample.labels for sample in samples])
    ids = np.concatenate([sample.ids for sample in samples])
    return Samples(ids, labels >= 0, np.array(store.lengths))
