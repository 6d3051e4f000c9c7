"""Small sets of facts and questions about them: places, prices, hours, lists, dates. No torch.

Each class holds the facts, words them as a passage and computes the right answer from them.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from tools.embedded import vocabulary
from tools.embedded.vocabulary import WORDS, Date, capitalize, join_words

# {desk: templates of messages for it}
MESSAGES = json.loads(Path(__file__).with_name("messages.json").read_text("utf-8"))


@dataclass(frozen=True)
class Places:
    """Where things are kept: {thing: spot}."""

    spots: dict[str, str]

    @staticmethod
    def verb(thing: str) -> str:
        """Return "is" or "are", whichever agrees with `thing`."""
        return "are" if thing.endswith("s") else "is"

    def passage(self) -> str:
        """Return one sentence for each thing."""
        return " ".join(self.answer(thing) for thing in self.spots)

    def question(self, thing: str, rng: random.Random) -> str:
        """Return one way to ask where `thing` is."""
        questions = (
            f"Where {self.verb(thing)} {thing}?",
            f"Where can I find {thing}?",
            f"Where do we keep {thing}?",
        )
        return rng.choice(questions)

    def answer(self, thing: str) -> str:
        """Return the sentence that says where `thing` is."""
        return capitalize(f"{thing} {self.verb(thing)} {self.spots[thing]}.")


@dataclass(frozen=True)
class Jobs:
    """Who works where: {first name: place}."""

    places: dict[str, str]

    def passage(self) -> str:
        """Return one sentence for each person."""
        return " ".join(self.answer(name) for name in self.places)

    def question(self, name: str, asks_place: bool) -> str:
        """Return the question for the place of `name`, or for the name at that place."""
        if asks_place:
            return f"Where does {name} work?"
        return f"Who works at {self.places[name]}?"

    def answer(self, name: str) -> str:
        """Return the sentence that says where `name` works."""
        return f"{name} works at {self.places[name]}."


@dataclass(frozen=True)
class Prices:
    """A price list: {noun: whole euros}."""

    euros: dict[str, int]

    def listing(self) -> str:
        """Return "mug 6 euros, lamp 22 euros"."""
        return ", ".join(f"{noun} {price} euros" for noun, price in self.euros.items())

    def question(self, noun: str, rng: random.Random) -> str:
        """Return one way to ask for the price of `noun`."""
        questions = (
            f"What does the {noun} cost?",
            f"How much is the {noun}?",
            f"What is the price of the {noun}?",
        )
        return rng.choice(questions)

    def answer(self, noun: str) -> str:
        """Return the sentence that says what `noun` costs."""
        return f"The {noun} costs {self.euros[noun]} euros."


class OpeningHours(NamedTuple):
    """When one place opens and closes, "8:00" and "17:30"."""

    opening: str
    closing: str


@dataclass(frozen=True)
class Hours:
    """When places open and close: {place: its hours}."""

    times: dict[str, OpeningHours]

    def passage(self) -> str:
        """Return one sentence for each place."""
        sentences = []
        for place, hours in self.times.items():
            sentence = f"{place} opens at {hours.opening} and closes at {hours.closing}."
            sentences.append(capitalize(sentence))
        return " ".join(sentences)

    def question(self, place: str, opens: bool) -> str:
        """Return the question for the opening or the closing time of `place`."""
        verb = "open" if opens else "close"
        return f"When does {place} {verb}?"

    def answer(self, place: str, opens: bool) -> str:
        """Return the sentence that says when `place` opens or closes."""
        if opens:
            return capitalize(f"{place} opens at {self.times[place].opening}.")
        return capitalize(f"{place} closes at {self.times[place].closing}.")


@dataclass(frozen=True)
class Things:
    """Counted things in order: (count, noun) with counts 1 to 9."""

    counted: tuple[tuple[int, str], ...]

    def words(self) -> list[str]:
        """Return "a mug" or "three mugs" for each thing."""
        words = []
        for count, noun in self.counted:
            if count == 1:
                words.append(f"a {noun}")
            else:
                words.append(f"{WORDS.number_words[count]} {vocabulary.plural(noun)}")
        return words

    def sentence(self) -> str:
        """Return the things as words joined by commas and "and"."""
        return join_words(self.words())

    def bullets(self) -> str:
        """Return the things as lines that begin with a dash."""
        return "\n".join(f"- {words}" for words in self.words())

    def line(self) -> str:
        """Return the things in one line, separated by semicolons."""
        return "; ".join(self.words())


@dataclass(frozen=True)
class Guests:
    """A list of first names for an event on a day; `absent` are names that are not on it."""

    event: str
    day: str
    names: tuple[str, ...]
    absent: tuple[str, ...]

    def passage(self) -> str:
        """Return the sentence with everybody who is on the list."""
        return f"On the list for {self.event} on {self.day} are {join_words(list(self.names))}."

    def question(self, name: str, rng: random.Random) -> str:
        """Return one way to ask whether `name` is on the list."""
        return rng.choice((f"Is {name} on the list?", f"Is {name} coming to {self.event}?"))

    def answer(self, name: str) -> str:
        """Return yes or no, in a full sentence."""
        if name in self.names:
            return f"Yes, {name} is on the list."
        return f"No, {name} is not on the list."


@dataclass(frozen=True)
class EventPair:
    """Two events in different months, (event, date), in the order in which they are told."""

    events: tuple[tuple[str, Date], tuple[str, Date]]

    def passage(self) -> str:
        """Return both events with "is on"."""
        return " and ".join(f"{event} is on {date}" for event, date in self.events)

    def both(self) -> str:
        """Return both events joined by "and"."""
        return " and ".join(f"{event} on {date}" for event, date in self.events)

    def either(self) -> str:
        """Return both events joined by "or"."""
        return " or ".join(f"{event} on {date}" for event, date in self.events)

    def months(self) -> str:
        """Return the sentence about their months that decides the order."""
        first, second = sorted(date.month for _, date in self.events)
        return f"{WORDS.months[first - 1]} comes before {WORDS.months[second - 1]}."

    def answer(self) -> str:
        """Return the sentence that names the earlier event."""
        event, date = min(self.events, key=lambda dated: dated[1])
        return capitalize(f"{event} on {date} comes first.")


@dataclass(frozen=True)
class Message:
    """A customer's message and the desk that should take it."""

    name: str
    text: str
    desk: str

    def answer(self) -> str:
        """Return the sentence that names the desk."""
        return f"This is for the {self.desk} desk."


