"""Settings that are taken from a notebook, one by one, each with where it comes from. Pure."""

from typing import Any

from pydantic import ValidationError

from sft_play.config.loader import nested
from sft_play.config.present import Line
from sft_play.config.schema import Config, settings
from sft_play.config.unknown import ADVICE, SAME_SETTING
from sft_play.notebooks.changes import Changes
from sft_play.notebooks.recognise import Notebook
from sft_play.notebooks.values import AUTO, Unknown, Values

OPTIMIZERS = {"adamw_bnb_8bit": "adamw_8bit", "paged_adamw": "paged_adamw_32bit"}
TRACKERS = ("mlflow", "tensorboard", "trackio", "wandb")


class Carried(Changes):
    """The settings found so far in a notebook, each with where it comes from, and the notes."""

    def __init__(self, notebook: Notebook) -> None:
        super().__init__()
        self.notebook = notebook
        self.values = Values(notebook)
        self.lines: dict[str, Line] = {}

    def value(self, path: str) -> Any:
        """Return the value of a setting, None where it is not found."""
        return self.lines[path].value if path in self.lines else None

    def put(self, path: str, value: Any, cell: int | None, word: str) -> None:
        """Take a setting; a second, other value for it is named and not taken."""
        origin = word if cell is None else f"cell {cell}: {word}"
        first = self.lines.setdefault(path, Line(path, value, origin))
        if first.value != value:
            taken = f"{path} is {first.value!r} by {first.comment}"
            self.look(cell, f"{word} is not carried: {taken}")

    def take(self, cell: int, name: str, value: Any) -> None:
        """Take a keyword's value, or say that it has no counterpart."""
        path = find_setting(name)
        said = f"{name} = {value.text if isinstance(value, Unknown) else repr(value)}"
        if path is None:
            advice = f": {ADVICE[name]}" if name in ADVICE else ""
            self.look(cell, f"{said} has no setting here{advice}")
        elif isinstance(value, Unknown):
            self.look(cell, f"{said}, which only running tells: write {path}")
        else:
            adapted = adapt_value(path, value)
            if isinstance(adapted, Unknown):
                self.look(cell, f"{said} is not carried: {adapted.text}")
            elif adapted is not None:
                self.put(path, adapted, cell, said)


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
    try:
        Config.model_validate(nested({path: value}))
    except ValidationError:
        return False
    return True
