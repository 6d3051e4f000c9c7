"""The eight kinds of note that reach the desk, and every way to say one. Pure: `random` only, no torch, no I/O.

A `Kind` is a table of templates over the same field names; a `Record` is one kind with its values. Both the corpus and the
conversations speak through these templates, so a restatement is right by construction.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass

from sft_play.embedded import world


@dataclass(frozen=True)
class Field:
    """One value of a note: how it is asked for and how it is told; templates over the record's fields."""

    questions: tuple[str, ...]
    answer: str


@dataclass(frozen=True)
class Kind:
    """One kind of note; `person` names the field that holds who it is about, every template is over `fields`."""

    name: str
    person: str
    fields: dict[str, Field]
    notes: tuple[str, ...]
    terse: str
    polite: str
    subject: str
    summary: str
    changeable: str


@dataclass(frozen=True)
class Record:
    """A kind of note with its values, in the order of the kind's fields."""

    kind: Kind
    values: tuple[tuple[str, str], ...]

    @property
    def by_name(self) -> dict[str, str]:
        """Return {field: value}."""
        return dict(self.values)

    @property
    def person(self) -> str:
        """Return the full name of the person whom the note is about."""
        return self.by_name[self.kind.person]

    def say(self, template: str) -> str:
        """Return `template` with this record's values; `{first}` is the first name of its person."""
        return template.format(first=self.person.split()[0], **self.by_name)

    def note(self, rng: random.Random) -> str:
        """Return the note as one plain sentence."""
        return self.say(rng.choice(self.kind.notes))

    def answer(self, field: str) -> str:
        """Return the full sentence that tells `field`."""
        return self.say(self.kind.fields[field].answer)

    def question(self, field: str, rng: random.Random) -> str:
        """Return one way to ask for `field`; it never gives the value away."""
        return self.say(rng.choice(self.kind.fields[field].questions))

    def reply(self) -> str:
        """Return two friendly sentences to the person of the note."""
        body = self.say(self.kind.polite).split(", ", 1)[1]
        return f"Thank you for your message, {self.person.split()[0]}. {world.upper_first(body)}"

    def as_json(self, fields: list[str]) -> str:
        """Return the chosen fields as a one-line JSON object in the given order."""
        return json.dumps({name: self.by_name[name] for name in fields}, ensure_ascii=False)

    def as_row(self, fields: list[str]) -> str:
        """Return the chosen values as a table row, "Ada Bell | 4 March"."""
        return " | ".join(self.by_name[name] for name in fields)

    def as_form(self, fields: list[str]) -> str:
        """Return the chosen fields as lines, "Guest: Ada Bell"."""
        return "\n".join(f"{world.upper_first(name)}: {self.by_name[name]}" for name in fields)

    def replace(self, field: str, value: str) -> Record:
        """Return the same record with another value for `field`."""
        return Record(
            self.kind, tuple((name, value if name == field else old) for name, old in self.values)
        )


BOOKING = Kind(
    name="booking",
    person="guest",
    fields={
        "guest": Field(("Who is the guest?", "Who wants the room?"), "The guest is {guest}."),
        "room": Field(
            ("Which room is it?", "Which room does {first} want?"), "{first} wants the {room}."
        ),
        "day": Field(
            ("Which day is the booking for?", "When does {first} need the room?"),
            "The booking is for {day}.",
        ),
        "time": Field(
            ("What time does the booking start?", "At what time does {first} need the room?"),
            "The booking starts at {time}.",
        ),
    },
    notes=(
        "{guest} would like the {room} on {day} at {time}.",
        "Please keep the {room} for {guest} on {day} at {time}.",
        "The {room} is for {guest}, on {day} at {time}.",
        "On {day} at {time}, {guest} needs the {room}.",
    ),
    terse="{room}, {guest}, {day}, {time}",
    polite="Dear {guest}, the {room} is booked for you on {day} at {time}.",
    subject="{room} for {guest}",
    summary="{guest} booked the {room} for {day}.",
    changeable="day",
)

ORDER = Kind(
    name="order",
    person="customer",
    fields={
        "customer": Field(
            ("Who is the customer?", "Who ordered this?"), "The customer is {customer}."
        ),
        "item": Field(
            ("What did {first} order?", "Which item is it?"), "{first} ordered a {item}."
        ),
        "city": Field(
            ("Where should it be sent?", "Which city does it go to?"), "It goes to {city}."
        ),
        "code": Field(
            ("What is the order number?", "Which number does the order have?"),
            "The order number is {code}.",
        ),
    },
    notes=(
        "{customer} ordered a {item}, order {code}, to be sent to {city}.",
        "Order {code}: a {item} for {customer} in {city}.",
        "Please send a {item} to {customer} in {city}, order {code}.",
        "A {item} goes to {customer} in {city} under order {code}.",
    ),
    terse="{item}, {customer}, {city}, order {code}",
    polite="Dear {customer}, your {item} is on its way to {city} under order {code}.",
    subject="Order {code} for {customer}",
    summary="{customer} ordered a {item} to {city}.",
    changeable="city",
)

