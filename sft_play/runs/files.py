"""Files that are written whole or not at all. Imports nothing of the project."""

import contextlib
import json
import os
import secrets
from pathlib import Path
from typing import Any


def write_text(path: Path, text: str) -> None:
    """Replace `path` with `text`: temporary file, fsync, rename. A reader sees the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(
        f".{path.name}.{secrets.token_hex(8)}"
    )  # made by open, so that who may read it is the umask's to say
    try:
        with temporary.open("x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()
        raise


def write_json(path: Path, value: Any) -> None:
    """Write `value` as JSON: sorted keys, indented, UTF-8, NaN refused."""
    write_text(
        path,
        json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n",
    )


def read_json(path: Path) -> Any:
    """Return the value of a JSON file. Raises FileNotFoundError, ValueError."""
    return json.loads(path.read_text(encoding="utf-8"))
