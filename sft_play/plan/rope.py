"""The longest sequence that a model takes, and a rope that model.rope_scaling stretches."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sft_play.config.sections.model import ModelSection, RopeScalingSection
from sft_play.errors import ConfigError
from sft_play.plan.config_json import ModelConfigJson, read_config_json
from sft_play.plan.model_shape import download, find_file, text_part

# what config.json calls the longest sequence: of most models, of GPT-2 and its like, of MPT
POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len")
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


def load_positions(model: ModelSection, environ: Mapping[str, str], may_fetch: bool) -> int | None:
    """Return the tokens of the longest sequence that a model can take, None if nobody says.

    A rope that is stretched by model.rope_scaling counts.

    Models of the same shape differ in it, so that of a well-known model is unknown too before its
    config.json is in the hub's cache, unless `may_fetch`.

    Raises: EnvironmentFault when it cannot be fetched.
    """
    path = find_file(model.name, "config.json", model.revision, environ)
    if path is None and may_fetch:
        path = download(model.name, model.revision)
    if path is None:
        return None
    config = read_config_json(path, model.name)
    longest = _longest(text_part(config))
    if model.rope_scaling.rope_type is None or longest is None:
        return positions_of(config)
    return stretch(_read_rope(text_part(config)), longest, model.rope_scaling).positions


def positions_of(config: ModelConfigJson) -> int | None:
    """Return the tokens of the longest sequence that a model can take, None if it says nothing.

    A rope that is stretched by a factor takes as much more than the sequences it began with.
    """
    text = text_part(config)
    positions = _longest(text)
    rope = _read_rope(text)
    factor = rope.get("factor")
    original = rope.get("original_max_position_embeddings")
    if rope.get("rope_type") == "dynamic":  # config.json has the length that it begins at
        original = positions
    if positions is None or not original or not factor:
        return positions
    return max(positions, int(original * factor))


def _longest(text: ModelConfigJson) -> int | None:
    """Return the positions that a config.json names, None if it names none."""
    found = (text.get(key) for key in POSITIONS)
    return next((value for value in found if type(value) is int and value > 0), None)


def _read_rope(text: ModelConfigJson) -> ModelConfigJson:
    """Return the rope of a config.json, of earlier versions of transformers too."""
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    return {"rope_type": rope.get("type", "default"), **rope}
