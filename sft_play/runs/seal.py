"""The seal of a folder: MANIFEST.json with the size and SHA-256 of every file. Loads no torch.

A file of more than PART_BYTES has one SHA-256 for each part of that size, which all cores compute
at once: SHA-256 of one stream is slower than many a disk. `sha256sum FILE` gives the same digests,
and `split -b 64M --filter=sha256sum FILE` those of parts.

The manifest has a digest of its list, and its text is compared with the one that this list
has, so a changed bit of it is found, too.
"""

import errno
import hashlib
import json
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

from sft_play.runs.files import Json, json_text, sync, write_text

NAME = "MANIFEST.json"
PIN = "pinned"  # a file of the user that keeps a checkpoint
SMALL_BYTES = 1 << 20  # files that are read even if larger ones are only measured
PART_BYTES = 64 << 20  # 30 ms of one core, and 70 bytes of the manifest
READ_BYTES = 1 << 20
MOST_THREADS = 16  # hash some 30 GB/s, more than a disk takes or gives
MIB = 1 << 20
SHOWN_DIGITS = 12  # of a digest in a message


class FileSlice(NamedTuple):
    """The bytes of a file from `start` up to `end`."""

    path: Path
    start: int
    end: int


class Entry(NamedTuple):
    """What the manifest says of one file: its digests, in order, and the bytes that each covers."""

    size: int
    digests: tuple[str, ...]
    part_bytes: int | None  # None: the one digest is that of the complete file

    def parts(self, path: Path) -> list[FileSlice]:
        """Return what each digest covers of the file."""
        if self.part_bytes is None:
            return [FileSlice(path, 0, self.size)]
        starts = range(0, self.size, self.part_bytes)
        return [FileSlice(path, start, min(start + self.part_bytes, self.size)) for start in starts]

    def facts(self) -> Json:
        """Return the entry as it stands in the manifest."""
        if self.part_bytes is None:
            return {"size": self.size, "sha256": self.digests[0]}
        return {
            "size": self.size,
            "part_bytes": self.part_bytes,
            "sha256_of_parts": list(self.digests),
        }


class Manifest(NamedTuple):
    """What a manifest says: its files by name, and what wrote them."""

    entries: dict[str, Entry]
    kind: str | None  # None: a checkpoint, or weights of a run

    @classmethod
    def read(cls, folder: Path) -> "Manifest":
        """Return the manifest of a folder. Raises: OSError, ValueError, KeyError, TypeError."""
        text = (folder / NAME).read_bytes().decode()
        found = json.loads(text)
        files, kind = found["files"], found.get("kind")
        if text != _manifest_text(files, kind):
            raise ValueError("it is not as it was written")
        return cls({name: _entry(facts) for name, facts in files.items()}, kind)

    def without(self, names: Collection[str]) -> str:
        """Return the text of the manifest without some of the files."""
        kept = {name: entry for name, entry in self.entries.items() if name not in names}
        return _manifest_text({name: entry.facts() for name, entry in kept.items()}, self.kind)


def seal(folder: Path, kind: str | None = None) -> None:
    """Bring a folder's files to the disk and write its manifest, last. Raises OSError."""
    paths = sorted(_files(folder))
    with ThreadPoolExecutor(1) as syncing:
        synced = syncing.submit(lambda: list(map(sync, paths)))
        entries = _hashed(paths)
        synced.result()
    files = {
        path.relative_to(folder).as_posix(): entry.facts()
        for path, entry in zip(paths, entries, strict=True)
    }
    write_text(folder / NAME, _manifest_text(files, kind))
    inner = [path for path in folder.rglob("*") if path.is_dir()]
    for path in [*inner, folder]:
        sync(path)


def is_sealed(folder: Path) -> bool:
    """Return whether a folder has a manifest; whether it is right, `find_damage` says."""
    return (folder / NAME).is_file()


