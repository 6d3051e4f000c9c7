"""The pre-training text: plain prose about an invented town, in short documents. No torch.

A tiny model learns to copy, look up and restate only if its text asks for it. So each document
states a few facts and then states them again: in a letter, on a card, in a list, in an answer that
one person gives another. None of it looks like a chat.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tools.embedded import task, vocabulary
from tools.embedded.documents import DOCUMENT_MAKERS
from tools.embedded.records import Record, draw_change, draw_record
from tools.embedded.vocabulary import WORDS, capitalize, join_words

CORPUS_SEED = 20
CORPUS_BYTES = 1_800_000
EXERCISE_SHARE = 0.5  # of the documents
NOTE_SHARE = 0.3


@dataclass(frozen=True)
class Scene:
    """Who speaks in a document: the clerk, the business, and the other person, who has no name.

    Names are few on purpose: the model cannot predict a new name, and each is a wrong candidate for
    later copies.
    """

    clerk: str
    business: str
    other: str


Segment = Callable[[Record, Scene, random.Random], str]


def ask_in_person(record: Record, scene: Scene, rng: random.Random) -> str:
    """Return a question about the note and its answer, as two people say them."""
    field = rng.choice(list(record.kind.fields))
    question = record.question(field, rng)
    answer = record.answer(field)
    value = record.values[field]
    looked_up = f"{capitalize(scene.other)} looked up."
    forms = (
        f'"{question}" asked {scene.other}. "{answer}"',
        f'{looked_up} "{question}" {scene.clerk} read the note again. "{answer}"',
        f'"{question}" {answer}',
        f'"{question}" {answer}',
        f'"{question}" In one word: {value}',
        f'"{question}" asked {scene.other}, and {scene.clerk} wrote one line: {value}',
    )
    return rng.choice(forms)


def state_fields(record: Record, scene: Scene, rng: random.Random) -> str:
    """Return two or three facts of the note, each in a sentence of its own."""
    fields = task.draw_fields(record, rng)
    leads = (
        "",
        f"{scene.clerk} read it out. ",
        "That is all there is to know: ",
        "In other words: ",
    )
    return rng.choice(leads) + " ".join(record.answer(field) for field in fields)


def write_letter(record: Record, scene: Scene, rng: random.Random) -> str:
    """Return the slip of paper and the polite letter that was made of it."""
    polite = record.fill(record.kind.polite)
    terse = record.fill(record.kind.terse)
    forms = (
        f"The slip of paper said: {terse}. The letter said: {polite}",
        f"{scene.clerk} had scribbled: {terse}. A polite message went out the same day: {polite}",
        f"{scene.clerk} wrote a polite message: {polite}",
        f"On the slip: {terse}. In the letter: {polite} Kind regards, {scene.business}",
        f"The letter was short. {polite} Kind regards, {scene.business}",
    )
    return rng.choice(forms)


def draw_fields(record: Record, rng: random.Random) -> list[str]:
    """Return two to four field names of the record in a random order."""
    names = list(record.kind.fields)
    return rng.sample(names, rng.randint(2, min(4, len(names))))


def fill_card(record: Record, scene: Scene, rng: random.Random) -> str:
    """Return the note as a card with one line for each field."""
    fields = draw_fields(record, rng)
    words = join_words(fields)
    leads = (
        f"{scene.clerk} filled in a form with {words}.",
        f"The card has lines for {words}.",
        f"A card asks for {words}.",
    )
    return f"{rng.choice(leads)}\n{record.as_form(fields)}"


def keep_in_file(record: Record, scene: Scene, rng: random.Random) -> str:
    """Return the note as JSON or as a row of a table."""
    fields = draw_fields(record, rng)
    words = join_words(fields)
    if rng.random() < 0.5:
        leads = (
            f"The computer keeps {words} as JSON",
            f"In the file with {words} it is",
            f"{scene.clerk} typed {words} as JSON",
        )
        return f"{rng.choice(leads)}:\n{record.as_json(fields)}"
    leads = (
        f"The table has columns for {words}",
        f"{scene.clerk} wrote {words} in one row",
        f"The row with {words} is",
    )
    return f"{rng.choice(leads)}:\n{record.as_row(fields)}"


def give_heading(record: Record, scene: Scene, rng: random.Random) -> str:
    """Return the note's subject line or its one-sentence summary."""
    subject = capitalize(record.fill(record.kind.subject))
    summary = record.fill(record.kind.summary)
    forms = (
        f"The subject line reads: {subject}",
        f"{scene.clerk} put it under the heading: {subject}",
        f"In one sentence: {summary}",
        f"In short: {summary}",
        f"{scene.clerk} told it in one sentence. {summary}",
    )
    return rng.choice(forms)


