"""The shape of a model, from which bytes and FLOPs follow.

Reads config.json; loads no torch and no weights.
"""

import difflib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from sft_play.errors import EnvironmentFault, first_line

KNOWN = Path(__file__).parent / "known_models.json"
REQUIRED = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
# what config.json calls the longest sequence: of most models, of GPT-2 and its like, of MPT
POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len")
OPTIONAL = ("intermediate_size", "num_key_value_heads", "head_dim", "tie_word_embeddings")
# the linear layers of a block, as transformers names them
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
# their config.json on the hub leaves tie_word_embeddings to the class
TIED_BY_DEFAULT = ("gemma", "gemma2", "gemma3", "gemma3_text")

ModelConfigJson = Mapping[str, Any]  # a transformers config.json


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder."""

    vocab: int
    hidden: int  # features
    intermediate: int  # features of the MLP
    layers: int
    heads: int
    kv_heads: int
    head_dim: int  # features of a head
    is_tied: bool  # the output head shares the embedding's weights
    model_type: str = ""  # as config.json names the architecture

    @property
    def linears(self) -> tuple[tuple[int, int], ...]:
        """(inputs, outputs) of the linear layers of one block: q, k, v, o, gate, up, down."""
        h = self.hidden
        i = self.intermediate
        q = self.heads * self.head_dim
        kv = self.kv_heads * self.head_dim
        return (h, q), (h, kv), (h, kv), (q, h), (h, i), (h, i), (i, h)

    @property
    def block_weights(self) -> int:
        """Number of weights in all blocks' linear layers, which a 4-bit base quantises."""
        return self.layers * sum(inputs * outputs for inputs, outputs in self.linears)

    @property
    def other_weights(self) -> int:
        """Number of weights in embedding, output head and norms."""
        matrices = 1 if self.is_tied else 2
        norms = 2 * self.layers + 1
        return (matrices * self.vocab + norms) * self.hidden

    @property
    def parameters(self) -> int:
        return self.block_weights + self.other_weights

    def lora_parameters(self, rank: int, targets: str | Sequence[str]) -> int:
        """Return rank * (inputs + outputs), summed over the target layers of all blocks."""
        chosen = adapted_linears(targets)
        sizes = dict(zip(LINEARS, self.linears, strict=True))
        return self.layers * rank * sum(sum(sizes[name]) for name in chosen)


def adapted_linears(targets: str | Sequence[str]) -> tuple[str, ...]:
    """Return which of a block's LINEARS get an adapter."""
    if targets == "all-linear":
        return LINEARS
    names = {target.rpartition(".")[2] for target in targets}
    return tuple(name for name in LINEARS if name in names)


def shape_of(config: ModelConfigJson, name: str) -> ModelShape:
    """Return the shape that a transformers config.json describes.

    Raises: EnvironmentFault with the keys that it lacks.
    """
    text = config.get("text_config") or config  # multimodal models nest their language model
    if any(text.get(key) is None for key in REQUIRED):
        text = _completed_by_class(config)
    missing = [key for key in REQUIRED if text.get(key) is None]
    if missing:
        raise EnvironmentFault(
            f"model.name={name}: its config.json names no {', '.join(missing)}; "
            "is it a language model? Set MODEL_NAME to one that is"
        )
    heads = text["num_attention_heads"]
    tied_by_default = text.get("model_type") in TIED_BY_DEFAULT
    is_tied = text.get("tie_word_embeddings", config.get("tie_word_embeddings", tied_by_default))
    return ModelShape(
        vocab=text["vocab_size"],
        hidden=text["hidden_size"],
        intermediate=text.get("intermediate_size") or 4 * text["hidden_size"],
        layers=text["num_hidden_layers"],
        heads=heads,
        kv_heads=text.get("num_key_value_heads") or heads,
        head_dim=text.get("head_dim") or text["hidden_size"] // heads,
        model_type=config.get("model_type") or "",
        is_tied=bool(is_tied),
    )


