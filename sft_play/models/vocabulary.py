"""Check in a model's weight files, before loading, that it knows every token of the rows.

Adapters do not train the embedding or the output head. A token whose row there was never trained is
noise to the model. When it generates, it cannot distinguish this token from other untrained ones.
Base models that share the tokenizer of their instruct version have such rows (Llama 3's <|eot_id|>
and <|start_header_id|>). Every newly added token has one, too.

A row counts as untrained if its distance from one of these points is at most UNTRAINED x the median
length of ordinary rows:

- zero: weight decay shrinks the embedding of a token that no text contains to nothing;
- the mean of all rows, because resize_token_embeddings puts new rows there (transformers:
  N(mean, 1e-9 x covariance));
- the row of an added token with a smaller id: rows without a gradient move together. A larger id
  does not count, since a copy follows its original.

The criteria are those of Land and Bartolo, "Fishing for Magikarp" (arXiv 2405.05417). Rows that
were drawn at random from the distribution of the others (resize_token_embeddings with
mean_resizing=False) look like trained ones.

Rows are read one by one, never a full matrix at once. Legend: V rows, D features.
"""

import logging
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from sft_play.config.backends import backend_of
from sft_play.config.schema import Config
from sft_play.config.sections.model import EMBEDDINGS, HEADS
from sft_play.data.splits import UsedTokens
from sft_play.errors import EnvironmentFault, first_line
from sft_play.models.base_files import read_config
from sft_play.models.experts import is_named
from sft_play.models.shards import tensor_files

logger = logging.getLogger(__name__)

FLOATS = ("F32", "F16", "BF16")
# Rows from resize_token_embeddings are 3e-5 standard deviations from the mean, or 1e-3 after
# rounding to bfloat16. Ten training steps at a learning rate of 1e-5 move a row further than this:
# by 1e-4 per feature, if features are about 1e-2.
UNTRAINED = 1e-3
# A fraction of the median length. A row nearer than this to the mean of a sample is compared with
# the exact mean. Only then the full matrix is read, chunk by chunk.
NEAR_MEAN = 0.25
# A sample of rows is RUNS runs of RUN_ROWS adjacent rows, since each jump in the file costs a seek
RUNS = 16
RUN_ROWS = 16
CHUNK_ROWS = 4096


@dataclass(frozen=True)
class Matrix:
    """A (V, D) matrix in a safetensors file, whose rows are read one by one."""

    path: Path
    name: str
    rows: int
    dtype: str

    def read(self, ids: np.ndarray) -> Tensor:
        """Return the rows of `ids` (n,), float32 (n, D)."""
        with safe_open(self.path, framework="pt") as file:
            matrix = file.get_slice(self.name)
            return torch.stack([matrix[row].float() for row in ids.tolist()])

    def mean(self) -> Tensor:
        """Return the mean of all rows, float32 (D,); at most CHUNK_ROWS of them are in memory."""
        with safe_open(self.path, framework="pt") as file:
            matrix = file.get_slice(self.name)
            total = 0
            for start in range(0, self.rows, CHUNK_ROWS):
                chunk = matrix[start : start + CHUNK_ROWS]
                total += chunk.float().sum(0)
            return total / self.rows


def check_vocabulary(config: Config, tokenizer: PreTrainedTokenizerBase, used: UsedTokens) -> None:
    """Check that every token of the data, and padding, has a row that is or will be trained.

    For weights that are not on disk yet, or not in safetensors files, only the number of rows is
    checked, and a line is logged.

    Raises: EnvironmentFault for a token without a row, or with a row that adapters leave untrained.
    """
    try:
        embedding, head = find_matrices(config)
        rows = embedding.rows if embedding else read_config(config).get_text_config().vocab_size
        _refuse_ids_without_rows(config, tokenizer, used, rows)
        if config.tuning.allow_untrained_tokens:
            return
        # Reading a token needs its row of the embedding. Learning to generate it needs its row of
        # the head, unless the head is tied.
        if embedding and not _is_trained(config, embedding.name):
            _refuse_untrained(config, tokenizer, used, embedding, "read")
        if head and not _is_trained(config, head.name):
            _refuse_untrained(config, tokenizer, used, head, "write")
    except (OSError, SafetensorError, ValueError, KeyError) as error:
        # KeyError: an index of shards without its map
        raise EnvironmentFault(
            f"model.name={config.model.name}: its files cannot be read: {first_line(error)}; "
            "get the model again"
        ) from error


def find_matrices(config: Config) -> tuple[Matrix | None, Matrix | None]:
    """Return the embedding and the output head of a model's safetensors files.

    They have one row per token. A matrix is None if it is missing, or tied to the other one.
    """
    files = tensor_files(config)
    embedding = _find_matrix(files, EMBEDDINGS)
    if embedding is None:
        logger.info(
            "vocabulary: no embedding of %s in safetensors files here yet: "
            "whether its rows are trained was not looked at",
            config.model.name,
        )
    return embedding, _find_matrix(files, HEADS)


def _find_matrix(files: dict[str, Path], modules: Collection[str]) -> Matrix | None:
    """Return the weight of one of these modules with the shortest name, None if there is none.

    Layers that predict further tokens repeat the weight under longer names (DeepSeek V3).
    """
    endings = [f"{module}.weight" for module in modules]
    name = min((name for name in files if is_named(name, endings)), key=len, default=None)
    if name is None:
        return None
    with safe_open(files[name], framework="pt") as file:
        tensor = file.get_slice(name)
        return Matrix(files[name], name, tensor.get_shape()[0], tensor.get_dtype())


