"""Documents that are not about notes: lists, prices, places, dates and small stories. No torch."""

from __future__ import annotations

import random

from tools.embedded import facts, vocabulary
from tools.embedded.vocabulary import WORDS, capitalize


def visitor_question(question: str, answer: str, rng: random.Random) -> str:
    """Return a question and its answer, or the answer alone."""
    forms = (f'"{question}" asked the visitor. "{answer}"', f'"{question}" {answer}', answer)
    return rng.choice(forms)


def place_document(rng: random.Random) -> str:
    """Return where a few things are kept, and who asked for which."""
    places = facts.draw_places(rng, rng.randint(3, 5))
    clerk = rng.choice(WORDS.first_names)
    business = vocabulary.draw_business(rng)
    parts = [f"{clerk} showed a visitor around the {business}.", places.passage()]
    for thing in rng.sample(list(places.spots), 3):
        parts.append(visitor_question(places.question(thing, rng), places.answer(thing), rng))
    return " ".join(parts)


def job_document(rng: random.Random) -> str:
    """Return who works where, and questions about it."""
    jobs = facts.draw_jobs(rng, rng.randint(3, 4))
    parts = [jobs.passage()]
    for name in rng.sample(list(jobs.places), 3):
        asks_place = rng.random() < 0.5
        parts.append(visitor_question(jobs.question(name, asks_place), jobs.answer(name), rng))
    return " ".join(parts)


def price_document(rng: random.Random) -> str:
    """Return a price list, and what somebody paid."""
    prices = facts.draw_prices(rng, rng.randint(3, 5))
    buyer = rng.choice(WORDS.first_names)
    parts = [f"The prices at the {vocabulary.draw_business(rng)}: {prices.listing()}."]
    for noun in rng.sample(list(prices.euros), 3):
        question = prices.question(noun, rng)
        answer = prices.answer(noun)
        forms = (
            f'"{question}" asked {buyer}. "{answer}"',
            f'"{question}" {answer}',
            f"{buyer} paid {prices.euros[noun]} euros for the {noun}. {answer}",
        )
        parts.append(rng.choice(forms))
    return " ".join(parts)


def hours_document(rng: random.Random) -> str:
    """Return when a few places open and close, and questions about it."""
    hours = facts.draw_hours(rng, rng.randint(2, 3))
    parts = [hours.passage()]
    for place in rng.sample(list(hours.times), 2):
        opens = rng.random() < 0.5
        parts.append(
            visitor_question(hours.question(place, opens), hours.answer(place, opens), rng)
        )
    return " ".join(parts)


def list_document(rng: random.Random) -> str:
    """Return a sentence of things to buy or pack, and the same things as a list."""
    things = facts.draw_things(rng, rng.randint(2, 5))
    name = rng.choice(WORDS.first_names)
    sentences = (
        f"{name} needs {things.sentence()}.",
        f"Please send {things.sentence()} to {name}.",
        f"{name} bought {things.sentence()} at the market.",
        f"{name} put {things.sentence()} on the counter.",
    )
    sentence = rng.choice(sentences)
    leads = (
        "The list is:",
        f"{name} made a list.",
        "One thing a line:",
        "Here it is as a list:",
    )
    lead = rng.choice(leads)
    if rng.random() < 0.3:
        return f"{sentence} In one line that is: {things.line()}"
    return f"{sentence} {lead}\n{things.bullets()}"


def guest_document(rng: random.Random) -> str:
    """Return a list of names, who is on it and who is not."""
    guests = facts.draw_guests(rng, rng.randint(3, 5))
    parts = [guests.passage()]
    for name in rng.sample([*guests.names, *guests.absent], 3):
        parts.append(visitor_question(guests.question(name, rng), guests.answer(name), rng))
    return " ".join(parts)


