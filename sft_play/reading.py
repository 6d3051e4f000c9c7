"""Files that users name: regular ones, read within a bound. Imports nothing of the project."""

import errno
import os
import stat
from pathlib import Path

MAX_BYTES = 4 << 20  # of a template, a schema or code; a config has a bound of its own
# gzip itself reaches 1,032. Chats have 3 to 20; with a long system prompt in each, some 100
MAX_RATIO = 200
FREE_BYTES = 4 << 20  # decoded; fewer do no harm
KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def refuse_special(path: Path) -> None:
    """Raise OSError for a FIFO, a socket or a device: it may never begin, or never end."""
    kind = KINDS.get(stat.S_IFMT(path.stat().st_mode))
    if kind is not None:
        words = f"{kind}, not a regular file: write what it gives to one (cat), and name that"
        raise OSError(errno.EINVAL, words, str(path))


def read_bytes(path: Path, max_bytes: int = MAX_BYTES) -> bytes:
    """Return what a file has. Raises OSError, also for one that is too large to be meant."""
    refuse_special(path)
    with path.open("rb") as file:
        data = file.read(max_bytes + 1)
        size = os.fstat(file.fileno()).st_size
    if len(data) > max_bytes:
        words = f"{max(size, len(data)):,} bytes, more than the {max_bytes:,} that are read"
        raise OSError(errno.EFBIG, f"{words}: name another file, or leave out what it need not say")
    return data


def refuse_bomb(
    file_bytes: int, decoded_bytes: int, remedy: str, max_ratio: int = MAX_RATIO
) -> None:
    """Raise OSError if bytes of a file become far more than those of rows do."""
    if decoded_bytes > max(FREE_BYTES, max_ratio * file_bytes):
        words = f"{file_bytes:,} bytes become {decoded_bytes:,} or more, over {max_ratio} times"
        raise OSError(errno.EFBIG, f"{words} as many; if they are rows, {remedy}")
