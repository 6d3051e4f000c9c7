"""The pre-training text: plain prose about the town, one document a paragraph block. Pure: `random` only, no torch, no I/O.

A tiny model learns to copy, look up and restate only if its text makes it do so. So each document tells a few facts and then says
them again: in a letter, on a card, in a list, in an answer that one person gives another. None of it looks like a chat.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from sft_play.embedded import desk, stories, world
from sft_play.embedded.records import Record, draw_change, draw_record

CORPUS_SEED = 20
CORPUS_BYTES = 1_800_000
EXERCISE_SHARE = 0.5  # of the documents


@dataclass(frozen=True)
class Scene:
    """Who speaks in a document: the clerk, the business, and the other person, who has no name.

    Few names on purpose: each new one is a token that nothing foretells, and a wrong candidate for every later copy.
    """

    clerk: str
    house: str
    other: str


Segment = Callable[[Record, Scene, random.Random], str]


def ask_in_person(record: Record, scene: Scene, rng: random.Random) -> str:
    """Return a question about the note and its answer, as two people say them."""
    field = rng.choice(list(record.kind.fields))
    question, answer = record.question(field, rng), record.answer(field)
    value = record.by_name[field]
    return rng.choice((
        f'"{question}" asked {scene.other}. "{answer}"',
        f'{world.upper_first(scene.other)} looked up. "{question}" {scene.clerk} read the note again. "{answer}"',
        f'"{question}" {answer}',
        f'"{question}" {answer}',
        f'"{question}" In one word: {value}',
        f'"{question}" asked {scene.other}, and {scene.clerk} wrote one line: {value}',
    ))  # fmt: skip


def tell_fields(record: Record, scene: Scene, rng: random.Random) -> str:
    """Return two or three facts of the note, each in a sentence of its own."""
    names = rng.sample(list(record.kind.fields), rng.randint(2, 3))
    lead = rng.choice(
        ("", f"{scene.clerk} read it out. ", "That is all there is to know: ", "In other words: ")
    )
    return lead + " ".join(record.answer(name) for name in names)


def write_letter(record: Record, scene: Scene, rng: random.Random) -> str:
    """Return the slip of paper and the polite letter that was made of it."""
    polite, terse = record.say(record.kind.polite), record.say(record.kind.terse)
    return rng.choice((
        f"The slip of paper said: {terse}. The letter said: {polite}",
        f"{scene.clerk} had scribbled: {terse}. A polite message went out the same day: {polite}",
        f"{scene.clerk} wrote a polite message: {polite}",
        f"On the slip: {terse}. In the letter: {polite} Kind regards, {scene.house}",
        f"The letter was short. {polite} Kind regards, {scene.house}",
    ))  # fmt: skip


def some_fields(record: Record, rng: random.Random) -> list[str]:
    """Return two to four field names of the record in a random order."""
    names = list(record.kind.fields)
    return rng.sample(names, rng.randint(2, min(4, len(names))))


def fill_card(record: Record, scene: Scene, rng: random.Random) -> str:
    """Return the note as a card with one line for each field."""
    fields = some_fields(record, rng)
    words = world.join_words(fields)
    lead = rng.choice(
        (
            f"{scene.clerk} filled in a form with {words}.",
            f"The card has lines for {words}.",
            f"A card asks for {words}.",
        )
    )
    return f"{lead}\n{record.as_form(fields)}"


def keep_in_file(record: Record, scene: Scene, rng: random.Random) -> str:
    """Return the note as JSON or as a row of a table."""
    fields = some_fields(record, rng)
    words = world.join_words(fields)
    if rng.random() < 0.5:
        lead = rng.choice(
            (
                f"The computer keeps {words} as JSON",
                f"In the file with {words} it is",
                f"{scene.clerk} typed {words} as JSON",
            )
        )
        return f"{lead}:\n{record.as_json(fields)}"
    lead = rng.choice(
        (
            f"The table has columns for {words}",
            f"{scene.clerk} wrote {words} in one row",
            f"The row with {words} is",
        )
    )
    return f"{lead}:\n{record.as_row(fields)}"


def give_heading(record: Record, scene: Scene, rng: random.Random) -> str:
    """Return the note's subject line or its one-sentence summary."""
    subject = world.upper_first(record.say(record.kind.subject))
    summary = record.say(record.kind.summary)
    return rng.choice((
        f"The subject line reads: {subject}",
        f"{scene.clerk} put it under the heading: {subject}",
        f"In one sentence: {summary}",
        f"In short: {summary}",
        f"{scene.clerk} told it in one sentence. {summary}",
    ))  # fmt: skip


