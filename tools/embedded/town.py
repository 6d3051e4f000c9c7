"""The small town that every text is about: its words, the notes that its people send, and facts.

Every draw takes a `random.Random`, so one seed gives one text. "a" is the right article for every
noun phrase. A note is a record: a kind of note_kinds.json with its values. Facts are drawn together
with the passage that tells them and the right answers. No torch.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from pydantic import TypeAdapter

Rng = random.Random


def read_json(name: str) -> Any:
    """Return the value of a JSON file of this folder."""
    return json.loads(Path(__file__).with_name(name).read_text("utf-8"))


WORDS = SimpleNamespace(**read_json("vocabulary.json"))
PHRASES = read_json("phrases.json")  # ways to say one thing
MESSAGES = read_json("messages.json")  # {desk: templates of messages for it}


def say(rng: Rng, phrase: str, **values: object) -> str:
    """Return one way to say something, with these values."""
    return rng.choice(PHRASES[phrase]).format(**values)


class Date(NamedTuple):
    """A day of the year; `month` is 1-12."""

    month: int
    day: int

    def __str__(self) -> str:
        return f"{self.day} {WORDS.months[self.month - 1]}"


def draw_full_names(rng: Rng, count: int) -> list[str]:
    """Return `count` full names that share neither a first name nor a surname."""
    first_names = rng.sample(WORDS.first_names, count)
    surnames = rng.sample(WORDS.surnames, count)
    return [f"{first} {last}" for first, last in zip(first_names, surnames, strict=True)]


def draw_date(rng: Rng) -> Date:
    """Return a date; days 29-31 are left out so that every month has every day."""
    return Date(rng.randint(1, 12), rng.randint(1, 28))


def draw_time(rng: Rng, first_hour: int = 8, last_hour: int = 18) -> str:
    """Return a full or half hour, by default of the working day: "8:00" to "18:30"."""
    return f"{rng.randint(first_hour, last_hour)}:{rng.choice(('00', '30'))}"


def draw_pair(rng: Rng, first: list[str], second: list[str]) -> str:
    """Return a word of each list: "green vase", or "Millbrook Library"."""
    return f"{rng.choice(first)} {rng.choice(second)}"


def draw_goods(rng: Rng) -> str:
    """Return a thing for sale without its article, "green vase"."""
    return draw_pair(rng, WORDS.looks, WORDS.goods)


def draw_machine(rng: Rng) -> str:
    """Return a thing that can be repaired without its article, "red kettle"."""
    return draw_pair(rng, WORDS.looks, WORDS.machines)


def draw_book(rng: Rng) -> str:
    """Return a book title, "The Quiet Harbour"."""
    return f"The {draw_pair(rng, WORDS.title_looks, WORDS.title_things)}"


def draw_business(rng: Rng) -> str:
    """Return the name of a small business, "Millbrook Library"."""
    return draw_pair(rng, WORDS.business_names, WORDS.business_kinds)


def join_words(words: list[str]) -> str:
    """Return "a", "a and b" or "a, b and c"."""
    *first, last = words
    return f"{', '.join(first)} and {last}" if first else last


def plural(noun: str) -> str:
    """Return the plural of one of our nouns: "mugs", "boxes", "shelves"."""
    if noun.endswith("f"):
        return f"{noun[:-1]}ves"
    return f"{noun}es" if noun.endswith(("s", "x", "ch", "sh")) else f"{noun}s"


def capitalize(text: str) -> str:
    """Return `text` with its first letter in upper case and the rest as it is."""
    return text[:1].upper() + text[1:]


@dataclass(frozen=True)
class Field:
    """Templates for one value of a note: questions for it and the sentence that answers them."""

    questions: list[str]
    answer: str


@dataclass(frozen=True)
class NoteKind:
    """One kind of note; `person` names the field that holds who it is about."""

    name: str
    person: str
    changeable: str
    fields: dict[str, Field]
    notes: list[str]
    terse: str
    polite: str
    subject: str
    summary: str


KINDS = TypeAdapter(list[NoteKind]).validate_python(read_json("note_kinds.json"))


@dataclass(frozen=True)
class Record:
    """A kind of note with its values, {field: value} in the order of the kind's fields."""

    kind: NoteKind
    values: dict[str, str]

    @property
    def person(self) -> str:
        """The full name of the person whom the note is about."""
        return self.values[self.kind.person]

    @property
    def first_name(self) -> str:
        """The first name of that person."""
        return self.person.split()[0]

    def fill(self, template: str) -> str:
        """Return `template` with this record's values; `{first}` is the person's first name."""
        return template.format(first=self.first_name, **self.values)

    def note(self, rng: Rng) -> str:
        """Return the note as one plain sentence."""
        return self.fill(rng.choice(self.kind.notes))

    def answer(self, field: str) -> str:
        """Return the full sentence that states `field`."""
        return self.fill(self.kind.fields[field].answer)

    def ask(self, rng: Rng) -> tuple[str, str, str]:
        """Return a field, a question for it that does not give it away, and its answer."""
        field = rng.choice(list(self.kind.fields))
        question = self.fill(rng.choice(self.kind.fields[field].questions))
        return field, question, self.answer(field)

    def reply(self) -> str:
        """Return two friendly sentences to the person of the note."""
        body = self.fill(self.kind.polite).split(", ", 1)[1]
        return f"Thank you for your message, {self.first_name}. {capitalize(body)}"

    def surname_first(self) -> str:
        """Return the person's name as an index has it, "Bell, Ada"."""
        first, last = self.person.split()
        return f"{last}, {first}"

    def draw_fields(self, rng: Rng, least: int, most: int) -> list[str]:
        """Return some field names in a random order."""
        return rng.sample(list(self.kind.fields), rng.randint(least, most))

    def as_json(self, fields: list[str]) -> str:
        """Return the chosen fields as a one-line JSON object in the given order."""
        return json.dumps({name: self.values[name] for name in fields}, ensure_ascii=False)

    def as_row(self, fields: list[str]) -> str:
        """Return the chosen values as a table row, "Ada Bell | 4 March"."""
        return " | ".join(self.values[name] for name in fields)

    def as_form(self, fields: list[str]) -> str:
        """Return the chosen fields as lines, "Guest: Ada Bell"."""
        return "\n".join(f"{capitalize(name)}: {self.values[name]}" for name in fields)

    def change(self, rng: Rng) -> Record:
        """Return the record with a changeable value that it does not hold yet."""
        field = self.kind.changeable
        while True:
            value = draw_value(field, rng)
            if value not in self.values.values():
                return replace(self, values={**self.values, field: value})


