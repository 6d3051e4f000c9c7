"""Locate a run's rows: the data settings refer to this disk or to the hub.

Opens no file; loads no torch.
"""

import os
import re
from pathlib import Path
from typing import Any

from sft_play.config.layers import nearest_path
from sft_play.config.loader import PROJECT_ROOT, LoadedConfig
from sft_play.config.messages import no_such_file
from sft_play.config.schema import DataSection, SourceSection, env_name
from sft_play.errors import DataError

SHIPPED = PROJECT_ROOT / "data" / "desk"
SETTINGS = ("train_path", "val_path", "test_path")
HUB_ID = re.compile(
    r"[\w-][\w.-]*/[\w.-]+"
    r"(?<!\.json)(?<!\.jsonl)(?<!\.csv)(?<!\.tsv)(?<!\.parquet)(?<!\.arrow)(?<!\.gz)(?<!\.txt)"
)

Value = str | list[str | SourceSection] | None


def resolved(data: DataSection) -> DataSection:
    """Return the section with every path absolute, and a null train_path filled.

    The rows that ship take its place.
    """
    values = {name: getattr(data, name) for name in (*SETTINGS, "image_folder")}
    if data.train_path is None:
        for name in SETTINGS:
            file = f"{name.removesuffix('_path')}.jsonl"
            values[name] = values[name] or str(SHIPPED / file)
    return data.changed({name: _absolute(value) for name, value in values.items()})


def require_rows(loaded: LoadedConfig) -> None:
    """Refuse missing rows before a run folder is made.

    A name that may be a hub data set passes. Raises: DataError.
    """
    data = resolved(loaded.config.data)
    for setting in SETTINGS:
        for path in list_paths(getattr(data, setting)):
            if not Path(path).exists() and not HUB_ID.fullmatch(path):
                name = f"data.{setting}"
                near = nearest_path(path)
                meant = f"did you mean {near}? Else " if near else ""
                raise DataError(
                    f"{name}={path} ({loaded.origin[name]}): {no_such_file(path)}; {meant}set "
                    f"{env_name(name)} to a data file, a folder of them, or a hub data set id; "
                    "for some of its rows write [{path: a.jsonl, rows: 500}]"
                )


def list_paths(value: Value) -> list[str]:
    """Return the path of every source that a setting names."""
    if not value:
        return []
    if isinstance(value, str):
        return [value]
    return [part if isinstance(part, str) else part.path for part in value]


def _absolute(value: Value | SourceSection) -> Any:
    """Return a setting with every path absolute; names on the hub are unchanged."""
    if isinstance(value, SourceSection):
        return value.changed({"path": _absolute(value.path)})
    if not isinstance(value, str):
        return value and [_absolute(part) for part in value]
    if not Path(value).exists() and HUB_ID.fullmatch(value):
        return value
    return os.path.realpath(value)  # raises no error for links that point to each other
