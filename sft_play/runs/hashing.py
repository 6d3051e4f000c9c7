"""SHA-256 of files while they are written, by a thread: sealing them then takes little more time.

torch.save only ever appends (it raises an error otherwise), so its files are hashed as they grow.
Any other file is hashed once it has not changed for a while, and the digest counts only if the file
is the same when the folder is sealed. Loads no torch.
"""

import hashlib
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Self

READ_BYTES = 1 << 20
LARGE_BYTES = 16 << 20  # smaller files take no time afterwards
SETTLED_SECONDS = 0.1  # without a change
POLL_SECONDS = 0.02
OF_TORCH_SAVE = ".pt"  # each is written once


class Identity(NamedTuple):
    """What changes where a file is written to or replaced."""

    inode: int
    size: int
    changed_ns: int

    @classmethod
    def of(cls, path: Path) -> "Identity":
        """Return the identity of a file."""
        facts = path.stat()
        return cls(facts.st_ino, facts.st_size, facts.st_mtime_ns)


@dataclass
class Hashed:
    """The digest of the first `offset` bytes of a file."""

    identity: Identity
    seen_at: float
    total: Any = field(default_factory=hashlib.sha256)
    offset: int = 0


class HashesWhileWritten:
    """The context in which the files of a folder are written, by processes of this machine.

    Over a network disk another machine's file may be read before all of it has arrived.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self._files: dict[Path, Hashed] = {}
        self._lock = threading.Lock()  # of one reader at a time
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="hashes", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def digests(self) -> Mapping[Path, str]:
        """Return the digests of files that are as they were when they were hashed."""
        found = {}
        for path, hashed in list(self._files.items()):
            if not path.exists():  # a temporary one, which was renamed
                continue
            now = Identity.of(path)
            if path.suffix == OF_TORCH_SAVE and now.inode == hashed.identity.inode:
                self._read_on(path, hashed)
                hashed.identity = now
            if hashed.identity == now and hashed.offset == now.size:
                found[path] = hashed.total.hexdigest()
        return found

    def _follow(self) -> None:
        while not self._ended.wait(POLL_SECONDS):
            for path in list(self.folder.rglob("*")):
                try:
                    self._look_at(path)
                except FileNotFoundError:  # a temporary one
                    self._files.pop(path, None)

    def _look_at(self, path: Path) -> None:
        identity, now = Identity.of(path), time.monotonic()
        if not path.is_file() or identity.size < LARGE_BYTES:
            return
        hashed = self._files.get(path)
        is_appended = path.suffix == OF_TORCH_SAVE
        has_changed = hashed is not None and hashed.identity != identity
        if hashed is None or (has_changed and not is_appended):
            hashed = self._files[path] = Hashed(identity, now)
        if is_appended or (now - hashed.seen_at >= SETTLED_SECONDS and not hashed.offset):
            self._read_on(path, hashed)

    def _read_on(self, path: Path, hashed: Hashed) -> None:
        block = bytearray(READ_BYTES)
        view = memoryview(block)
        with self._lock, path.open("rb", buffering=0) as file:
            file.seek(hashed.offset)
            while count := file.readinto(block):
                hashed.total.update(view[:count])  # without the GIL
                hashed.offset += count


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
