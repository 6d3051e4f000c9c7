"""How far the reading of a run's rows has come: data-check tells it when an error ends it."""

from dataclasses import dataclass, field

from sft_play.data.rows import Json
from sft_play.data.tally import Tally


@dataclass
class SourceAccount:
    """What was read of a source so far; without a tally, nothing."""

    split: str
    name: str
    files: int
    tally: Tally | None = None

    def as_json(self) -> Json:
        tally = self.tally.as_json() if self.tally else None
        return {"split": self.split, "name": self.name, "files": self.files, "tally": tally}

    def as_line(self) -> str:
        """Return the account as a line of text."""
        files = "1 file" if self.files == 1 else f"{self.files} files"
        start = f"{self.split} {self.name} ({files}): "
        if self.tally is None:
            return start + "no row read"
        dropped = [f"{reason} {rows:,}" for reason, rows in self.tally.dropped.items() if rows]
        return start + ", ".join([f"{self.tally.rows_in:,} rows read", *dropped])


@dataclass
class DataAccount:
    """What was read of all sources so far."""

    sources: dict[tuple[str, str], SourceAccount] = field(default_factory=dict)

    def find(self, split: str, name: str, files: int) -> None:
        """Enter a source whose files are known."""
        self.sources[split, name] = SourceAccount(split, name, files)

    def read(self, split: str, name: str, files: int, tally: Tally) -> None:
        """Enter what became of the rows of a source that were read."""
        self.sources[split, name] = SourceAccount(split, name, files, tally)

    def as_json(self) -> Json:
        """Return the account as data-check prints it after an error."""
        sources = [source.as_json() for source in self.sources.values()]
        return {"complete": False, "sources": sources}

    def lines(self) -> list[str]:
        """Return the account as lines of text."""
        lines = [source.as_line() for source in self.sources.values()]
        return ["read before the error:", *(f"  {line}" for line in lines)] if lines else []