def _is_trained(config: Config, name: str) -> bool:
    """Return whether the run trains a matrix: in mode full, as a full module, or with adapters."""
    if config.tuning.mode == "full":
        return True
    lora = config.tuning.lora
    trained = list(lora.modules_to_save or ())
    if isinstance(lora.target_modules, list):  # all-linear excludes embedding and head
        trained += lora.target_modules
    return is_named(name.removesuffix(".weight"), trained)


def _refuse_ids_without_rows(
    config: Config, tokenizer: PreTrainedTokenizerBase, used: UsedTokens, rows: int
) -> None:
    """Raise EnvironmentFault for an id beyond the matrix, including the padding id.

    A GPU would fail on it without reporting the id.
    """
    embeds = f"model.name={config.model.name} embeds {rows} tokens"
    added = tokenizer.convert_tokens_to_ids(config.model.add_tokens or [])
    without_row = set(used.ids[used.ids >= rows].tolist()) - set(added)
    if without_row:
        raise EnvironmentFault(
            f"{embeds}, and the rows hold {_describe(max(without_row), tokenizer, used)}; get "
            "tokenizer and weights from one place, or write it into model.add_tokens"
        )
    if tokenizer.pad_token_id >= max(rows, *(token + 1 for token in added), 0):
        raise EnvironmentFault(
            f"{embeds}, and the padding token {tokenizer.pad_token} has id "
            f"{tokenizer.pad_token_id}; set pad_token in tokenizer_config.json to another token"
        )


def _refuse_untrained(
    config: Config,
    tokenizer: PreTrainedTokenizerBase,
    used: UsedTokens,
    matrix: Matrix,
    use: Literal["read", "write"],
) -> None:
    """Raise EnvironmentFault for tokens that a run reads or writes and whose rows are untrained."""
    ids = used.ids if use == "read" else used.trained_ids
    untrained = untrained_tokens(matrix, ids, tokenizer)
    for token in tokenizer.convert_tokens_to_ids(config.trained_tokens):
        untrained.pop(token, None)
    if not untrained:
        return
    described = "; ".join(
        f"{_describe(token, tokenizer, used)}, whose row of {matrix.name} is {what}"
        for token, what in untrained.items()
    )
    raise EnvironmentFault(
        f"model.name={config.model.name} never learned tokens that the rows hold: {described}. "
        f"tuning.mode={config.tuning.mode} leaves these rows as they are, so the model could not "
        f"{use} them; set MODEL_NAME to the instruct model of this base, "
        f"{_train_them(config, tokenizer, untrained)}TUNING_MODE=full, or "
        "MODEL_CHAT_TEMPLATE=default, which needs no new token "
        "(TUNING_ALLOW_UNTRAINED_TOKENS=true trains anyway)"
    )


def _train_them(
    config: Config, tokenizer: PreTrainedTokenizerBase, untrained: Iterable[int]
) -> str:
    """Return the setting that trains these tokens too, '' if the backend has no such setting."""
    if "trainable_tokens" not in backend_of(config).lora_options:
        return ""
    tokens = [*(config.tuning.lora.trainable_tokens or ())]
    tokens += tokenizer.convert_ids_to_tokens(list(untrained))
    return f"TUNING_LORA_TRAINABLE_TOKENS='{','.join(tokens)}' to train their rows, "


def _describe(token: int, tokenizer: PreTrainedTokenizerBase, used: UsedTokens) -> str:
    origin = used.origin(token)
    first = f", first in {origin}" if origin else ""
    return f"{tokenizer.convert_ids_to_tokens(token)} (id {token}{first})"


def untrained_tokens(
    matrix: Matrix, ids: np.ndarray, tokenizer: PreTrainedTokenizerBase
) -> dict[int, str]:
    """Return the added tokens in `ids` with an untrained row, and what each row equals.

    The criteria are in the module's docstring. No row counts as a copy of the padding token's row,
    which is often a copy itself.
    """
    added_ids = [token for token in tokenizer.added_tokens_decoder if token < matrix.rows]
    added = np.array(added_ids, dtype=np.int64)
    asked = np.intersect1d(ids, added)
    ordinary = np.setdiff1d(np.arange(matrix.rows), added)
    is_empty = len(asked) == 0 or len(ordinary) == 0
    if is_empty or matrix.dtype not in FLOATS:
        return {}
    sample = matrix.read(_spread(ordinary))
    length = sample.norm(dim=1).median()
    needed = np.sort(added[added <= asked[-1]])
    rows = dict(zip(needed.tolist(), matrix.read(needed), strict=True))
    points = {"zero": torch.zeros_like(sample[0])}
    sample_mean = sample.mean(0)
    distances = [(rows[token] - sample_mean).norm() for token in asked.tolist()]
    if any(distance < NEAR_MEAN * length for distance in distances):
        points["the mean of all"] = matrix.mean()
    untrained = {}
    for token, row in rows.items():
        what = _nearest(row, points, UNTRAINED * length)
        if what and token in asked:
            untrained[token] = what
        if token != tokenizer.pad_token_id:
            points[f"that of {tokenizer.convert_ids_to_tokens(token)}"] = row
    return untrained


def _nearest(row: Tensor, points: dict[str, Tensor], distance: Tensor) -> str | None:
    """Return the name of the first point within `distance` of a row."""
    for name, point in points.items():
        if (row - point).norm() <= distance:
            return name
    return None


def _spread(ids: np.ndarray) -> np.ndarray:
    """Return short runs of ids, spread over a vocabulary that is often sorted by frequency."""
    run = np.arange(min(RUN_ROWS, len(ids)))
    starts = np.linspace(0, len(ids) - len(run), RUNS, dtype=np.int64)
    return ids[np.unique(starts[:, None] + run)]
