"""Where a run's rows are: what the data settings name, on this disk or on the hub. Opens no file; loads no torch."""

import re
from pathlib import Path

from sft_play.config.loader import PROJECT_ROOT, LoadedConfig
from sft_play.config.schema import DataSection, SourceSection, env_name
from sft_play.errors import DataError

SHIPPED = PROJECT_ROOT / "data" / "desk"
SETTINGS = ("train_path", "val_path", "test_path")
HUB_ID = re.compile(
    r"[\w-][\w.-]*/[\w.-]+(?<!\.json)(?<!\.jsonl)(?<!\.csv)(?<!\.tsv)(?<!\.parquet)(?<!\.arrow)(?<!\.gz)(?<!\.txt)"
)

Value = str | list[str | SourceSection] | None


def resolved(data: DataSection) -> DataSection:
    """Return the section with the set that ships in place of a null train_path, and every path absolute."""
    if data.train_path is None:
        shipped = {
            f"{split}_path": str(SHIPPED / f"{split}.jsonl") for split in ("train", "val", "test")
        }
        data = data.model_copy(
            update={name: getattr(data, name) or path for name, path in shipped.items()}
        )
    return data.model_copy(update={name: _absolute(getattr(data, name)) for name in SETTINGS})


def require(loaded: LoadedConfig) -> None:
    """Refuse rows that are not there before a run folder is made; a name that may be a hub data set's passes. Raises DataError."""
    data = resolved(loaded.config.data)
    for setting in SETTINGS:
        for path in paths_of(getattr(data, setting)):
            if not Path(path).exists() and not HUB_ID.fullmatch(path):
                name = f"data.{setting}"
                raise DataError(
                    f"{name}={path} ({loaded.origin[name]}): no such file; set {env_name(name)} to a data file, a folder of them, or a hub data set id"
                )


def paths_of(value: Value) -> list[str]:
    """Return the path of every source that a setting names."""
    parts = value if isinstance(value, list) else [value] if value else []
    return [part if isinstance(part, str) else part.path for part in parts]


def _absolute(value: Value) -> Value:
    if isinstance(value, list):
        return [
            _absolute(part)
            if isinstance(part, str)
            else part.model_copy(update={"path": _absolute(part.path)})
            for part in value
        ]
    if value is None or (not Path(value).exists() and HUB_ID.fullmatch(value)):
        return value
    return str(Path(value).resolve())
