"""Stretches the rope of a base as model.rope_scaling says."""

import logging
from pathlib import Path

from transformers import PretrainedConfig

from sft_play.config.schema import Config, ModelSection
from sft_play.errors import ConfigError
from sft_play.plan.rope import stretch
from sft_play.runs.files import read_json, write_json

logger = logging.getLogger(__name__)


def with_stretched_rope(stored: PretrainedConfig, model: ModelSection) -> PretrainedConfig:
    """Return the config of a base's files with its rope stretched.

    Raises: ConfigError for a base without a rope, or with one for each kind of layer.
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
    """Write config.json into an adapter's folder where the base's own has another rope.

    The folder's README.md loads it. transformers takes the folder for a whole model then, and finds
    no weights: without the file it would load the base with its own rope, without a word.
    """
    if config.tuning.mode == "full" or not config.model.rope_scaling.rope_type:
        return
    trained.save_pretrained(folder)
    path = folder / "config.json"
    values = read_json(path)
    values.pop("quantization_config", None)  # how the base was loaded, not what it is
    write_json(path, values)
