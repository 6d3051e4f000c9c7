"""The task: conversations with the front desk of a small business, with computed answers. No torch.

A conversation starts from one source, a note or a small set of facts, and asks one to three things
about it. No two conversations share a source. Each full name belongs to one split, so people of the
held-out rows are not in training.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

from tools.embedded import facts, vocabulary
from tools.embedded.records import Record, draw_change, draw_record
from tools.embedded.vocabulary import WORDS, capitalize, join_words

TASK_SEED = 7
SPLIT_ROWS = {"train": 1200, "val": 100, "test": 100}
VALUE_ONLY_PROMPTS = (
    "Answer with the value only.",
    "Reply with the bare value, without a sentence.",
)


class Turn(NamedTuple):
    """What the user asks and what the assistant answers."""

    request: str
    answer: str


@dataclass(frozen=True)
class Note:
    """A record and the template in which the user wrote it down."""

    record: Record
    template: str

    @property
    def text(self) -> str:
        """Return the note as the user gives it."""
        text = self.record.fill(self.template)
        return text if text.endswith(".") else f"{text}."


@dataclass(frozen=True)
class Conversation:
    """Turns about one source; `system` is the system prompt or None."""

    kind: str
    source: str
    turns: tuple[Turn, ...]
    system: str | None = None

    def messages(self) -> list[dict[str, str]]:
        """Return the "messages" value of a row."""
        messages = []
        if self.system:
            messages.append({"role": "system", "content": self.system})
        for turn in self.turns:
            messages.append({"role": "user", "content": turn.request})
            messages.append({"role": "assistant", "content": turn.answer})
        return messages


def draw_split_name(split: str, rng: random.Random) -> str:
    """Return a full name of `split`: a tenth of all names is for val, a tenth for test."""
    while True:
        first = rng.randrange(len(WORDS.first_names))
        last = rng.randrange(len(WORDS.surnames))
        owner = {8: "val", 9: "test"}.get((first + last) % 10, "train")
        if owner == split:
            return f"{WORDS.first_names[first]} {WORDS.surnames[last]}"


def draw_fields(record: Record, rng: random.Random) -> list[str]:
    """Return two or three field names in a random order."""
    return rng.sample(list(record.kind.fields), rng.randint(2, 3))


def ask(note: Note, rng: random.Random) -> Turn:
    """Return a question about one field and the sentence that answers it."""
    field = rng.choice(list(note.record.kind.fields))
    return Turn(note.record.question(field, rng), note.record.answer(field))


def as_json(note: Note, rng: random.Random) -> Turn:
    """Return the request for JSON with some fields."""
    fields = draw_fields(note.record, rng)
    words = join_words(fields)
    requests = (
        f"Write the note as JSON with {words}.",
        f"Turn the note into JSON with the keys {words}.",
    )
    return Turn(rng.choice(requests), note.record.as_json(fields))


def as_row(note: Note, rng: random.Random) -> Turn:
    """Return the request for a table row with some fields."""
    fields = draw_fields(note.record, rng)
    words = join_words(fields)
    requests = (
        f"Write the note as a table row with {words}.",
        f"Make a table row with {words}.",
    )
    return Turn(rng.choice(requests), note.record.as_row(fields))


def as_form(note: Note, rng: random.Random) -> Turn:
    """Return the request for a form with some fields."""
    fields = draw_fields(note.record, rng)
    words = join_words(fields)
    requests = (f"Fill in a form with {words}.", f"Put the note into a form with {words}.")
    return Turn(rng.choice(requests), note.record.as_form(fields))


def summarize(note: Note, rng: random.Random) -> Turn:
    """Return the request for one short sentence."""
    requests = ("Shorten the note to one sentence.", "Sum up the note in one short sentence.")
    return Turn(rng.choice(requests), note.record.fill(note.record.kind.summary))


def write_subject(note: Note, rng: random.Random) -> Turn:
    """Return the request for a subject line."""
    requests = ("Write a subject line for the note.", "Give the note a subject line.")
    return Turn(rng.choice(requests), capitalize(note.record.fill(note.record.kind.subject)))


def change(note: Note, rng: random.Random) -> Turn:
    """Return the request for another value and the note with that value."""
    field = note.record.kind.changeable
    value = draw_change(note.record, rng)
    requests = (
        f"Change the {field} to {value} and write the note again.",
        f"Write the note again with {value} as the {field}.",
    )
    changed = note.record.with_value(field, value)
    return Turn(rng.choice(requests), changed.fill(note.template))


def surname_first(note: Note, rng: random.Random) -> Turn:
    """Return the request for the person's name as an index has it."""
    role = note.record.kind.person
    requests = (
        f"Write the name of the {role} with the surname first.",
        f"Give the {role} as surname, first name.",
    )
    return Turn(rng.choice(requests), note.record.surname_first())


