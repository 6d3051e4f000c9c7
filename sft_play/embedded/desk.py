"""The task: conversations with the desk of a small business, every answer computed from the facts. Pure: `random` only, no torch, no I/O.

A conversation starts from one source, a note or a small set of facts, and asks for one to three things about it. No two
conversations share a source, and full names are dealt out by split, so the held-out rows hold people whom training never saw.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from sft_play.embedded import facts, world
from sft_play.embedded.records import Record, draw_change, draw_record

DESK_SEED = 7
SPLIT_ROWS = {"train": 1200, "val": 100, "test": 100}
VALUE_ONLY = ("Answer with the value only.", "Reply with the bare value, without a sentence.")

Turn = tuple[str, str]


@dataclass(frozen=True)
class Note:
    """A record and the template in which the user wrote it down."""

    record: Record
    template: str

    @property
    def text(self) -> str:
        """Return the note as the user gives it."""
        text = self.record.say(self.template)
        return text if text.endswith(".") else f"{text}."


@dataclass(frozen=True)
class Conversation:
    """Turns of (request, answer) about one source; `system` is the system prompt or None."""

    kind: str
    source: str
    turns: tuple[Turn, ...]
    system: str | None = None

    def messages(self) -> list[dict[str, str]]:
        """Return the rows' "messages" value."""
        start = [{"role": "system", "content": self.system}] if self.system else []
        return start + [
            {"role": role, "content": text}
            for turn in self.turns
            for role, text in zip(("user", "assistant"), turn, strict=True)
        ]


def draw_person(split: str, rng: random.Random) -> str:
    """Return a full name that only `split` may use: a tenth of all names for val, a tenth for test, the rest for train."""
    while True:
        first, last = rng.randrange(len(world.FIRST_NAMES)), rng.randrange(len(world.SURNAMES))
        owner = {8: "val", 9: "test"}.get((first + last) % 10, "train")
        if owner == split:
            return f"{world.FIRST_NAMES[first]} {world.SURNAMES[last]}"


def some_fields(record: Record, rng: random.Random) -> list[str]:
    """Return two or three field names, in the record's order or not."""
    return rng.sample(list(record.kind.fields), rng.randint(2, 3))


def ask(note: Note, rng: random.Random) -> Turn:
    """Return a question about one field and the sentence that answers it."""
    field = rng.choice(list(note.record.kind.fields))
    return note.record.question(field, rng), note.record.answer(field)


def as_json(note: Note, rng: random.Random) -> Turn:
    """Return the request for JSON with some fields."""
    fields = some_fields(note.record, rng)
    words = world.join_words(fields)
    request = rng.choice(
        (f"Write the note as JSON with {words}.", f"Turn the note into JSON with the keys {words}.")
    )
    return request, note.record.as_json(fields)


def as_row(note: Note, rng: random.Random) -> Turn:
    """Return the request for a table row with some fields."""
    fields = some_fields(note.record, rng)
    words = world.join_words(fields)
    request = rng.choice(
        (f"Write the note as a table row with {words}.", f"Make a table row with {words}.")
    )
    return request, note.record.as_row(fields)


def as_form(note: Note, rng: random.Random) -> Turn:
    """Return the request for a form with some fields."""
    fields = some_fields(note.record, rng)
    words = world.join_words(fields)
    request = rng.choice(
        (f"Fill in a form with {words}.", f"Put the note into a form with {words}.")
    )
    return request, note.record.as_form(fields)


def summarise(note: Note, rng: random.Random) -> Turn:
    """Return the request for one short sentence."""
    request = rng.choice(
        ("Shorten the note to one sentence.", "Sum up the note in one short sentence.")
    )
    return request, note.record.say(note.record.kind.summary)


def head(note: Note, rng: random.Random) -> Turn:
    """Return the request for a subject line."""
    request = rng.choice(("Write a subject line for the note.", "Give the note a subject line."))
    return request, world.upper_first(note.record.say(note.record.kind.subject))


def change(note: Note, rng: random.Random) -> Turn:
    """Return the request for another value and the note as it reads then."""
    field = note.record.kind.changeable
    value = draw_change(note.record, rng)
    request = rng.choice(
        (
            f"Change the {field} to {value} and write the note again.",
            f"Write the note again with {value} as the {field}.",
        )
    )
    return request, note.record.replace(field, value).say(note.template)


