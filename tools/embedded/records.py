"""The eight kinds of note that customers send, and every way to word one. No torch.

A `NoteKind` is a table of templates over the same field names; a `Record` is one kind with its
values. Both the corpus and the conversations use these templates, so every restatement of a note is
right by construction.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, replace
from pathlib import Path

from tools.embedded import vocabulary
from tools.embedded.vocabulary import WORDS


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


def read_kinds() -> dict[str, NoteKind]:
    """Return the kinds of note_kinds.json by name."""
    kinds = {}
    for entry in json.loads(Path(__file__).with_name("note_kinds.json").read_text("utf-8")):
        fields = {name: Field(**field) for name, field in entry.pop("fields").items()}
        kinds[entry["name"]] = NoteKind(fields=fields, **entry)
    return kinds


KINDS = read_kinds()


@dataclass(frozen=True)
class Record:
    """A kind of note with its values, {field: value} in the order of the kind's fields."""

    kind: NoteKind
    values: dict[str, str]

    @property
    def person(self) -> str:
        """Return the full name of the person whom the note is about."""
        return self.values[self.kind.person]

    @property
    def first_name(self) -> str:
        """Return the first name of that person."""
        return self.person.split()[0]

    def fill(self, template: str) -> str:
        """Return `template` with this record's values; `{first}` is the person's first name."""
        return template.format(first=self.first_name, **self.values)

    def note(self, rng: random.Random) -> str:
        """Return the note as one plain sentence."""
        return self.fill(rng.choice(self.kind.notes))

    def answer(self, field: str) -> str:
        """Return the full sentence that states `field`."""
        return self.fill(self.kind.fields[field].answer)

    def question(self, field: str, rng: random.Random) -> str:
        """Return one way to ask for `field`, which does not give the value away."""
        return self.fill(rng.choice(self.kind.fields[field].questions))

    def reply(self) -> str:
        """Return two friendly sentences to the person of the note."""
        body = self.fill(self.kind.polite).split(", ", 1)[1]
        return f"Thank you for your message, {self.first_name}. {vocabulary.capitalize(body)}"

    def surname_first(self) -> str:
        """Return the person's name as an index has it, "Bell, Ada"."""
        first, last = self.person.split()
        return f"{last}, {first}"

    def as_json(self, fields: list[str]) -> str:
        """Return the chosen fields as a one-line JSON object in the given order."""
        return json.dumps({name: self.values[name] for name in fields}, ensure_ascii=False)

    def as_row(self, fields: list[str]) -> str:
        """Return the chosen values as a table row, "Ada Bell | 4 March"."""
        return " | ".join(self.values[name] for name in fields)

    def as_form(self, fields: list[str]) -> str:
        """Return the chosen fields as lines, "Guest: Ada Bell"."""
        return "\n".join(f"{vocabulary.capitalize(name)}: {self.values[name]}" for name in fields)

    def with_value(self, field: str, value: str) -> Record:
        """Return the same record with another value for `field`."""
        return replace(self, values={**self.values, field: value})


def draw_value(field: str, rng: random.Random) -> str:
    """Return a value for a field that depends on no other field of the record."""
    match field:
        case "room":
            return f"{rng.choice(WORDS.room_names)} Room"
        case "day":
            return vocabulary.draw_day(rng)
        case "date":
            return str(vocabulary.draw_date(rng))
        case "time":
            return vocabulary.draw_time(rng)
        case "city" | "origin":
            return rng.choice(WORDS.cities)
        case "code":
            return vocabulary.draw_code(rng)
        case "book":
            return vocabulary.draw_book(rng)
        case "fault":
            return rng.choice(WORDS.faults)
        case "topic":
            return rng.choice(WORDS.topics)
        case "shelf":
            return f"shelf {rng.randint(1, 9)}"
        case "subject":
            return rng.choice(WORDS.subjects)
    raise KeyError(field)


def draw_change(record: Record, rng: random.Random) -> str:
    """Return a value for the record's changeable field that the record does not hold yet."""
    while True:
        value = draw_value(record.kind.changeable, rng)
        if value not in record.values.values():
            return value


def draw_record(rng: random.Random, person: str) -> Record:
    """Return a record of any kind about `person`."""
    kind = rng.choice(list(KINDS.values()))
    cities = rng.sample(WORDS.cities, 2)
    first_name = person.split()[0]
    colleagues = [name for name in WORDS.first_names if name != first_name]
    dependent = {kind.person: person, "start": cities[0], "end": cities[1]}
    dependent["colleague"] = rng.choice(colleagues)
    if kind.name == "repair":
        dependent["item"] = vocabulary.draw_machine(rng)
    else:
        dependent["item"] = vocabulary.draw_goods(rng)
    values = {}
    for field in kind.fields:
        values[field] = dependent.get(field) or draw_value(field, rng)
    return Record(kind, values)