def be_polite(note: Note, rng: random.Random) -> Turn:
    """Return the request for a polite message."""
    requests = ("Turn the note into a polite message.", "Write a polite message from the note.")
    return Turn(rng.choice(requests), note.record.fill(note.record.kind.polite))


def reply(note: Note, rng: random.Random) -> Turn:
    """Return the request for a friendly reply of two sentences."""
    name = note.record.first_name
    requests = (f"Write a friendly reply to {name}.", f"Answer {name} in two friendly sentences.")
    return Turn(rng.choice(requests), note.record.reply())


Operation = Callable[[Note, random.Random], Turn]
OPERATIONS: tuple[Operation, ...] = (
    ask,
    as_json,
    as_row,
    as_form,
    summarize,
    write_subject,
    change,
    surname_first,
    be_polite,
    reply,
)


def first_request(request: str, source: str, rng: random.Random) -> str:
    """Return the first user message: the request and the note, in one of several orders."""
    messages = (
        f"{request}\n{source}",
        f"{source}\n{request}",
        f"{request} Note: {source}",
        f"Note: {source} {request}",
        f"Here is a note. {source} {request}",
    )
    return rng.choice(messages)


def later_request(request: str, rng: random.Random) -> str:
    """Return a later user message about the same note."""
    if request.endswith("?"):
        return request
    lowered = request[0].lower() + request[1:]
    return rng.choice((request, f"Now {lowered}", f"Please {lowered}"))


def draw_operations(first: Operation, rng: random.Random) -> list[Operation]:
    """Return one to three operations that begin with `first`."""
    count = 1 if rng.random() < 0.6 else rng.choice((2, 2, 3))
    later = []
    for operation in OPERATIONS:
        # the note of a polite message is a list of words: it is not written again
        rewrites_words = operation is change and first is be_polite
        if operation not in (first, ask) and not rewrites_words:
            later.append(operation)
    return [first, *rng.sample([*later, ask, ask], count - 1)]


def note_conversation(first: Operation, split: str, rng: random.Random) -> Conversation:
    """Return one to three requests about a note; the first of them is `first`."""
    record = draw_record(rng, draw_split_name(split, rng))
    if first is be_polite:
        template = record.kind.terse
    else:
        template = rng.choice(record.kind.notes)
    note = Note(record, template)
    turns: list[Turn] = []
    for operation in draw_operations(first, rng):
        request, answer = operation(note, rng)
        if not turns:
            turns.append(Turn(first_request(request, note.text, rng), answer))
        elif request not in [turn.request for turn in turns]:
            turns.append(Turn(later_request(request, rng), answer))
    return add_system(Conversation(first.__name__, note.text, tuple(turns)), record, first, rng)


def add_system(
    conversation: Conversation, record: Record, operation: Operation, rng: random.Random
) -> Conversation:
    """Return the conversation with a system prompt, which may change its answer, or without."""
    business = vocabulary.draw_business(rng)
    chance = rng.random()
    turn = conversation.turns[0]
    has_one_turn = len(conversation.turns) == 1
    if operation in (be_polite, reply) and has_one_turn and chance < 0.5:
        prompts = (
            f"You write for the {business}. Sign every message.",
            f"Sign your messages with the name of the {business}.",
        )
        signed = Turn(turn.request, f"{turn.answer} Kind regards, {business}")
        return replace(conversation, turns=(signed,), system=rng.choice(prompts))
    if operation is ask and has_one_turn and chance < 0.5:
        field = next(name for name in record.kind.fields if record.answer(name) == turn.answer)
        bare = Turn(turn.request, record.values[field])
        system = rng.choice(VALUE_ONLY_PROMPTS)
        return Conversation("value", conversation.source, (bare,), system)
    if chance > 0.85:
        return replace(conversation, system=f"You are the assistant of the {business}.")
    return conversation


def quiz(kind: str, passage: str, turns: list[Turn], rng: random.Random) -> Conversation:
    """Return a conversation that opens with a passage and asks one to three questions about it."""
    count = 1 if rng.random() < 0.5 else rng.choice((2, 2, 3))
    answers = dict(turns)  # a question drawn twice is asked once
    question, *later = list(answers)[:count]
    openings = (
        f"{passage}\n{question}",
        f"{question}\n{passage}",
        f"{passage} {question}",
    )
    opening = Turn(rng.choice(openings), answers[question])
    return Conversation(kind, passage, (opening, *(Turn(text, answers[text]) for text in later)))