def draw_value(field: str, rng: Rng) -> str:
    """Return a value for a field that depends on no other field of the record."""
    match field:
        case "room":
            return f"{rng.choice(WORDS.room_names)} Room"
        case "day":  # a weekday or a date: both read well after "on"
            return rng.choice(WORDS.days) if rng.random() < 0.5 else str(draw_date(rng))
        case "date":
            return str(draw_date(rng))
        case "time":
            return draw_time(rng)
        case "city" | "origin":
            return rng.choice(WORDS.cities)
        case "code":  # a letter and three different digits: "K-417"
            return f"{rng.choice('BCDFGHKLMNPRSTVWXZ')}-{''.join(rng.sample('123456789', 3))}"
        case "book":
            return draw_book(rng)
        case "shelf":
            return f"shelf {rng.randint(1, 9)}"
    return rng.choice(getattr(WORDS, f"{field}s"))  # a fault, topic or subject


def draw_record(rng: Rng, person: str) -> Record:
    """Return a record of any kind about `person`."""
    kind = rng.choice(KINDS)
    start, end = rng.sample(WORDS.cities, 2)
    first_name = person.split()[0]
    colleague = rng.choice([name for name in WORDS.first_names if name != first_name])
    item = draw_machine(rng) if kind.name == "repair" else draw_goods(rng)
    known = {kind.person: person, "start": start, "end": end, "colleague": colleague, "item": item}
    values = {field: known.get(field) or draw_value(field, rng) for field in kind.fields}
    return Record(kind, values)


class Facts(NamedTuple):
    """Facts of one kind: a passage that tells them, and what `ask` gives a question for."""

    passage: str
    keys: list[str]
    ask: Callable[[str, Rng], tuple[str, str]]  # return a question and its answer


def draw_places(rng: Rng, count: int) -> Facts:
    """Return where things are kept, each in a spot of its own."""
    things = rng.sample(WORDS.things, count)
    spots = dict(zip(things, rng.sample(WORDS.spots, count), strict=True))
    verbs = {thing: "are" if thing.endswith("s") else "is" for thing in things}

    def answer(thing: str) -> str:
        return capitalize(f"{thing} {verbs[thing]} {spots[thing]}.")

    def ask(thing: str, rng: Rng) -> tuple[str, str]:
        return say(rng, "place", thing=thing, verb=verbs[thing]), answer(thing)

    return Facts(" ".join(map(answer, things)), things, ask)


