"""The pre-training text: plain prose about an invented town, in short documents. No torch.

A tiny model learns to copy, look up and restate only if its text asks for it. So each document
states a few facts and then states them again: in a letter, on a card, in a list, in an answer that
one person gives another. None of it looks like a chat.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial

from tools.embedded import task, town
from tools.embedded.town import WORDS, Record, Rng, capitalize, join_words, say

CORPUS_SEED = 20
CORPUS_BYTES = 1_800_000
EXERCISE_SHARE = 0.5  # of the documents
NOTE_SHARE = 0.3

# Who speaks in a document: the clerk, the business, and the other person, who has no name. Names
# are few on purpose: the model cannot predict a new name, and each is a wrong candidate for copies.
Scene = dict[str, str]
Segment = Callable[[Record, Scene, Rng], str]


def ask_in_person(record: Record, scene: Scene, rng: Rng) -> str:
    """Return a question about the note and its answer, as two people say them."""
    field, question, answer = record.ask(rng)
    value = record.values[field]
    return say(rng, "ask_in_person", question=question, answer=answer, value=value, **scene)


def state_fields(record: Record, scene: Scene, rng: Rng) -> str:
    """Return two or three facts of the note, each in a sentence of its own."""
    facts = " ".join(map(record.answer, record.draw_fields(rng, 2, 3)))
    return say(rng, "state_fields", **scene) + facts


def fill_card(record: Record, scene: Scene, rng: Rng) -> str:
    """Return the note as a card with one line for each field."""
    fields = record.draw_fields(rng, 2, min(4, len(record.values)))
    return f"{say(rng, 'fill_card', words=join_words(fields), **scene)}\n{record.as_form(fields)}"


def keep_in_file(record: Record, scene: Scene, rng: Rng) -> str:
    """Return the note as JSON or as a row of a table."""
    fields = record.draw_fields(rng, 2, min(4, len(record.values)))
    phrase, written = "keep_as_row", record.as_row(fields)
    if rng.random() < 0.5:
        phrase, written = "keep_as_json", record.as_json(fields)
    return f"{say(rng, phrase, words=join_words(fields), **scene)}:\n{written}"


def retell(phrase: str, record: Record, scene: Scene, rng: Rng) -> str:
    """Return the note in other words: a letter, a heading, a reply or an index."""
    kind = record.kind
    return say(
        rng,
        phrase,
        polite=record.fill(kind.polite),
        terse=record.fill(kind.terse),
        subject=capitalize(record.fill(kind.subject)),
        summary=record.fill(kind.summary),
        reply=record.reply(),
        role=kind.person,
        person=record.person,
        indexed=record.surname_first(),
        **scene,
    )


def correct(record: Record, scene: Scene, rng: Rng) -> str:
    """Return the note, a changed value and the note with that value."""
    field = record.kind.changeable
    changed = record.change(rng)
    template = rng.choice(record.kind.notes)
    return say(
        rng,
        "correct",
        field=field,
        old=record.fill(template),
        new=changed.fill(template),
        before=record.values[field],
        value=changed.values[field],
        first=record.first_name,
        **scene,
    )


def copy_out(record: Record, scene: Scene, rng: Rng) -> str:
    """Return the note twice, word for word."""
    return say(rng, "copy_out", note=record.note(rng), **scene)


# listed more than once: drawn more often
SEGMENTS: tuple[Segment, ...] = (
    *4 * (ask_in_person,),
    state_fields,
    *3 * (partial(retell, "write_letter"),),
    fill_card,
    *2 * (keep_in_file,),
    *2 * (partial(retell, "give_heading"),),
    correct,
    copy_out,
    partial(retell, "thank"),
    partial(retell, "index_name"),
)


def note_document(rng: Rng) -> str:
    """Return a document about one or two notes: the notes first, then what was made of each."""
    scene = {"clerk": rng.choice(WORDS.first_names), "business": town.draw_business(rng)}
    scene["other"] = say(rng, "other")
    scene["Other"] = capitalize(scene["other"])
    opening = say(rng, "opening", day=rng.choice(WORDS.days), **scene)
    # nobody shares the clerk's first name: "said Ada" must not mean two people
    names = [name for name in town.draw_full_names(rng, 3) if name.split()[0] != scene["clerk"]]
    records = [town.draw_record(rng, name) for name in names[: rng.choice((1, 1, 2))]]
    parts = [" ".join([opening, *(record.note(rng) for record in records)])]
    for _ in range(rng.randint(3, 6)):
        segment = rng.choice(SEGMENTS)
        parts.append(segment(rng.choice(records), scene, rng))
        if segment is correct:
            break  # what came before it no longer holds
    return "\n".join(parts)


def exercise(rng: Rng) -> str:
    """Return a page of the exercise book: requests about a source with their solutions, in prose.

    Names are those of the training split. The chat format, its markers and its stop are left to
    fine-tuning.
    """
    turns = task.make_conversation(rng.randrange(1 << 16), "train", rng).turns
    return "\n".join(f"Exercise. {turn.request}\nSolution: {turn.answer}" for turn in turns)


def fact_document(kind: str, rng: Rng) -> str:
    """Return a few facts, and questions about them that people ask."""
    draw, least, most, asked = task.FACTS[kind]
    facts = draw(rng, rng.randint(least, most + (kind == "place")))
    parts, person = [facts.passage], ""
    if kind in ("place", "price"):
        person, business = rng.choice(WORDS.first_names), town.draw_business(rng)
        if kind == "place":
            parts.insert(0, f"{person} showed a visitor around the {business}.")
        else:
            parts = [f"The prices at the {business}: {facts.passage}."]
    phrase = "buyer" if kind == "price" else "visitor"
    for key in rng.sample(facts.keys, asked):
        question, answer = facts.ask(key, rng)
        price = answer.split()[-2]  # of "... costs 6 euros."
        values = {"question": question, "answer": answer, "noun": key, "price": price}
        parts.append(say(rng, phrase, buyer=person, **values))
    return " ".join(parts)


def list_document(rng: Rng) -> str:
    """Return a sentence of things to buy or pack, and the same things as a list."""
    things = town.draw_things(rng, rng.randint(2, 5))
    name = rng.choice(WORDS.first_names)
    sentence = say(rng, "list_sentence", name=name, things=join_words(things))
    lead = say(rng, "list_lead", name=name)
    if rng.random() < 0.3:
        return f"{sentence} In one line that is: {'; '.join(things)}"
    return "\n".join([f"{sentence} {lead}", *(f"- {thing}" for thing in things)])


def date_document(rng: Rng) -> str:
    """Return pairs of events and which of them comes first."""
    count = rng.randint(2, 4)
    return " ".join(say(rng, "dates", **town.draw_event_pair(rng)) for _ in range(count))


def calendar_document(rng: Rng) -> str:
    """Return some months or weekdays in their order."""
    names = rng.choice((WORDS.months, WORDS.days))
    parts = []
    for _ in range(rng.randint(3, 6)):
        low, high = sorted(rng.sample(range(len(names)), 2))
        parts.append(say(rng, "calendar", earlier=names[low], later=names[high]))
    start = rng.randint(0, len(names) - 3)
    stop = start + rng.randint(3, len(names))
    parts.append(f"The order is {', '.join(names[start:stop])}.")
    return " ".join(parts)


def route_document(rng: Rng) -> str:
    """Return messages and the desk that each of them went to."""
    clerk = rng.choice(WORDS.first_names)
    parts = [f"{clerk} sorts the messages of the {town.draw_business(rng)}."]
    for _ in range(rng.randint(2, 3)):
        parts.append(say(rng, "routed", clerk=clerk, **town.draw_message(rng)))
    return " ".join(parts)


def story_document(rng: Rng) -> str:
    """Return a small story about two people and a day in the town; nothing is asked."""
    one, two = town.draw_full_names(rng, 2)
    first, second = rng.sample(WORDS.places, 2)
    values = {"a": one.split()[0], "b": two.split()[0], "first": first, "second": second}
    values |= {"item": town.draw_goods(rng), "day": rng.choice(WORDS.days)}
    values["city"] = rng.choice(WORDS.cities)
    opening = f"{say(rng, 'weather')} on {values['day']}. {one} and {two} are old friends."
    meeting = say(rng, "meeting", **values)
    topics = {"topic": rng.choice(WORDS.topics), "later_topic": rng.choice(WORDS.topics)}
    middle = say(rng, "middle", **values, **topics)
    return f"{opening} {meeting} {middle} {say(rng, 'ending', **values)}"


# listed twice: drawn twice as often
DOCUMENT_MAKERS = (
    partial(fact_document, "place"),
    partial(fact_document, "job"),
    partial(fact_document, "price"),
    partial(fact_document, "hours"),
    list_document,
    partial(fact_document, "guest"),
    date_document,
    date_document,
    calendar_document,
    route_document,
    story_document,
)


def make_document(rng: Rng) -> str:
    """Return one document: exercises, notes and what was made of them, or a list or story."""
    chance = rng.random()
    if chance < EXERCISE_SHARE:
        return exercise(rng)
    if chance < EXERCISE_SHARE + NOTE_SHARE:
        return note_document(rng)
    return rng.choice(DOCUMENT_MAKERS)(rng)


def make_documents(seed: int = CORPUS_SEED) -> Iterator[str]:
    """Yield documents without end; none holds an empty line, so an empty line can separate them."""
    rng = random.Random(seed)
    while True:
        yield make_document(rng)


def corpus_text(seed: int = CORPUS_SEED, size_bytes: int = CORPUS_BYTES) -> str:
    """Return documents separated by an empty line, at most `size_bytes` bytes of UTF-8."""
    kept: list[str] = []
    used_bytes = 0
    for document in make_documents(seed):
        used_bytes += len(document.encode()) + 2
        if used_bytes > size_bytes:
            break
        kept.append(document)
    return "\n\n".join(kept) + "\n"


def split_documents(text: str) -> list[str]:
    """Return the documents of a corpus text."""
    return [part for part in text.strip().split("\n\n") if part]
