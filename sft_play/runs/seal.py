"""The seal of a folder: MANIFEST.json with the size and SHA-256 of every file. Loads no torch.

`sha256sum` gives the same digests. The manifest has a digest of its own list, and its text is
compared with the one that this list has, so a changed bit of it is found, too.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from sft_play.runs.files import as_text, write_text

NAME = "MANIFEST.json"
PIN = "pinned"  # a file of the user that keeps a checkpoint
SMALL_BYTES = 1 << 20  # files that are read even where larger ones are only measured
READ_BYTES = 1 << 20
SHOWN_DIGITS = 12  # of a digest in a message


class Entry(NamedTuple):
    """What the manifest says of one file."""

    size: int
    sha256: str


def seal(folder: Path) -> None:
    """Bring a folder's files to the disk and write its manifest, last. Raises OSError."""
    paths = sorted(_files(folder))
    with _threads(len(paths)) as hashing, ThreadPoolExecutor(1) as syncing:
        synced = syncing.submit(lambda: list(map(sync, paths)))
        digests = list(hashing.map(digest_of_file, paths))
        synced.result()
    files = {}
    for path, digest in zip(paths, digests, strict=True):
        entry = Entry(path.stat().st_size, digest)
        files[path.relative_to(folder).as_posix()] = entry._asdict()
    write_text(folder / NAME, _manifest_text(files))
    for inner in (*(path for path in folder.rglob("*") if path.is_dir()), folder):
        sync(inner)


def is_sealed(folder: Path) -> bool:
    """Return whether a folder has a manifest; whether it is right, `find_damage` says."""
    return (folder / NAME).is_file()


def find_damage(folder: Path, reads_all: bool = True, allows_more: bool = False) -> str | None:
    """Return the first difference between a folder and its manifest, None where there is none.

    Without `reads_all` files over SMALL_BYTES are measured and not read. Files that the manifest
    does not list are a difference, unless it `allows_more`. So is a file that cannot be read.
    """
    try:
        return find_difference(folder, reads_all, allows_more)
    except OSError as error:
        return unreadable(error)


def unreadable(error: OSError) -> str:
    """Return which file of a folder cannot be read, and why."""
    return f"{Path(error.filename or NAME).name} cannot be read ({error.strerror or error})"


def find_difference(folder: Path, reads_all: bool = True, allows_more: bool = False) -> str | None:
    """Return what `find_damage` does. Raises: OSError for a file that cannot be read."""
    if not is_sealed(folder):
        return f"{NAME} is missing"
    try:
        entries = _read_manifest(folder)
        found = {path.relative_to(folder).as_posix(): path for path in _files(folder)}
        for name in sorted(entries):
            if name not in found:
                return f"{name} is missing"
        more = sorted(name for name in found if name not in entries and not name.startswith("."))
        if more and not allows_more:
            return f"{more[0]} is not in {NAME}"
        pairs = [(found[name], entry) for name, entry in sorted(entries.items())]
        return _first_difference(folder, pairs, reads_all)
    except (ValueError, KeyError, TypeError) as error:
        return f"{NAME} cannot be used ({error})"


def digest_of_file(path: Path) -> str:
    """Return the SHA-256 of a file's bytes."""
    total = hashlib.sha256()
    block = bytearray(READ_BYTES)
    view = memoryview(block)
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(block):
            total.update(view[:count])  # without the GIL, so threads hash at the same time
    return total.hexdigest()


def sync(path: Path) -> None:
    """Bring a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _first_difference(
    folder: Path, pairs: Iterable[tuple[Path, Entry]], reads_all: bool
) -> str | None:
    read: list[tuple[Path, Entry]] = []
    for path, entry in pairs:
        name = path.relative_to(folder).as_posix()
        size = path.stat().st_size
        if size != entry.size:
            return f"{name} has {size} bytes, and was sealed with {entry.size}"
        if reads_all or size <= SMALL_BYTES:
            read.append((path, entry))
    with _threads(len(read)) as pool:
        digests = pool.map(digest_of_file, [path for path, _ in read])
        for (path, entry), digest in zip(read, digests, strict=True):
            if digest != entry.sha256:
                name = path.relative_to(folder).as_posix()
                return (
                    f"{name} has SHA-256 {digest[:SHOWN_DIGITS]}, and was sealed with "
                    f"{entry.sha256[:SHOWN_DIGITS]}"
                )
    return None


def _files(folder: Path) -> Iterator[Path]:
    """Yield the files of a folder that a seal covers."""
    for path in folder.rglob("*"):
        if path.is_file() and path not in (folder / NAME, folder / PIN):
            yield path


def _manifest_text(files: Mapping[str, Mapping[str, Any]]) -> str:
    digest = hashlib.sha256(as_text(files).encode()).hexdigest()
    return as_text({"files": files, "sha256_of_files": digest})


def _read_manifest(folder: Path) -> dict[str, Entry]:
    """Return what a manifest lists. Raises: OSError, ValueError, KeyError, TypeError."""
    text = (folder / NAME).read_bytes().decode()
    files = json.loads(text)["files"]
    if text != _manifest_text(files):
        raise ValueError("it is not as it was written")
    return {name: Entry(**facts) for name, facts in files.items()}


def _threads(files: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max(1, min(files, len(os.sched_getaffinity(0)))))
