"""The shape of a run's model, counted on its modules where config.json does not say it all."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from sft_play.config.schema import Config
from sft_play.errors import ConfigError
from sft_play.plan import counting
from sft_play.plan.model_shape import LLAMA_LIKE, ModelShape, load_model_config, load_shape
from sft_play.plan.structure import structure_from_json
from sft_play.runs.folder import cache_folder

COUNTER = "sft_play.models.structure"


def load_counted_shape(config: Config, environ: Mapping[str, str]) -> ModelShape:
    """Return the shape of a run's model with its structure, without towers that are dropped.

    Architectures like Llama need none, and that of well-known models is at hand. Any other model is
    built without weights in a process of its own, once. Where that fails the shape has the reason
    as its `guess`, and the counts of a Llama of its sizes.

    Raises: EnvironmentFault where there is no config.json; ConfigError for a model that cannot be
    run on text alone.
    """
    shape = _counted_shape(config, environ)
    return shape.without_towers() if config.tuning.towers == "drop" else shape


def _counted_shape(config: Config, environ: Mapping[str, str]) -> ModelShape:
    model = config.model
    shape = load_shape(model.name, model.revision, environ)
    is_known = shape.model_type in LLAMA_LIKE and shape.composite is None
    if shape.structure is not None or is_known:
        return shape
    if not shape.model_type:
        return replace(shape, guess="its config.json names no model_type")
    request = {
        "model": model.model_dump(include={"name", "revision", "trust_remote_code"}),
        "config": dict(load_model_config(model.name, model.revision, environ)),
    }
    if Path(model.name).is_dir():  # the same files in another folder are the same model
        request["model"]["name"] = str(Path(model.name).resolve())
    told = f"counting the weights of {model.name} without loading them, once"
    folder = cache_folder(config) / "structures"
    try:
        facts = counting.answer(COUNTER, request, told, folder, environ)
    except counting.Uncounted as reason:
        return replace(shape, guess=str(reason))
    if "unusable" in facts:
        raise ConfigError(facts["unusable"])
    return replace(shape, structure=structure_from_json(facts))