def draw_jobs(rng: Rng, count: int) -> Facts:
    """Return who works where, each at a place of their own."""
    names = rng.sample(WORDS.first_names, count)
    places = dict(zip(names, rng.sample(WORDS.places, count), strict=True))

    def answer(name: str) -> str:
        return f"{name} works at {places[name]}."

    def ask(name: str, rng: Rng) -> tuple[str, str]:
        asks_place = rng.random() < 0.5
        question = f"Where does {name} work?" if asks_place else f"Who works at {places[name]}?"
        return question, answer(name)

    return Facts(" ".join(map(answer, names)), names, ask)


def draw_prices(rng: Rng, count: int) -> Facts:
    """Return different prices of 3 to 90 euros."""
    nouns = rng.sample(WORDS.goods, count)
    euros = dict(zip(nouns, rng.sample(range(3, 91), count), strict=True))

    def ask(noun: str, rng: Rng) -> tuple[str, str]:
        return say(rng, "price", noun=noun), f"The {noun} costs {euros[noun]} euros."

    return Facts(", ".join(f"{noun} {euros[noun]} euros" for noun in nouns), nouns, ask)


def draw_hours(rng: Rng, count: int) -> Facts:
    """Return when places open in the morning and close in the afternoon or evening."""
    places = rng.sample(WORDS.places, count)
    opening = {place: draw_time(rng, 7, 11) for place in places}
    closing = {place: draw_time(rng, 15, 21) for place in places}

    def ask(place: str, rng: Rng) -> tuple[str, str]:
        verb, hours = ("open", opening) if rng.random() < 0.5 else ("close", closing)
        return f"When does {place} {verb}?", capitalize(f"{place} {verb}s at {hours[place]}.")

    sentences = []
    for place in places:
        said = f"{place} opens at {opening[place]} and closes at {closing[place]}."
        sentences.append(capitalize(said))
    return Facts(" ".join(sentences), places, ask)


def draw_guests(rng: Rng, count: int) -> Facts:
    """Return a list of guests; the last two names are not on it."""
    names = rng.sample(WORDS.first_names, count + 2)
    event, day = rng.choice(WORDS.events), rng.choice(WORDS.days)
    guests = names[:count]

    def ask(name: str, rng: Rng) -> tuple[str, str]:
        answer = f"No, {name} is not on the list."
        if name in guests:
            answer = f"Yes, {name} is on the list."
        return say(rng, "guest", name=name, event=event), answer

    return Facts(f"On the list for {event} on {day} are {join_words(guests)}.", names, ask)


def draw_things(rng: Rng, count: int) -> list[str]:
    """Return different things with their number, about half of them more than one: "two mugs"."""
    things = []
    for noun in rng.sample(WORDS.goods, count):
        number = rng.choice((1, 1, 1, 2, 3, 4, 5, 6))
        several = f"{WORDS.number_words[number]} {plural(noun)}"
        things.append(f"a {noun}" if number == 1 else several)
    return things


def draw_event_pair(rng: Rng) -> dict[str, str]:
    """Return ways to tell of two events in different months, and the answer which comes first."""
    first, second = rng.sample(WORDS.events, 2)
    months = rng.sample(range(1, 13), 2)
    return tell_event_pair(
        [
            (first, Date(months[0], rng.randint(1, 28))),
            (second, Date(months[1], rng.randint(1, 28))),
        ]
    )


def tell_event_pair(events: list[tuple[str, Date]]) -> dict[str, str]:
    """Return ways to tell of two events, and the answer which comes first."""
    dated = [f"{event} on {date}" for event, date in events]
    early, late = sorted(events, key=lambda event: event[1])
    answer = capitalize(f"{early[0]} on {early[1]} comes first.")
    months = [WORDS.months[date.month - 1] for _, date in (early, late)]
    return {
        "Passage": capitalize(" and ".join(f"{event} is on {date}" for event, date in events)),
        "both": " and ".join(dated),
        "either": " or ".join(dated),
        "months": f"{months[0]} comes before {months[1]}.",
        "answer": answer,
        "answer_within": answer[0].lower() + answer[1:],
    }


def draw_message(rng: Rng) -> dict[str, str]:
    """Return a customer's message, its writer, the desk that should take it, and the answer."""
    desk = rng.choice(list(MESSAGES))
    text = rng.choice(MESSAGES[desk]).format(
        machine=draw_machine(rng),
        fault=rng.choice(WORDS.faults),
        goods=draw_goods(rng),
        city=rng.choice(WORDS.cities),
        book=draw_book(rng),
        tree=rng.choice(WORDS.room_names),
        day=rng.choice(WORDS.days),
        euros=rng.randint(12, 95),
    )
    name = rng.choice(WORDS.first_names)
    return {"name": name, "text": text, "desk": desk, "answer": f"This is for the {desk} desk."}
