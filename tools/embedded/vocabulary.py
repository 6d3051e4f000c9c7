"""The words of the small town that every text is about, and how to draw them. No torch.

Every draw takes a `random.Random`, so one seed gives one text. "a" is the right article for every
noun phrase.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Words:
    """The word lists of vocabulary.json."""

    first_names: list[str]
    surnames: list[str]
    cities: list[str]
    days: list[str]
    months: list[str]
    room_names: list[str]
    looks: list[str]
    goods: list[str]
    machines: list[str]
    faults: list[str]
    title_looks: list[str]
    title_things: list[str]
    topics: list[str]
    subjects: list[str]
    things: list[str]
    spots: list[str]
    places: list[str]
    events: list[str]
    business_names: list[str]
    business_kinds: list[str]
    number_words: list[str]


WORDS = Words(**json.loads(Path(__file__).with_name("vocabulary.json").read_text("utf-8")))


@dataclass(frozen=True, order=True)
class Date:
    """A day of the year; `month` is 1-12."""

    month: int
    day: int

    def __str__(self) -> str:
        return f"{self.day} {WORDS.months[self.month - 1]}"


def draw_full_name(rng: random.Random) -> str:
    """Return a full name, first name then surname."""
    return f"{rng.choice(WORDS.first_names)} {rng.choice(WORDS.surnames)}"


def draw_full_names(rng: random.Random, count: int) -> list[str]:
    """Return `count` full names that share neither a first name nor a surname."""
    first_names = rng.sample(WORDS.first_names, count)
    surnames = rng.sample(WORDS.surnames, count)
    return [f"{first} {last}" for first, last in zip(first_names, surnames, strict=True)]


def draw_date(rng: random.Random) -> Date:
    """Return a date; days 29-31 are left out so that every month has every day."""
    return Date(rng.randint(1, 12), rng.randint(1, 28))


def draw_day(rng: random.Random) -> str:
    """Return a weekday or a date: both read well after "on"."""
    if rng.random() < 0.5:
        return rng.choice(WORDS.days)
    return str(draw_date(rng))


def draw_time(rng: random.Random, first_hour: int = 8, last_hour: int = 18) -> str:
    """Return a full or half hour, by default of the working day: "8:00" to "18:30"."""
    return f"{rng.randint(first_hour, last_hour)}:{rng.choice(('00', '30'))}"


def draw_goods(rng: random.Random) -> str:
    """Return a thing for sale without its article, "green vase"."""
    return f"{rng.choice(WORDS.looks)} {rng.choice(WORDS.goods)}"


def draw_machine(rng: random.Random) -> str:
    """Return a thing that can be repaired without its article, "red kettle"."""
    return f"{rng.choice(WORDS.looks)} {rng.choice(WORDS.machines)}"


def draw_book(rng: random.Random) -> str:
    """Return a book title, "The Quiet Harbour"."""
    return f"The {rng.choice(WORDS.title_looks)} {rng.choice(WORDS.title_things)}"


def draw_business(rng: random.Random) -> str:
    """Return the name of a small business, "Millbrook Library"."""
    return f"{rng.choice(WORDS.business_names)} {rng.choice(WORDS.business_kinds)}"


def draw_code(rng: random.Random) -> str:
    """Return a reference, a letter and three different digits: "K-417"."""
    return f"{rng.choice('BCDFGHKLMNPRSTVWXZ')}-{''.join(rng.sample('123456789', 3))}"


def join_words(words: list[str]) -> str:
    """Return "a", "a and b" or "a, b and c"."""
    if len(words) == 1:
        return words[0]
    return f"{', '.join(words[:-1])} and {words[-1]}"


def plural(noun: str) -> str:
    """Return the plural of one of our nouns: "mugs", "boxes", "shelves"."""
    if noun.endswith("f"):
        return f"{noun[:-1]}ves"
    if noun.endswith(("s", "x", "ch", "sh")):
        return f"{noun}es"
    return f"{noun}s"


def capitalize(text: str) -> str:
    """Return `text` with its first letter in upper case and the rest as it is."""
    return text[:1].upper() + text[1:]
