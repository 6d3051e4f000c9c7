"""The documents that are not about notes: lists, prices, places, dates and small stories. Pure: `random` only, no torch, no I/O."""

from __future__ import annotations

import random

from sft_play.embedded import facts, world


def shelf_story(rng: random.Random) -> str:
    """Return where a few things are kept, and who asked for which."""
    places = facts.draw_places(rng, rng.randint(3, 5))
    clerk = rng.choice(world.FIRST_NAMES)
    lines = [f"{clerk} showed a visitor around the {world.house(rng)}.", places.passage()]
    for thing in rng.sample(list(places.spots), 3):
        question, answer = places.question(thing, rng), places.answer(thing)
        lines.append(
            rng.choice(
                (f'"{question}" asked the visitor. "{answer}"', f'"{question}" {answer}', answer)
            )
        )
    return " ".join(lines)


def work_story(rng: random.Random) -> str:
    """Return who works where, and a question or two about it."""
    jobs = facts.draw_jobs(rng, rng.randint(3, 4))
    lines = [jobs.passage()]
    for name in rng.sample(list(jobs.places), 3):
        by_name = rng.random() < 0.5
        question, answer = jobs.question(name, by_name), jobs.answer(name)
        lines.append(
            rng.choice(
                (
                    f'"{question}" asked the visitor. "{answer}"',
                    f'"{question}" {answer}',
                    f"{answer}",
                )
            )
        )
    return " ".join(lines)


def price_story(rng: random.Random) -> str:
    """Return a price list, and what somebody paid."""
    prices = facts.draw_prices(rng, rng.randint(3, 5))
    buyer = rng.choice(world.FIRST_NAMES)
    lines = [f"The prices at the {world.house(rng)}: {prices.listing()}."]
    for noun in rng.sample(list(prices.euros), 3):
        question, answer = prices.question(noun, rng), prices.answer(noun)
        lines.append(rng.choice((
            f'"{question}" asked {buyer}. "{answer}"',
            f'"{question}" {answer}',
            f"{buyer} paid {prices.euros[noun]} euros for the {noun}. {answer}",
        )))  # fmt: skip
    return " ".join(lines)


def hours_story(rng: random.Random) -> str:
    """Return when a few places open and close, and a question or two about it."""
    hours = facts.draw_hours(rng, rng.randint(2, 3))
    lines = [hours.passage()]
    for place in rng.sample(list(hours.times), 2):
        opens = rng.random() < 0.5
        question, answer = hours.question(place, opens), hours.answer(place, opens)
        lines.append(
            rng.choice(
                (f'"{question}" asked the visitor. "{answer}"', f'"{question}" {answer}', answer)
            )
        )
    return " ".join(lines)


def list_story(rng: random.Random) -> str:
    """Return a sentence of things to buy or pack, and the same things as a list."""
    things = facts.draw_things(rng, rng.randint(2, 5))
    name = rng.choice(world.FIRST_NAMES)
    lead = rng.choice((f"{name} needs {things.sentence()}.", f"Please send {things.sentence()} to {name}.",
                       f"{name} bought {things.sentence()} at the market.", f"{name} put {things.sentence()} on the counter."))  # fmt: skip
    middle = rng.choice(
        ("The list is:", f"{name} made a list.", "One thing a line:", "Here it is as a list:")
    )
    if rng.random() < 0.3:
        return f"{lead} In one line that is: {things.line()}"
    return f"{lead} {middle}\n{things.bullets()}"


def guest_story(rng: random.Random) -> str:
    """Return a list of names, who is on it and who is not."""
    guests = facts.draw_guests(rng, rng.randint(3, 5))
    lines = [guests.passage()]
    for name in rng.sample([*guests.names, *guests.absent], 3):
        question, answer = guests.question(name, rng), guests.answer(name)
        lines.append(
            rng.choice(
                (f'"{question}" asked the visitor. "{answer}"', f'"{question}" {answer}', answer)
            )
        )
    return " ".join(lines)


