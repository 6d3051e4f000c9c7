"""Save what other programs need to run a model: its stop tokens and the keys of older formats.

When transformers saves a trained model, it keeps the base's stop tokens. Some chat templates end
turns with a token other than the base's eos. Such a model would continue after the trained stop.

transformers 5 moved the rope's base, the dtype and special tokens to new keys, and templates to a
separate file. A server on transformers 4 uses its defaults for keys that it does not find. For
example, a Llama 3 with `rope_theta` 10000 gives worse answers without any warning. Programs without
transformers (TGI's router, llama.cpp, MLX) read the template in tokenizer_config.json. Their Jinja
does not support transformers' `generation` tag.
"""

import copy
import json
import logging
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from transformers import AutoConfig, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import GENERATION_CONFIG_NAME

from sft_play.data.render import IGNORE_INDEX, stop_ids
from sft_play.data.rows import Json
from sft_play.data.store import Split
from sft_play.data.template_sources import TEMPLATE_FILE
from sft_play.runs.exports import SavedStops
from sft_play.runs.files import read_json, write_json, write_text

logger = logging.getLogger(__name__)

GENERATION_TAG = re.compile(r"\{%(?P<left>[-+]?)\s*(?P<end>end)?generation\s*(?P<right>[-+]?)%\}")
OF_LOADING = ("is_local", "local_files_only")  # transformers 5 saves how it loaded the model
COUNTED_ROWS = 1000  # a template ends the answers of every row in the same way
# Padding tokens that vocabularies have, for tokenizers that do not name one
PAD_TOKENS = """
<|finetune_right_pad_id|> <pad> [PAD] <|pad|> <|padding|> <PAD> <|endoftext|> <unk>
""".split()

# Settings of one call, not of a model, with transformers' value for each one that a file lacks.
# Each lets generate() return more than ids, require another argument, or end an answer by itself.
OF_A_CALL = {
    "return_dict_in_generate": False,
    "output_attentions": False,
    "output_hidden_states": False,
    "output_scores": False,
    "output_logits": False,
    "num_return_sequences": 1,
    "prompt_lookup_num_tokens": None,
    "stop_strings": None,
    "max_time": None,
    "forced_eos_token_id": None,
    "dola_layers": None,
}
# Values that only sampling reads
OF_SAMPLING = """
temperature top_p top_k min_p top_h typical_p epsilon_cutoff eta_cutoff
""".split()


def trained_stops(
    rows: Split, tokenizer: PreTrainedTokenizerBase, own: Iterable[int] = ()
) -> list[int]:
    """Return the ids that end an answer, sorted so that the most frequent trained stop is first.

    The others are stop tokens that evaluations also use. They are the tokenizer's, and those of
    `own`, the base's generation stops, that do not occur inside a trained answer.
    """
    known = stop_ids(tokenizer)
    counts: Counter[int] = Counter()
    inside: set[int] = set()
    own = set(own) - known
    for index in range(min(len(rows), COUNTED_ROWS)):
        labels = rows[index].labels
        trained = labels[labels != IGNORE_INDEX].tolist()
        counts.update([token for token in trained if token in known][-1:])
        inside |= own.intersection(trained)
    return sorted(known | (own - inside), key=lambda stop: (-counts[stop], stop))


def stops_of(model: PreTrainedModel) -> tuple[int, ...]:
    """Return the ids at which a model's generation ends, () if it names none."""
    return _as_tuple(getattr(getattr(model, "generation_config", None), "eos_token_id", None))


def _as_tuple(eos: int | list[int] | None) -> tuple[int, ...]:
    if eos is None:
        return ()
    return tuple(eos) if isinstance(eos, list) else (eos,)


def write_stops(
    folder: Path, stops: list[int], tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel
) -> None:
    """Write tokenizer and generation_config.json with `stops`, the trained one first.

    If the folder contains a full model, its config.json lists the stops too.
    """
    own_tokenizer = with_eos(tokenizer, stops[0])
    own_tokenizer.save_pretrained(folder)
    generation = savable_generation_config(model)
    generation._from_model_config = False  # otherwise transformers may use the model config's stops
    generation.eos_token_id = stops if len(stops) > 1 else stops[0]
    generation.pad_token_id = own_tokenizer.pad_token_id
    generation.save_pretrained(folder)
    config_path = folder / "config.json"
    if config_path.is_file():
        config = read_json(config_path)
        if "eos_token_id" in config:
            write_json(config_path, {**config, "eos_token_id": generation.eos_token_id})


def read_stops(folder: Path) -> tuple[int, ...]:
    """Return the stops of a saved folder; () if another program saved it without stops."""
    path = folder / GENERATION_CONFIG_NAME
    if not path.is_file():
        return ()
    return _as_tuple(read_json(path).get("eos_token_id"))


def saved_stops(stops: list[int], tokenizer: PreTrainedTokenizerBase) -> SavedStops:
    """Return stops with their tokens, for the model card."""
    return SavedStops(tuple(tokenizer.convert_ids_to_tokens(stops)), tuple(stops))


def with_eos(tokenizer: PreTrainedTokenizerBase, stop: int) -> PreTrainedTokenizerBase:
    """Return a copy of the tokenizer with eos `stop`, whose template produces the same text."""
    changed = copy.deepcopy(tokenizer)
    if stop != tokenizer.eos_token_id:
        changed.chat_template = _with_fixed_eos(tokenizer.chat_template, tokenizer.eos_token)
        changed.eos_token = tokenizer.convert_ids_to_tokens(stop)
    if changed.pad_token_id in (None, stop):
        changed.pad_token = _pad_token(changed)
    return changed