def surname_first(note: Note, rng: random.Random) -> Turn:
    """Return the request for the person's name as an index has it."""
    first, last = note.record.person.split()
    role = note.record.kind.person
    return rng.choice(
        (
            f"Write the name of the {role} with the surname first.",
            f"Give the {role} as surname, first name.",
        )
    ), f"{last}, {first}"


def be_polite(note: Note, rng: random.Random) -> Turn:
    """Return the request for a polite message."""
    request = rng.choice(
        ("Turn the note into a polite message.", "Write a polite message from the note.")
    )
    return request, note.record.say(note.record.kind.polite)


def reply(note: Note, rng: random.Random) -> Turn:
    """Return the request for a friendly reply of two sentences."""
    first = note.record.person.split()[0]
    return rng.choice(
        (f"Write a friendly reply to {first}.", f"Answer {first} in two friendly sentences.")
    ), note.record.reply()


Operation = Callable[[Note, random.Random], Turn]
OPERATIONS: tuple[Operation, ...] = (
    ask,
    as_json,
    as_row,
    as_form,
    summarise,
    head,
    change,
    surname_first,
    be_polite,
    reply,
)


def combine(request: str, source: str, rng: random.Random) -> str:
    """Return the first user message: the request and the note, in one of several orders."""
    return rng.choice((f"{request}\n{source}", f"{source}\n{request}", f"{request} Note: {source}", f"Note: {source} {request}",
                       f"Here is a note. {source} {request}"))  # fmt: skip


def follow(request: str, rng: random.Random) -> str:
    """Return a later request about the same note."""
    return (
        request
        if request.endswith("?")
        else rng.choice(
            (
                request,
                f"Now {request[0].lower()}{request[1:]}",
                f"Please {request[0].lower()}{request[1:]}",
            )
        )
    )


def note_conversation(operation: Operation, split: str, rng: random.Random) -> Conversation:
    """Return one to three requests about a note, the first of them `operation`."""
    record = draw_record(rng, person=draw_person(split, rng))
    note = Note(
        record, record.kind.terse if operation is be_polite else rng.choice(record.kind.notes)
    )
    count = 1 if rng.random() < 0.6 else rng.choice((2, 2, 3))
    later = [
        op
        for op in OPERATIONS
        if op not in (operation, ask) and not (op is change and operation is be_polite)
    ]
    operations = [operation, *rng.sample([*later, ask, ask], count - 1)]
    turns = []
    for op in operations:
        request, answer = op(note, rng)
        if all(request != earlier for earlier, _ in turns):
            turns.append(
                (combine(request, note.text, rng) if not turns else follow(request, rng), answer)
            )
    return with_system(
        Conversation(operation.__name__, note.text, tuple(turns)), record, operation, rng
    )


def with_system(
    talk: Conversation, record: Record, operation: Operation, rng: random.Random
) -> Conversation:
    """Return the conversation under a system prompt that changes its answers, under one that does not, or as it is."""
    house, draw = world.house(rng), rng.random()
    if operation in (be_polite, reply) and len(talk.turns) == 1 and draw < 0.5:
        system = rng.choice(
            (
                f"You write for the {house}. Sign every message.",
                f"Sign your messages with the name of the {house}.",
            )
        )
        request, answer = talk.turns[0]
        return Conversation(
            talk.kind, talk.source, ((request, f"{answer} Kind regards, {house}"),), system
        )
    if operation is ask and len(talk.turns) == 1 and draw < 0.5:
        field = next(name for name in record.kind.fields if record.answer(name) == talk.turns[0][1])
        return Conversation(
            "value",
            talk.source,
            ((talk.turns[0][0], record.by_name[field]),),
            rng.choice(VALUE_ONLY),
        )
    if draw > 0.85:
        return Conversation(
            talk.kind, talk.source, talk.turns, f"You are the assistant of the {house}."
        )
    return talk


def quiz(kind: str, passage: str, turns: list[Turn], rng: random.Random) -> Conversation:
    """Return a conversation that opens with a passage and asks one to three questions about it."""
    count = 1 if rng.random() < 0.5 else rng.choice((2, 2, 3))
    kept = list(dict(turns).items())[:count]
    first = rng.choice(
        (f"{passage}\n{kept[0][0]}", f"{kept[0][0]}\n{passage}", f"{passage} {kept[0][0]}")
    )
    return Conversation(kind, passage, ((first, kept[0][1]), *kept[1:]))


def place_quiz(rng: random.Random) -> Conversation:
    """Return questions about where things are."""
    places = facts.draw_places(rng, rng.randint(3, 4))
    return quiz(
        "place",
        places.passage(),
        [(places.question(t, rng), places.answer(t)) for t in rng.sample(list(places.spots), 3)],
        rng,
    )


