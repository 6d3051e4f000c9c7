"""Add the rows of model.add_tokens: a base is read as if its files contained them.

All code that reads a base gets a config.json with the larger vocabulary. It also gets an embedding
and an output head with the new rows, which are the mean of all others. So adapters, quantization,
FSDP, ZeRO-3 and merging need no special code, and every rank reads the same numbers.

Legend: V rows of the files, R rows including those of the added tokens, D features.
"""

import contextlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PretrainedConfig

from sft_play.config.schema import Config
from sft_play.config.sections.model import EMBEDDINGS, HEADS
from sft_play.data.tokenizer import load_tokenizer
from sft_play.errors import ConfigError
from sft_play.models.stored_weights import reading_changed, stored_shape

logger = logging.getLogger(__name__)


class Growth(NamedTuple):
    """The number of rows of a vocabulary, in a base's files and with the added tokens."""

    before: int  # V
    after: int  # R


@dataclass(frozen=True)
class GrownTensor:
    """A tensor in a file whose first dimension gets more rows. It is read when it is indexed."""

    stored: Any
    rows: int

    def __getitem__(self, index: Any) -> Tensor:
        """Return rows (R, ...) in the file's dtype."""
        weight = self.stored[...]  # (V, ...)
        # in float64, so that the summation order does not change the rounded mean
        mean = weight.mean(0, keepdim=True, dtype=torch.float64).to(weight.dtype)
        return torch.cat([weight, mean.expand(self.rows - len(weight), *mean.shape[1:])])[index]

    def get_shape(self) -> list[int]:
        """Return the shape including the new rows."""
        return [self.rows, *self.stored.get_shape()[1:]]

    def get_dtype(self) -> str:
        """Return the dtype by its name in the file."""
        return self.stored.get_dtype()


def growth_of(config: Config, stored: PretrainedConfig) -> Growth | None:
    """Return how the vocabulary of a base grows, None if it already has a row for each added token.

    `stored` is the config of the base's files.
    """
    if not config.model.add_tokens:
        return None
    rows = stored.get_text_config().vocab_size
    needed = max(load_tokenizer(config).convert_tokens_to_ids(config.model.add_tokens)) + 1
    return Growth(rows, needed) if needed > rows else None


def grow_config(stored: PretrainedConfig, growth: Growth | None) -> PretrainedConfig:
    """Return the config of a base's files with the number of rows of the grown vocabulary."""
    for part in (stored, stored.get_text_config()) if growth else ():
        if getattr(part, "vocab_size", None) == growth.before:
            part.vocab_size = growth.after
    return stored


def grow_tensors(tensors: Mapping[str, Any], growth: Growth | None) -> Mapping[str, Any]:
    """Return the tensors of a base's files, with the new rows in the embedding and the head.

    Raises: ConfigError if the embedding has an unknown name.
    """
    grown = dict(tensors)
    modules = {name: name.split(".")[-2:][0] for name in tensors}
    for name, tensor in tensors.items() if growth else ():
        is_matrix = modules[name] in EMBEDDINGS | HEADS  # or a bias of the head
        if is_matrix and stored_shape(tensor)[0] == growth.before:
            lazy = GrownTensor(tensor, growth.after)
            grown[name] = lazy[...] if isinstance(tensor, Tensor) else lazy
    if growth and tensors and not EMBEDDINGS.intersection(modules.values()):
        raise ConfigError(
            "model.add_tokens: the base's files have no embedding under a name that is known "
            f"({', '.join(sorted(EMBEDDINGS))}); add the tokens and their rows to the base by "
            "yourself, and name them in TUNING_LORA_TRAINABLE_TOKENS"
        )
    return grown


def reading_grown(growth: Growth | None) -> contextlib.AbstractContextManager[None]:
    """Return the context in which `from_pretrained` reads a base with the new rows."""
    if growth is None:
        return contextlib.nullcontext()
    logger.info("model.add_tokens: the vocabulary of %d rows is read with %d", *growth)
    return reading_changed(lambda tensors: grow_tensors(tensors, growth))
