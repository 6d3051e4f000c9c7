"""The shape of a model, from which bytes and FLOPs follow.

Reads config.json; loads no torch and no weights.
"""

import difflib
import json
import socket
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import NamedTuple, Self
from urllib.parse import urlsplit

from sft_play.config.layers import nearest_path
from sft_play.errors import EnvironmentFault, first_line
from sft_play.plan.config_json import ModelConfigJson, read_config_json, read_typed
from sft_play.plan.structure import LayerKind, MatrixKind, Structure, structure_from_json

KNOWN = Path(__file__).parent / "known_models.json"
REQUIRED = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
OPTIONAL = (
    "intermediate_size",
    "num_key_value_heads",
    "head_dim",
)
READ = (*REQUIRED, *OPTIONAL, "tie_word_embeddings", "model_type")
# what config.json has beside a language model's sizes where the model also reads something else
TOWERS = ("vision_config", "audio_config", "speech_config")
# Architectures like Llama, for which the sizes in config.json are the structure
LLAMA_LIKE = frozenset(
    ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "gemma3_text", "phi3")
)
HEAD_NORMS = ("qwen3", "gemma3", "gemma3_text")  # norms over queries and keys, which keep inputs
FOUR_NORMS = ("gemma2", "gemma3", "gemma3_text")  # two more norms, after attention and MLP
LAYER_NORMS = ("input_layernorm", "post_attention_layernorm")
# their config.json on the hub leaves tie_word_embeddings to the class
TIED_BY_DEFAULT = ("gemma", "gemma2", "gemma3", "gemma3_text")


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder. Without a `structure` its layers are those of Llama."""

    vocab: int
    hidden: int  # features
    intermediate: int  # features of the MLP
    layers: int
    heads: int
    kv_heads: int
    head_dim: int  # features of a head
    is_tied: bool  # the output head shares the embedding's weights
    model_type: str = ""  # as config.json names the architecture, of a composite one its text part
    composite: str | None = None  # the class of a model that has towers next to its text part
    structure: Structure | None = None  # counted on the model's modules
    guess: str | None = None  # why nobody counted, where the layers may not be those of Llama
    in_mxfp4: bool = False  # its experts are published so, and stay so over a 4-bit base

    @cached_property
    def counts(self) -> Structure:
        """What was counted, else the structure of a Llama of these sizes."""
        if self.structure is not None:
            return self.structure
        query = self.heads * self.head_dim
        keys = self.kv_heads * self.head_dim
        sizes = {
            "self_attn.q_proj": (self.hidden, query),
            "self_attn.k_proj": (self.hidden, keys),
            "self_attn.v_proj": (self.hidden, keys),
            "self_attn.o_proj": (query, self.hidden),
            "mlp.gate_proj": (self.hidden, self.intermediate),
            "mlp.up_proj": (self.hidden, self.intermediate),
            "mlp.down_proj": (self.intermediate, self.hidden),
        }
        matrices = []
        for name, (inputs, outputs) in sizes.items():
            matrices.append(MatrixKind(f"model.layers.*.{name}", inputs, outputs, self.layers))
        vocabularies = 1 if self.is_tied else 2
        parameters = sum(kind.weights for kind in matrices)
        parameters += (vocabularies * self.vocab + 2 * self.layers + 1) * self.hidden  # and norms
        layers = (LayerKind(self.layers, query_features=query, kv_features=keys),)
        return Structure(parameters, parameters, tuple(matrices), layers)

    @property
    def matrices(self) -> tuple[MatrixKind, ...]:
        """The matrices of the layers: what adapters, 4-bit weights and operations follow from."""
        return self.counts.matrices

    @property
    def block_weights(self) -> int:
        """Number of weights in the matrices of all layers."""
        return self.counts.product_weights

    @property
    def float8_matrices(self) -> tuple[MatrixKind, ...]:
        """The matrices that a float8 base has in 8 bits."""
        return tuple(kind for kind in self.matrices if kind.fits_float8)

    @property
    def parameters(self) -> int:
        """All weights; tied ones once."""
        return self.counts.parameters

    @property
    def active_parameters(self) -> int:
        """All weights but those of experts that a token does not meet."""
        return self.counts.active_parameters

    def with_vocab(self, rows: int) -> Self:
        """Return the shape with another number of rows in embedding and output head."""
        shape = replace(self, vocab=rows)
        if self.structure is None:
            return shape
        more = (rows - self.vocab) * self.hidden * (1 if self.is_tied else 2)
        return replace(shape, structure=self.structure.with_more(more))

    def without_towers(self) -> Self:
        """Return the shape of the language model alone."""
        if self.structure is None:
            return self
        return replace(self, structure=self.structure.without_towers())


def shape_of(config: ModelConfigJson, name: str) -> ModelShape:
    """Return the shape that a transformers config.json describes.

    Raises: EnvironmentFault with the keys that it lacks.
    """
    text = text_part(config)
    if any(text.get(key) is None for key in REQUIRED):
        text = _completed_by_class(config)
    read = read_typed(text, name)
    sizes = {key: _widest(getattr(read, key)) for key in (*REQUIRED, *OPTIONAL)}
    missing = [key for key in REQUIRED if not sizes[key]]
    if missing:
        raise EnvironmentFault(
            f"model.name={name}: its config.json names no {', '.join(missing)}; "
            "is it a language model? Set MODEL_NAME to one that is"
        )
    heads = sizes["num_attention_heads"]
    head_dim = sizes["head_dim"] or sizes["hidden_size"] // heads
    if head_dim == 0:
        raise EnvironmentFault(
            f"model.name={name}: its config.json says num_attention_heads={heads}, and "
            f"hidden_size={sizes['hidden_size']} is less; get the model again"
        )
    tied_by_default = text.get("model_type") in TIED_BY_DEFAULT
    is_tied = text.get("tie_word_embeddings", config.get("tie_word_embeddings", tied_by_default))
    packing = config.get("quantization_config")
    return ModelShape(
        vocab=sizes["vocab_size"],
        hidden=sizes["hidden_size"],
        intermediate=sizes["intermediate_size"] or 4 * sizes["hidden_size"],
        layers=sizes["num_hidden_layers"],
        heads=heads,
        kv_heads=sizes["num_key_value_heads"] or heads,
        head_dim=head_dim,
        model_type=text.get("model_type") or config.get("model_type") or "",
        composite=(config.get("architectures") or [""])[0] if is_composite(config) else None,
        is_tied=bool(is_tied),
        in_mxfp4=isinstance(packing, Mapping) and packing.get("quant_method") == "mxfp4",
    )


def is_composite(config: ModelConfigJson) -> bool:
    """Return whether a config.json describes a language model with towers."""
    return any(isinstance(config.get(key), Mapping) for key in TOWERS)


def _widest(sizes: int | list[int] | None) -> int | None:
    """Return a size of all layers; the largest where each has another, as in Gemma 3n."""
    return max(sizes, default=None) if isinstance(sizes, list) else sizes


def _completed_by_class(config: ModelConfigJson) -> ModelConfigJson:
    """Return the sizes by the model's class, {} if transformers has no such class.

    The class knows what config.json leaves out (Gemma 3) or names differently (GPT-2).
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig  # seconds, so only for such files

    try:
        text = AutoConfig.for_model(**config).get_text_config()
    except (
        TypeError,
        ValueError,
        LookupError,
        AttributeError,
        ArithmeticError,
        StrictDataclassError,
    ):  # no model_type, an unknown one, or values that its class refuses
        return {}
    return {key: getattr(text, key, None) for key in READ}