def place_quiz(rng: random.Random) -> Conversation:
    """Return questions about where things are."""
    places = facts.draw_places(rng, rng.randint(3, 4))
    things = rng.sample(list(places.spots), 3)
    turns = [Turn(places.question(thing, rng), places.answer(thing)) for thing in things]
    return quiz("place", places.passage(), turns, rng)


def job_quiz(rng: random.Random) -> Conversation:
    """Return questions about who works where."""
    jobs = facts.draw_jobs(rng, rng.randint(3, 4))
    names = rng.sample(list(jobs.places), 3)
    turns = [Turn(jobs.question(name, rng.random() < 0.5), jobs.answer(name)) for name in names]
    return quiz("job", jobs.passage(), turns, rng)


def price_quiz(rng: random.Random) -> Conversation:
    """Return questions about a price list."""
    prices = facts.draw_prices(rng, rng.randint(3, 5))
    nouns = rng.sample(list(prices.euros), 3)
    turns = [Turn(prices.question(noun, rng), prices.answer(noun)) for noun in nouns]
    return quiz("price", f"Prices: {prices.listing()}.", turns, rng)


def hours_quiz(rng: random.Random) -> Conversation:
    """Return questions about opening hours."""
    hours = facts.draw_hours(rng, rng.randint(2, 3))
    turns = []
    for place in rng.sample(list(hours.times), 2):
        opens = rng.random() < 0.5
        turns.append(Turn(hours.question(place, opens), hours.answer(place, opens)))
    return quiz("hours", hours.passage(), turns, rng)


def guest_quiz(rng: random.Random) -> Conversation:
    """Return questions about who is on a list."""
    guests = facts.draw_guests(rng, rng.randint(3, 5))
    names = []
    for _ in range(3):
        pool = guests.names if rng.random() < 0.5 else guests.absent
        names.append(rng.choice(pool))
    turns = [Turn(guests.question(name, rng), guests.answer(name)) for name in names]
    return quiz("guest", guests.passage(), turns, rng)


def list_request(rng: random.Random) -> Conversation:
    """Return a sentence of things to turn into a list."""
    things = facts.draw_things(rng, rng.randint(2, 5))
    templates = (
        "Please send {}.",
        "We need {}.",
        "The customer wants {}.",
        "Bring {} to the shop.",
    )
    source = rng.choice(templates).format(things.sentence())
    requests = (
        "Make a list of the items.",
        "List the items, one a line.",
        "Write the items as a list.",
    )
    request = rng.choice(requests)
    messages = (f"{request}\n{source}", f"{source}\n{request}", f"{request} {source}")
    turns = [Turn(rng.choice(messages), things.bullets())]
    if rng.random() < 0.3:
        later = ("Now in one line, please.", "And now all in one line.")
        turns.append(Turn(rng.choice(later), things.line()))
    return Conversation("list", source, tuple(turns))


def date_request(rng: random.Random) -> Conversation:
    """Return two events and the question which one is earlier."""
    pair = facts.draw_event_pair(rng)
    requests = (
        f"Which comes first, {pair.either()}?",
        f"{capitalize(pair.passage())}. Which comes first?",
        f"Which is earlier, {pair.either()}?",
    )
    return Conversation("date", pair.both(), (Turn(rng.choice(requests), pair.answer()),))


def route_request(rng: random.Random) -> Conversation:
    """Return a message that has to be passed to the right desk."""
    message = facts.draw_message(rng)
    questions = (
        "Which desk should take this?",
        "Which desk is this for?",
        "Who should answer this message?",
    )
    question = rng.choice(questions)
    source = f"{message.name} wrote: {message.text}"
    request = rng.choice((f"{source}\n{question}", f"{question}\n{source}"))
    return Conversation("route", source, (Turn(request, message.answer()),))


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


def make_conversation(index: int, split: str, rng: random.Random) -> Conversation:
    """Return a conversation for `split`; `index` picks its kind, so kinds are evenly drawn."""
    makers = (*OPERATIONS, ask, be_polite, *FACT_MAKERS)
    maker = makers[index % len(makers)]
    if maker in FACT_MAKERS:
        return maker(rng)
    return note_conversation(maker, split, rng)


def make_splits(seed: int = TASK_SEED) -> dict[str, list[Conversation]]:
    """Return {split: conversations}; a source appears once in all splits together."""
    rng = random.Random(seed)
    seen: set[str] = set()
    splits: dict[str, list[Conversation]] = {split: [] for split in SPLIT_ROWS}
    for split, conversations in splits.items():
        while len(conversations) < SPLIT_ROWS[split]:
            conversation = make_conversation(len(conversations), split, rng)
            if conversation.source not in seen:
                seen.add(conversation.source)
                conversations.append(conversation)
        rng.shuffle(conversations)
    return splits
