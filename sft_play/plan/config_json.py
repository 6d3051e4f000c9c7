"""A model's config.json, checked: anyone may have written it. Loads no torch."""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field, ValidationError

from sft_play.errors import EnvironmentFault
from sft_play.runs.model_folder import read_object

ModelConfigJson = Mapping[str, Any]  # a transformers config.json
COUNT = re.compile(r"(layer|block|head|expert)s?$")  # of modules, which are built one by one
MAX_COUNT = 4096

Size = Annotated[int, Field(strict=True, ge=0, le=1 << 30)]
Count = Annotated[int, Field(strict=True, ge=1, le=1 << 30)]


class Rope(BaseModel):
    """What is read of a rope."""

    factor: Annotated[float, Field(strict=True, gt=0, le=1 << 30)] | None = None
    original_max_position_embeddings: Size | None = None


class ConfigJson(BaseModel):
    """What is read of a config.json, with its types."""

    model_type: str | None = None
    architectures: list[str] | None = None
    auto_map: dict[str, Any] | None = None
    rope_parameters: Rope | None = None
    rope_scaling: Rope | None = None
    vocab_size: Count | list[Count] | None = None
    hidden_size: Count | list[Count] | None = None
    num_hidden_layers: Count | list[Count] | None = None
    num_attention_heads: Count | list[Count] | None = None
    intermediate_size: Size | list[Size] | None = None
    num_key_value_heads: Size | list[Size] | None = None
    head_dim: Size | list[Size] | None = None
    text_config: "ConfigJson | None" = None


def read_config_json(path: Path, name: str) -> ModelConfigJson:
    """Return a config.json, whose values have the types that are read. Raises: EnvironmentFault."""
    if path.is_symlink() and not path.exists():
        raise EnvironmentFault(
            f"model.name={name}: its config.json is a link to {os.readlink(path)}, which cannot be "
            "opened. Copy the model again with cp -L."
        )
    if not path.exists():
        raise EnvironmentFault(
            f"model.name={name}: the folder has no config.json, so it is no transformers model; "
            f"see what is in it with ls {name}"
        )
    config = read_object(path)
    _refuse_too_many(config, name)
    read_typed(config, name)
    return config


def read_typed(part: ModelConfigJson, name: str) -> ConfigJson:
    """Return what is read of a config.json. Raises: EnvironmentFault for other types."""
    try:
        return ConfigJson.model_validate(part)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise _wrong(name, first["loc"][0], first["input"], first["msg"]) from None


def _wrong(name: str, key: Any, value: Any, why: str) -> EnvironmentFault:
    return EnvironmentFault(
        f"model.name={name}: its config.json says {key}={repr(value)[:100]} ({why}); get the model "
        "again"
    )


def _refuse_too_many(part: ModelConfigJson, name: str) -> None:
    """Raise EnvironmentFault for more layers, heads or experts than any model has."""
    for key, value in part.items():
        if COUNT.search(key) and isinstance(value, int) and value > MAX_COUNT:
            raise _wrong(name, key, value, f"no model has more than {MAX_COUNT}")
        if isinstance(value, dict):
            _refuse_too_many(value, name)