def correct(record: Record, scene: Scene, rng: random.Random) -> str:
    """Return the note, a changed value and the note with that value."""
    field = record.kind.changeable
    changed = record.with_value(field, draw_change(record, rng))
    template = rng.choice(record.kind.notes)
    old = record.fill(template)
    new = changed.fill(template)
    before = record.values[field]
    value = changed.values[field]
    said = f'"Make it {value}," said {record.first_name}. {scene.clerk} wrote the note again:'
    forms = (
        f"{scene.clerk} had written: {old} "
        f"Then the {field} changed to {value}, so now it reads: {new}",
        f"The first version said: {old} With {value} in place of {before} it says: {new}",
        f"The note said: {old} {said} {new}",
        f"Yesterday: {old} But the {field} is now {value}. Today: {new}",
    )
    return rng.choice(forms)


def copy_out(record: Record, scene: Scene, rng: random.Random) -> str:
    """Return the note twice, word for word."""
    note = record.note(rng)
    forms = (
        f"{note} And once more: {note}",
        f"{scene.clerk} read: {note} Then {scene.clerk} copied it: {note}",
    )
    return rng.choice(forms)


def thank(record: Record, scene: Scene, rng: random.Random) -> str:
    """Return a two-sentence reply to the person of the note."""
    reply = record.reply()
    forms = (
        f"{scene.clerk} answered: {reply}",
        f"The reply was friendly. {reply}",
        f"Back came two sentences: {reply}",
        f"The reply was friendly. {reply} Kind regards, {scene.business}",
    )
    return rng.choice(forms)


def index_name(record: Record, scene: Scene, rng: random.Random) -> str:
    """Return the person's name as the card index files it, surname first."""
    role = record.kind.person
    indexed = record.surname_first()
    forms = (
        f"In the index the {role} is {indexed}",
        f"{scene.clerk} filed {record.person} as {indexed}",
        f"With the surname first, the {role} is {indexed}",
    )
    return rng.choice(forms)


# listed more than once: drawn more often
SEGMENTS: tuple[Segment, ...] = (
    *4 * (ask_in_person,),
    state_fields,
    *3 * (write_letter,),
    fill_card,
    *2 * (keep_in_file,),
    *2 * (give_heading,),
    correct,
    copy_out,
    thank,
    index_name,
)


def draw_scene(rng: random.Random) -> Scene:
    """Return who speaks."""
    clerk = rng.choice(WORDS.first_names)
    business = vocabulary.draw_business(rng)
    others = ("a colleague", "the manager", "somebody at the door", "the new clerk", "an old man")
    return Scene(clerk, business, rng.choice(others))


def draw_opening(scene: Scene, rng: random.Random) -> str:
    """Return the sentence that introduces the clerk and the business."""
    day = rng.choice(WORDS.days)
    openings = (
        f"{scene.clerk} opened the post of the {scene.business}.",
        f"It was a quiet {day} at the {scene.business}, and {scene.clerk} was on duty.",
        f"{scene.clerk} works at the {scene.business}.",
        f"From the day book of the {scene.business}, kept by {scene.clerk}.",
    )
    return rng.choice(openings)


def note_document(rng: random.Random) -> str:
    """Return a document about one or two notes: the notes first, then what was made of each."""
    scene = draw_scene(rng)
    opening = draw_opening(scene, rng)
    # nobody shares the clerk's first name: "said Ada" must not mean two people
    names = [name for name in vocabulary.draw_full_names(rng, 3) if name.split()[0] != scene.clerk]
    records = [draw_record(rng, name) for name in names[: rng.choice((1, 1, 2))]]
    parts = [" ".join([opening, *(record.note(rng) for record in records)])]
    for _ in range(rng.randint(3, 6)):
        segment = rng.choice(SEGMENTS)
        parts.append(segment(rng.choice(records), scene, rng))
        if segment is correct:
            break  # what came before it no longer holds
    return "\n".join(parts)


def exercise(rng: random.Random) -> str:
    """Return a page of the exercise book: requests about a source with their solutions, in prose.

    Names are those of the training split. The chat format, its markers and its stop are left to
    fine-tuning.
    """
    turns = task.make_conversation(rng.randrange(1 << 16), "train", rng).turns
    return "\n".join(f"Exercise. {turn.request}\nSolution: {turn.answer}" for turn in turns)


def make_document(rng: random.Random) -> str:
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
