"""Where tokenised rows are kept, and under which key: the same rows, tokenizer and policy are tokenised once. Loads no torch.

A key holds the content of the files, never their names or times: a moved file finds its samples, a changed byte does not.
"""

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from sft_play.config.schema import Config

logger = logging.getLogger(__name__)

COMPLETE = "meta.json"  # written last into an entry
LIBRARIES = ("transformers", "tokenizers", "jinja2")  # whose versions may change what a row becomes


def root_of(config: Config) -> Path:
    """Return the folder of the cache."""
    return Path(config.data.cache_dir or Path(config.train.output_dir) / ".data").resolve()


def digest_of_files(paths: Iterable[Path]) -> str:
    """Return the SHA-256 of the contents of files, in their order."""
    total = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            total.update(hashlib.file_digest(file, "sha256").digest())
    return total.hexdigest()


def digest_of_tokenizer(tokenizer: Any, template: str) -> str:
    """Return the SHA-256 of what a tokenizer makes of a text, its special tokens, and the chat template."""
    special = {name: str(token) for name, token in sorted(tokenizer.special_tokens_map.items())}
    return _digest(
        tokenizer.backend_tokenizer.to_str(), json.dumps(special, sort_keys=True), template
    )


def key_of(content: str, tokenizer: str, policy: Mapping[str, Any]) -> str:
    """Return the name of an entry: digests of the rows and the tokenizer, what is done with rows, and the code that does it."""
    return _digest(content, tokenizer, json.dumps(policy, sort_keys=True), _digest_of_code())[:32]


def entry(root: Path, key: str, build: Callable[[Path], None]) -> Path:
    """Return the folder of an entry; `build` fills it where it is not there yet.

    Two processes that want the same one at once: the second waits for the first. An entry is built aside and renamed, so
    that it is complete or absent.
    """
    folder = root / key
    if (folder / COMPLETE).is_file():
        return folder
    root.mkdir(parents=True, exist_ok=True)
    with _locked(root / f".{key}.lock"):
        if (folder / COMPLETE).is_file():
            return folder
        aside = root / f".{key}.{secrets.token_hex(4)}"
        try:
            build(aside)
            assert (aside / COMPLETE).is_file(), f"{COMPLETE} says that an entry is complete"
            _sync(aside)
            shutil.rmtree(folder, ignore_errors=True)  # a damaged one: it is not complete
            aside.rename(folder)
        finally:
            shutil.rmtree(aside, ignore_errors=True)
    return folder


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock that ends with this process, however it ends."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.warning("another run tokenises the same rows; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _sync(folder: Path) -> None:
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())


@cache
def _digest_of_code() -> str:
    """Of this room's sources: whoever changes how rows are rendered need not remember to raise a version."""
    sources = sorted(Path(__file__).parent.glob("*.py"))
    versions = [f"{name}=={metadata.version(name)}" for name in LIBRARIES]
    return _digest(*(path.read_text(encoding="utf-8") for path in sources), *versions)


def _digest(*texts: str) -> str:
    total = hashlib.sha256()
    for text in texts:
        data = text.encode("utf-8", "surrogatepass")
        total.update(f"{len(data)}:".encode() + data)
    return total.hexdigest()
