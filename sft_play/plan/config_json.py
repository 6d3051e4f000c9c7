"""A model's config.json: find it, check its values, and return its longest sequence.

The file may come from anyone. Loads no torch.
"""

import difflib
import json
import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, NamedTuple
from urllib.parse import urlsplit

from pydantic import BaseModel, Field, ValidationError

from sft_play.config.layers import nearest_path
from sft_play.config.sections.model import ModelSection, RopeScalingSection
from sft_play.errors import ConfigError, EnvironmentFault, first_line
from sft_play.plan.structure import Structure, structure_from_json
from sft_play.runs.model_folder import read_object

# keys of config.json next to a language model's sizes if the model also has encoders
ENCODERS = ("vision_config", "audio_config", "speech_config")
KNOWN = Path(__file__).parent / "known_models.json"
UNSLOTH_COPY = re.compile(r"unsloth/(?P<model>.+?)(?P<in_4_bits>(-unsloth)?-bnb-4bit)?")
IN_4_BITS = {"quant_method": "bitsandbytes", "load_in_4bit": True}
ModelConfigJson = Mapping[str, Any]  # a transformers config.json
COUNT = re.compile(r"(layer|block|head|expert)s?$")  # of modules, which are built one by one
MAX_COUNT = 4096

Size = Annotated[int, Field(strict=True, ge=0, le=1 << 30)]
Count = Annotated[int, Field(strict=True, ge=1, le=1 << 30)]


class Rope(BaseModel):
    """The fields of a rope that are read."""

    factor: Annotated[float, Field(strict=True, gt=0, le=1 << 30)] | None = None
    original_max_position_embeddings: Size | None = None


class ConfigJson(BaseModel):
    """The fields of a config.json that are read, with their types."""

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
    """Return a config.json whose fields have the expected types. Raises: EnvironmentFault."""
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
    """Return the fields that are read. Raises: EnvironmentFault for other types."""
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


def text_part(config: ModelConfigJson) -> ModelConfigJson:
    """Return the part of a config.json that describes the language model."""
    return config.get("text_config") or config


def is_composite(config: ModelConfigJson) -> bool:
    """Return whether a config.json describes a language model with encoders."""
    return any(isinstance(config.get(key), Mapping) for key in ENCODERS)


class ModelFacts(NamedTuple):
    """The config.json of a model, and the counts of a well-known model of these sizes."""

    name: str  # if several well-known models have one shape, the first in the file; "" for others
    config: ModelConfigJson
    structure: Structure | None  # if the config is not sufficient


def load_facts(name: str, revision: str | None, environ: Mapping[str, str]) -> ModelFacts:
    """Return the config.json of a model, and the well-known model of the same sizes.

    Raises: EnvironmentFault when there is no config.json.
    """
    known = known_model(name)
    if known is not None:  # before the cache: the plan of a shipped config is the same everywhere
        return known
    config = load_model_config(name, revision, environ)
    same = (each for each in known_models().values() if _has_values(config, each.config))
    return next(same, ModelFacts("", config, None))._replace(config=config)


def _has_values(config: ModelConfigJson, wanted: ModelConfigJson) -> bool:
    """Return whether a config.json has all wanted values, and maybe others."""
    for key, value in wanted.items():
        found = config.get(key)
        if isinstance(value, Mapping) and isinstance(found, Mapping):
            if not _has_values(found, value):
                return False
        elif found != value:
            return False
    return True


def load_model_config(
    name: str, revision: str | None, environ: Mapping[str, str]
) -> ModelConfigJson:
    """Return the config.json of a local model, or of one in the hub's cache or on the hub.

    Raises: EnvironmentFault when it is in none of these places.
    """
    if Path(name).is_dir():
        return read_config_json(Path(name) / "config.json", name)
    path = find_file(name, "config.json", revision, environ) or download_config(name, revision)
    return read_config_json(path, name)


