"""What programs read that are not on transformers 5, written beside what it saves.

transformers 5 moved the rope's base, the dtype and special tokens to new keys, and templates to a
file of their own. A server on transformers 4 takes its defaults for keys that it does not find: a
Llama 3 with `rope_theta` 10000 answers worse, and nothing says why. Programs without transformers
(TGI's router, llama.cpp, MLX) read the template in tokenizer_config.json, in a Jinja without
transformers' `generation` tag.
"""

import re
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from sft_play.runs.files import read_json, write_json, write_text

GENERATION_TAG = re.compile(r"\{%(?P<left>[-+]?)\s*(?P<end>end)?generation\s*(?P<right>[-+]?)%\}")
OF_LOADING = ("is_local", "local_files_only")  # transformers 5 saves how it loaded
TEMPLATE_FILE = "chat_template.jinja"
Json = dict[str, Any]


def write_for_older_readers(folder: Path, trust_remote_code: bool = False) -> None:
    """Complete config.json, tokenizer_config.json and the chat template of a saved model."""
    _complete_config(folder / "config.json", trust_remote_code)
    complete_tokenizer(folder)


def plain_template(template: str) -> str:
    """Return a template that writes the same without the `generation` tag.

    `if true` trims the whitespace around it as that tag does.
    """

    def as_if(found: re.Match[str]) -> str:
        word = "endif" if found["end"] else "if true"
        return f"{{%{found['left']} {word} {found['right']}%}}"

    return GENERATION_TAG.sub(as_if, template)


def _complete_config(path: Path, trust_remote_code: bool) -> None:
    """Add the keys of transformers 4, unless transformers 5 would then read something else."""
    config = read_json(path)
    completed = {**config, **_older_keys(config)}
    if "text_config" in config:
        text_config = config["text_config"]
        completed["text_config"] = {**text_config, **_older_keys(text_config)}
    before = _as_read(path, trust_remote_code)
    write_json(path, completed)
    if _as_read(path, trust_remote_code) != before:
        write_json(path, config)


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
    elif "full_attention" in rope and "sliding_attention" in rope:  # as Gemma 3
        found["rope_theta"] = rope["full_attention"].get("rope_theta")
        found["rope_local_base_freq"] = rope["sliding_attention"].get("rope_theta")
    return found


def _as_read(path: Path, trust_remote_code: bool) -> Json:
    read = AutoConfig.from_pretrained(path.parent, trust_remote_code=trust_remote_code).to_dict()
    return {name: value for name, value in read.items() if not name.startswith("_")}


def complete_tokenizer(folder: Path) -> None:
    """Complete tokenizer_config.json, and write the chat template where every program reads it."""
    path = folder / "tokenizer_config.json"
    config = read_json(path)
    if config.get("tokenizer_class") == "TokenizersBackend":  # its older name is known to both
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
    for name in OF_LOADING:
        config.pop(name, None)
    extra = config.get("extra_special_tokens")
    if isinstance(extra, list):  # transformers 4 takes a dict of names there
        config["additional_special_tokens"] = config.pop("extra_special_tokens")
    template_file = folder / TEMPLATE_FILE
    if template_file.is_file():
        template = plain_template(template_file.read_text(encoding="utf-8"))
        write_text(template_file, template)
        config["chat_template"] = template
    write_json(path, config)
