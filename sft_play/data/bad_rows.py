"""The error for rows that cannot be used: one message where they have one cause."""

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from sft_play.data.files import encoding_hint
from sft_play.data.rows import MAX_LISTED_ROWS, BadRow
from sft_play.errors import DataError

# Of the rows that were read. The others are no reason to list a cause row by row.
NEARLY_ALL = 0.9
MOST = 0.5  # of the rows, where the cause is the chat template
# What differs between rows of one cause: quoted texts, values, numbers
VARYING = re.compile(r"'[^']*'|\"[^\"]*\"|(?<= is ).*(?=, not )|\d+")
PLACE = re.compile(r"(:\d+|\[\d+\])$")
GO_ON_WITHOUT = (
    "correct them, or go on without: DATA_ON_BAD_ROW=quarantine sets them aside in the run's folder"
)
TEMPLATE_CAUSE = "the chat template"
NAMES_A_SETTING = re.compile(r"\b(?:DATA|MODEL)_[A-Z_]+=")
TEMPLATE = (
    "the chat template of model.name does this; "
    "MODEL_CHAT_TEMPLATE=default uses a plain one, or name a Jinja file of your own"
)


@dataclass
class BadRows:
    """Bad rows, counted by cause; the first ones are kept."""

    rows_read: int = 0
    total: int = 0
    first: list[BadRow] = field(default_factory=list)
    causes: Counter[str] = field(default_factory=Counter)
    first_of_cause: dict[str, BadRow] = field(default_factory=dict)

    def add(self, rows: Iterable[BadRow]) -> None:
        """Count bad rows."""
        for row in rows:
            cause = VARYING.sub("_", row.reason)
            self.total += 1
            self.causes[cause] += 1
            self.first_of_cause.setdefault(cause, row)
            if len(self.first) < MAX_LISTED_ROWS:
                self.first.append(row)

    def refuse(self) -> NoReturn:
        """Raise DataError: with the cause that nearly all rows have, else with the first rows."""
        ((cause, count),) = self.causes.most_common(1)
        row = self.first_of_cause[cause]
        share = MOST if row.reason.startswith(TEMPLATE_CAUSE) else NEARLY_ALL
        if self.rows_read > MAX_LISTED_ROWS and count >= share * self.rows_read:
            lines = [
                f"{row.origin}: {row.reason}",
                f"so it is with {count:,} of {self.rows_read:,} rows, the first of them named",
            ]
            raise DataError("\n".join([*lines, *self._hints([row])]))
        lines = [f"{row.origin}: {row.reason}" for row in self.first]
        if self.total > len(self.first):
            lines.append(f"... and {self.total - len(self.first)} more bad rows")
        raise DataError("\n".join([*lines, *self._hints(self.first), GO_ON_WITHOUT]))

    def _hints(self, rows: Iterable[BadRow]) -> list[str]:
        """Return what helps against the causes of rows, each once."""
        hints: dict[str, None] = {}
        for row in rows:
            if row.reason.startswith(("not UTF-8", "a text is not UTF-8")):
                hints[encoding_hint(Path(PLACE.sub("", row.origin)))] = None
            elif row.reason.startswith(TEMPLATE_CAUSE) and not NAMES_A_SETTING.search(row.reason):
                hints[TEMPLATE] = None
        return [hint for hint in hints if hint]


def refuse_bad_rows(rows: Iterable[BadRow], rows_read: int = 0) -> NoReturn:
    """Raise DataError for bad rows among `rows_read`; 0: how many were read does not matter."""
    bad = BadRows(rows_read)
    bad.add(rows)
    bad.refuse()