LOAN = Kind(
    name="loan",
    person="reader",
    fields={
        "reader": Field(("Who is the reader?", "Who has the book?"), "The reader is {reader}."),
        "book": Field(
            ("Which book is it?", "Which book did {first} borrow?"), "{first} borrowed {book}."
        ),
        "date": Field(
            ("When is the book due?", "When must {first} return the book?"),
            "The book is due on {date}.",
        ),
    },
    notes=(
        "{reader} borrowed {book} and will return it on {date}.",
        "{book} is with {reader} until {date}.",
        "{reader} has {book}, due on {date}.",
        "The book {book} was lent to {reader} and is due on {date}.",
    ),
    terse="{book}, {reader}, due {date}",
    polite="Dear {reader}, please return {book} by {date}.",
    subject="{book} for {reader}",
    summary="{reader} has {book} until {date}.",
    changeable="date",
)

REPAIR = Kind(
    name="repair",
    person="owner",
    fields={
        "owner": Field(("Who is the owner?", "Who brought it in?"), "The owner is {owner}."),
        "item": Field(
            ("What needs a repair?", "What did {first} bring in?"), "{first} brought in a {item}."
        ),
        "fault": Field(("What is wrong with it?", "What is the fault?"), "It has {fault}."),
        "day": Field(
            ("When will it be ready?", "When can {first} pick it up?"), "It will be ready on {day}."
        ),
    },
    notes=(
        "{owner} brought in a {item} with {fault}; it will be ready on {day}.",
        "The {item} of {owner} has {fault} and will be ready on {day}.",
        "A {item} with {fault} came from {owner}, ready on {day}.",
        "Ready on {day}: the {item} of {owner}, which has {fault}.",
    ),
    terse="{item}, {owner}, {fault}, ready {day}",
    polite="Dear {owner}, your {item} with {fault} will be ready on {day}.",
    subject="Repair of the {item} for {owner}",
    summary="The {item} of {owner} will be ready on {day}.",
    changeable="day",
)

TRIP = Kind(
    name="trip",
    person="traveller",
    fields={
        "traveller": Field(
            ("Who is the traveller?", "Who is going away?"), "The traveller is {traveller}."
        ),
        "start": Field(
            ("Where does the trip start?", "Which city does {first} leave from?"),
            "The trip starts in {start}.",
        ),
        "end": Field(
            ("Where does the trip end?", "Which city is {first} going to?"),
            "{first} is going to {end}.",
        ),
        "day": Field(
            ("Which day is the trip?", "When does {first} travel?"), "{first} travels on {day}."
        ),
        "time": Field(
            ("What time is the train?", "When does the train leave?"), "The train leaves at {time}."
        ),
    },
    notes=(
        "{traveller} is going from {start} to {end} on {day} by the {time} train.",
        "{traveller} takes the {time} train from {start} to {end} on {day}.",
        "On {day}, {traveller} travels from {start} to {end} at {time}.",
        "The {time} train from {start} to {end} on {day} is for {traveller}.",
    ),
    terse="{start} to {end}, {traveller}, {day}, {time}",
    polite="Dear {traveller}, your train from {start} to {end} leaves on {day} at {time}.",
    subject="Trip to {end} for {traveller}",
    summary="{traveller} travels from {start} to {end} on {day}.",
    changeable="day",
)

CALL = Kind(
    name="call",
    person="caller",
    fields={
        "caller": Field(("Who is the caller?", "Who rang?"), "The caller is {caller}."),
        "topic": Field(
            ("What was the call about?", "Why did {first} ring?"), "{first} rang about {topic}."
        ),
        "colleague": Field(
            ("Who should ring back?", "Whom was the call for?"), "{colleague} should ring back."
        ),
        "day": Field(
            ("When should we ring back?", "Which day suits {first}?"), "The call back is on {day}."
        ),
    },
    notes=(
        "{caller} rang about {topic} and asks {colleague} to ring back on {day}.",
        "{colleague} should ring {caller} on {day} about {topic}.",
        "A call for {colleague}: {caller} rang about {topic}, please ring back on {day}.",
        "On {day}, {colleague} should ring back {caller} about {topic}.",
    ),
    terse="{caller}, {topic}, ring back {day}, {colleague}",
    polite="Dear {caller}, {colleague} will ring you about {topic} on {day}.",
    subject="Call from {caller} about {topic}",
    summary="{colleague} will ring {caller} on {day}.",
    changeable="day",
)

