"""Does a model know every token of the rows? Asked of its weight files, before any weight is loaded. Reads rows, never a whole matrix.

Adapters leave the embedding and the output head as they are. A token whose row there was never trained stays what it was:
noise to read, and impossible to write apart from its like. Base models that share the tokenizer of their instruct sibling
have such rows (Llama 3's <|eot_id|> and <|start_header_id|>), and so has every token that was just added.

A row counts as untrained when it lies within UNTRAINED x the median length of ordinary rows of
- zero: weight decay shrinks the embedding of a token that no text holds, step by step, to nothing;
- the mean of all rows: where resize_token_embeddings puts new rows (transformers: N(mean, 1e-9 x covariance));
- the row of another added token before it: rows without a gradient of their own move together. Not of one behind it, since
  a copy follows its original.
The signs are those of Land and Bartolo, "Fishing for Magikarp" (arXiv 2405.05417). Rows that were drawn at random like those
of the others (resize_token_embeddings with mean_resizing=False) cannot be told from trained ones.

Legend: V rows, D features.
"""

import json
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from huggingface_hub import try_to_load_from_cache
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, PreTrainedTokenizerBase
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from sft_play.config.schema import Config
from sft_play.data.vocabulary_use import VocabularyUse
from sft_play.errors import EnvironmentFault, first_line

logger = logging.getLogger(__name__)

EMBEDDINGS = (
    "embed_tokens",
    "wte",
    "embed_in",
    "word_embeddings",
)  # Llama and most others; GPT-2; GPT-NeoX; BLOOM, Falcon
HEADS = ("lm_head", "embed_out")  # most; GPT-NeoX
FLOATS = ("F32", "F16", "BF16")
# Rows that resize_token_embeddings drew lie 3e-5 spreads from the mean, 1e-3 when bfloat16 has rounded them. Ten steps of
# training at a learning rate of 1e-5 move a row further than this: 1e-4 a feature, where features are about 1e-2.
UNTRAINED = 1e-3
NEAR_MEAN = (
    0.25  # of the median length: only then is a whole matrix read, chunk by chunk, for its mean
)
RUNS, RUN_ROWS = 16, 16  # a sample of rows, neighbours together: a far row costs a seek
CHUNK_ROWS = 4096


@dataclass(frozen=True)
class Matrix:
    """A (V, D) matrix of a safetensors file, of which rows are read one by one."""

    path: Path
    name: str
    rows: int
    dtype: str

    def read(self, ids: np.ndarray) -> torch.Tensor:
        """Return the rows of `ids` (n,), float32 (n, D)."""
        with safe_open(self.path, framework="pt") as file:
            matrix = file.get_slice(self.name)
            return torch.stack([matrix[row].float() for row in ids.tolist()])

    def mean(self) -> torch.Tensor:
        """Return the mean of all rows, float32 (D,); at no time are more than CHUNK_ROWS of them in memory."""
        with safe_open(self.path, framework="pt") as file:
            matrix = file.get_slice(self.name)
            return (
                sum(
                    matrix[start : start + CHUNK_ROWS].float().sum(0)
                    for start in range(0, self.rows, CHUNK_ROWS)
                )
                / self.rows
            )


def check_vocabulary(
    config: Config, tokenizer: PreTrainedTokenizerBase, used: VocabularyUse
) -> None:
    """Raise EnvironmentFault when the model has no row for a token of the rows or for padding, or one that adapters need and nobody trained.

    Weights that are not on disk yet, and those of other formats than safetensors, leave the second question open: that is logged.
    """
    try:
        embedding, head = find_matrices(config)
        _refuse_ids_without_rows(
            config, tokenizer, used, embedding.rows if embedding else _vocab_size(config)
        )
        # what a row only reads needs an embedding; what it learns to write needs a row of the head, where that is a matrix of its own
        for matrix, ids, use in ((embedding, used.ids, "read"), (head, used.trained_ids, "write")):
            if (
                matrix
                and not config.tuning.allow_untrained_tokens
                and not _is_trained(config, matrix.name)
            ):
                _refuse_untrained(config, tokenizer, used, matrix, ids, use)
    except (
        OSError,
        SafetensorError,
        ValueError,
        KeyError,
    ) as error:  # KeyError: an index of shards without its map
        raise EnvironmentFault(
            f"model.name={config.model.name}: its files cannot be read: {first_line(error)}; get the model again"
        ) from error


def find_matrices(config: Config) -> tuple[Matrix | None, Matrix | None]:
    """Return (embedding, head) as they lie on disk; None for what is not there. A tied head has no matrix of its own."""
    files = _tensor_files(config)
    embedding, head = (_matrix(files, _ending_in(files, names)) for names in (EMBEDDINGS, HEADS))
    if embedding is None:
        logger.info(
            "vocabulary: no embedding of %s in safetensors files here yet: whether its rows are trained was not looked at",
            config.model.name,
        )
    return embedding, head


def _tensor_files(config: Config) -> dict[str, Path]:
    """The file of each tensor, found as transformers finds them: one file before an index of several. Those that are here."""
    single = _on_disk(config, SAFE_WEIGHTS_NAME)
    if single:
        with safe_open(single, framework="pt") as file:
            return dict.fromkeys(file.keys(), single)
    index = _on_disk(config, SAFE_WEIGHTS_INDEX_NAME)
    if index is None:
        return {}
    names = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    here = {name: path for name in set(names.values()) if (path := _on_disk(config, name))}
    return {tensor: here[name] for tensor, name in names.items() if name in here}