def job_quiz(rng: random.Random) -> Conversation:
    """Return questions about who works where."""
    jobs = facts.draw_jobs(rng, rng.randint(3, 4))
    return quiz(
        "job",
        jobs.passage(),
        [
            (jobs.question(n, rng.random() < 0.5), jobs.answer(n))
            for n in rng.sample(list(jobs.places), 3)
        ],
        rng,
    )


def price_quiz(rng: random.Random) -> Conversation:
    """Return questions about a price list."""
    prices = facts.draw_prices(rng, rng.randint(3, 5))
    return quiz(
        "price",
        f"Prices: {prices.listing()}.",
        [(prices.question(n, rng), prices.answer(n)) for n in rng.sample(list(prices.euros), 3)],
        rng,
    )


def hours_quiz(rng: random.Random) -> Conversation:
    """Return questions about opening hours."""
    hours = facts.draw_hours(rng, rng.randint(2, 3))
    asked = [(place, rng.random() < 0.5) for place in rng.sample(list(hours.times), 2)]
    return quiz(
        "hours",
        hours.passage(),
        [(hours.question(*each), hours.answer(*each)) for each in asked],
        rng,
    )


def guest_quiz(rng: random.Random) -> Conversation:
    """Return questions about who is on a list."""
    guests = facts.draw_guests(rng, rng.randint(3, 5))
    asked = [rng.choice(guests.names if rng.random() < 0.5 else guests.absent) for _ in range(3)]
    return quiz(
        "guest", guests.passage(), [(guests.question(n, rng), guests.answer(n)) for n in asked], rng
    )


def list_request(rng: random.Random) -> Conversation:
    """Return a sentence of things to be made a list."""
    things = facts.draw_things(rng, rng.randint(2, 5))
    source = rng.choice(
        ("Please send {}.", "We need {}.", "The customer wants {}.", "Bring {} to the shop.")
    ).format(things.sentence())
    request = rng.choice(
        ("Make a list of the items.", "List the items, one a line.", "Write the items as a list.")
    )
    turns = [
        (
            rng.choice((f"{request}\n{source}", f"{source}\n{request}", f"{request} {source}")),
            things.bullets(),
        )
    ]
    if rng.random() < 0.3:
        turns.append(
            (rng.choice(("Now in one line, please.", "And now all in one line.")), things.line())
        )
    return Conversation("list", source, tuple(turns))


def date_request(rng: random.Random) -> Conversation:
    """Return two events of which the earlier one is asked for."""
    pair = facts.draw_pair(rng)
    request = rng.choice((
        f"Which comes first, {pair.either()}?",
        f"{world.upper_first(pair.passage())}. Which comes first?",
        f"Which is earlier, {pair.either()}?",
    ))  # fmt: skip
    return Conversation("date", pair.both(), ((request, pair.answer()),))


def route_request(rng: random.Random) -> Conversation:
    """Return a message that has to be passed to the right desk."""
    message = facts.draw_message(rng)
    question = rng.choice(
        (
            "Which desk should take this?",
            "Which desk is this for?",
            "Who should answer this message?",
        )
    )
    source = f"{message.name} wrote: {message.text}"
    return Conversation(
        "route",
        source,
        ((rng.choice((f"{source}\n{question}", f"{question}\n{source}")), message.answer()),),
    )


FACT_MAKERS = (
    place_quiz,
    job_quiz,
    price_quiz,
    hours_quiz,
    guest_quiz,
    list_request,
    date_request,
    route_request,
)


def conversation(index: int, split: str, rng: random.Random) -> Conversation:
    """Return one conversation for `split`; `index` picks what it opens with, so that every split holds every kind evenly."""
    makers = (*OPERATIONS, ask, be_polite, *FACT_MAKERS)
    maker = makers[index % len(makers)]
    return maker(rng) if maker in FACT_MAKERS else note_conversation(maker, split, rng)


def conversations(seed: int = DESK_SEED) -> dict[str, list[Conversation]]:
    """Return {split: conversations}; a source appears once in all splits together."""
    rng = random.Random(seed)
    seen: set[str] = set()
    splits: dict[str, list[Conversation]] = {split: [] for split in SPLIT_ROWS}
    for split, rows in splits.items():
        while len(rows) < SPLIT_ROWS[split]:
            talk = conversation(len(rows), split, rng)
            if talk.source not in seen:
                seen.add(talk.source)
                rows.append(talk)
        rng.shuffle(rows)
    return splits
