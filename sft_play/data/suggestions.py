"""What to type for a file whose columns no row format has: data.columns, filled in. Pure.

A suggestion is checked on the file's first rows before it is given.
"""

import json
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from sft_play.data.rows import Json
from sft_play.data.turn_lists import is_marked_text

# Names that files give to a question, to what it is about, and to its answer; likeliest first
QUESTIONS = (
    *(
        "definition",
        "instruction",
        "instructions",
        "prompt",
        "question",
        "query",
        "problem",
        "input",
        "inputs",
    ),
    *("user", "human", "ask", "request", "document", "article", "text", "source", "title"),
)
EXTRAS = ("context", "input", "inputs", "passage")
ANSWERS = (
    *("output", "outputs", "response", "responses", "completion", "answer", "answers"),
    *("target", "targets", "assistant", "solution", "reply", "bot", "summary", "highlights"),
    *("chosen", "best_answer", "generation", "translation"),
)
MAX_DEPTH = 4
PLAIN_NAME = re.compile(r"[A-Za-z_][\w.-]*")  # written in YAML without quotes

Columns = Mapping[str, str]


class Leaf(NamedTuple):
    """A text in a record: its path, and the names on the way, the innermost first."""

    path: str
    names: tuple[str, ...]
    is_part: bool  # it stands beside other texts in each object of a list


def columns_setting(columns: Columns) -> str:
    """Return data.columns as it is typed in a shell.

    >>> columns_setting({"question": "problem", "answer": "a.0"})
    "DATA_COLUMNS='{question: problem, answer: a.0}'"
    """
    pairs = []
    for field, column in columns.items():
        is_plain = PLAIN_NAME.fullmatch(column)
        pairs.append(f"{field}: {column if is_plain else json.dumps(column, ensure_ascii=False)}")
    return "DATA_COLUMNS=" + shlex.quote("{" + ", ".join(pairs) + "}")


def suggest_columns(records: Sequence[Json], works: Callable[[Columns], bool]) -> Columns | None:
    """Return columns with which the rows can be read, None where nobody can guess them."""
    return next(filter(works, _candidates(records[0])), None)


def suggest_chosen(records: Sequence[Json], works: Callable[[Columns], bool]) -> Columns | None:
    """Return columns that train the preferred answers of a preference set alone."""
    record = records[0]
    candidates: list[Columns] = []
    chosen = record.get("chosen")
    if not isinstance(chosen, str) or is_marked_text(chosen):
        candidates.append({"messages": "chosen"})
    for name in ("prompt", *QUESTIONS, "messages", "conversations"):
        if name in record:
            candidates.append({"prompt": name, "completion": "chosen"})
    candidates.append({"text": "chosen"})
    return next(filter(works, candidates), None)


def _candidates(record: Json) -> Iterator[Columns]:
    for path in _turn_lists(record, ""):
        yield {"messages": path}
    leaves = list(_leaves(record, "", ()))
    question = _first_named(leaves, QUESTIONS, ())
    if question is None:
        parts = [leaf for leaf in leaves if not leaf.is_part]  # of a turn, each would be a row
        yield from ({"text": leaf.path} for leaf in parts if leaf.names[0] in ("text", "content"))
        return
    answer = _first_named(leaves, ANSWERS, (question,))
    if answer is None:
        return
    extra = _first_named(leaves, EXTRAS, (question, answer))
    if extra is None:
        yield {"question": question.path, "answer": answer.path}
    else:  # without it, the question could not be answered
        yield {"instruction": question.path, "input": extra.path, "output": answer.path}


def _turn_lists(record: Json, place: str) -> Iterator[str]:
    """Yield the paths of lists of turns, in objects of the record too."""
    for name, value in record.items():
        first = value[0] if isinstance(value, list) and value else None
        if isinstance(first, dict) and ({"role", "content"} <= first.keys() or "from" in first):
            yield f"{place}{name}"
        elif isinstance(value, dict) and "." not in name:
            yield from _turn_lists(value, f"{place}{name}.")


def _leaves(value: Any, path: str, names: tuple[str, ...], is_part: bool = False) -> Iterator[Leaf]:
    """Yield the texts of a value; of a list of texts the first, of a list of objects every one."""
    if isinstance(value, str):
        yield Leaf(path, names or ("",), is_part)
    elif len(names) == MAX_DEPTH:
        return
    elif isinstance(value, dict):
        for name, held in value.items():
            if "." not in name:
                inner = f"{path}.{name}" if path else name
                yield from _leaves(held, inner, (name.lower(), *names), is_part)
    elif isinstance(value, list) and value:
        inner = path if isinstance(value[0], dict) else f"{path}.0"
        texts = value[0].values() if isinstance(value[0], dict) else ()
        has_several = sum(isinstance(text, str) for text in texts) > 1
        yield from _leaves(value[0], inner, names, is_part or has_several)


def _first_named(
    leaves: Sequence[Leaf], wanted: Sequence[str], taken: Sequence[Leaf]
) -> Leaf | None:
    """Return the leaf with the likeliest name; its own name counts before those around it."""
    for name in wanted:
        for leaf in leaves:
            if leaf not in taken and name == leaf.names[0]:
                return leaf
    for name in wanted:
        for leaf in leaves:
            if leaf not in taken and name in leaf.names:
                return leaf
    return None