def find_damage(folder: Path, reads_all: bool = True, allows_more: bool = False) -> str | None:
    """Return the first difference between a folder and its manifest, None if there is none.

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
        entries = Manifest.read(folder).entries
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


def digest_of(part: FileSlice) -> str:
    """Return the SHA-256 of a part of a file. Raises: OSError if the file ends before it."""
    total = hashlib.sha256()
    left = part.end - part.start
    view = memoryview(bytearray(min(left, READ_BYTES)))
    with part.path.open("rb", buffering=0) as file:
        file.seek(part.start)
        while left:
            count = file.readinto(view[: min(left, READ_BYTES)])
            if not count:
                raise OSError(errno.EIO, f"it ends {left} bytes early", str(part.path))
            total.update(view[:count])  # without the GIL, so threads hash at the same time
            left -= count
    return total.hexdigest()


def _hashed(paths: Sequence[Path]) -> list[Entry]:
    """Return what the manifest is to say of each file."""
    measured = list(map(_measured, paths))
    parts = [entry.parts(path) for entry, path in zip(measured, paths, strict=True)]
    digests = _digests(list(chain.from_iterable(parts)))
    return [
        entry._replace(digests=tuple(islice(digests, len(own))))
        for entry, own in zip(measured, parts, strict=True)
    ]


def _measured(path: Path) -> Entry:
    """Return the entry of a file before it is hashed.

    The file is opened: NFS asks then for the size that another machine's write has left, and may
    give an older one otherwise.
    """
    with path.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
    return Entry(size, (), PART_BYTES if size > PART_BYTES else None)


def _digests(parts: Sequence[FileSlice]) -> Iterator[str]:
    """Yield the SHA-256 of each part, in their order; threads compute them ahead.

    If the caller stops, after a difference, so do they.
    """
    cores = len(os.sched_getaffinity(0))
    with ThreadPoolExecutor(max(1, min(len(parts), cores, MOST_THREADS))) as pool:
        yield from pool.map(digest_of, parts)


def _first_difference(
    folder: Path, pairs: Iterable[tuple[Path, Entry]], reads_all: bool
) -> str | None:
    read: list[tuple[Entry, FileSlice, str]] = []
    for path, entry in pairs:
        size = path.stat().st_size
        if size != entry.size:
            name = path.relative_to(folder).as_posix()
            return f"{name} has {size} bytes, and was sealed with {entry.size}"
        if reads_all or size <= SMALL_BYTES:
            parts = zip(entry.parts(path), entry.digests, strict=True)
            read += [(entry, part, digest) for part, digest in parts]
    digests = _digests([part for _, part, _ in read])
    for (entry, part, sealed), digest in zip(read, digests, strict=True):
        if digest != sealed:
            name = part.path.relative_to(folder).as_posix()
            return (
                f"{name} has SHA-256 {digest[:SHOWN_DIGITS]}{_place(part, entry)}, and was sealed "
                f"with {sealed[:SHOWN_DIGITS]}"
            )
    return None


def _place(part: FileSlice, entry: Entry) -> str:
    """Return where in its file a part is, in words; nothing if it is the complete file."""
    if entry.part_bytes is None:
        return ""
    end = "its end" if part.end == entry.size else f"{part.end / MIB:.9g} MiB"
    return f" from {part.start / MIB:.9g} MiB to {end}"


def _files(folder: Path) -> Iterator[Path]:
    """Yield the files of a folder that a seal covers."""
    for path in folder.rglob("*"):
        if path.is_file() and path not in (folder / NAME, folder / PIN):
            yield path


def _manifest_text(files: Mapping[str, Mapping[str, Any]], kind: str | None) -> str:
    digest = hashlib.sha256(json_text(files).encode()).hexdigest()
    facts = {"files": files, "sha256_of_files": digest}
    return json_text(facts if kind is None else {**facts, "kind": kind})


def _entry(facts: Mapping[str, Any]) -> Entry:
    """Return what a manifest says of one file. Raises: ValueError, KeyError, TypeError."""
    if "sha256" in facts:
        entry = Entry(facts["size"], (facts["sha256"],), None)
    else:
        entry = Entry(facts["size"], tuple(facts["sha256_of_parts"]), facts["part_bytes"])
    if entry.facts() != facts:
        raise ValueError(f"it says of a file what is not known here: {', '.join(facts)}")
    return entry