def known_model(name: str) -> ModelFacts | None:
    """Return a well-known model by its name in any case, None for any other and for a folder.

    `unsloth/NAME` is NAME of its publisher, and `-bnb-4bit` behind it means stored in 4 bits.
    """
    if Path(name).is_dir():
        return None
    models = {known.lower(): model for known, model in known_models().items()}
    if found := models.get(name.lower()):
        return found
    copied = UNSLOTH_COPY.fullmatch(name.lower())
    if copied is None:
        return None
    names = (known for known in models if known.rpartition("/")[2] == copied["model"])
    found = models.get(next(names, ""))
    if found is None or not copied["in_4_bits"]:
        return found
    return found._replace(config={**found.config, "quantization_config": IN_4_BITS})


@cache
def known_models() -> dict[str, ModelFacts]:
    """Return all well-known models by name.

    The file has each shape once; models of the same shape are its list `also`. `source` is where
    the sizes were read, and `published` the billions of weights that its maker names.
    """
    models: dict[str, ModelFacts] = {}
    for name, config in json.loads(KNOWN.read_text(encoding="utf-8")).items():
        others = config.pop("also", [])
        for key in ("source", "published"):
            config.pop(key, None)
        counted = config.pop("structure", None)
        structure = None if counted is None else structure_from_json(counted)
        models.update(dict.fromkeys([name, *others], ModelFacts(name, config, structure)))
    return models


def _similar_names(name: str) -> str:
    """Return a hint with well-known names similar to this one, ignoring owners; "" for none."""
    names = {known.rpartition("/")[2].lower(): known for known in known_models()}
    near = difflib.get_close_matches(name.rpartition("/")[2].lower(), names, n=2)
    return f"; known without the hub: {', '.join(names[found] for found in near)}" if near else ""


def _hub_home(environ: Mapping[str, str]) -> Path:
    """Return the folder of the hub's libraries; importing them would take half a second."""
    cache_home = Path(environ.get("XDG_CACHE_HOME") or "~/.cache")
    return Path(environ.get("HF_HOME") or cache_home / "huggingface").expanduser()


def fetched_commits(name: str, environ: Mapping[str, str]) -> list[str]:
    """Return the commits of a data set, and of others of its owner, that were fetched."""
    folder = Path(environ.get("HF_DATASETS_CACHE") or _hub_home(environ) / "datasets")
    owner = name.partition("/")[0]  # the rest of a name may be spelled otherwise there
    found = folder.expanduser().glob(f"{owner}___*/*/*/*")
    return sorted(str(path) for path in found if path.is_dir())


def find_folder(name: str, revision: str | None, environ: Mapping[str, str]) -> Path | None:
    """Return a local folder, or a snapshot in the hub's cache, None without it."""
    if Path(name).is_dir():
        return Path(name)
    hub = Path(environ.get("HF_HUB_CACHE") or _hub_home(environ) / "hub").expanduser()
    repo = hub / f"models--{name.replace('/', '--')}"
    reference = repo / "refs" / (revision or "main")
    commit = reference.read_text().strip() if reference.is_file() else revision
    return repo / "snapshots" / commit if commit else None


def find_file(
    name: str, file: str, revision: str | None, environ: Mapping[str, str]
) -> Path | None:
    """Return a file of a local model or of one in the hub's cache, None without it."""
    folder = find_folder(name, revision, environ)
    return folder / file if folder and (folder / file).is_file() else None


def go_offline_without_network() -> None:
    """Make the hub's libraries use only their cache if the hub's name cannot be resolved.

    They would otherwise retry for half a minute.
    """
    from urllib.request import getproxies  # takes 30 ms, and few commands contact the hub

    from huggingface_hub import constants

    if getproxies():
        return
    try:
        socket.getaddrinfo(urlsplit(constants.ENDPOINT).hostname, None)
    except OSError:
        constants.HF_HUB_OFFLINE = True