def date_story(rng: random.Random) -> str:
    """Return pairs of events and which of them comes first."""
    lines = []
    for _ in range(rng.randint(2, 4)):
        pair = facts.draw_pair(rng)
        lines.append(rng.choice((
            f"{world.upper_first(pair.passage())}. {pair.answer()}",
            f"Two dates to remember: {pair.both()}. {pair.answer()}",
            f'"Which comes first, {pair.either()}?" {pair.answer()}',
            f"{pair.months()} So of {pair.both()}, {pair.answer()[0].lower()}{pair.answer()[1:]}",
        )))  # fmt: skip
    return " ".join(lines)


def month_story(rng: random.Random) -> str:
    """Return some months or weekdays in their order."""
    names = rng.choice((world.MONTHS, world.DAYS))
    lines = []
    for _ in range(rng.randint(3, 6)):
        low, high = sorted(rng.sample(range(len(names)), 2))
        lines.append(rng.choice((
            f"{names[low]} comes before {names[high]}.",
            f"{names[high]} comes after {names[low]}.",
            f"Of {names[high]} and {names[low]}, {names[low]} comes first.",
            f"Of {names[low]} and {names[high]}, {names[low]} comes first.",
        )))  # fmt: skip
    start = rng.randint(0, len(names) - 3)
    lines.append(f"The order is {', '.join(names[start : start + rng.randint(3, len(names))])}.")
    return " ".join(lines)


def route_story(rng: random.Random) -> str:
    """Return messages and the desk that each of them went to."""
    clerk = rng.choice(world.FIRST_NAMES)
    lines = [f"{clerk} sorts the messages of the {world.house(rng)}."]
    for _ in range(rng.randint(2, 3)):
        message = facts.draw_message(rng)
        lines.append(rng.choice((
            f"{message.name} wrote: {message.text} {message.answer()}",
            f"{message.name} wrote: {message.text} {message.answer()}",
            f'"{message.text}" wrote {message.name}, and {clerk} passed it to the {message.desk} desk.',
            f'"{message.text}" "{message.answer()}" said {clerk}.',
        )))  # fmt: skip
    return " ".join(lines)


def walk_story(rng: random.Random) -> str:
    """Return a small story about two people and a day in the town; nothing is asked."""
    one, two = world.people(rng, 2)
    a, b = one.split()[0], two.split()[0]
    first, second = rng.sample(world.PLACES, 2)
    item, day, city = world.goods(rng), rng.choice(world.DAYS), rng.choice(world.CITIES)
    weather = rng.choice(("It rained all morning", "The sun was out", "There was snow on the roofs", "A cold wind blew from the river",
                          "Fog lay over the square", "It was the warmest day of the year"))  # fmt: skip
    meeting = rng.choice((
        f"{a} went to {first} and met {b} at the door.",
        f"{b} was waiting for {a} in front of {first}.",
        f"{a} wanted to go to {first}, but {b} was already on the way to {second}.",
    ))  # fmt: skip
    middle = rng.choice((
        f'"I am looking for a {item}," said {a}. "Then let us go to {second}," said {b}.',
        f"{b} had brought a {item} from {city} and gave it to {a}.",
        f"They talked about {rng.choice(world.TOPICS)} and then about {rng.choice(world.TOPICS)}.",
        f"{a} had left a {item} at {second}, and so they went there together.",
        f"{b} told {a} about a journey to {city}, where everything was sold, even a {item}.",
    ))  # fmt: skip
    end = rng.choice((
        f"In the evening {a} walked home along the river.",
        f"They drank tea until {first} closed.",
        f"{b} took the last train to {city}.",
        f"After that {a} and {b} met every {day}.",
        f"Nobody in the town ever saw the {item} again.",
    ))  # fmt: skip
    return f"{weather} on {day}. {one} and {two} are old friends. {meeting} {middle} {end}"


STORIES = (shelf_story, work_story, price_story, hours_story, list_story, guest_story, date_story, date_story, month_story, route_story,
           walk_story)  # fmt: skip