def _completed_by_class(config: ModelConfigJson) -> ModelConfigJson:
    """Return the sizes by the model's class, {} where transformers has no such class.

    The class knows what config.json leaves out (Gemma 3) or names differently (GPT-2).
    """
    from transformers import AutoConfig  # seconds, so only for such files

    try:
        text = AutoConfig.for_model(**config).get_text_config()
    except (TypeError, ValueError, KeyError):  # no model_type, or an unknown one
        return {}
    return {key: getattr(text, key, None) for key in (*REQUIRED, *OPTIONAL)}


def load_shape(name: str, revision: str | None, environ: Mapping[str, str]) -> ModelShape:
    """Return the shape of a local model, a well-known one, or one in the hub's cache or on the hub.

    Raises: EnvironmentFault when it is in none of these places.
    """
    local = Path(name)
    if local.is_dir():
        return shape_of(_read(local / "config.json", name), name)
    config = known_config(name)
    if config is not None:  # before the cache: the plan of a shipped config is the same everywhere
        return shape_of(config, name)
    path = find_file(name, "config.json", revision, environ) or _download(name, revision)
    return shape_of(_read(path, name), name)


def load_positions(
    name: str, revision: str | None, environ: Mapping[str, str], may_fetch: bool
) -> int | None:
    """Return the tokens of the longest sequence that a model can take, None where nobody says.

    Models of the same shape differ in it, so that of a well-known model is unknown too before its
    config.json is in the hub's cache, unless `may_fetch`.

    Raises: EnvironmentFault when it cannot be fetched.
    """
    path = find_file(name, "config.json", revision, environ)
    if path is None and may_fetch:
        path = _download(name, revision)
    return None if path is None else positions_of(_read(path, name))


def positions_of(config: ModelConfigJson) -> int | None:
    """Return the tokens of the longest sequence that a model can take, None where it says nothing.

    A rope that is stretched by a factor takes as much more than the sequences it began with.
    """
    text = config.get("text_config") or config
    positions = next((text[key] for key in POSITIONS if isinstance(text.get(key), int)), None)
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    original = rope.get("original_max_position_embeddings")
    factor = rope.get("factor")
    if positions is None or not original or not factor:
        return positions
    return max(positions, int(original * factor))


def known_config(name: str) -> ModelConfigJson | None:
    """Return the sizes of a well-known model as its config.json has them, None for any other.

    The case of the name does not matter.
    """
    for known, config in known_models().items():
        if known.lower() == name.lower():
            return config
    return None


@cache
def known_models() -> dict[str, ModelConfigJson]:
    """Return the configs of all well-known models by name.

    The file has each shape once; models of the same shape are its list `also`.
    """
    configs: dict[str, ModelConfigJson] = {}
    for name, config in json.loads(KNOWN.read_text(encoding="utf-8")).items():
        others = config.pop("also", [])
        configs.update(dict.fromkeys([name, *others], config))
    return configs


def _similar_names(name: str) -> str:
    """Return a hint with the well-known names like this one, owners aside; empty for none."""
    names = {known.rpartition("/")[2].lower(): known for known in known_models()}
    near = difflib.get_close_matches(name.rpartition("/")[2].lower(), names, n=2)
    return f"; known without the hub: {', '.join(names[found] for found in near)}" if near else ""


def _read(path: Path, name: str) -> ModelConfigJson:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise EnvironmentFault(
            f"model.name={name}: the folder has no config.json, so it is no transformers model; "
            f"see what is in it with ls {name}"
        ) from None
    except ValueError as error:
        raise EnvironmentFault(
            f"{path}: not valid JSON: {error}; download the model again"
        ) from None
    if not isinstance(config, dict):
        raise EnvironmentFault(
            f"{path}: holds {type(config).__name__} rather than an object; download the model again"
        )
    return config


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


def _download(name: str, revision: str | None) -> Path:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(hf_hub_download(name, "config.json", revision=revision))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise EnvironmentFault(
            f"model.name={name}: no folder of that name here, and the hub gave none "
            f"({first_line(error)}); check the name, run `hf auth login` for a gated model, or "
            f"download it elsewhere and set MODEL_NAME to the folder{_similar_names(name)}"
        ) from None
