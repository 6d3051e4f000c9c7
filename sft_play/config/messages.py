"""The wording of config errors: a value as it was typed, what to type instead, the nearest real name. Pure."""

import difflib
import math
import types
import typing
from collections.abc import Iterable
from typing import Any

from pydantic import BaseModel

from sft_play.config.schema import is_structured, kinds, settings
from sft_play.config.yaml_source import Located
from sft_play.errors import ConfigError

PROBLEMS_SHOWN = 8
WORD_LENGTH = 80  # characters of a value that a message repeats
# Names that transformers, TRL, PEFT and Unsloth use for what a setting here does.
FOREIGN = {
    "per_device_train_batch_size": "train.batch_size",
    "per_device_eval_batch_size": "train.eval_batch_size",
    "micro_batch_size": "train.batch_size",
    "gradient_accumulation_steps": "train.grad_accum",
    "global_batch_size": "train.effective_batch_size",
    "num_train_epochs": "train.epochs",
    "num_epochs": "train.epochs",
    "lr": "train.learning_rate",
    "scheduler": "train.lr_scheduler_type",
    "optimizer": "train.optim",
    "warmup_ratio": "train.warmup_steps",
    "gradient_clipping": "train.max_grad_norm",
    "evaluation_strategy": "train.eval_strategy",
    "num_beams": "train.generation_num_beams",
    "max_new_tokens": "train.generation_max_new_tokens",
    "resume_from_checkpoint": "train.resume_from",
    "random_state": "train.seed",
    "max_seq_length": "model.max_seq_len",
    "max_length": "model.max_seq_len",
    "model_name": "model.name",
    "model_name_or_path": "model.name",
    "torch_dtype": "model.dtype",
    "load_in_4bit": "tuning.mode",
    "rank": "tuning.lora.r",
    "lora_r": "tuning.lora.r",
    "lora_alpha": "tuning.lora.alpha",
    "lora_dropout": "tuning.lora.dropout",
    "dataset": "data.train_path",
    "train_file": "data.train_path",
    "validation_file": "data.val_path",
}


def refuse(problems: list[str]) -> None:
    """Raise ConfigError with one problem a line, if there is any."""
    if problems:
        more = (
            [f"... and {len(problems) - PROBLEMS_SHOWN} more"]
            if len(problems) > PROBLEMS_SHOWN
            else []
        )
        raise ConfigError("\n".join([*problems[:PROBLEMS_SHOWN], *more]))


def word(value: Any, length: int = WORD_LENGTH) -> str:
    """Return a value as YAML and the shell spell it: `true`, `null`, `[q_proj, v_proj]`; cut after `length` characters."""
    if isinstance(value, bool | None):
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, BaseModel):
        value = value.model_dump(exclude_defaults=True)
    if isinstance(value, dict):
        if any(isinstance(part, Located) for part in value.values()):
            return "{...}"
        return _shortened(
            f"{{{', '.join(f'{key}: {word(part)}' for key, part in value.items())}}}", length
        )
    if isinstance(value, list):
        # a list that aliases nest could spell out to gigabytes
        return _shortened(
            f"[{', '.join('[...]' if isinstance(item, list) else word(item) for item in value[:length])}]",
            length,
        )
    return _shortened(str(value), length) or '""'


def _shortened(text: str, length: int = WORD_LENGTH) -> str:
    text = " ".join(text.split())
    return text if len(text) <= length else f"{text[: length - 3]}..."


def is_switch(path: str) -> bool:
    """Return whether a setting takes true or false; the strategies read false as their `no`."""
    return any(
        kind is bool or "no" in typing.get_args(kind) for kind in kinds(settings()[path].annotation)
    )


def invalid(path: str, located: Located) -> str:
    """Return `configs/a.yaml:7: train.batch_size=two is not valid; write a whole number of at least 1, or auto`."""
    value, field = located.value, settings()[path]
    typed = word(value) if located.text is None else _shortened(located.text)
    name, wanted_words = path.rsplit(".", 1)[-1], f"write {wanted(path)}"
    if value is None and not typed:
        return f"{located.origin}: {path} has no value; {wanted_words}, or delete the line"
    if isinstance(value, dict) and not is_structured(path):
        return f"{located.origin}: {path} takes one value, not settings below it; {wanted_words}"
    if str in kinds(field.annotation) and isinstance(value, bool | int | float):
        kind = "a switch" if isinstance(value, bool) else "a number"
        return f'{located.origin}: {path}={typed} is {kind}, not a text; put it in quotes: {name}: "{typed}"'
    if isinstance(value, bool):
        return f"{located.origin}: {path}={typed} is a switch; {wanted_words}"
    if isinstance(value, float) and not math.isfinite(value):
        return f"{located.origin}: {path}={typed} is not finite; {wanted_words}"
    if value == "":
        return f"{located.origin}: {path} is empty; {wanted_words}"
    return f"{located.origin}: {path}={typed} is not valid; {wanted_words}"


def wanted(path: str) -> str:
    """Return `a whole number of at least 1, or auto`: what a setting takes, from the schema."""
    field = settings()[path]
    special = (field.json_schema_extra or {}).get("write")
    words = [special or _words_of(field.annotation, field.metadata)]
    if special and type(None) in kinds(field.annotation):
        words.append("null")
    return ", or ".join(words)


def _words_of(annotation: Any, metadata: Iterable[Any] = ()) -> str:
    origin = typing.get_origin(annotation)
    if origin is typing.Annotated:
        inner, *extra = typing.get_args(annotation)
        return _words_of(
            inner,
            [constraint for item in extra for constraint in getattr(item, "metadata", [item])],
        )
    if origin in (typing.Union, types.UnionType):
        return ", or ".join(
            _words_of(argument, metadata) for argument in typing.get_args(annotation)
        )
    if origin is typing.Literal:
        *others, last = map(str, typing.get_args(annotation))
        return f"{', '.join(others)} or {last}" if others else last
    if origin is list:
        return "a list of names"
    words = {
        int: "a whole number",
        float: "a number",
        bool: "true or false",
        str: "a text",
        type(None): "null",
    }[annotation]
    bounds = [
        f"{phrase} {getattr(item, name)}"
        for item in metadata
        for name, phrase in (
            ("ge", "of at least"),
            ("gt", "above"),
            ("lt", "below"),
            ("le", "of at most"),
        )
        if getattr(item, name, None) is not None
    ]
    return f"{words} {' and '.join(bounds)}" if bounds else words


def nearest(path: str, known: Iterable[str], sections: Iterable[str] = ()) -> str | None:
    """Return the real name that a mistyped dotted name most likely means.

    In order: the same last word in another section, another library's name for it, the likeliest spelling of the
    whole name, the likeliest spelling of its last word.
    """
    names = [*known, *sections]
    by_leaf: dict[str, str] = {}
    for name in names:
        by_leaf.setdefault(name.rsplit(".", 1)[-1], name)
    by_leaf |= {
        foreign: name
        for foreign, name in FOREIGN.items()
        if foreign not in by_leaf and name in names
    }
    lowered = path.lower()
    leaf = lowered.rsplit(".", 1)[-1]
    if leaf in by_leaf:
        return by_leaf[leaf]
    whole = difflib.get_close_matches(lowered, names, n=1, cutoff=0.75)
    last = [by_leaf[match] for match in difflib.get_close_matches(leaf, by_leaf, n=1, cutoff=0.65)]
    return next(iter([*whole, *last]), None)
