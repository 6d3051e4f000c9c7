"""Settings that are taken from a notebook, one by one, each with where it comes from. Pure."""

from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from sft_play.config.foreign_keys import ADVICE, SAME_SETTING
from sft_play.config.schema import Config, settings
from sft_play.notebooks.notes import Note, look
from sft_play.notebooks.values import AUTO, Unknown

OPTIMIZERS = {"adamw_bnb_8bit": "adamw_8bit", "paged_adamw": "paged_adamw_32bit"}


@dataclass
class Carried:
    """The settings found so far, with where each comes from, and the notes."""

    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    notes: list[Note] = field(default_factory=list)

    def put(self, path: str, value: Any, cell: int, word: str) -> None:
        """Take a setting; a second, other value for it is named and not taken."""
        if path in self.values and self.values[path] != value:
            said = f"{word} is not carried: {path} is {self.values[path]!r} by "
            self.notes.append(look(cell, f"{said}{self.origins[path]}"))
            return
        if path not in self.values:
            self.values[path] = value
            self.origins[path] = f"cell {cell}: {word}"

    def take(self, cell: int, name: str, value: Any) -> None:
        """Take a keyword's value, or say that it has no counterpart."""
        path = setting_of(name)
        if path is None:
            advice = f": {ADVICE[name]}" if name in ADVICE else ""
            shown = value.text if isinstance(value, Unknown) else repr(value)
            self.notes.append(look(cell, f"{name} = {shown} has no setting here{advice}"))
            return
        if isinstance(value, Unknown):
            said = f"{name} = {value.text}, which only running tells: write {path}"
            self.notes.append(look(cell, said))
            return
        adapted = adapted_value(path, value)
        if adapted is not None and not isinstance(adapted, Unknown) and not is_valid(path, adapted):
            adapted = Unknown(f"{path} takes other values, which docs/configuration.md lists")
        if isinstance(adapted, Unknown):
            self.notes.append(look(cell, f"{name} = {value!r} is not carried: {adapted.text}"))
        elif adapted is not None:
            self.put(path, adapted, cell, f"{name} = {value!r}")


def setting_of(name: str) -> str | None:
    """Return the setting that takes the value of a keyword, None where there is none."""
    for section in ("train", "tuning.lora", "model"):
        if f"{section}.{name}" in settings():
            return f"{section}.{name}"
    return SAME_SETTING.get(name)


def adapted_value(path: str, value: Any) -> Any:
    """Return a value as its setting has it.

    None leaves the setting out, an Unknown says why it is not carried.
    """
    if path == "train.max_steps":
        return value if isinstance(value, int) and value > 0 else None
    if path == "train.gradient_checkpointing":
        return bool(value)
    if path == "train.optim":
        return OPTIMIZERS.get(str(value), value)
    if path in ("train.bf16", "train.fp16"):
        return value if value in (True, False, AUTO) else None
    if path == "train.report_to":
        return _trackers(value)
    if path == "tuning.lora.init_lora_weights":
        return None if value is True else value
    if path == "tuning.lora.target_modules" and isinstance(value, str):
        return value if value == "all-linear" else Unknown("write a list of names")
    if path == "train.resume_from":
        return Unknown("name a run of SFT-Play in train.resume_from")
    return value


def is_valid(path: str, value: Any) -> bool:
    """Return whether a setting takes a value."""
    tree: Any = value
    for name in reversed(path.split(".")):
        tree = {name: tree}
    try:
        Config.model_validate(tree)
    except ValidationError:
        return False
    return True


def _trackers(value: Any) -> Any:
    """Return the trackers of report_to."""
    known = {"tensorboard", "wandb", "mlflow", "trackio"}
    names = value if isinstance(value, list) else [value]
    if names in (["none"], [None], []):
        return []
    unknown = [name for name in names if name not in known]
    return Unknown(f"train.report_to has {', '.join(sorted(known))} and none") if unknown else names
