"""The cache of tokenized rows. The same rows, tokenizer and policy are tokenized once.

A key is a digest of the files' content, not of their names or times: a moved file is found in the
cache, a changed byte is not. An entry is sealed, and verified before it is used: a changed
bit would change the training. An entry also records what happened to the source's rows.
Loads no torch.
"""

import contextlib
import fcntl
import hashlib
import json
import logging
import re
import secrets
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple, Self

from sft_play.data.file_kinds import file_format
from sft_play.data.images import file_state
from sft_play.data.ledger import Tally
from sft_play.data.rows import BadRow, Json
from sft_play.data.store import RECORDS, Split, Store
from sft_play.data.templates import stop_ids
from sft_play.errors import DataError, EnvironmentFault
from sft_play.runs import seal
from sft_play.runs.files import rename, sync

logger = logging.getLogger(__name__)

IMAGE_STATES = "image_states.jsonl"  # of an entry: the folders of its data files, then its images
LIBRARIES = ("transformers", "tokenizers", "jinja2")  # their versions may change the samples
SUMMARY = "meta.json"
BAD_ROWS = "bad_rows.jsonl"
MAX_PARTS = 99  # of a path
NO_WORD = re.compile(r"[^\w.-]+")  # characters that a tracker's name may not contain


def digest_tokenizer(tokenizer: Any, template: str) -> str:
    """Return the SHA-256 of a tokenizer's backend, special tokens, stops and chat template."""
    special = {name: str(token) for name, token in sorted(tokenizer.special_tokens_map.items())}
    backend = tokenizer.backend_tokenizer.to_str()
    special["stops"] = str(sorted(stop_ids(tokenizer)))  # also those that the base's files name
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


def read_image_paths(entry: Path) -> list[str]:
    """Return the paths of the images that the rows of an entry name."""
    with (entry / IMAGE_STATES).open(encoding="utf-8") as lines:
        next(lines)
        return [json.loads(line)[0] for line in lines]


def get_or_build(
    root: Path, key: str, build: Callable[[Path], None], check: Callable[[], None] = lambda: None
) -> Path:
    """Return the folder of an entry; `build` fills it if it does not exist yet or is damaged.

    `check` raises if the new entry must not be kept.

    If two processes need the same entry, the second waits for the first. An entry is built
    under another name, sealed, then renamed, so it is complete or absent. Raises EnvironmentFault.
    """
    folder = root / key
    if folder.is_dir() and seal.find_damage(folder) is None:
        return folder
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise EnvironmentFault(
            f"{root}, for tokenized rows: {error.strerror}; "
            "set DATA_CACHE_DIR to a folder that can be written"
        ) from None
    with _locked(root / f".{key}.lock"):
        if folder.is_dir():
            damage = seal.find_damage(folder)
            if damage is None:
                return folder
            logger.warning("the tokenized rows in %s are tokenized again: %s", folder, damage)
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
    """Acquire a lock that the system releases when this process ends, for any reason."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.warning("another run tokenizes the same rows; waiting for it")
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


class LongRow(NamedTuple):
    """A row over model.max_seq_len: its file in the source, its record in the file, its tokens."""

    file: int
    number: int
    tokens: int


@dataclass(frozen=True)
class StoreSummary:
    """What happened to a source's rows, and the longest rows over the limit, longest first."""

    tally: Tally
    long_rows: Sequence[LongRow]

    def write(self, folder: Path) -> None:
        """Write the summary into a store folder."""
        facts = {"tally": self.tally.as_json(), "long": self.long_rows}
        (folder / SUMMARY).write_text(json.dumps(facts), encoding="utf-8")


@dataclass(frozen=True)
class TokenizedSource:
    """A source and the folder of its samples, as data.json has it."""

    name: str
    files: tuple[str, ...]
    weight: float | None
    digest: str  # of the files' content
    folder: str
    file_bytes: int | None = None  # of the files; None in a data.json of an older version
    choice: str = ""  # which of its rows were used; empty for all rows
    title: str | None = None  # given by the user
    unread: dict[str, int] = field(default_factory=dict)  # other files in its folder, by ending

    @property
    def label(self) -> str:
        """Its name in ledgers with the used rows, and its name in scores."""
        words = (self.name, self.choice, self.title and f"as {self.title}")
        return " ".join(filter(None, words))

    @classmethod
    def from_json(cls, facts: Json) -> Self:
        """Return the source from `asdict`. Raises DataError if its samples are missing."""
        source = cls(**{**facts, "files": tuple(facts["files"])})
        if not (Path(source.folder) / RECORDS).is_file():
            raise DataError(
                f"{source.folder}: the tokenized rows of {source.name} are gone; "
                "start the run again, which makes new ones"
            )
        return source

    def read_summary(self) -> StoreSummary:
        """Return what was recorded when the source was tokenized."""
        facts = json.loads((Path(self.folder) / SUMMARY).read_text(encoding="utf-8"))
        long_rows = [LongRow(*row) for row in facts["long"]]
        return StoreSummary(Tally.from_json(facts["tally"]), long_rows)

    def read_bad_rows(self) -> list[BadRow]:
        """Return the rows that were quarantined."""
        with (Path(self.folder) / BAD_ROWS).open(encoding="utf-8") as lines:
            rows = [json.loads(line) for line in lines]
        return [
            BadRow(f"{self.files[row['file']]}{row['place']}", row["reason"], row["row"])
            for row in rows
        ]


def open_samples(sources: Sequence[TokenizedSource]) -> Split:
    """Return all samples of sources."""
    names = name_sources(sources)
    return Split.whole(
        [Store(Path(one.folder), one.files, name) for one, name in zip(sources, names, strict=True)]
    )


def name_sources(sources: Sequence[TokenizedSource]) -> list[str]:
    """Return the name of each source in scores.

    It is the one that the user gave, or as much of the path's end as tells it from other paths.
    """
    given = [
        one.title or one.name.removesuffix(file_format(Path(one.name)) or "") for one in sources
    ]
    for length in range(1, MAX_PARTS):
        names = ["_".join(Path(name).parts[-length:]) for name in given]
        if len(set(names)) == len(set(given)):
            break
    names = [one.title or name for one, name in zip(sources, names, strict=True)]
    return [NO_WORD.sub("_", name).strip("_") for name in names]


# train; validation and test if they have rows
TokenizedSplits = dict[str, tuple[TokenizedSource, ...]]


def read_bad_rows(splits: TokenizedSplits) -> dict[str, list[BadRow]]:
    """Return the quarantined rows of each split that has some."""
    found: dict[str, list[BadRow]] = {}
    for split, sources in splits.items():
        rows = [row for source in sources for row in source.read_bad_rows()]
        if rows:
            found[split] = rows
    return found
