"""The cache of tokenized rows. The same rows, tokenizer and policy are tokenized once.

A key is a digest of the files' content, not of their names or times: a moved file finds its
samples, a changed byte does not. An entry is sealed, and verified before it is used: a changed
bit in it would train something else. Loads no torch.
"""

import contextlib
import fcntl
import hashlib
import json
import logging
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from sft_play.data.images import file_state
from sft_play.data.rows import Json
from sft_play.errors import EnvironmentFault
from sft_play.runs import seal
from sft_play.runs.files import rename, sync

logger = logging.getLogger(__name__)

IMAGE_STATES = "image_states.jsonl"  # of an entry: the folders of its data files, then its images
LIBRARIES = ("transformers", "tokenizers", "jinja2")  # their versions may change the samples


def digest_files(paths: Iterable[Path], choice: str = "") -> str:
    """Return the SHA-256 of the contents of files, in their order, and of a choice of rows."""
    total = hashlib.sha256(choice.encode())
    for path in paths:
        with path.open("rb") as file:
            total.update(hashlib.file_digest(file, "sha256").digest())
    return total.hexdigest()


def digest_tokenizer(tokenizer: Any, template: str) -> str:
    """Return the SHA-256 of a tokenizer's backend, its special tokens and the chat template."""
    special = {name: str(token) for name, token in sorted(tokenizer.special_tokens_map.items())}
    backend = tokenizer.backend_tokenizer.to_str()
    return _digest(backend, json.dumps(special, sort_keys=True), template)


def entry_key(files_digest: str, tokenizer_digest: str, policy: Json) -> str:
    """Return the name of an entry: a digest of rows, tokenizer, policy and this package's code."""
    policy_text = json.dumps(policy, sort_keys=True)
    return _digest(files_digest, tokenizer_digest, policy_text, _digest_code())[:32]


def digest_changed_images(entry: Path, folders: Sequence[str]) -> str:
    """Return a digest of the files of an entry's images, "" if they are as they were.

    That are also those of rows that are not used. `folders` are where the paths of rows begin. Asks
    for the state of each file, and opens none.
    """
    total = hashlib.sha256()
    with (entry / IMAGE_STATES).open(encoding="utf-8") as lines:
        is_moved = json.loads(next(lines)) != folders
        is_changed = False
        for line in lines:
            path, _ = json.loads(line)
            now = f"{json.dumps([path, file_state(path)])}\n"
            is_changed |= is_moved or now != line
            total.update(now.encode())
    return _digest(*folders, total.hexdigest()) if is_changed else ""


def get_or_build(
    root: Path, key: str, build: Callable[[Path], None], check: Callable[[], None] = lambda: None
) -> Path:
    """Return the folder of an entry; `build` fills it where it does not exist yet or is damaged.

    `check` raises where what was built is not to be kept.

    If two processes want the same entry at once, the second waits for the first. An entry is built
    under another name, sealed and then renamed, so it is whole or absent. Raises EnvironmentFault.
    """
    folder = root / key
    if folder.is_dir() and seal.find_damage(folder) is None:
        return folder
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise EnvironmentFault(
            f"{root}, for tokenised rows: {error.strerror}; "
            "set DATA_CACHE_DIR to a folder that can be written"
        ) from None
    with _locked(root / f".{key}.lock"):
        if folder.is_dir():
            damage = seal.find_damage(folder)
            if damage is None:
                return folder
            logger.warning("the tokenised rows in %s are tokenised again: %s", folder, damage)
        for leftover in root.glob(f".{key}.*/"):  # of a process that was killed
            shutil.rmtree(leftover, ignore_errors=True)
        unfinished = root / f".{key}.{secrets.token_hex(4)}"
        try:
            build(unfinished)
            check()
            seal.seal(unfinished)
            shutil.rmtree(folder, ignore_errors=True)
            rename(unfinished, folder)
            sync(root)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    return folder


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock that the system releases when this process ends, however it ends."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.warning("another run tokenises the same rows; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@cache
def _digest_code() -> str:
    """Return a digest of this package's source, so that changed code never reads old entries."""
    sources = sorted(Path(__file__).parent.glob("*.*"))
    versions = [f"{name}=={metadata.version(name)}" for name in LIBRARIES]
    return _digest(*(path.read_text(encoding="utf-8") for path in sources), *versions)


def _digest(*texts: str) -> str:
    total = hashlib.sha256()
    for text in texts:
        data = text.encode("utf-8", "surrogatepass")
        total.update(f"{len(data)}:".encode() + data)
    return total.hexdigest()
