"""The complete config and its settings by dotted name. Pure: no I/O, no environment, no torch.

The sections define every setting with its type, its unit and what `auto` or null means. Help,
docs/configuration.md and error messages are made from their sentences.
"""

import types
import typing
from collections.abc import Mapping
from functools import cache
from types import MappingProxyType
from typing import Annotated, Any, Self

from pydantic.fields import FieldInfo

from sft_play.config.sections.base import Section
from sft_play.config.sections.data import DataSection, SourceSection
from sft_play.config.sections.model import LoraSection, ModelSection, TuningSection
from sft_play.config.sections.train import TrainSection
from sft_play.config.unknown import EARLIER_NAMES, REMOVED

__all__ = [
    "Config",
    "DataSection",
    "LoraSection",
    "ModelSection",
    "Section",
    "SourceSection",
    "TrainSection",
    "TuningSection",
    "env_name",
    "is_name",
    "is_structured",
    "kinds",
    "sections",
    "settings",
    "with_present_names",
]


FREE_TEXTS = ("data.system_prompt",)  # what they say is for the model


class Config(Section):
    """A complete config: what one run was asked for, or, in a run folder, what it does."""

    model: ModelSection = ModelSection()
    tuning: TuningSection = TuningSection()
    train: TrainSection = TrainSection()
    data: DataSection = DataSection()

    @classmethod
    def of_run(cls, values: Mapping[str, Any]) -> Self:
        """Return the config that a run has written, also one of a version with other names."""
        if isinstance(values, Mapping):
            values = {
                name: with_present_names(section) if isinstance(section, Mapping) else section
                for name, section in values.items()
            }
        return cls.model_validate(values)

    @property
    def epoch_seed(self) -> int | None:
        """Seed of the order of an epoch's rows; None keeps them in the order of the files."""
        return None if self.data.order == "as_given" else self.train.order_seed

    @property
    def trained_tokens(self) -> list[str]:
        """Tokens whose rows of embedding and head are trained in addition to adapters."""
        if self.tuning.mode == "full":
            return []
        tokens = [*(self.tuning.lora.trainable_tokens or ()), *(self.model.add_tokens or ())]
        return list(dict.fromkeys(tokens))


def with_present_names(section: Mapping[str, Any]) -> dict[str, Any]:
    """Return a section of a run of any version, without settings that were removed since."""
    return {
        EARLIER_NAMES.get(name, name).rpartition(".")[2]: value
        for name, value in section.items()
        if name not in REMOVED
    }


@cache
def settings(section: type[Section] = Config, prefix: str = "") -> Mapping[str, FieldInfo]:
    """Return every setting as `{"train.batch_size": FieldInfo}`, in the order of the schema."""
    fields: dict[str, FieldInfo] = {}
    for name, field in section.model_fields.items():
        path = prefix + name
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            fields.update(settings(field.annotation, f"{path}."))
        else:
            fields[path] = field
    return MappingProxyType(fields)


def sections() -> list[str]:
    """Return the dotted name of every section, outer ones first."""
    names: dict[str, None] = {}  # a set that keeps its order
    for path in settings():
        parts = path.split(".")
        names.update(dict.fromkeys(".".join(parts[:depth]) for depth in range(1, len(parts))))
    return list(names)


def env_name(path: str) -> str:
    """Return the variable that sets a setting: `tuning.lora.r` -> `TUNING_LORA_R`."""
    return path.replace(".", "_").upper()


def is_structured(path: str) -> bool:
    """Return whether a setting's value may be a mapping, or contain one."""
    return bool((settings()[path].json_schema_extra or {}).get("structured"))


@cache
def is_name(path: str) -> bool:
    """Return whether a setting is a path or a name, which is never empty."""
    field = settings().get(path)
    return field is not None and path not in FREE_TEXTS and str in kinds(field.annotation)


def kinds(annotation: Any) -> set[Any]:
    """Return the types that a setting admits: the members of a union, a Literal as itself."""
    origin = typing.get_origin(annotation)
    if origin in (typing.Union, types.UnionType):
        return set().union(*map(kinds, typing.get_args(annotation)))
    if origin is Annotated:
        return kinds(typing.get_args(annotation)[0])
    return {list} if origin is list else {annotation}