def correct(record: Record, scene: Scene, rng: random.Random) -> str:
    """Return the note, a change of mind and the note as it reads then."""
    field = record.kind.changeable
    changed = record.replace(field, draw_change(record, rng))
    template = rng.choice(record.kind.notes)
    old, new = record.say(template), changed.say(template)
    value, before = changed.by_name[field], record.by_name[field]
    return rng.choice((
        f"{scene.clerk} had written: {old} Then the {field} changed to {value}, so now it reads: {new}",
        f"The first version said: {old} With {value} in place of {before} it says: {new}",
        f'The note said: {old} "Make it {value}," said {record.person.split()[0]}. {scene.clerk} wrote the note again: {new}',
        f"Yesterday: {old} But the {field} is now {value}. Today: {new}",
    ))  # fmt: skip


def copy_out(record: Record, scene: Scene, rng: random.Random) -> str:
    """Return the note twice, word for word."""
    note = record.note(rng)
    return rng.choice(
        (
            f"{note} And once more: {note}",
            f"{scene.clerk} read: {note} Then {scene.clerk} copied it: {note}",
        )
    )


def thank(record: Record, scene: Scene, rng: random.Random) -> str:
    """Return a two-sentence reply to the person of the note."""
    reply = record.reply()
    return rng.choice((f"{scene.clerk} answered: {reply}", f"The reply was friendly. {reply}", f"Back came two sentences: {reply}",
                       f"The reply was friendly. {reply} Kind regards, {scene.house}"))  # fmt: skip


def index_name(record: Record, scene: Scene, rng: random.Random) -> str:
    """Return the person's name as the card index files it, surname first."""
    first, last = record.person.split()
    role = record.kind.person
    return rng.choice((f"In the index the {role} is {last}, {first}", f"{scene.clerk} filed {first} {last} as {last}, {first}",
                       f"With the surname first, the {role} is {last}, {first}"))  # fmt: skip


SEGMENTS: tuple[Segment, ...] = (
    ask_in_person, ask_in_person, ask_in_person, ask_in_person, tell_fields, write_letter, write_letter, write_letter, fill_card, keep_in_file,
    keep_in_file, give_heading, give_heading, correct, copy_out, thank, index_name,
)  # fmt: skip


def draw_scene(rng: random.Random) -> tuple[Scene, str]:
    """Return who speaks and the sentence that brings them in."""
    others = ("a colleague", "the manager", "somebody at the door", "the new clerk", "an old man")
    scene = Scene(rng.choice(world.FIRST_NAMES), world.house(rng), rng.choice(others))
    opening = rng.choice((
        f"{scene.clerk} opened the post of the {scene.house}.",
        f"It was a quiet {rng.choice(world.DAYS)} at the {scene.house}, and {scene.clerk} was on duty.",
        f"{scene.clerk} works at the {scene.house}.",
        f"From the day book of the {scene.house}, kept by {scene.clerk}.",
    ))  # fmt: skip
    return scene, opening


def desk_document(rng: random.Random) -> str:
    """Return a document about one or two notes: the notes first, then what was made of each."""
    scene, opening = draw_scene(rng)
    # the clerk is nobody's namesake: "said Ada" must not point at two people
    names = [name for name in world.people(rng, 3) if name.split()[0] != scene.clerk]
    records = [draw_record(rng, person=name) for name in names[: rng.choice((1, 1, 2))]]
    parts = [" ".join([opening, *(record.note(rng) for record in records)])]
    for _ in range(rng.randint(3, 6)):
        segment = rng.choice(SEGMENTS)
        parts.append(segment(rng.choice(records), scene, rng))
        if segment is correct:
            break  # what came before it no longer holds
    return "\n".join(parts)


def exercise(rng: random.Random) -> str:
    """Return a page of the exercise book: requests about a note or some facts, each with its solution, in plain prose.

    Names are those of the training split; the chat format, its markers and its stop belong to fine-tuning.
    """
    talk = desk.conversation(rng.randrange(1 << 16), "train", rng)
    return "\n".join(f"Exercise. {request}\nSolution: {answer}" for request, answer in talk.turns)


def document(rng: random.Random) -> str:
    """Return one document: mostly pages of the exercise book, else notes and what was made of them, stories and lists of the town."""
    chance = rng.random()
    if chance < EXERCISE_SHARE:
        return exercise(rng)
    return (
        desk_document(rng)
        if chance < EXERCISE_SHARE + 0.6 * (1 - EXERCISE_SHARE)
        else rng.choice(stories.STORIES)(rng)
    )


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
