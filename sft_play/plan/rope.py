"""A rope that is stretched by model.rope_scaling, in the terms of config.json. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sft_play.config.sections.model import ModelSection, RopeScalingSection
from sft_play.errors import ConfigError

# What a rope has whatever its type
KEPT = ("rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved")
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}  # as Llama 3.1 has them
HAVE_ORIGINAL = ("yarn", "llama3")


@dataclass(frozen=True)
class StretchedRope:
    """What a stretched rope changes in the config of a model."""

    parameters: dict[str, Any]  # rope_parameters of transformers
    original: int  # tokens that the base takes
    positions: int  # tokens that the model takes now
    max_position_embeddings: int  # of config.json; dynamic stretches beyond it


def stretch(
    rope: Mapping[str, Any], max_position_embeddings: int, wanted: RopeScalingSection
) -> StretchedRope:
    """Return a base's rope as `wanted` stretches it.

    `rope` is the base's rope_parameters. A rope that is stretched so already stays as it is: the
    saved model of a run is read with the run's settings.

    Raises: ConfigError for a model with a rope for each kind of layer.
    """
    if any(isinstance(value, Mapping) for value in rope.values()):
        kinds = ", ".join(sorted(rope))
        raise ConfigError(
            f"model.rope_scaling.rope_type={wanted.rope_type}: the base has a rope for each kind "
            f"of layer ({kinds}); stretch them in a copy of its config.json, and set "
            "MODEL_ROPE_SCALING_ROPE_TYPE=null"
        )
    original = (
        wanted.original_max_position_embeddings
        or rope.get("original_max_position_embeddings")
        or max_position_embeddings
    )
    is_done = (rope.get("rope_type"), rope.get("factor")) == (wanted.rope_type, wanted.factor)
    if is_done and wanted.rope_type == "linear":  # whose config.json does not say where it began
        original = int(max_position_embeddings / wanted.factor)
    parameters = {name: rope[name] for name in KEPT if rope.get(name) is not None}
    if wanted.rope_type == "llama3":
        parameters |= LLAMA3
    parameters |= wanted.model_dump(exclude_none=True)
    if wanted.rope_type in HAVE_ORIGINAL:
        parameters["original_max_position_embeddings"] = original
    positions = int(original * wanted.factor)
    is_dynamic = wanted.rope_type == "dynamic"
    return StretchedRope(parameters, original, positions, original if is_dynamic else positions)


def unstretched(model: ModelSection) -> ModelSection:
    """Return the section with the base's own rope."""
    return model.model_copy(update={"rope_scaling": RopeScalingSection()})