def download_config(name: str, revision: str | None) -> Path:
    """Return a config.json of the hub. Raises: EnvironmentFault when it cannot be fetched."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
    )

    go_offline_without_network()
    try:
        return Path(hf_hub_download(name, "config.json", revision=revision))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        is_path = isinstance(error, HFValidationError) or (
            "/" in name and Path(name).parent.is_dir()
        )
        near = nearest_path(name)
        if near and Path(near, "config.json").is_file():
            raise EnvironmentFault(
                f"model.name={name}: no folder of that name here; did you mean {near}?"
            ) from None
        if is_path and not isinstance(error, GatedRepoError):
            raise EnvironmentFault(
                f"model.name={name}: no folder with a config.json, and no name of the hub, which "
                f"is owner/name; set MODEL_NAME to one of them{_similar_names(name)}"
            ) from None
        raise EnvironmentFault(
            f"model.name={name}: no folder of that name here, and the hub gave none "
            f"({first_line(error)}); check the name, run `hf auth login` for a gated model, or "
            f"download it elsewhere and set MODEL_NAME to the folder{_similar_names(name)}"
        ) from None


# config.json's names of the longest sequence: of most models, of GPT-2 and similar ones, of MPT
POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len")
# Values of a rope that do not depend on its type
KEPT = ("rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved")
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}  # as in Llama 3.1
HAVE_ORIGINAL = ("yarn", "llama3")


@dataclass(frozen=True)
class StretchedRope:
    """The changes that a stretched rope makes to a model's config."""

    parameters: dict[str, Any]  # rope_parameters of transformers
    original: int  # maximum tokens of the base model
    positions: int  # maximum tokens of the stretched model
    max_position_embeddings: int  # of config.json; dynamic stretches beyond it


def stretch(
    rope: Mapping[str, Any], max_position_embeddings: int, wanted: RopeScalingSection
) -> StretchedRope:
    """Return a base's rope stretched as `wanted` says.

    `rope` is the base's rope_parameters. A rope that is already stretched so is unchanged: the
    saved model of a run is read with the run's settings.

    Raises: ConfigError for a model with separate ropes for its kinds of layers.
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
    if is_done and wanted.rope_type == "linear":  # config.json then lacks the original length
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


def load_positions(model: ModelSection, environ: Mapping[str, str], may_fetch: bool) -> int | None:
    """Return the tokens of the longest sequence that a model supports, None if unknown.

    Stretching by model.rope_scaling is included.

    Models of the same shape differ in it. It is therefore unknown for a well-known model until its
    config.json is in the hub's cache, unless `may_fetch`.

    Raises: EnvironmentFault if it cannot be fetched.
    """
    path = find_file(model.name, "config.json", model.revision, environ)
    if path is None and may_fetch:
        path = download_config(model.name, model.revision)
    if path is None:
        return None
    config = read_config_json(path, model.name)
    longest = _longest(text_part(config))
    if model.rope_scaling.rope_type is None or longest is None:
        return positions_of(config)
    return stretch(_read_rope(text_part(config)), longest, model.rope_scaling).positions


def positions_of(config: ModelConfigJson) -> int | None:
    """Return the tokens of the longest sequence that a model supports, None if not given.

    A rope that is stretched by a factor supports the original length times this factor.
    """
    text = text_part(config)
    positions = _longest(text)
    rope = _read_rope(text)
    factor = rope.get("factor")
    original = rope.get("original_max_position_embeddings")
    if rope.get("rope_type") == "dynamic":  # config.json has the length at which stretching starts
        original = positions
    if positions is None or not original or not factor:
        return positions
    return max(positions, int(original * factor))


def _longest(text: ModelConfigJson) -> int | None:
    """Return the positions that a config.json names, None if it names none."""
    found = (text.get(key) for key in POSITIONS)
    return next((value for value in found if type(value) is int and value > 0), None)


def _read_rope(text: ModelConfigJson) -> ModelConfigJson:
    """Return the rope of a config.json, also of earlier versions of transformers."""
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    return {"rope_type": rope.get("type", "default"), **rope}