def load_shape(name: str, revision: str | None, environ: Mapping[str, str]) -> ModelShape:
    """Return the shape of a local model, a well-known one, or one in the hub's cache or on the hub.

    Its structure is there for the sizes of well-known models: see `counting.load_counted_shape`.

    Raises: EnvironmentFault when it is in none of these places.
    """
    config, known = load_config_and_shape(name, revision, environ)
    return replace(shape_of(config, name), structure=known.structure if known else None)


def load_config_and_shape(
    name: str, revision: str | None, environ: Mapping[str, str]
) -> tuple[ModelConfigJson, "KnownModel | None"]:
    """Return the config.json of a model, and the well-known model of the same sizes.

    Raises: EnvironmentFault when there is no config.json.
    """
    known = known_model(name)
    if known is not None:  # before the cache: the plan of a shipped config is the same everywhere
        return known.config, known
    config = load_model_config(name, revision, environ)
    same = (each for each in known_models().values() if _has_values(config, each.config))
    return config, next(same, None)


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
    path = find_file(name, "config.json", revision, environ) or download(name, revision)
    return read_config_json(path, name)


def text_part(config: ModelConfigJson) -> ModelConfigJson:
    """Return the part of a config.json that describes the language model."""
    return config.get("text_config") or config


class KnownModel(NamedTuple):
    """The sizes of a well-known model, and what was counted where these do not say it all."""

    name: str  # of several models of one shape, the first in the file
    config: ModelConfigJson
    structure: Structure | None


