"""Hashes of rows: equal ones are found among training, validation and test rows. Loads no torch."""

import re
import unicodedata
from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

from sft_play.data.rows import Images, Row

HASHED = 64  # messages, each of which is hashed several times


class RowHashes(NamedTuple):
    """64-bit hashes of a row.

    `exact` is the hash of all its text; `normalized`, of its words without case, punctuation and
    spacing; `question`, of the words before its last trained answer, or of all if there are none.
    """

    exact: int
    normalized: int
    question: int
    group: int = 0  # of its value in the column data.split_by


def hash_rows(rows: Sequence[Row]) -> RowHashes:
    """Return hashes of a record's rows, which are trained or evaluated on together."""
    found = []
    for values in zip(*map(hash_row, rows), strict=True):
        distinct = sorted(set(values))
        found.append(distinct[0] if len(distinct) == 1 else _hash(repr(distinct)))
    return RowHashes(*found)


def hash_piece(hashes: RowHashes, piece: int) -> RowHashes:
    """Return hashes of a piece of a plain text, which is held out or trained separately."""
    names = ("exact", "normalized", "question")
    return hashes._replace(**{name: _hash(f"{getattr(hashes, name)} {piece}") for name in names})


def hash_row(row: Row) -> RowHashes:
    """Return hashes of a row without its system message."""
    exact = content = "" if row.messages else row.plain_text
    asked: int | None = None  # messages before the last trained answer
    contents: list[str] = []
    facts: list[Any] = []
    for m in row.messages:
        images = _key(m.images)
        calls = (m.reasoning, m.tool_calls, m.name, m.tool_call_id)
        facts.append((m.role, m.content, *calls, images))
        if m.role == "system":
            continue
        if m.role == "assistant" and m.is_trained:
            asked = len(contents)
        contents.append(f"{m.content} {images}" if images else m.content)
    if row.messages:
        content = "\n".join(contents)
        exact = repr(facts + ([row.variables] if row.variables else []))
    question = "\n".join(contents[:asked])
    asked_words = _words(question)
    # a text may have no words
    words = f"{asked_words} {_words(content[len(question) :])}".strip() or content
    group = _hash(row.group) if row.group else 0
    return RowHashes(_hash(exact), _hash(words), _hash(asked_words or question or words), group)


def forget_images() -> None:
    """Read image files again: another chunk may be read much later."""
    _key.cache_clear()


@lru_cache(HASHED)
def _key(images: Images) -> str:
    """Return the key of a message's images: a hash of their bytes."""
    data = (image.data or Path(image.path).read_bytes() for image in images)
    return " ".join(blake2b(each, digest_size=8).hexdigest() for each in data)


def _words(text: str) -> str:
    if text.isascii():
        return " ".join(re.findall(r"\w+", text.lower()))
    composed = unicodedata.normalize("NFC", text)
    words = " ".join(re.findall(r"\w+", composed.casefold()))
    return unicodedata.normalize("NFKC", words)  # at once, punctuation would cost thrice the time


def _hash(text: str) -> int:
    digest = blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little")
