"""The rows of a workload: a file of text for us, and for the other arms the same rows tokenized.

They are in the order of our steps. Loads no CUDA.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.inputs import TINY, fixed_rows, ragged_rows
from benchmarks.machine import ROOT
from benchmarks.speed.results import TokenCount
from benchmarks.speed.workloads import RAGGED_MEDIAN, SEED, TOY, WARM_UP, Workload

HELD_OUT_TOKENS = 48  # of held-out rows, which are not what is measured
TOY_MEDIAN = 40  # tokens of the toy's ragged rows


@dataclass(frozen=True)
class Inputs:
    """Files of a workload: model folder, rows and held-out rows for us, samples for the others."""

    folder: Path
    model: Path

    @property
    def rows(self) -> Path:
        return self.folder / "rows.jsonl"

    @property
    def held_out(self) -> Path:
        return self.folder / "held-out.jsonl"

    @property
    def samples(self) -> Path:
        return self.folder / "samples.npz"

    @property
    def adapters(self) -> Path:
        """LoRA weights of the first program that ran; the others start from them."""
        return self.folder / "adapters.safetensors"


class Sample(NamedTuple):
    """One row: token ids (T,) int32 and where they are trained on, (T,) bool."""

    ids: np.ndarray
    trained: np.ndarray


@dataclass(frozen=True)
class Samples:
    """All rows one after the other, in the order of the steps, and the length of each."""

    ids: np.ndarray  # (all tokens,) int32
    trained: np.ndarray  # (all tokens,) bool
    lengths: np.ndarray  # (rows,) int64

    @classmethod
    def read(cls, path: Path) -> Samples:
        with np.load(path) as arrays:
            return cls(arrays["ids"], arrays["trained"], arrays["lengths"])

    @property
    def ends(self) -> np.ndarray:
        return np.cumsum(self.lengths)

    def row(self, index: int) -> Sample:
        """Return one row."""
        end = int(self.ends[index])
        begin = end - int(self.lengths[index])
        return Sample(self.ids[begin:end], self.trained[begin:end])

    def count_tokens(self, first: int, last: int) -> TokenCount:
        """Return the tokens of rows first <= row < last."""
        ends = np.concatenate([[0], self.ends])
        begin = int(ends[first])
        end = int(ends[last])
        return TokenCount(end - begin, int(self.trained[begin:end].sum()))


def model_folder(
    shape: str, folder: Path, layers: int | None = None, in_mxfp4: bool = False
) -> Path:
    """Return where the random weights of a model lie, or will."""
    name = shape.rpartition("/")[2]
    if layers is not None:
        name += f"-{layers}-layers"
    if in_mxfp4:
        name += "-mxfp4"
    return folder / "models" / name / "model"


def make_model(shape: str, folder: Path, layers: int | None = None, in_mxfp4: bool = False) -> Path:
    """Return the folder of a model with random weights, made in a process of its own."""
    if shape == TOY:
        return TINY
    model = model_folder(shape, folder, layers, in_mxfp4)
    if not (model / "tokenizer.json").exists():  # written last
        command = [sys.executable, ROOT / "benchmarks" / "inputs.py", "--rows", "0"]
        command += ["--shape", shape, "--out", model.parent]
        if layers is not None:
            command += ["--layers", str(layers)]
        if in_mxfp4:
            command.append("--mxfp4")
        subprocess.run(command, check=True, cwd=ROOT)
    return model


def make_inputs(workload: Workload, steps: int, folder: Path) -> Inputs:
    """Return the files for WARM_UP + `steps` optimizer steps, made unless they exist."""
    model = make_model(workload.shape, folder, workload.layers, workload.in_mxfp4)
    inputs = Inputs(folder / f"{workload.name}-{steps}", model)
    if not inputs.samples.exists():
        inputs.folder.mkdir(parents=True, exist_ok=True)
        _write(workload, (WARM_UP + steps) * workload.rows_per_step, inputs)
    return inputs


def _write(workload: Workload, rows: int, inputs: Inputs) -> None:
    """Write samples in the order of the steps, and our file in one that is shuffled into it."""
    from sft_play.data.order import steps

    in_order = inputs.folder / "in-order.jsonl"
    if workload.tokens is None:
        median = TOY_MEDIAN if workload.shape == TOY else RAGGED_MEDIAN
        ragged_rows(in_order, rows, median=median, least=24, most=workload.max_seq_len)
    else:
        fixed_rows(in_order, workload.tokens, rows)
    fixed_rows(inputs.held_out, HELD_OUT_TOKENS, rows=4)
    samples = _tokenize(in_order, workload, inputs)
    assert len(samples.lengths) == rows, "a row was dropped"
    assert samples.lengths.max() <= workload.max_seq_len, "a row was cut"

    lines = in_order.read_text(encoding="utf-8").splitlines(keepends=True)
    drawn = [row for step in steps(rows, workload.rows_per_step, SEED, epoch=0) for row in step]
    shuffled = [""] * rows
    for line, row in zip(lines, drawn, strict=True):
        shuffled[row] = line
    inputs.rows.write_text("".join(shuffled), encoding="utf-8")
    np.savez(inputs.samples, ids=samples.ids, trained=samples.trained, lengths=samples.lengths)


def _tokenize(rows: Path, workload: Workload, inputs: Inputs) -> Samples:
    """Return the rows of a file as our own data preparation tokenizes them."""
    from sft_play.config.schema import Config
    from sft_play.data.pipeline import build_run_data
    from sft_play.data.tokenizer import load_tokenizer

    config = Config(
        model={"name": str(inputs.model), "max_seq_len": workload.max_seq_len},
        data={
            "train_path": str(rows),
            "val_path": str(inputs.held_out),
            "cache_dir": str(inputs.folder / "cache"),
        },
    )
    (store,) = build_run_data(config, load_tokenizer(config)).train.stores
    return Samples(np.array(store.ids), np.array(store.trained), np.array(store.lengths))


def count_step_tokens(workload: Workload, samples: Samples, steps: int) -> list[TokenCount]:
    """Return the tokens of each of the first optimizer steps."""
    size = workload.rows_per_step
    return [samples.count_tokens(step * size, (step + 1) * size) for step in range(steps)]
