"""A tokenized source: its samples in the store, and the facts beside them. Loads no torch."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple, Self

from sft_play.data.files import format_origin
from sft_play.data.rows import BadRow, Json
from sft_play.data.store import Store
from sft_play.data.tally import Tally
from sft_play.errors import DataError

SUMMARY = "meta.json"
BAD_ROWS = "bad_rows.jsonl"


class LongRow(NamedTuple):
    """A row over model.max_seq_len: its file in the source, its record in the file, its tokens."""

    file: int
    number: int
    tokens: int


@dataclass(frozen=True)
class StoreSummary:
    """What became of a source's rows, and the longest rows over the limit, longest first."""

    tally: Tally
    long_rows: tuple[LongRow, ...]

    def write(self, folder: Path) -> None:
        """Write the summary into a store folder."""
        facts = {"tally": self.tally.as_json(), "long": self.long_rows}
        (folder / SUMMARY).write_text(json.dumps(facts), encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read the summary that `write` wrote."""
        facts = json.loads((folder / SUMMARY).read_text(encoding="utf-8"))
        long_rows = tuple(LongRow(*row) for row in facts["long"])
        return cls(Tally.from_json(facts["tally"]), long_rows)


@dataclass(frozen=True)
class StoredBadRow:
    """A row that was set aside. Its file is a number, so a moved file keeps its cache entry."""

    file: int
    place: str  # `:line` or `[index]` in that file
    reason: str
    row: str

    def as_line(self) -> str:
        """Return the row as a line of BAD_ROWS."""
        return json.dumps(asdict(self), ensure_ascii=False) + "\n"

    def named(self, files: tuple[str, ...]) -> BadRow:
        """Return the row with the name of its file."""
        return BadRow(f"{files[self.file]}{self.place}", self.reason, self.row)


@dataclass(frozen=True)
class TokenizedSource:
    """A source and the folder of its samples; data.json holds it."""

    name: str
    files: tuple[str, ...]
    weight: float | None
    digest: str  # of the files' content
    folder: str
    file_bytes: int | None = None  # of the files; None in a data.json of an older version

    @classmethod
    def from_json(cls, facts: Json) -> Self:
        """Return the source that `asdict` gave. Raises DataError when its samples are gone."""
        source = cls(**{**facts, "files": tuple(facts["files"])})
        if not (Path(source.folder) / SUMMARY).is_file():
            raise DataError(
                f"{source.folder}: the tokenised rows of {source.name} are gone; "
                "start the run anew, which makes them again"
            )
        return source

    def open_store(self) -> Store:
        """Return the samples."""
        return Store(Path(self.folder))

    def read_summary(self) -> StoreSummary:
        """Return what was recorded when the source was tokenized."""
        return StoreSummary.read(Path(self.folder))

    def read_bad_rows(self) -> list[BadRow]:
        """Return the rows that were set aside."""
        lines = (Path(self.folder) / BAD_ROWS).read_text(encoding="utf-8").splitlines()
        return [StoredBadRow(**json.loads(line)).named(self.files) for line in lines]

    def origin(self, file: int, number: int) -> str:
        """Return `file:line` or `file[index]` of a row."""
        return format_origin(Path(self.files[file]), number)


# train; validation and test if they have rows of their own
TokenizedSplits = dict[str, tuple[TokenizedSource, ...]]


def read_bad_rows(splits: TokenizedSplits) -> dict[str, list[BadRow]]:
    """Return the rows that were set aside, of each split that has some."""
    found: dict[str, list[BadRow]] = {}
    for split, sources in splits.items():
        rows: list[BadRow] = []
        for source in sources:
            rows += source.read_bad_rows()
        if rows:
            found[split] = rows
    return found