def _on_disk(config: Config, name: str) -> Path | None:
    """A file of the model in its folder or in the hub's cache."""
    folder = Path(config.model.name)
    if folder.is_dir():
        return folder / name if (folder / name).is_file() else None
    cached = try_to_load_from_cache(config.model.name, name, revision=config.model.revision)
    return Path(cached) if isinstance(cached, str) else None


def _ending_in(names: Iterable[str], modules: tuple[str, ...]) -> str | None:
    """The weight of a module of these names, wherever the model keeps it. The shortest: layers that predict further tokens repeat it (DeepSeek V3)."""
    found = (
        name
        for name in names
        if f".{name}".endswith(tuple(f".{module}.weight" for module in modules))
    )
    return min(found, key=len, default=None)


def _matrix(files: dict[str, Path], name: str | None) -> Matrix | None:
    if name is None:
        return None
    with safe_open(files[name], framework="pt") as file:
        tensor = file.get_slice(name)
        return Matrix(files[name], name, tensor.get_shape()[0], tensor.get_dtype())


def _vocab_size(config: Config) -> int:
    model = config.model
    return (
        AutoConfig.from_pretrained(
            model.name, revision=model.revision, trust_remote_code=model.trust_remote_code
        )
        .get_text_config()
        .vocab_size
    )


def _is_trained(config: Config, name: str) -> bool:
    """Whether the run trains a matrix itself: in mode full, or as a target of adapters (by PEFT's rule)."""
    targets = config.tuning.lora.target_modules
    module = f".{name.removesuffix('.weight')}"
    return config.tuning.mode == "full" or (
        isinstance(targets, list) and any(module.endswith(f".{target}") for target in targets)
    )


def _refuse_ids_without_rows(
    config: Config, tokenizer: PreTrainedTokenizerBase, used: VocabularyUse, rows: int
) -> None:
    """A GPU dies of such an id without naming it. Padding is looked up, too."""
    embeds = f"model.name={config.model.name} embeds {rows} tokens"
    if used.largest_id >= rows:
        advice = "get tokenizer and weights from one place, or resize the embeddings of the base and save both"
        raise EnvironmentFault(
            f"{embeds}, and the rows hold {_named(used.largest_id, tokenizer, used)}; {advice}"
        )
    if tokenizer.pad_token_id >= rows:
        advice = "in its tokenizer_config.json name a token as pad_token that it has"
        raise EnvironmentFault(
            f"{embeds}, and its padding is {tokenizer.pad_token} (id {tokenizer.pad_token_id}); {advice}"
        )


def _refuse_untrained(
    config: Config,
    tokenizer: PreTrainedTokenizerBase,
    used: VocabularyUse,
    matrix: Matrix,
    ids: np.ndarray,
    use: str,
) -> None:
    untrained = untrained_tokens(matrix, ids, tokenizer)
    if untrained:
        named = "; ".join(
            f"{_named(token, tokenizer, used)}, whose row of {matrix.name} is {what}"
            for token, what in untrained.items()
        )
        kept = f"tuning.mode={config.tuning.mode} leaves these rows as they are, so the model could not {use} them"
        advice = (
            "set MODEL_NAME to the instruct model of this base, TUNING_MODE=full, or MODEL_CHAT_TEMPLATE=default, which needs no new token "
            "(TUNING_ALLOW_UNTRAINED_TOKENS=true trains all the same)"
        )
        raise EnvironmentFault(
            f"model.name={config.model.name} never learned tokens that the rows hold: {named}. {kept}; {advice}"
        )


def _named(token: int, tokenizer: PreTrainedTokenizerBase, used: VocabularyUse) -> str:
    origin = used.origin(token)
    return f"{tokenizer.convert_ids_to_tokens(token)} (id {token}{f', first in {origin}' if origin else ''})"


def untrained_tokens(
    matrix: Matrix, ids: np.ndarray, tokenizer: PreTrainedTokenizerBase
) -> dict[int, str]:
    """Return those of `ids` that are added tokens with an untrained row, each with what its row is. The rule: see the module.

    The padding token is no one's original: it is often made as a copy.
    """
    added = np.array(
        [token for token in tokenizer.added_tokens_decoder if token < matrix.rows], dtype=np.int64
    )
    asked = np.intersect1d(ids, added)
    ordinary = np.setdiff1d(np.arange(matrix.rows), added)
    if matrix.dtype not in FLOATS or not len(asked) or not len(ordinary):
        return {}
    sample = matrix.read(_spread(ordinary))
    length = sample.norm(dim=1).median()
    needed = np.sort(added[added <= asked[-1]])
    rows = dict(zip(needed.tolist(), matrix.read(needed), strict=True))
    points = {"zero": torch.zeros_like(sample[0])}
    if any((rows[token] - sample.mean(0)).norm() < NEAR_MEAN * length for token in asked.tolist()):
        points["the mean of all"] = matrix.mean()
    untrained = {}
    for token, row in rows.items():
        if token in asked:
            what = next(
                (
                    name
                    for name, point in points.items()
                    if (row - point).norm() <= UNTRAINED * length
                ),
                None,
            )
            untrained |= {token: what} if what else {}
        if token != tokenizer.pad_token_id:
            points[f"that of {tokenizer.convert_ids_to_tokens(token)}"] = row
    return untrained


def _spread(ids: np.ndarray) -> np.ndarray:
    """Short runs of ids from everywhere in a vocabulary, whose ids often stand in the order of frequency."""
    run = np.arange(min(RUN_ROWS, len(ids)))
    starts = np.linspace(0, len(ids) - len(run), RUNS, dtype=np.int64)
    return ids[np.unique(starts[:, None] + run)]
