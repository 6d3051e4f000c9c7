"""The shape of a model: what bytes and FLOPs follow from. Reads config.json; loads no torch and no weight."""

import difflib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from sft_play.errors import EnvironmentFault

KNOWN = Path(__file__).parent / "known_models.json"
REQUIRED = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
OPTIONAL = ("intermediate_size", "num_key_value_heads", "head_dim", "tie_word_embeddings")
LINEARS = (
    "q_proj",
    "k_proj",
    "v_proj",
    "o_proj",
    "gate_proj",
    "up_proj",
    "down_proj",
)  # of a block, as transformers names them
TIED_BY_DEFAULT = (
    "gemma",
    "gemma2",
    "gemma3",
    "gemma3_text",
)  # their config.json on the hub does not say it; the class does


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder: `hidden` features, `intermediate` features of the MLP, heads of `head_dim` features."""

    vocab: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    is_tied: bool  # the output head shares the embedding's weights
    model_type: str = ""  # as config.json names the architecture

    @property
    def linears(self) -> tuple[tuple[int, int], ...]:
        """(inputs, outputs) of the linear layers of one block: q, k, v, o, gate, up, down."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        h, i = self.hidden, self.intermediate
        return (h, q), (h, kv), (h, kv), (q, h), (h, i), (h, i), (i, h)

    @property
    def block_weights(self) -> int:
        """Weights of all blocks' linear layers: what a 4-bit base quantises."""
        return self.layers * sum(inputs * outputs for inputs, outputs in self.linears)

    @property
    def other_weights(self) -> int:
        """Embedding, head and norms."""
        return (
            self.vocab * self.hidden * (1 if self.is_tied else 2)
            + (2 * self.layers + 1) * self.hidden
        )

    @property
    def parameters(self) -> int:
        return self.block_weights + self.other_weights

    def lora_parameters(self, rank: int, targets: str | Sequence[str]) -> int:
        """Return r * (inputs + outputs) summed over the target layers; names that are not of a block count nothing."""
        chosen = adapted_linears(targets)
        return (
            self.layers
            * rank
            * sum(
                sum(sizes)
                for name, sizes in zip(LINEARS, self.linears, strict=True)
                if name in chosen
            )
        )


def adapted_linears(targets: str | Sequence[str]) -> tuple[str, ...]:
    """Return which of a block's LINEARS get an adapter."""
    return (
        LINEARS
        if targets == "all-linear"
        else tuple(
            name for name in LINEARS if any(target.rpartition(".")[2] == name for target in targets)
        )
    )


def shape_of(config: Mapping[str, Any], name: str) -> ModelShape:
    """Return the shape that a transformers config.json describes. Raises EnvironmentFault naming the key that it lacks."""
    text = config.get("text_config") or config  # multimodal models nest their language model
    if any(text.get(key) is None for key in REQUIRED):
        text = _completed(config)
    missing = [key for key in REQUIRED if text.get(key) is None]
    if missing:
        raise EnvironmentFault(
            f"model.name={name}: its config.json names no {', '.join(missing)}; is it a language model? Set MODEL_NAME to one that is"
        )
    heads = text["num_attention_heads"]
    tied_by_default = text.get("model_type") in TIED_BY_DEFAULT
    return ModelShape(
        vocab=text["vocab_size"],
        hidden=text["hidden_size"],
        intermediate=text.get("intermediate_size") or 4 * text["hidden_size"],
        layers=text["num_hidden_layers"],
        heads=heads,
        kv_heads=text.get("num_key_value_heads") or heads,
        head_dim=text.get("head_dim") or text["hidden_size"] // heads,
        model_type=config.get("model_type") or "",
        is_tied=bool(
            text.get("tie_word_embeddings", config.get("tie_word_embeddings", tied_by_default))
        ),
    )


def _completed(config: Mapping[str, Any]) -> dict[str, Any]:
    """What the model's class knows and its config.json leaves out (Gemma 3) or names otherwise (GPT-2); {} where there is no such class."""
    from transformers import AutoConfig  # seconds, so only for such files

    try:
        text = AutoConfig.for_model(**config).get_text_config()
    except (
        TypeError,
        ValueError,
        KeyError,
    ):  # no model_type, or one that transformers does not have
        return {}
    return {key: getattr(text, key, None) for key in (*REQUIRED, *OPTIONAL)}


def load_shape(name: str, revision: str | None, environ: Mapping[str, str]) -> ModelShape:
    """Return the shape of a local model, one that is known by name, one in the hub's cache, or one on the hub.

    Raises: EnvironmentFault when it can be had nowhere.
    """
    local = Path(name)
    if local.is_dir():
        return shape_of(_read(local / "config.json", name), name)
    config = known_config(name)
    if config is not None:  # before the cache: the plan of a shipped config is the same everywhere
        return shape_of(config, name)
    cached = _cached(name, revision, environ)
    if cached is not None:
        return shape_of(_read(cached, name), name)
    return shape_of(_read(_download(name, revision), name), name)


def known_config(name: str) -> dict[str, Any] | None:
    """Return the sizes of a well-known model as its config.json has them, whatever the case of its name; None for any other.

    The file names a shape once: models under `also` share it.
    """
    return next(
        (config for known, config in known_models().items() if known.lower() == name.lower()), None
    )


@cache
def known_models() -> dict[str, dict[str, Any]]:
    """Return the configs of all well-known models by name."""
    shapes = json.loads(KNOWN.read_text(encoding="utf-8"))
    return {
        name: config
        for first, config in shapes.items()
        for name in (first, *config.pop("also", ()))
    }


def _nearest(name: str) -> str:
    """Return the well-known names like this one, by what follows the owner; empty where there are none."""
    names = {known.rpartition("/")[2].lower(): known for known in known_models()}
    near = difflib.get_close_matches(name.rpartition("/")[2].lower(), names, n=2)
    return f"; known without the hub: {', '.join(names[found] for found in near)}" if near else ""


def _read(path: Path, name: str) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise EnvironmentFault(
            f"model.name={name}: the folder has no config.json, so it is no transformers model; see what is in it with ls {name}"
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


def _cached(name: str, revision: str | None, environ: Mapping[str, str]) -> Path | None:
    """The config.json in huggingface_hub's cache, found without importing it (half a second)."""
    home = Path(
        environ.get("HF_HOME") or Path(environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    ).expanduser()
    repo = (
        Path(environ.get("HF_HUB_CACHE") or home / "hub").expanduser()
        / f"models--{name.replace('/', '--')}"
    )
    reference = repo / "refs" / (revision or "main")
    commit = reference.read_text().strip() if reference.is_file() else revision or ""
    path = repo / "snapshots" / commit / "config.json"
    return path if commit and path.is_file() else None


def _download(name: str, revision: str | None) -> Path:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(hf_hub_download(name, "config.json", revision=revision))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise EnvironmentFault(
            f"model.name={name}: no folder of that name here, and the hub gave none ({reason}); check the name, run `hf auth login` for a gated model, "
            f"or download it elsewhere and set MODEL_NAME to the folder{_nearest(name)}"
        ) from None
