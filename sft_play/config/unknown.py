"""What to write in place of a name that is no setting. Pure.

What is known is said as a fact: the same name in another section, or what another program calls it.
A name that is only spelled alike is offered as a guess, and only where it is very much alike.
"""

import difflib
from collections.abc import Iterable
from typing import NamedTuple

from sft_play.config.foreign_keys import ADVICE, SAME_SETTING

# Words that mean something else in another section: they count in their own section alone
AMBIGUOUS = ("backend", "columns", "dropout", "mode", "name", "path", "split", "weight")
ALIKE = 0.8  # of difflib's ratio: a letter or two of a word


class Suggestion(NamedTuple):
    """What to write; one of `name` and `advice` is given."""

    name: str | None = None  # of a setting or a section
    advice: str | None = None  # a clause that says what to write
    is_guess: bool = False

    def clause(self, shown_name: str | None = None) -> str:
        """Return the end of the message; `shown_name` is how its origin spells the setting."""
        if self.advice is not None:
            return self.advice
        shown = shown_name or self.name
        if self.is_guess:
            return f"did you mean {shown}? (a guess from the spelling)"
        return f"here it is {shown}"


def suggest(path: str, known: Iterable[str], sections: Iterable[str] = ()) -> Suggestion | None:
    """Return what to write in place of a dotted name, None where nothing is known of it.

    In order: the same last word in another section, another program's name, the closest spelling of
    the whole name, the closest spelling of its last word.
    """
    names = [*known, *sections]
    lowered = path.lower()
    same_word = _with_same_last_word(lowered, names)
    if same_word is not None:
        return Suggestion(same_word)
    foreign = _foreign(lowered, names)
    if foreign is not None:
        return foreign
    close = _spelled_alike(lowered, names)
    return None if close is None else Suggestion(close, is_guess=True)


def _with_same_last_word(path: str, names: list[str]) -> str | None:
    section, _, word = path.rpartition(".")
    found = [name for name in names if name.rpartition(".")[2] == word]
    if word in AMBIGUOUS:
        top = section.partition(".")[0]
        found = [name for name in found if top and name.startswith(f"{top}.")]
    return found[0] if found else None


def _foreign(path: str, names: list[str]) -> Suggestion | None:
    for key in (path, path.rpartition(".")[2]):
        name = SAME_SETTING.get(key)
        if name in names:
            return Suggestion(name)
        if key in ADVICE:
            return Suggestion(advice=ADVICE[key])
    return None


def _spelled_alike(path: str, names: list[str]) -> str | None:
    close = difflib.get_close_matches(path, names, n=1, cutoff=ALIKE)
    if close and _is_alike(path.rpartition(".")[2], close[0].rpartition(".")[2]):
        return close[0]
    by_last_word: dict[str, str] = {}
    for name in names:
        by_last_word.setdefault(name.rpartition(".")[2], name)
    word = path.rpartition(".")[2]
    if word in AMBIGUOUS:
        return None
    close = difflib.get_close_matches(word, by_last_word, n=1, cutoff=ALIKE)
    return by_last_word[close[0]] if close else None


def _is_alike(word: str, other: str) -> bool:
    """Return whether two last words are alike: a shared section alone makes whole names so."""
    return difflib.SequenceMatcher(None, word, other).ratio() >= ALIKE
