"""Settings that are taken from a notebook, one by one, each with where it comes from. Pure."""

from typing import Any

from pydantic import ValidationError

from sft_play.config.schema import Config, settings
from sft_play.config.unknown import ADVICE, SAME_SETTING
from sft_play.notebooks.changes import Changes
from sft_play.notebooks.values import AUTO, Unknown

OPTIMIZERS = {"adamw_bnb_8bit": "adamw_8bit", "paged_adamw": "paged_adamw_32bit"}
TRACKERS = ("mlflow", "tensorboard", "trackio", "wandb")


class Carried(Changes):
    """The settings found so far, with where each comes from, and the notes."""

    def __init__(self) -> None:
        super().__init__()
        self.values: dict[str, Any] = {}
        self.origins: dict[str, str] = {}

    def put(self, path: str, value: Any, cell: int, word: str) -> None:
        """Take a setting; a second, other value for it is named and not taken."""
        if path not in self.values:
            self.values[path] = value
            self.origins[path] = f"cell {cell}: {word}"
        elif self.values[path] != value:
            said = f"{word} is not carried: {path} is {self.values[path]!r} by "
            self.look(cell, f"{said}{self.origins[path]}")

    def take(self, cell: int, name: str, value: Any) -> None:
        """Take a keyword's value, or say that it has no counterpart."""
        path = find_setting(name)
        shown = value.text if isinstance(value, Unknown) else repr(value)
        if path is None:
            advice = f": {ADVICE[name]}" if name in ADVICE else ""
            self.look(cell, f"{name} = {shown} has no setting here{advice}")
        elif isinstance(value, Unknown):
            self.look(cell, f"{name} = {shown}, which only running tells: write {path}")
        else:
            adapted = adapt_value(path, value)
            if isinstance(adapted, Unknown):
                self.look(cell, f"{name} = {shown} is not carried: {adapted.text}")
            elif adapted is not None:
                self.put(path, adapted, cell, f"{name} = {shown}")


def find_setting(name: str) -> str | None:
    """Return the setting that takes the value of a keyword, None where there is none."""
    for section in ("train", "tuning.lora", "model"):
        if f"{section}.{name}" in settings():
            return f"{section}.{name}"
    return SAME_SETTING.get(name)


def adapt_value(path: str, value: Any) -> Any:
    """Return a value as its setting has it.

    None leaves the setting out, an Unknown says why it is not carried.
    """
    match path:
        case "train.max_steps":
            value = value if isinstance(value, int) and value > 0 else None
        case "train.gradient_checkpointing":
            value = bool(value)
        case "train.optim":
            value = OPTIMIZERS.get(str(value), value)
        case "train.bf16" | "train.fp16":
            value = value if value in (True, False, AUTO) else None
        case "train.report_to":
            names = value if isinstance(value, list) else [value]
            value = [] if names in (["none"], [None]) else names
            if not set(value) <= set(TRACKERS):
                return Unknown(f"train.report_to has {', '.join(TRACKERS)} and none")
        case "tuning.lora.init_lora_weights":
            value = None if value is True else value
        case "tuning.lora.target_modules":
            if isinstance(value, str) and value != "all-linear":
                return Unknown("write a list of names")
        case "train.resume_from":
            return Unknown("name a run of SFT-Play in train.resume_from")
    if value is not None and not is_valid(path, value):
        return Unknown(f"{path} takes other values, which docs/configuration.md lists")
    return value


def is_valid(path: str, value: Any) -> bool:
    """Return whether a setting takes a value."""
    for name in reversed(path.split(".")):
        value = {name: value}
    try:
        Config.model_validate(value)
    except ValidationError:
        return False
    return True
