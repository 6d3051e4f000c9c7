"""Keys of rows and messages that training does not use, and what that means. Pure.

Each source names them once: nobody shall believe that a column counts when it does not.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from sft_play.data.loss_flags import FLAG_KEYS
from sft_play.data.messages import REASONING_KEYS
from sft_play.data.row_formats import RowFormat
from sft_play.data.rows import Json
from sft_play.data.turn_lists import is_marked_text

USED_TURN_KEYS = frozenset(
    (
        *("role", "content", "from", "value", "input", "output"),
        *("name", "tool_calls", "tool_call_id", "function_call"),
        *REASONING_KEYS,
        *FLAG_KEYS,
    )
)
TURN_PREFIX = "messages[]."
TURNS_IN_TEXT = "Human: and Assistant: in the text"
MAX_LISTED = 12  # keys without a meaning of their own
EVERY_ROW = "every row weighs the same; weights are of files: DATA_TRAIN_PATH='{a.jsonl: 3, b: 1}'"
NOT_CHOSEN = "no row is chosen or left out by it"
TEXT_ONLY = "models here take text"
MEANINGS = {
    **dict.fromkeys(("weight", "sample_weight"), EVERY_ROW),
    **dict.fromkeys(("score", "label", "rating", "quality"), NOT_CHOSEN),
    **dict.fromkeys(("loss", "mask", "train"), "flags of loss belong to messages"),
    "split": "all rows are read; name files of their own in data.train_path and data.val_path",
    **dict.fromkeys(("chosen", "rejected"), "preference training is not here"),
    **dict.fromkeys(("image", "images", "audio", "audios", "video", "videos"), TEXT_ONLY),
    **dict.fromkeys(("tools", "functions"), "plain texts and segments have no functions"),
    "context": "to put it behind the question: "
    "DATA_COLUMNS='{instruction: <question>, input: context, output: <answer>}'",
    "definition": "to put it before the inputs: "
    "DATA_COLUMNS='{instruction: definition, input: inputs, output: targets}'",
    f"{TURN_PREFIX}prefix": "the whole answer is trained",
    TURNS_IN_TEXT: "every token is trained, also the questions'; "
    "to train the answers alone: DATA_COLUMNS='{messages: text}'",
}


class UnusedKeys:
    """Counts the rows in which a key that is not used has a value."""

    def __init__(self, row_format: RowFormat):
        self._used = row_format.file_columns
        self._turn_column = row_format.turn_column
        self._text_column = row_format.required[0] if row_format.name == "text" else None
        self.rows: Counter[str] = Counter()

    def add(self, record: Json) -> None:
        """Count the keys of a record, and those of its turns."""
        for key, value in record.items():
            if key not in self._used and _is_given(value):
                self.rows[key] += 1
        if self._text_column is not None:
            text = record.get(self._text_column)
            if isinstance(text, str) and is_marked_text(text):
                self.rows[TURNS_IN_TEXT] += 1
        turns = record.get(self._turn_column) if self._turn_column else None
        if not isinstance(turns, list):
            return
        unused = [
            turn for turn in turns if isinstance(turn, dict) and not turn.keys() <= USED_TURN_KEYS
        ]
        if unused:
            self._add_turns(unused)

    def _add_turns(self, turns: Iterable[Json]) -> None:
        keys: set[str] = set()
        for turn in turns:
            keys.update(key for key in turn.keys() - USED_TURN_KEYS if _is_given(turn[key]))
        for key in keys:
            self.rows[f"{TURN_PREFIX}{key}"] += 1

    def add_columns(self, rows_of: Mapping[str, int]) -> None:
        """Count the columns of an Arrow batch, of which records hold only the used ones."""
        for column, rows in rows_of.items():
            if column not in self._used and rows:
                self.rows[column] += rows


def unused_notes(unused: Mapping[str, int], source: str) -> list[str]:
    """Return what becomes of a source's unused keys, as sentences."""
    notes = []
    others = []
    for key in sorted(unused):
        if key in MEANINGS:
            notes.append(f"{source}: {key} ({unused[key]:,} rows) not used: {MEANINGS[key]}")
        else:
            others.append(key)
    if others:
        more = len(others) - MAX_LISTED
        listed = ", ".join(others[:MAX_LISTED]) + (f" and {more} more" if more > 0 else "")
        notes.append(f"{source}: not used: {listed}")
    return notes


def _is_given(value: Any) -> bool:
    return value not in (None, "", [], {})