PARCEL = Kind(
    name="parcel",
    person="recipient",
    fields={
        "recipient": Field(
            ("Who is the recipient?", "Whom is the parcel for?"), "The recipient is {recipient}."
        ),
        "origin": Field(
            ("Where does the parcel come from?", "Which city was it sent from?"),
            "The parcel comes from {origin}.",
        ),
        "shelf": Field(
            ("Where is the parcel now?", "Which shelf is it on?"), "The parcel is on {shelf}."
        ),
        "day": Field(
            ("When will {first} pick it up?", "Which day is the pick-up?"),
            "{first} will pick it up on {day}.",
        ),
    },
    notes=(
        "A parcel from {origin} for {recipient} is on {shelf} until {day}.",
        "On {shelf} there is a parcel from {origin}; {recipient} will pick it up on {day}.",
        "{recipient} will come on {day} for the parcel from {origin} on {shelf}.",
        "The parcel from {origin} on {shelf} is for {recipient}, pick-up on {day}.",
    ),
    terse="parcel from {origin}, {recipient}, {shelf}, {day}",
    polite="Dear {recipient}, your parcel from {origin} is on {shelf} and you can pick it up on {day}.",
    subject="Parcel from {origin} for {recipient}",
    summary="{recipient} will pick up a parcel from {origin} on {day}.",
    changeable="day",
)

LESSON = Kind(
    name="lesson",
    person="teacher",
    fields={
        "teacher": Field(
            ("Who is the teacher?", "Who gives the lesson?"), "The teacher is {teacher}."
        ),
        "subject": Field(
            ("What is the lesson about?", "What does {first} teach?"), "{first} teaches {subject}."
        ),
        "room": Field(
            ("Which room is the lesson in?", "Where does {first} teach?"),
            "The lesson is in the {room}.",
        ),
        "day": Field(
            ("Which day is the lesson?", "When does {first} teach?"), "The lesson is on {day}."
        ),
        "time": Field(
            ("What time does the lesson start?", "At what time should we come?"),
            "The lesson starts at {time}.",
        ),
    },
    notes=(
        "{teacher} teaches {subject} in the {room} on {day} at {time}.",
        "The {subject} lesson with {teacher} is in the {room} on {day} at {time}.",
        "On {day} at {time}, {teacher} gives a {subject} lesson in the {room}.",
        "In the {room} on {day} at {time}: {subject} with {teacher}.",
    ),
    terse="{subject}, {teacher}, {room}, {day}, {time}",
    polite="Dear {teacher}, your {subject} lesson is in the {room} on {day} at {time}.",
    subject="{subject} lesson with {teacher}",
    summary="{teacher} teaches {subject} on {day}.",
    changeable="day",
)

KINDS = (BOOKING, ORDER, LOAN, REPAIR, TRIP, CALL, PARCEL, LESSON)


def draw_value(field: str, rng: random.Random) -> str:
    """Return a value for any field that is no person, no item and no end of a trip."""
    draws = {
        "room": lambda: f"{rng.choice(world.TREES)} Room",
        "day": lambda: world.day(rng),
        "date": lambda: str(world.date(rng)),
        "time": lambda: world.time(rng),
        "city": lambda: rng.choice(world.CITIES),
        "origin": lambda: rng.choice(world.CITIES),
        "code": lambda: world.code(rng),
        "book": lambda: world.book(rng),
        "fault": lambda: rng.choice(world.FAULTS),
        "topic": lambda: rng.choice(world.TOPICS),
        "shelf": lambda: f"shelf {rng.randint(1, 9)}",
        "subject": lambda: rng.choice(world.SUBJECTS),
    }
    return draws[field]()


def draw_change(record: Record, rng: random.Random) -> str:
    """Return a value for the record's changeable field that the record does not hold yet."""
    while True:
        value = draw_value(record.kind.changeable, rng)
        if value not in record.by_name.values():
            return value


def draw_record(rng: random.Random, kind: Kind | None = None, person: str | None = None) -> Record:
    """Return a record of `kind` (any if None) about `person` (anyone if None)."""
    kind = kind or rng.choice(KINDS)
    person = person or world.person(rng)
    cities = rng.sample(world.CITIES, 2)
    special = {
        kind.person: person,
        "colleague": rng.choice([name for name in world.FIRST_NAMES if name != person.split()[0]]),
        "item": world.machine(rng) if kind is REPAIR else world.goods(rng),
        "start": cities[0],
        "end": cities[1],
    }
    return Record(
        kind, tuple((name, special.get(name) or draw_value(name, rng)) for name in kind.fields)
    )