def date_document(rng: random.Random) -> str:
    """Return pairs of events and which of them comes first."""
    parts = []
    for _ in range(rng.randint(2, 4)):
        pair = facts.draw_event_pair(rng)
        answer = pair.answer()
        forms = (
            f"{capitalize(pair.passage())}. {answer}",
            f"Two dates to remember: {pair.both()}. {answer}",
            f'"Which comes first, {pair.either()}?" {answer}',
            f"{pair.months()} So of {pair.both()}, {answer[0].lower()}{answer[1:]}",
        )
        parts.append(rng.choice(forms))
    return " ".join(parts)


def calendar_document(rng: random.Random) -> str:
    """Return some months or weekdays in their order."""
    names = rng.choice((WORDS.months, WORDS.days))
    parts = []
    for _ in range(rng.randint(3, 6)):
        low, high = sorted(rng.sample(range(len(names)), 2))
        earlier = names[low]
        later = names[high]
        forms = (
            f"{earlier} comes before {later}.",
            f"{later} comes after {earlier}.",
            f"Of {later} and {earlier}, {earlier} comes first.",
            f"Of {earlier} and {later}, {earlier} comes first.",
        )
        parts.append(rng.choice(forms))
    start = rng.randint(0, len(names) - 3)
    stop = start + rng.randint(3, len(names))
    parts.append(f"The order is {', '.join(names[start:stop])}.")
    return " ".join(parts)


def route_document(rng: random.Random) -> str:
    """Return messages and the desk that each of them went to."""
    clerk = rng.choice(WORDS.first_names)
    parts = [f"{clerk} sorts the messages of the {vocabulary.draw_business(rng)}."]
    for _ in range(rng.randint(2, 3)):
        message = facts.draw_message(rng)
        wrote = f"{message.name} wrote: {message.text} {message.answer()}"
        passed = f"{clerk} passed it to the {message.desk} desk."
        forms = (
            wrote,
            wrote,
            f'"{message.text}" wrote {message.name}, and {passed}',
            f'"{message.text}" "{message.answer()}" said {clerk}.',
        )
        parts.append(rng.choice(forms))
    return " ".join(parts)


def story_document(rng: random.Random) -> str:
    """Return a small story about two people and a day in the town; nothing is asked."""
    one, two = vocabulary.draw_full_names(rng, 2)
    a = one.split()[0]
    b = two.split()[0]
    first, second = rng.sample(WORDS.places, 2)
    item = vocabulary.draw_goods(rng)
    day = rng.choice(WORDS.days)
    city = rng.choice(WORDS.cities)
    weathers = (
        "It rained all morning",
        "The sun was out",
        "There was snow on the roofs",
        "A cold wind blew from the river",
        "Fog lay over the square",
        "It was the warmest day of the year",
    )
    weather = rng.choice(weathers)
    meetings = (
        f"{a} went to {first} and met {b} at the door.",
        f"{b} was waiting for {a} in front of {first}.",
        f"{a} wanted to go to {first}, but {b} was already on the way to {second}.",
    )
    meeting = rng.choice(meetings)
    middles = (
        f'"I am looking for a {item}," said {a}. "Then let us go to {second}," said {b}.',
        f"{b} had brought a {item} from {city} and gave it to {a}.",
        f"They talked about {rng.choice(WORDS.topics)} and then about {rng.choice(WORDS.topics)}.",
        f"{a} had left a {item} at {second}, and so they went there together.",
        f"{b} told {a} about a journey to {city}, where everything was sold, even a {item}.",
    )
    middle = rng.choice(middles)
    endings = (
        f"In the evening {a} walked home along the river.",
        f"They drank tea until {first} closed.",
        f"{b} took the last train to {city}.",
        f"After that {a} and {b} met every {day}.",
        f"Nobody in the town ever saw the {item} again.",
    )
    ending = rng.choice(endings)
    return f"{weather} on {day}. {one} and {two} are old friends. {meeting} {middle} {ending}"


# listed twice: drawn twice as often
DOCUMENT_MAKERS = (
    place_document,
    job_document,
    price_document,
    hours_document,
    list_document,
    guest_document,
    date_document,
    date_document,
    calendar_document,
    route_document,
    story_document,
)
