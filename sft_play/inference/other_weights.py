"""Weights that no run here has made: what is checked of them, and what is said of them."""

import warnings
from collections.abc import Sequence

from safetensors import SafetensorError
from transformers import AutoConfig, PreTrainedModel, PreTrainedTokenizerBase

from sft_play.data.store import Split
from sft_play.data.templates import DEFAULT_TEMPLATE
from sft_play.errors import CheckpointError, first_line, is_out_of_memory
from sft_play.models import expert_adapters
from sft_play.models.export import read_stops, trained_stops
from sft_play.runs.model_folder import ModelFolder

MISSING = "missing adapter keys"  # of PEFT's warning, behind which it goes on with zeros


def load_other_adapter(base: PreTrainedModel, adapter: ModelFolder) -> PreTrainedModel:
    """Return the base with an adapter of PEFT. Raises CheckpointError where it does not fit it."""
    _refuse_other_rope(adapter, base)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model = expert_adapters.load_adapter(base, adapter.path)
    except (OSError, ValueError, RuntimeError, KeyError, TypeError, SafetensorError) as error:
        if is_out_of_memory(error):  # it says nothing of the adapter
            raise
        raise CheckpointError(
            f"{adapter.path}: the adapter cannot be loaded over {adapter.base} "
            f"({first_line(error)}); is that the base it was trained on?"
        ) from error
    if any(MISSING in str(warning.message) for warning in caught):
        raise CheckpointError(
            f"{adapter.path}: its file has no weights for some of the layers that its "
            f"adapter_config.json names in {adapter.base}; is that the base it was trained on?"
        )
    return model


def lines_of(
    folder: ModelFolder,
    tokenizer: PreTrainedTokenizerBase,
    stops: Sequence[int],
    dtype: str,
    rows: Split,
) -> list[str]:
    """Return what was taken from the folder, its base and its tokenizer, where a run knows it."""
    name = str(folder.path)
    if folder.base is not None:
        name += f" over {folder.base}"
    ends = trained_stops(rows, tokenizer)  # as answers of these rows end, the first one mostly
    words = " ".join(tokenizer.convert_ids_to_tokens(list(stops) or ends))
    place = _place_of_stops(folder, stops)
    lines = [
        f"model {name} in {dtype}",
        f"template {_place_of_template(folder, tokenizer)}",
        f"stops {words} ({place})",
    ]
    if folder.was_packed():
        lines.append(
            f"warning: the adapter was trained over 4-bit weights, and its base is in {dtype} "
            "here; RUN= with its run scores it as it was trained"
        )
    if stops and ends[0] not in stops:
        lines.append(
            f"warning: the rows end answers with {tokenizer.convert_ids_to_tokens(ends[0])}, which "
            f"is no stop of this model ({place}): its answers may run on, as in any program"
        )
    return lines


def _place_of_template(folder: ModelFolder, tokenizer: PreTrainedTokenizerBase) -> str:
    source, _ = folder.tokenizer_source
    if tokenizer.chat_template == DEFAULT_TEMPLATE:
        return f"plain, of SFT-Play: the tokenizer of {source} has none"
    return f"of {source}"


def _place_of_stops(folder: ModelFolder, stops: Sequence[int]) -> str:
    if read_stops(folder.path):
        return "generation_config.json"
    if not stops:
        return "the tokenizer's"
    return "config.json" if folder.base is None else "its base's"


def _refuse_other_rope(adapter: ModelFolder, base: PreTrainedModel) -> None:
    """Refuse an adapter whose config.json has another rope than its base: it was trained with that.

    Raises: CheckpointError.
    """
    if not (adapter.path / "config.json").is_file():
        return
    trained = AutoConfig.from_pretrained(adapter.path).get_text_config()
    rope = getattr(trained, "rope_parameters", None)
    if rope != getattr(base.config.get_text_config(), "rope_parameters", None):
        raise CheckpointError(
            f"{adapter.path}: was trained with a stretched rope, as its config.json says, and its "
            "base has another; score the run that made it, or merge it and score that folder"
        )
