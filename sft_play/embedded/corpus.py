"""The pre-training text: plain prose about the town, one document a paragraph block. Pure: `random` only, no torch, no I/O.

A tiny model learns to copy, look up and restate only if its text makes it do so. So each document tells a few facts and then says
them again: in a letter, on a card, in a list, in an answer that one person gives another. None of it looks like a chat.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

from sft_play.embedded import stories, world
from sft_play.embedded.records import Record, draw_record, draw_value

CORPUS_SEED = 20
CORPUS_BYTES = 1_900_000

Segment = Callable[[Record, str, random.Random], str]


def ask_in_person(record: Record, clerk: str, rng: random.Random) -> str:
    """Return a question about the note and its answer, as two people say them."""
    field = rng.choice(list(record.kind.fields))
    question, answer = record.question(field, rng), record.answer(field)
    other = rng.choice(world.FIRST_NAMES)
    value = record.by_name[field]
    return rng.choice((
        f'"{question}" asked {other}. "{answer}" said {clerk}.',
        f'{other} looked up. "{question}" {clerk} read the note again. "{answer}"',
        f'"{question}" {answer}',
        f'{other} wanted one word only: "{question}" "{world.upper_first(value)}," said {clerk}.',
        f'"{question}" asked {other}, and {clerk} wrote one line: {value}',
    ))  # fmt: skip


def tell_fields(record: Record, clerk: str, rng: random.Random) -> str:
    """Return two or three facts of the note, each in a sentence of its own."""
    names = rng.sample(list(record.kind.fields), rng.randint(2, 3))
    lead = rng.choice(("", f"{clerk} read it out. ", "That is all there is to know: ", "In other words: "))
    return lead + " ".join(record.answer(name) for name in names)


def write_letter(record: Record, clerk: str, rng: random.Random) -> str:
    """Return the slip of paper and the polite letter that was made of it."""
    polite, terse, house = record.say(record.kind.polite), record.say(record.kind.terse), world.house(rng)
    return rng.choice((
        f"The slip of paper said: {terse}. The letter said: {polite}",
        f"{clerk} had scribbled: {terse}. A polite message went out the same day: {polite}",
        f"{clerk} wrote a polite message: {polite}",
        f"{clerk} of the {house} wrote: {polite} Kind regards, {house}",
        f"The letter of the {house} was short. {polite} Kind regards, {house}",
    ))  # fmt: skip


def some_fields(record: Record, rng: random.Random) -> list[str]:
    """Return two to four field names of the record in a random order."""
    names = list(record.kind.fields)
    return rng.sample(names, rng.randint(2, min(4, len(names))))


def fill_card(record: Record, clerk: str, rng: random.Random) -> str:
    """Return the note as a card with one line for each field."""
    fields = some_fields(record, rng)
    words = world.join_words(fields)
    lead = rng.choice((f"{clerk} filled in the card.", f"The card has lines for {words}.", f"A card asks for {words}."))
    return f"{lead}\n{record.as_form(fields)}"


def keep_in_file(record: Record, clerk: str, rng: random.Random) -> str:
    """Return the note as JSON or as a row of a table."""
    fields = some_fields(record, rng)
    words = world.join_words(fields)
    if rng.random() < 0.5:
        lead = rng.choice(("The computer keeps it as JSON", f"In the file with {words} it is", f"{clerk} typed {words} as JSON"))
        return f"{lead}:\n{record.as_json(fields)}"
    lead = rng.choice((f"The table has columns for {words}", f"In the ledger {clerk} wrote {words} in one row", f"The row with {words} is"))
    return f"{lead}:\n{record.as_row(fields)}"


def give_heading(record: Record, clerk: str, rng: random.Random) -> str:
    """Return the note's subject line or its one-sentence summary."""
    subject = world.upper_first(record.say(record.kind.subject))
    summary = record.say(record.kind.summary)
    return rng.choice((
        f"The subject line reads: {subject}",
        f"{clerk} put it under the heading: {subject}",
        f"In one sentence: {summary}",
        f"In short, {summary}",
        f"{clerk} told it in one sentence. {summary}",
    ))  # fmt: skip


