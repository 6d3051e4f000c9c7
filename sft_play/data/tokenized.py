"""A source whose rows are tokenized: its store, what became of its rows, and its name in scores.

Loads no torch.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Self

from sft_play.data.files import file_format
from sft_play.data.ledger import Tally
from sft_play.data.rows import BadRow, Json
from sft_play.data.store import RECORDS, Split, Store
from sft_play.errors import DataError

SUMMARY = "meta.json"
BAD_ROWS = "bad_rows.jsonl"
MAX_PARTS = 99  # of a path
NO_WORD = re.compile(r"[^\w.-]+")  # what no tracker's name may have


class LongRow(NamedTuple):
    """A row over model.max_seq_len: its file in the source, its record in the file, its tokens."""

    file: int
    number: int
    tokens: int


@dataclass(frozen=True)
class StoreSummary:
    """What became of a source's rows, and the longest rows over the limit, longest first."""

    tally: Tally
    long_rows: Sequence[LongRow]

    def write(self, folder: Path) -> None:
        """Write the summary into a store folder."""
        facts = {"tally": self.tally.as_json(), "long": self.long_rows}
        (folder / SUMMARY).write_text(json.dumps(facts), encoding="utf-8")


@dataclass(frozen=True)
class TokenizedSource:
    """A source and the folder of its samples; data.json has it."""

    name: str
    files: tuple[str, ...]
    weight: float | None
    digest: str  # of the files' content
    folder: str
    file_bytes: int | None = None  # of the files; None in a data.json of an older version
    choice: str = ""  # which of its rows were taken; empty for all of them
    title: str | None = None  # that the user gave it

    @property
    def label(self) -> str:
        """Its name in ledgers, with which of its rows were taken, and its name in scores."""
        words = (self.name, self.choice, self.title and f"as {self.title}")
        return " ".join(filter(None, words))

    @classmethod
    def from_json(cls, facts: Json) -> Self:
        """Return the source that `asdict` gave. Raises DataError when its samples are gone."""
        source = cls(**{**facts, "files": tuple(facts["files"])})
        if not (Path(source.folder) / RECORDS).is_file():
            raise DataError(
                f"{source.folder}: the tokenised rows of {source.name} are gone; "
                "start the run anew, which makes them again"
            )
        return source

    def read_summary(self) -> StoreSummary:
        """Return what was recorded when the source was tokenized."""
        facts = json.loads((Path(self.folder) / SUMMARY).read_text(encoding="utf-8"))
        long_rows = [LongRow(*row) for row in facts["long"]]
        return StoreSummary(Tally.from_json(facts["tally"]), long_rows)

    def read_bad_rows(self) -> list[BadRow]:
        """Return the rows that were set aside."""
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


# train; validation and test if they have rows of their own
TokenizedSplits = dict[str, tuple[TokenizedSource, ...]]


def read_bad_rows(splits: TokenizedSplits) -> dict[str, list[BadRow]]:
    """Return the rows that were set aside, of each split that has some."""
    found: dict[str, list[BadRow]] = {}
    for split, sources in splits.items():
        rows = [row for source in sources for row in source.read_bad_rows()]
        if rows:
            found[split] = rows
    return found