def savable_generation_config(model: PreTrainedModel) -> GenerationConfig:
    """Return a copy of the model's generation config that transformers can save.

    Some bases set a temperature and leave do_sample out or false. transformers loads that config
    but refuses to save it, which would lose the run's weights. Settings of one call are removed.
    """
    generation = copy.deepcopy(getattr(model, "generation_config", None)) or GenerationConfig()
    _leave_out(generation, OF_A_CALL, "answers are generated here until a stop token or the limit")
    fault = _fault(generation)
    if fault is None:
        return generation
    if generation.do_sample is None:
        generation.do_sample = True  # sampling values need it
    else:
        _leave_out(generation, dict.fromkeys(OF_SAMPLING), "do_sample is false")
    if _fault(generation) is None:
        return generation
    logger.warning("the base's generation_config.json is left out but for its stops: %s", fault)
    return GenerationConfig(
        bos_token_id=generation.bos_token_id,
        eos_token_id=generation.eos_token_id,
        pad_token_id=generation.pad_token_id,
    )


def _leave_out(generation: GenerationConfig, usual: Mapping[str, Any], reason: str) -> None:
    """Reset values that are not `usual`, as if the file did not have them, and log a warning."""
    found = {
        name: getattr(generation, name)
        for name, default in usual.items()
        if getattr(generation, name, None) not in (None, default)
    }
    for name in found:
        setattr(generation, name, None)
    if found:
        words = ", ".join(f"{name}={value!r}" for name, value in found.items())
        logger.warning("the base's generation_config.json: %s left out, because %s", words, reason)


def _fault(generation: GenerationConfig) -> str | None:
    """Return why transformers would not save the config, None if it would."""
    try:
        generation.validate(strict=True)
    except ValueError as error:
        return str(error)
    return None


def _with_fixed_eos(template: str | dict[str, str], eos: str) -> str | dict[str, str]:
    """Return a template, or several by name, in which eos_token has its value from training.

    `+%}` preserves the template's first character if that is a line break.
    """
    if isinstance(template, dict):
        return {name: _with_fixed_eos(text, eos) for name, text in template.items()}
    if "eos_token" not in template:
        return template
    return f"{{% set eos_token = {json.dumps(eos, ensure_ascii=False)} +%}}{template}"


def _pad_token(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a token that no answer ends with, or eos if the vocabulary has no other.

    Trainers mask padding. If the stop token was also the padding token, training from this folder
    would not learn it.
    """
    ids = tokenizer.convert_tokens_to_ids(PAD_TOKENS)
    for token, token_id in zip(PAD_TOKENS, ids, strict=True):
        is_known = token_id is not None and tokenizer.convert_ids_to_tokens(token_id) == token
        if is_known and token_id != tokenizer.eos_token_id:
            return token
    return tokenizer.eos_token


def write_for_older_readers(folder: Path, trust_remote_code: bool = False) -> None:
    """Complete config.json, tokenizer_config.json and the chat template of a saved model.

    config.json gets the keys of transformers 4, unless they change what transformers 5 reads.
    """
    path = folder / "config.json"
    config = read_json(path)
    completed = {**config, **_older_keys(config)}
    if "text_config" in config:
        text_config = config["text_config"]
        completed["text_config"] = {**text_config, **_older_keys(text_config)}
    before = _as_read(folder, trust_remote_code)
    write_json(path, completed)
    if _as_read(folder, trust_remote_code) != before:
        write_json(path, config)
    complete_tokenizer(folder)


def plain_template(template: str) -> str:
    """Return a template that produces the same text without the `generation` tag.

    `if true` trims the surrounding whitespace in the same way as that tag.
    """

    def as_if(found: re.Match[str]) -> str:
        word = "endif" if found["end"] else "if true"
        return f"{{%{found['left']} {word} {found['right']}%}}"

    return GENERATION_TAG.sub(as_if, template)


def _older_keys(config: Json) -> Json:
    found: Json = {}
    if "dtype" in config:
        found["torch_dtype"] = config["dtype"]
    rope = config.get("rope_parameters") or {}
    if "rope_theta" in rope:
        found["rope_theta"] = rope["rope_theta"]
        scaling = {name: value for name, value in rope.items() if name != "rope_theta"}
        is_plain = rope.get("rope_type", "default") == "default"
        found["rope_scaling"] = None if is_plain else scaling
    elif "full_attention" in rope and "sliding_attention" in rope:  # e.g. Gemma 3
        found["rope_theta"] = rope["full_attention"].get("rope_theta")
        found["rope_local_base_freq"] = rope["sliding_attention"].get("rope_theta")
    return found


def _as_read(folder: Path, trust_remote_code: bool) -> Json:
    read = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code).to_dict()
    return {name: value for name, value in read.items() if not name.startswith("_")}


def complete_tokenizer(folder: Path) -> None:
    """Complete tokenizer_config.json, and write the chat template where every program reads it."""
    path = folder / "tokenizer_config.json"
    config = read_json(path)
    if config.get("tokenizer_class") == "TokenizersBackend":  # both versions know its older name
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
    for name in OF_LOADING:
        config.pop(name, None)
    extra = config.get("extra_special_tokens")
    if isinstance(extra, list):  # transformers 4 expects a dict of names there
        config["additional_special_tokens"] = config.pop("extra_special_tokens")
    template_file = folder / TEMPLATE_FILE
    if template_file.is_file():
        template = plain_template(template_file.read_text(encoding="utf-8"))
        write_text(template_file, template)
        config["chat_template"] = template
    write_json(path, config)