def correct(record: Record, clerk: str, rng: random.Random) -> str:
    """Return the note, a change of mind and the note as it reads then."""
    field = record.kind.changeable
    changed = record.replace(field, draw_value(field, rng))
    template = rng.choice(record.kind.notes)
    old, new = record.say(template), changed.say(template)
    value, before = changed.by_name[field], record.by_name[field]
    return rng.choice((
        f"{clerk} had written: {old} Then the {field} changed to {value}, so now it reads: {new}",
        f"The first version said: {old} With {value} in place of {before} it says: {new}",
        f'"Make it {value}," said {record.person.split()[0]}. {clerk} wrote the note again: {new}',
        f"The {field} is not {before} but {value}. {new}",
    ))  # fmt: skip


def thank(record: Record, clerk: str, rng: random.Random) -> str:
    """Return a two-sentence reply to the person of the note."""
    reply = record.reply()
    return rng.choice((f"{clerk} answered: {reply}", f"The reply was friendly. {reply}", f"Back came two sentences: {reply}"))


def index_name(record: Record, clerk: str, rng: random.Random) -> str:
    """Return the person's name as the card index files it, surname first."""
    first, last = record.person.split()
    return rng.choice((f"In the index the name is {last}, {first}.", f"{clerk} filed {first} {last} as {last}, {first}.",
                       f"Surname first, that is {last}, {first}."))  # fmt: skip


SEGMENTS: tuple[Segment, ...] = (
    ask_in_person, ask_in_person, ask_in_person, tell_fields, write_letter, write_letter, fill_card, keep_in_file, keep_in_file,
    give_heading, correct, thank, index_name,
)  # fmt: skip


def desk_document(rng: random.Random) -> str:
    """Return a document about one to three notes: the notes first, then what was made of each."""
    clerk, day = rng.choice(world.FIRST_NAMES), rng.choice(world.DAYS)
    names = world.people(rng, 3)
    records = [draw_record(rng, person=name) for name in names[: rng.choice((1, 1, 2, 2, 3))]]
    opening = rng.choice((
        f"{clerk} opened the post on {day} morning.",
        f"It was a quiet {day} at the {world.house(rng)}.",
        f"{clerk} works at the {world.house(rng)}.",
        f"From the day book of the {world.house(rng)}.",
        "",
        "",
    ))  # fmt: skip
    parts = [" ".join([opening, *(record.note(rng) for record in records)]).strip()]
    for _ in range(rng.randint(2, 5)):
        record = rng.choice(records)
        parts.append(rng.choice(SEGMENTS)(record, clerk, rng))
    return "\n".join(parts)


def document(rng: random.Random) -> str:
    """Return one document; two in three are about notes, the others are the stories and lists of the town."""
    return desk_document(rng) if rng.random() < 0.6 else rng.choice(stories.STORIES)(rng)


def documents(seed: int = CORPUS_SEED) -> Iterator[str]:
    """Yield documents without end; none holds an empty line, so an empty line can part them."""
    rng = random.Random(seed)
    while True:
        yield document(rng)


def corpus_text(seed: int = CORPUS_SEED, size_bytes: int = CORPUS_BYTES) -> str:
    """Return the shipped corpus: documents parted by an empty line, at most `size_bytes` bytes of UTF-8."""
    kept: list[str] = []
    used = 0
    for text in documents(seed):
        used += len(text.encode()) + 2
        if used > size_bytes:
            return "\n\n".join(kept) + "\n"
        kept.append(text)
    raise AssertionError("documents() ends only with the process")


def split_documents(text: str) -> list[str]:
    """Return the documents of a corpus text."""
    return [part for part in text.strip().split("\n\n") if part]