def known_model(name: str) -> KnownModel | None:
    """Return a well-known model by its name in any case, None for any other and for a folder."""
    if Path(name).is_dir():
        return None
    for known, model in known_models().items():
        if known.lower() == name.lower():
            return model
    return None


@cache
def known_models() -> dict[str, KnownModel]:
    """Return all well-known models by name.

    The file has each shape once; models of the same shape are its list `also`.
    """
    models: dict[str, KnownModel] = {}
    for name, config in json.loads(KNOWN.read_text(encoding="utf-8")).items():
        others = config.pop("also", [])
        counted = config.pop("structure", None)
        structure = None if counted is None else structure_from_json(counted)
        models.update(dict.fromkeys([name, *others], KnownModel(name, config, structure)))
    return models


def _similar_names(name: str) -> str:
    """Return a hint with the well-known names like this one, owners aside; empty for none."""
    names = {known.rpartition("/")[2].lower(): known for known in known_models()}
    near = difflib.get_close_matches(name.rpartition("/")[2].lower(), names, n=2)
    return f"; known without the hub: {', '.join(names[found] for found in near)}" if near else ""


def find_file(
    name: str, file: str, revision: str | None, environ: Mapping[str, str]
) -> Path | None:
    """Return a file of a local model or of one in the cache of huggingface_hub, None without it.

    The import of huggingface_hub would take half a second.
    """
    path = Path(name) / file
    if not Path(name).is_dir():
        cache_home = Path(environ.get("XDG_CACHE_HOME") or "~/.cache")
        home = Path(environ.get("HF_HOME") or cache_home / "huggingface")
        hub = Path(environ.get("HF_HUB_CACHE") or home / "hub").expanduser()
        repo = hub / f"models--{name.replace('/', '--')}"
        reference = repo / "refs" / (revision or "main")
        commit = reference.read_text().strip() if reference.is_file() else revision or ""
        if not commit:
            return None
        path = repo / "snapshots" / commit / file
    return path if path.is_file() else None


def go_offline_without_network() -> None:
    """Let the hub's libraries ask their cache alone where the hub's name is not known here.

    They would try for half a minute.
    """
    from urllib.request import getproxies  # 30 ms, and few commands ask the hub

    from huggingface_hub import constants

    if getproxies():
        return
    try:
        socket.getaddrinfo(urlsplit(constants.ENDPOINT).hostname, None)
    except OSError:
        constants.HF_HUB_OFFLINE = True


def download(name: str, revision: str | None) -> Path:
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
