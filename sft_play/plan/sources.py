"""Where a run's rows are: what the data settings name, on this disk or on the hub.

Opens no file; loads no torch.
"""

import os
import re
from pathlib import Path

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
    if data.train_path is None:
        shipped = {}
        for split in ("train", "val", "test"):
            given = getattr(data, f"{split}_path")
            shipped[f"{split}_path"] = given or str(SHIPPED / f"{split}.jsonl")
        data = data.model_copy(update=shipped)
    places = (*SETTINGS, "image_folder")
    return data.model_copy(update={name: _absolute(getattr(data, name)) for name in places})


def require(loaded: LoadedConfig) -> None:
    """Refuse rows that are not there before a run folder is made.

    A name that may be a hub data set's passes. Raises: DataError.
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


def _absolute(value: Value) -> Value:
    if value is None:
        return None
    if isinstance(value, str):
        return _absolute_path(value)
    parts = []
    for part in value:
        if isinstance(part, str):
            parts.append(_absolute_path(part))
        else:
            parts.append(part.model_copy(update={"path": _absolute_path(part.path)}))
    return parts


def _absolute_path(path: str) -> str:
    if not Path(path).exists() and HUB_ID.fullmatch(path):
        return path
    return os.path.realpath(path)  # raises nothing if links point at each other
