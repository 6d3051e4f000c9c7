"""asked.json: what the user asked of a run, where each value was written, and how to repeat it.

config.yaml holds what the run does, with no "auto" left; this holds the words before that.
Loads no torch.
"""

from dataclasses import asdict, dataclass
from typing import Any, Self

from sft_play.config.loader import LoadedConfig
from sft_play.config.messages import word
from sft_play.config.schema import settings
from sft_play.runs.files import read_json, write_json
from sft_play.runs.folder import RunFolder

NAME = "asked.json"
VALUE_LENGTH = 400  # characters of a value that are kept


@dataclass(frozen=True)
class AskedSetting:
    """A setting as the user, a file or the schema has it."""

    value: str  # as YAML spells it; "auto" stands as it is
    origin: str  # such as configs/tiny.yaml:20, or environment TRAIN_EPOCHS
    is_chosen: bool  # by the user, not by the schema or configs/base.yaml


@dataclass(frozen=True)
class AskedRun:
    """The settings of a run by dotted name, and the shell command that repeats it."""

    command: str
    settings: dict[str, AskedSetting]

    @classmethod
    def of(cls, loaded: LoadedConfig, command: str) -> Self:
        """Return what a loaded config asks."""
        asked = {}
        for path in settings():
            value = word(loaded.value(path), VALUE_LENGTH)
            asked[path] = AskedSetting(value, loaded.origin[path], loaded.is_set(path))
        return cls(command, asked)

    def write(self, folder: RunFolder) -> None:
        """Write asked.json."""
        write_json(folder.path / NAME, asdict(self))

    @classmethod
    def read(cls, folder: RunFolder) -> Self | None:
        """Return what asked.json says, or None where a run of another version has none."""
        path = folder.path / NAME
        if not path.exists():
            return None
        values: dict[str, Any] = read_json(path)
        found = {name: AskedSetting(**facts) for name, facts in values["settings"].items()}
        return cls(values["command"], found)
