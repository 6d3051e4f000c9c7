"""Files that are written completely or not at all. Imports nothing of the project."""

import contextlib
import errno
import json
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from itertools import count
from pathlib import Path
from typing import IO, Any

Json = dict[str, Any]  # a JSON object: a record, a message, a function, facts of a run
CANNOT_SYNC = (errno.EINVAL, errno.ENOTSUP)  # some FUSE and CIFS mounts
BUSY_SECONDS = 0.5
LOCAL = ("apfs", "btrfs", "ext3", "ext4", "f2fs", "overlay", "tmpfs", "xfs", "zfs")


def entries(folder: Path) -> list[Path]:
    """Return what is in a folder, nothing if there is no such folder.

    Raises: OSError if it cannot be read; Path.glob takes such a folder for an empty one.
    """
    try:
        return sorted(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []


def free_name(path: Path) -> Path:
    """Return a name next to `path` that nothing has."""
    names = (path.with_name(f"{path.stem}-{number}{path.suffix}") for number in count(2))
    return next(name for name in names if not os.path.lexists(name))


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Give errors of the system their file: those of write and fsync have none."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def sync(path: Path) -> None:
    """Bring a file, or the names in a folder, to the disk, if its file system can."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with naming(path):
            os.fsync(descriptor)
    except OSError as error:
        if error.errno not in CANNOT_SYNC:
            raise
    finally:
        os.close(descriptor)


def is_local(path: Path) -> bool:
    """Return whether a path is on a disk that no other machine writes; False if unknown."""
    import psutil

    places = {Path(part.mountpoint): part.fstype for part in psutil.disk_partitions(all=True)}
    found = next((places[place] for place in path.resolve().parents if place in places), None)
    return found in LOCAL


def rename(source: Path, target: Path) -> None:
    """Replace `target` by `source`; what is busy for a moment, as on shares, is tried once more."""
    try:
        os.replace(source, target)
    except OSError as error:
        if error.errno != errno.EBUSY:
            raise
        time.sleep(BUSY_SECONDS)
        os.replace(source, target)


def write_text(path: Path, text: str) -> None:
    """Replace `path` with `text`, as `write_bytes` does."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, data: bytes) -> None:
    """Replace `path` with `data`: temporary file, fsync, rename.

    A reader sees the old file or the new one.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # made by open, so that the umask decides who may read it
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with naming(path), temporary.open("xb") as file:
            file.write(data)
        sync(temporary)
        rename(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def open_in_place(path: Path, mode: str) -> IO[Any]:
    """Open a file that a run writes in parts; never through a link, which may lead anywhere.

    Raises: OSError, for a link ELOOP, and for a pipe or a device EEXIST.
    """
    return open(path, mode, encoding=None if "b" in mode else "utf-8", opener=open_descriptor)


def open_descriptor(path: str | Path, flags: int) -> int:
    """Open a regular file that is no link. Raises: as `open_in_place`."""
    with naming(Path(path)):
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise OSError(errno.EEXIST, "Not a regular file", str(path))
    return descriptor


def share(folder: Path) -> None:
    """Let others read the files of a folder as the umask says.

    Libraries write some of them through temporary files that only their owner may read.
    """
    probe = folder / f".mode.{secrets.token_hex(8)}"
    with probe.open("x"):
        mode = stat.S_IMODE(probe.stat().st_mode)
    probe.unlink()
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            path.chmod(mode)


def json_text(value: Any) -> str:
    """Return data, which may contain dataclasses, as JSON: sorted keys, indented, UTF-8, no NaN."""
    form = {"indent": 2, "sort_keys": True, "ensure_ascii": False, "allow_nan": False}
    return json.dumps(value, default=asdict, **form) + "\n"


def json_line(value: Any) -> str:
    """Return `value` as a line of JSON."""
    return json.dumps(value, ensure_ascii=False) + "\n"


def write_json(path: Path, value: Any) -> None:
    """Replace `path` with `value` as JSON."""
    write_text(path, json_text(value))


def read_json(path: Path, object_hook: Callable[[Json], Any] | None = None) -> Any:
    """Return the value of a JSON file. Raises FileNotFoundError, ValueError."""
    if not path.is_file() and not path.is_dir() and path.exists():
        raise ValueError("it is a pipe or a device")  # whose end may never come
    try:
        return json.loads(path.read_text(encoding="utf-8"), object_hook=object_hook)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
