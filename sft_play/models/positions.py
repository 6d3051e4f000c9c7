"""Handle a base's positions: a table of learned ones, or a stretched rope with exact angles.

A table of learned positions, as in GPT-2 and OPT, is finite: there is no vector after its end.
"""

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn
from transformers import PretrainedConfig

from sft_kernels.sharded import run_within
from sft_play.config.schema import Config, ModelSection
from sft_play.errors import ConfigError, DataError
from sft_play.models.base_files import stored_config
from sft_play.plan.config_json import stretch
from sft_play.runs.files import read_json, write_json

logger = logging.getLogger(__name__)

OFFSETS = (0, 2)  # rows of a table before position 0: OPT's table has two


def learned_positions(model: nn.Module) -> int | None:
    """Return how many positions a model has a learned vector for, None if it computes them.

    Its table is an embedding, but not of tokens. It has as many rows as config.json has positions.
    """
    config = model.config.get_text_config()
    positions = getattr(config, "max_position_embeddings", None)  # also GPT-2's n_positions
    if positions is None:
        return None
    for module in model.modules():
        if isinstance(module, nn.Embedding) and module is not model.get_input_embeddings():
            rows = module.num_embeddings
            if rows != config.vocab_size and rows - positions in OFFSETS:
                return positions
    return None


def refuse_longer_rows(model: nn.Module, max_seq_len: int | str | None) -> None:
    """Raise ConfigError if rows may have more tokens than the model has learned positions."""
    positions = learned_positions(model)
    if positions is not None and isinstance(max_seq_len, int) and max_seq_len > positions:
        raise ConfigError(
            f"model.max_seq_len={max_seq_len}: the model has only {positions} learned position "
            f"embeddings; set MODEL_MAX_SEQ_LEN={positions}"
        )


def room_for_answer(model: nn.Module, prompt_tokens: int, limit: int) -> int:
    """Return how many of `limit` tokens can be generated after a prompt.

    Raises: DataError if the prompt uses all learned positions.
    """
    positions = learned_positions(model)
    if positions is None or prompt_tokens + limit <= positions:
        return limit
    room = positions - prompt_tokens
    if room < 1:
        raise DataError(
            f"a prompt has {prompt_tokens} tokens, and the model takes {positions} with the "
            "answer; write less, in a chat /reset"
        )
    logger.warning(
        "answers to prompts of %d tokens end after %d tokens instead of %d: the model has %d "
        "learned positions",
        prompt_tokens,
        room,
        limit,
        positions,
    )
    return room


def keep_angles_exact(model: nn.Module) -> None:
    """Let rotary modules compute angles in float32, even if other multiplications use TF32.

    An angle is a position times a frequency, which transformers computes as a matrix
    multiplication. If TF32 is allowed, as in 16-bit runs, a GPU may round both to 11 bits.
    Positions over 2,048 then change (seen on a B200: transformers issue 48428).
    """
    for module in model.modules():
        if any(name.endswith("inv_freq") for name, _ in module.named_buffers(recurse=False)):
            run_within(module, _full_precision)


@contextlib.contextmanager
def _full_precision() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def with_stretched_rope(stored: PretrainedConfig, model: ModelSection) -> PretrainedConfig:
    """Return the config of a base's files with its rope stretched.

    Raises: ConfigError for a base without a rope, or with a separate rope for each kind of layer.
    """
    wanted = model.rope_scaling
    text = stored.get_text_config()
    rope = getattr(text, "rope_parameters", None)
    if not rope:
        raise ConfigError(
            f"model.rope_scaling.rope_type={wanted.rope_type}: {stored.model_type} has no rotary "
            "positions to stretch; set MODEL_ROPE_SCALING_ROPE_TYPE=null"
        )
    stretched = stretch(rope, text.max_position_embeddings, wanted)
    text.rope_parameters = stretched.parameters
    text.max_position_embeddings = stretched.max_position_embeddings
    logger.info(
        "rope %s factor=%g: %d tokens of the base become %d",
        wanted.rope_type,
        wanted.factor,
        stretched.original,
        stretched.positions,
    )
    return stored


def write_rope_beside_adapter(config: Config, trained: PretrainedConfig, folder: Path) -> None:
    """Write config.json into an adapter's folder if the rope differs from the base's.

    The folder's README.md loads this file. transformers then treats the folder as a full model, and
    finds no weights. Without the file it would load the base with its original rope, without a
    warning.
    """
    if config.tuning.mode == "full" or not config.model.rope_scaling.rope_type:
        return
    trained.save_pretrained(folder)
    path = folder / "config.json"
    values = read_json(path)
    values.pop("quantization_config", None)  # it describes how the base was loaded, not the model
    stored = getattr(stored_config(config), "quantization_config", None)
    if stored is not None:
        values["quantization_config"] = stored
    write_json(path, values)
