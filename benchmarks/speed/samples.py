"""The rows of a work: for us a file of text, for the others the same rows tokenised, in the order in which we draw them. Loads no CUDA."""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.inputs import TINY, fixed_rows, ragged_rows
from benchmarks.speed.workloads import RAGGED_MEDIAN, SEED, TOY, WARM_UP, Work

ROOT = Path(__file__).resolve().parents[2]
SHORT_TOKENS, TOY_MEDIAN = (
    48,
    40,
)  # of held-out rows, which are not what is measured; of the toy's ragged rows


@dataclass(frozen=True)
class Inputs:
    """Files of a work: model folder, rows and held-out rows for us, samples for the others."""

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
        """LoRA weights that the first program began with, and the others after it."""
        return self.folder / "adapters.safetensors"


@dataclass(frozen=True)
class Samples:
    """Ids and marks of all rows one behind the other, in the order of the steps, and how long each row is."""

    ids: np.ndarray  # (all tokens,) int32
    trained: np.ndarray  # (all tokens,) bool
    lengths: np.ndarray  # (rows,) int64

    @classmethod
    def read(cls, path: Path) -> "Samples":
        with np.load(path) as arrays:
            return cls(arrays["ids"], arrays["trained"], arrays["lengths"])

    @property
    def ends(self) -> np.ndarray:
        return np.cumsum(self.lengths)

    def row(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Return ids and marks of a row."""
        end = int(self.ends[index])
        begin = end - int(self.lengths[index])
        return self.ids[begin:end], self.trained[begin:end]

    def tokens_of_rows(self, first: int, last: int) -> tuple[int, int]:
        """Return (real tokens, those with loss) of rows first <= row < last."""
        ends = np.concatenate([[0], self.ends])
        begin, end = int(ends[first]), int(ends[last])
        return end - begin, int(self.trained[begin:end].sum())


def made_model(shape: str, folder: Path) -> Path:
    """Return the folder of a random model, made unless it is there, in a process that leaves the GPU empty."""
    if shape == TOY:
        return TINY
    model = folder / "models" / shape.rpartition("/")[2] / "model"
    if not (model / "tokenizer.json").exists():  # written last
        subprocess.run(
            [
                sys.executable,
                ROOT / "benchmarks" / "inputs.py",
                "--shape",
                shape,
                "--out",
                model.parent,
                "--rows",
                "0",
            ],
            check=True,
            cwd=ROOT,
        )
    return model


def made_inputs(work: Work, steps: int, folder: Path) -> Inputs:
    """Return the files of a work for WARM_UP + `steps` optimizer steps, made unless they are there."""
    inputs = Inputs(folder / f"{work.name}-{steps}", made_model(work.shape, folder))
    if not inputs.samples.exists():
        inputs.folder.mkdir(parents=True, exist_ok=True)
        _write(work, (WARM_UP + steps) * work.rows_per_step, inputs)
    return inputs


def _write(work: Work, rows: int, inputs: Inputs) -> None:
    """Write rows in the order of the steps, tokenise them by our own preparation, and put our file in the order that its shuffle undoes."""
    from sft_play.data.order import steps

    in_order = inputs.folder / "in-order.jsonl"
    if work.tokens is None:
        ragged_rows(
            in_order,
            rows,
            median=TOY_MEDIAN if work.shape == TOY else RAGGED_MEDIAN,
            least=24,
            most=work.max_seq_len,
        )
    else:
        fixed_rows(in_order, work.tokens, rows)
    fixed_rows(inputs.held_out, SHORT_TOKENS, 4)
    samples = _tokenised(in_order, work, inputs)
    assert len(samples.lengths) == rows and samples.lengths.max() <= work.max_seq_len, (
        "a row was dropped or cut"
    )

    lines = in_order.read_text(encoding="utf-8").splitlines(keepends=True)
    placed = [""] * rows
    drawn = [place for step in steps(rows, work.rows_per_step, SEED, epoch=0) for place in step]
    for line, place in zip(lines, drawn, strict=True):
        placed[place] = line
    inputs.rows.write_text("".join(placed), encoding="utf-8")
    np.savez(inputs.samples, ids=samples.ids, trained=samples.trained, lengths=samples.lengths)


def _tokenised(rows: Path, work: Work, inputs: Inputs) -> Samples:
    from sft_play.config.schema import Config
    from sft_play.data.prepare import prepare
    from sft_play.models.tokenizer import load_tokenizer

    config = Config(
        model={"name": str(inputs.model), "max_seq_len": work.max_seq_len},
        data={
            "train_path": str(rows),
            "val_path": str(inputs.held_out),
            "cache_dir": str(inputs.folder / "cache"),
        },
    )
    (store,) = prepare(config, load_tokenizer(config)).train.stores
    return Samples(np.array(store.ids), np.array(store.trained), np.array(store.lengths))


def step_tokens(work: Work, samples: Samples, last_step: int) -> list[tuple[int, int]]:
    """Return (real tokens, those with loss) of each optimizer step up to `last_step`."""
    size = work.rows_per_step
    return [samples.tokens_of_rows(step * size, (step + 1) * size) for step in range(last_step)]
