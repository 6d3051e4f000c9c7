"""What the files of a run's base are, before and without its model."""

import contextlib
import logging
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoConfig, PretrainedConfig

from sft_play.config.schema import Config
from sft_play.models import stored_weights
from sft_play.models.shards import InFile, tensors_in
from sft_play.models.stored_weights import Stored, as_plain, reading_as_plain
from sft_play.models.vocabulary import tensor_files
from sft_play.plan.stored_as import StoredAs, stored_as
from sft_play.runs.model_folder import read_headers

logger = logging.getLogger(__name__)


def stored_config(config: Config) -> PretrainedConfig | None:
    """Return the config of the base's files, None where loading the weights will say why not."""
    model = config.model
    try:
        return AutoConfig.from_pretrained(
            model.name, revision=model.revision, trust_remote_code=model.trust_remote_code
        )
    except (OSError, ValueError, KeyError):
        return None


def stored_format(config: Config, stored: PretrainedConfig | None) -> StoredAs | None:
    """Return the quantisation of the base's weight files, None for 16 or 32 bits."""
    if stored is None:
        return None
    try:
        headers = list(read_headers(sorted(set(tensor_files(config).values()))))
    except (SafetensorError, OSError, ValueError):  # loading the weights says why
        headers = []
    return stored_as(stored.to_dict(), headers)


def base_tensors(config: Config) -> dict[str, InFile | Stored]:
    """Return the tensors of a base's files by name, the quantised ones as the numbers they are."""
    tensors = tensors_in(tensor_files(config))
    found = stored_format(config, stored_config(config))
    if found is None:
        return tensors
    return as_plain(tensors, found.block, dtype=getattr(torch, found.dtype))


def plain_dtype(in_file: InFile | Stored, tensor: Tensor) -> torch.dtype:
    """Return the type in which a plain checkpoint stores a tensor that was read."""
    return in_file.dtype if isinstance(in_file, Stored) else tensor.dtype


def reading_stored(
    found: StoredAs, device: torch.device
) -> contextlib.AbstractContextManager[None]:
    """Return the context in which `from_pretrained` reads weights that are stored like that."""
    logger.info("model: stored as %s, %s", found.name, found.way)
    if found.way == "packed":
        return contextlib.nullcontext()
    return reading_as_plain(found.block, device if device.type == "cuda" else None)


def plain_reading(config: Config) -> dict[str, Any] | None:
    """Return how a process without this project reads a base as plain, None if it need not."""
    found = stored_format(config, stored_config(config))
    if found is None or found.way == "packed":
        return None
    return {"module": stored_weights.__file__, "block": found.block}
