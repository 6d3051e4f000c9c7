"""Small sets of facts with the questions that they answer: places, prices, hours, lists, dates. Pure: `random` only, no torch, no I/O.

Each class holds the facts, says them as a passage and computes the right answer from them.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from sft_play.embedded import world


@dataclass(frozen=True)
class Places:
    """Where things are kept: {thing: spot}; every thing is a plural or takes its verb from `verb`."""

    spots: dict[str, str]

    @staticmethod
    def verb(thing: str) -> str:
        """Return "is" or "are", whichever agrees with `thing`."""
        return "are" if thing.endswith("s") or thing == "the light bulbs" else "is"

    def passage(self) -> str:
        """Return one sentence for each thing."""
        return " ".join(self.answer(thing) for thing in self.spots)

    def question(self, thing: str, rng: random.Random) -> str:
        """Return one way to ask where `thing` is."""
        return rng.choice(
            (
                f"Where {self.verb(thing)} {thing}?",
                f"Where can I find {thing}?",
                f"Where do we keep {thing}?",
            )
        )

    def answer(self, thing: str) -> str:
        """Return the sentence that says where `thing` is."""
        return world.upper_first(f"{thing} {self.verb(thing)} {self.spots[thing]}.")


@dataclass(frozen=True)
class Jobs:
    """Who works where: {first name: place}."""

    places: dict[str, str]

    def passage(self) -> str:
        """Return one sentence for each person."""
        return " ".join(self.answer(name) for name in self.places)

    def question(self, name: str, by_name: bool) -> str:
        """Return the question for the place of `name`, or for the name at that place."""
        return f"Where does {name} work?" if by_name else f"Who works at {self.places[name]}?"

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
        return rng.choice(
            (
                f"What does the {noun} cost?",
                f"How much is the {noun}?",
                f"What is the price of the {noun}?",
            )
        )

    def answer(self, noun: str) -> str:
        """Return the sentence that says what `noun` costs."""
        return f"The {noun} costs {self.euros[noun]} euros."


@dataclass(frozen=True)
class Hours:
    """When places open and close: {place: (opening, closing)}."""

    times: dict[str, tuple[str, str]]

    def passage(self) -> str:
        """Return one sentence for each place."""
        return " ".join(
            world.upper_first(f"{p} opens at {a} and closes at {b}.")
            for p, (a, b) in self.times.items()
        )

    def question(self, place: str, opens: bool) -> str:
        """Return the question for the opening or the closing time of `place`."""
        return f"When does {place} {'open' if opens else 'close'}?"

    def answer(self, place: str, opens: bool) -> str:
        """Return the sentence that says when `place` opens or closes."""
        return world.upper_first(
            f"{place} {'opens' if opens else 'closes'} at {self.times[place][0 if opens else 1]}."
        )


@dataclass(frozen=True)
class Things:
    """Counted things in order: (count, noun) with counts 1 to 9."""

    counted: tuple[tuple[int, str], ...]

    def words(self) -> list[str]:
        """Return "a mug" or "three mugs" for each thing."""
        return [
            f"a {noun}" if n == 1 else f"{world.NUMBER_WORDS[n]} {world.plural(noun)}"
            for n, noun in self.counted
        ]

    def sentence(self) -> str:
        """Return the things as words joined by commas and "and"."""
        return world.join_words(self.words())

    def bullets(self) -> str:
        """Return the things as lines that begin with a dash."""
        return "\n".join(f"- {words}" for words in self.words())

    def line(self) -> str:
        """Return the things in one line, parted by semicolons."""
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
        return (
            f"On the list for {self.event} on {self.day} are {world.join_words(list(self.names))}."
        )

    def question(self, name: str, rng: random.Random) -> str:
        """Return one way to ask whether `name` is on the list."""
        return rng.choice((f"Is {name} on the list?", f"Is {name} coming to {self.event}?"))

    def answer(self, name: str) -> str:
        """Return yes or no, in a full sentence."""
        return (
            f"Yes, {name} is on the list."
            if name in self.names
            else f"No, {name} is not on the list."
        )


@dataclass(frozen=True)
class Pair:
    """Two events in different months, in the order in which they are told."""

    events: tuple[tuple[str, world.Date], tuple[str, world.Date]]

    def passage(self) -> str:
        """Return both events with "is on"."""
        return " and ".join(f"{event} is on {when}" for event, when in self.events)

    def both(self) -> str:
        """Return both events joined by "and"."""
        return " and ".join(f"{event} on {when}" for event, when in self.events)

    def either(self) -> str:
        """Return both events joined by "or"."""
        return " or ".join(f"{event} on {when}" for event, when in self.events)

    def months(self) -> str:
        """Return the sentence about their months that decides the order."""
        first, second = sorted(when.month for _, when in self.events)
        return f"{world.MONTHS[first - 1]} comes before {world.MONTHS[second - 1]}."

    def answer(self) -> str:
        """Return the sentence that names the earlier event."""
        event, when = min(self.events, key=lambda pair: (pair[1].month, pair[1].day))
        return world.upper_first(f"{event} on {when} comes first.")


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
    return Places(
        dict(zip(rng.sample(world.THINGS, count), rng.sample(world.SPOTS, count), strict=True))
    )


def draw_jobs(rng: random.Random, count: int) -> Jobs:
    """Return `count` people, each at a place of their own."""
    return Jobs(
        dict(
            zip(rng.sample(world.FIRST_NAMES, count), rng.sample(world.PLACES, count), strict=True)
        )
    )


def draw_prices(rng: random.Random, count: int) -> Prices:
    """Return `count` nouns with different prices of 3 to 90 euros."""
    return Prices(
        dict(zip(rng.sample(world.GOODS, count), rng.sample(range(3, 91), count), strict=True))
    )


def draw_hours(rng: random.Random, count: int) -> Hours:
    """Return `count` places that open in the morning and close in the afternoon or evening."""
    places = rng.sample(world.PLACES, count)
    opening = [f"{rng.randint(7, 11)}:{rng.choice(('00', '30'))}" for _ in places]
    closing = [f"{rng.randint(15, 21)}:{rng.choice(('00', '30'))}" for _ in places]
    return Hours(dict(zip(places, zip(opening, closing, strict=True), strict=True)))


def draw_things(rng: random.Random, count: int) -> Things:
    """Return `count` different things, about half of them more than once."""
    nouns = rng.sample(world.GOODS, count)
    return Things(tuple((rng.choice((1, 1, 1, 2, 3, 4, 5, 6)), noun) for noun in nouns))


def draw_guests(rng: random.Random, count: int) -> Guests:
    """Return `count` guests and two people who are not among them."""
    names = rng.sample(world.FIRST_NAMES, count + 2)
    return Guests(
        rng.choice(world.EVENTS), rng.choice(world.DAYS), tuple(names[:count]), tuple(names[count:])
    )


def draw_pair(rng: random.Random) -> Pair:
    """Return two different events in two different months."""
    events = rng.sample(world.EVENTS, 2)
    dates = [world.Date(month, rng.randint(1, 28)) for month in rng.sample(range(1, 13), 2)]
    return Pair(((events[0], dates[0]), (events[1], dates[1])))


def draw_message(rng: random.Random) -> Message:
    """Return a message for one of six desks."""
    desk = rng.choice(tuple(MESSAGES))
    text = rng.choice(MESSAGES[desk]).format(
        machine=world.machine(rng), fault=rng.choice(world.FAULTS), goods=world.goods(rng), city=rng.choice(world.CITIES),
        book=world.book(rng), tree=rng.choice(world.TREES), day=rng.choice(world.DAYS), euros=rng.randint(12, 95),
    )  # fmt: skip
    return Message(rng.choice(world.FIRST_NAMES), text, desk)


MESSAGES = {
    "repairs": (
        "My {machine} has {fault}.",
        "The {machine} does not work any more, it has {fault}.",
        "Can you mend a {machine} by {day}?",
        "There is {fault} in my {machine}.",
    ),
    "orders": (
        "I would like to buy a {goods}.",
        "Can I order a {goods} for {day}?",
        "When will the {goods} that I ordered arrive?",
        "Do you still sell a {goods}?",
    ),
    "travel": (
        "I need a train to {city} on {day}.",
        "Is there a train to {city} on {day}?",
        "I want to travel to {city} with my family.",
        "Which train goes to {city}?",
    ),
    "library": (
        "May I borrow {book} until {day}?",
        "I would like to return {book} on {day}.",
        "Do you have {book} to borrow?",
        "I am still reading {book}, can I keep it?",
    ),
    "rooms": (
        "Is the {tree} Room free on {day}?",
        "We need the {tree} Room for a meeting on {day}.",
        "How many chairs are in the {tree} Room?",
        "Please book the {tree} Room for {day}.",
    ),
    "billing": (
        "I paid the invoice of {euros} euros twice.",
        "My invoice says {euros} euros, which is too much.",
        "Please send me the invoice for {day} again.",
        "How can I pay the invoice of {euros} euros?",
    ),
}