def draw_places(rng: random.Random, count: int) -> Places:
    """Return `count` things, each in a spot of its own."""
    things = rng.sample(WORDS.things, count)
    return Places(dict(zip(things, rng.sample(WORDS.spots, count), strict=True)))


def draw_jobs(rng: random.Random, count: int) -> Jobs:
    """Return `count` people, each at a place of their own."""
    names = rng.sample(WORDS.first_names, count)
    return Jobs(dict(zip(names, rng.sample(WORDS.places, count), strict=True)))


def draw_prices(rng: random.Random, count: int) -> Prices:
    """Return `count` nouns with different prices of 3 to 90 euros."""
    nouns = rng.sample(WORDS.goods, count)
    return Prices(dict(zip(nouns, rng.sample(range(3, 91), count), strict=True)))


def draw_hours(rng: random.Random, count: int) -> Hours:
    """Return `count` places that open in the morning and close in the afternoon or evening."""
    places = rng.sample(WORDS.places, count)
    opening = [vocabulary.draw_time(rng, 7, 11) for _ in places]
    closing = [vocabulary.draw_time(rng, 15, 21) for _ in places]
    times = map(OpeningHours, opening, closing)
    return Hours(dict(zip(places, times, strict=True)))


def draw_things(rng: random.Random, count: int) -> Things:
    """Return `count` different things, about half of them more than once."""
    counted = []
    for noun in rng.sample(WORDS.goods, count):
        counted.append((rng.choice((1, 1, 1, 2, 3, 4, 5, 6)), noun))
    return Things(tuple(counted))


def draw_guests(rng: random.Random, count: int) -> Guests:
    """Return `count` guests and two people who are not among them."""
    names = tuple(rng.sample(WORDS.first_names, count + 2))
    event = rng.choice(WORDS.events)
    return Guests(event, rng.choice(WORDS.days), names[:count], names[count:])


def draw_event_pair(rng: random.Random) -> EventPair:
    """Return two different events in two different months."""
    first, second = rng.sample(WORDS.events, 2)
    months = rng.sample(range(1, 13), 2)
    first_date = Date(months[0], rng.randint(1, 28))
    second_date = Date(months[1], rng.randint(1, 28))
    return EventPair(((first, first_date), (second, second_date)))


def draw_message(rng: random.Random) -> Message:
    """Return a message for one of six desks."""
    desk = rng.choice(list(MESSAGES))
    template = rng.choice(MESSAGES[desk])
    text = template.format(
        machine=vocabulary.draw_machine(rng),
        fault=rng.choice(WORDS.faults),
        goods=vocabulary.draw_goods(rng),
        city=rng.choice(WORDS.cities),
        book=vocabulary.draw_book(rng),
        tree=rng.choice(WORDS.room_names),
        day=rng.choice(WORDS.days),
        euros=rng.randint(12, 95),
    )
    return Message(rng.choice(WORDS.first_names), text, desk)
