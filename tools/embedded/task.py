"""The task: conversations with the front desk of a small business, with computed answers. No torch.

A conversation starts from one source, a note or a small set of facts, and asks one to three things
about it. No two conversations share a source. Each full name belongs to one split, so people of the
held-out rows are not in training.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import NamedTuple

from tools.embedded import town
from tools.embedded.town import WORDS, Record, Rng, capitalize, join_words, say

TASK_SEED = 7
SPLIT_ROWS = {"train": 1200, "val": 100, "test": 100}
FORMATS = ("as_json", "as_row", "as_form")  # methods of Record
OPERATIONS = (
    "ask",
    *FORMATS,
    "summarize",
    "write_subject",
    "change",
    "surname_first",
    "be_polite",
    "reply",
)
# what draws them, least and most of them, and how many questions are asked
FACTS = {
    "place": (town.draw_places, 3, 4, 3),
    "job": (town.draw_jobs, 3, 4, 3),
    "price": (town.draw_prices, 3, 5, 3),
    "hours": (town.draw_hours, 2, 3, 2),
    "guest": (town.draw_guests, 3, 5, 3),
}


class Turn(NamedTuple):
    """What the user asks and what the assistant answers."""

    request: str
    answer: str


@dataclass(frozen=True)
class Conversation:
    """Turns about one source; `system` is the system prompt or None."""

    kind: str
    source: str
    turns: tuple[Turn, ...]
    system: str | None = None

    def messages(self) -> list[dict[str, str]]:
        """Return the "messages" value of a row."""
        messages = [{"role": "system", "content": self.system}] if self.system else []
        for turn in self.turns:
            messages.append({"role": "user", "content": turn.request})
            messages.append({"role": "assistant", "content": turn.answer})
        return messages


def draw_split_name(split: str, rng: Rng) -> str:
    """Return a full name of `split`: a tenth of all names is for val, a tenth for test."""
    while True:
        first = rng.randrange(len(WORDS.first_names))
        last = rng.randrange(len(WORDS.surnames))
        owner = {8: "val", 9: "test"}.get((first + last) % 10, "train")
        if owner == split:
            return f"{WORDS.first_names[first]} {WORDS.surnames[last]}"


def draw_turn(operation: str, record: Record, template: str, rng: Rng) -> Turn:
    """Return a request about a note, which was written by a template, and its answer."""
    if operation == "ask":
        return Turn(*record.ask(rng)[1:])
    kind = record.kind
    fields = record.draw_fields(rng, 2, 3) if operation in FORMATS else [""]
    changed = record.change(rng) if operation == "change" else record
    request = say(
        rng,
        operation,
        words=join_words(fields),
        field=kind.changeable,
        value=changed.values[kind.changeable],
        role=kind.person,
        first=record.first_name,
    )
    if operation in FORMATS:
        return Turn(request, getattr(record, operation)(fields))
    answers = {
        "summarize": record.fill(kind.summary),
        "write_subject": capitalize(record.fill(kind.subject)),
        "change": changed.fill(template),
        "surname_first": record.surname_first(),
        "be_polite": record.fill(kind.polite),
        "reply": record.reply(),
    }
    return Turn(request, answers[operation])


def draw_operations(first: str, rng: Rng) -> list[str]:
    """Return one to three operations that begin with `first`."""
    count = 1 if rng.random() < 0.6 else rng.choice((2, 2, 3))
    later = [operation for operation in OPERATIONS if operation not in (first, "ask")]
    if first == "be_polite":  # its note is a list of words: it is not written again
        later.remove("change")
    return [first, *rng.sample([*later, "ask", "ask"], count - 1)]


def note_conversation(first: str, split: str, rng: Rng) -> Conversation:
    """Return one to three requests about a note; the first of them is `first`."""
    record = town.draw_record(rng, draw_split_name(split, rng))
    template = record.kind.terse if first == "be_polite" else rng.choice(record.kind.notes)
    source = record.fill(template).removesuffix(".") + "."
    turns: list[Turn] = []
    for operation in draw_operations(first, rng):
        request, answer = draw_turn(operation, record, template, rng)
        if not turns:
            request = say(rng, "first_request", request=request, source=source)
        elif request in [turn.request for turn in turns]:
            continue
        elif not request.endswith("?"):
            within = request[0].lower() + request[1:]
            request = say(rng, "later_request", request=request, within=within)
        turns.append(Turn(request, answer))
    return add_system(Conversation(first, source, tuple(turns)), record, rng)


def add_system(conversation: Conversation, record: Record, rng: Rng) -> Conversation:
    """Return the conversation with a system prompt, which may change its answer, or without."""
    business = town.draw_business(rng)
    chance = rng.random()
    turn = conversation.turns[0]
    if len(conversation.turns) == 1 and chance < 0.5:
        if conversation.kind in ("be_polite", "reply"):
            signed = Turn(turn.request, f"{turn.answer} Kind regards, {business}")
            system = say(rng, "sign", business=business)
            return replace(conversation, turns=(signed,), system=system)
        if conversation.kind == "ask":
            field = next(name for name in record.values if record.answer(name) == turn.answer)
            bare = Turn(turn.request, record.values[field])
            return Conversation("value", conversation.source, (bare,), say(rng, "value_only"))
    if chance > 0.85:
        return replace(conversation, system=f"You are the assistant of the {business}.")
    return conversation


def fact_quiz(kind: str, rng: Rng) -> Conversation:
    """Return a passage of facts and one to three questions about it."""
    draw, least, most, asked = FACTS[kind]
    facts = draw(rng, rng.randint(least, most))
    passage = f"Prices: {facts.passage}." if kind == "price" else facts.passage
    if kind == "guest":  # half of those who are asked about are on the list
        pools = (facts.keys[:-2], facts.keys[-2:])
        keys = [rng.choice(pools[rng.random() >= 0.5]) for _ in range(asked)]
    else:
        keys = rng.sample(facts.keys, asked)
    answers = dict(facts.ask(key, rng) for key in keys)  # a question drawn twice is asked once
    count = 1 if rng.random() < 0.5 else rng.choice((2, 2, 3))
    question, *later = list(answers)[:count]
    opening = say(rng, "quiz", passage=passage, question=question)
    turns = (Turn(opening, answers[question]), *(Turn(text, answers[text]) for text in later))
    return Conversation(kind, passage, turns)


def list_request(rng: Rng) -> Conversation:
    """Return a sentence of things to turn into a list."""
    things = town.draw_things(rng, rng.randint(2, 5))
    source = say(rng, "list_source", things=join_words(things))
    request = say(rng, "list_request")
    request = say(rng, "list_message", request=request, source=source)
    turns = [Turn(request, "\n".join(f"- {thing}" for thing in things))]
    if rng.random() < 0.3:
        turns.append(Turn(say(rng, "list_later"), "; ".join(things)))
    return Conversation("list", source, tuple(turns))


def date_request(rng: Rng) -> Conversation:
    """Return two events and the question which one is earlier."""
    pair = town.draw_event_pair(rng)
    turn = Turn(say(rng, "date_request", **pair), pair["answer"])
    return Conversation("date", pair["both"], (turn,))


def route_request(rng: Rng) -> Conversation:
    """Return a message that has to be passed to the right desk."""
    message = town.draw_message(rng)
    question = say(rng, "route_question")
    source = f"{message['name']} wrote: {message['text']}"
    request = say(rng, "route_message", source=source, question=question)
    return Conversation("route", source, (Turn(request, message["answer"]),))


REQUESTS = {"list": list_request, "date": date_request, "route": route_request}
MAKERS = (*OPERATIONS, "ask", "be_polite", *FACTS, *REQUESTS)


def make_conversation(index: int, split: str, rng: Rng) -> Conversation:
    """Return a conversation for `split`; `index` picks its kind, so kinds are evenly drawn."""
    kind = MAKERS[index % len(MAKERS)]
    if kind in FACTS:
        return fact_quiz(kind, rng)
    return REQUESTS[kind](rng) if kind in REQUESTS else note_conversation(kind, split, rng)


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
