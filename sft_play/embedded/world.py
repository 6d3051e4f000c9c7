"""Words of the small town that every document and conversation is about. Pure: `random` only, no torch, no I/O.

Every draw takes a `random.Random`, so one seed gives one text. Noun phrases are chosen so that "a" is always the right article.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

FIRST_NAMES = (
    "Ada Adam Aisha Akira Alba Alice Amara Amir Anders Anika Anton Astrid Ben Bianca Boris Carla Carlos Cem Chiara Clara "
    "Daisy Dana David Diego Dora Edith Elena Elias Elif Emil Emma Erik Esther Eva Farah Felix Fiona Frank Freya Gita "
    "Grace Hana Hannah Hassan Helena Henrik Hugo Ida Ines Ingrid Iris Ivan Jamal Jana Jin Jonas Julia Kamal Karin Kenji "
    "Kofi Lara Laura Leila Leo Lina Lucas Lucia Magda Malik Marco Maria Marta Martin Maya Mei Mina Mona Nadia Nils Nina "
    "Noah Nora Olga Oliver Omar Oscar Paula Pedro Petra Priya Rafael Ravi Rita Robert Rosa Ruth Samir Sara Selma Simon "
    "Sofia Stefan Tara Theo Thomas Tomas Uma Vera Victor Yara Yusuf Zoë"
).split()

SURNAMES = (
    "Abbott Ahmed Alvarez Andersen Baker Barros Bauer Bell Berg Bianchi Brandt Brook Carter Castro Chen Cole Conti Costa "
    "Cruz Dahl Diaz Duarte Eriksen Evans Farrell Ferrari Fischer Flores Fox Garcia Gomez Grant Greco Gupta Haddad Hale "
    "Hansen Hayes Hill Hoffmann Holm Hughes Ito Jansen Kaya Keller Khan Kim Klein Kovac Kumar Lang Larsen Lee Lind Lopez "
    "Lund Marsh Mendes Meyer Molina Moreau Moss Müller Nakamura Novak Nguyen Okafor Olsen Ortiz Osman Park Patel Pereira "
    "Popov Quinn Ramos Rao Reed Rivera Romano Rossi Sato Schmidt Silva Singh Stone Suzuki Tanaka Torres Turner Vargas "
    "Vogel Walsh Weber West Winter Wolf Wong Wood Yilmaz Young Ziegler"
).split()

CITIES = (
    "Antwerp Athens Basel Bergen Berlin Bilbao Bologna Bordeaux Bremen Bruges Cardiff Cologne Cork Dresden Dublin Florence "
    "Geneva Ghent Gothenburg Granada Graz Hamburg Helsinki Leeds Leipzig Lille Lisbon Lyon Madrid Malaga Milan Munich Naples "
    "Nice Oslo Oxford Paris Porto Prague Riga Rome Salzburg Seville Tallinn Turin Valencia Venice Verona Vienna Vilnius Warsaw "
    "York Zurich"
).split()

DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = (
    "January February March April May June July August September October November December".split()
)
TREES = "Alder Apple Birch Cedar Cherry Elm Fir Hazel Juniper Larch Linden Maple Oak Olive Pear Pine Poplar Rowan Walnut Willow".split()

LOOKS = "black blue brown golden green grey large pink plain purple red silver small striped white yellow".split()
GOODS = (
    "basket|bench|blanket|bookcase|bowl|box|bucket|candle|carpet|chair|coat|cup|curtain|cushion|desk|dress|drum|flute|frame|"
    "guitar|hammer|hat|jacket|jug|ladder|map|mat|mirror|mug|notebook|painting|pan|pillow|plate|pot|rug|saddle|scarf|shelf|shirt|"
    "sofa|stool|suitcase|table|teapot|tent|towel|tray|vase|violin|wallet"
).split("|")
MACHINES = "clock|coffee grinder|drill|fan|hair dryer|heater|iron|kettle|lamp|mixer|printer|projector|radio|scanner|speaker|toaster|vacuum cleaner".split(
    "|"
)
FAULTS = (
    "a bent plug|a blown fuse|a broken light|a broken switch|a cracked plug|a loose button|a loose cable|a loose screw|"
    "a missing screw|a stuck button|a worn cable|a worn motor"
).split("|")

TITLE_LOOKS = "Blue Broken Distant Empty Forgotten Frozen Gentle Golden Hidden Last Little Long Lost Old Quiet Red Secret Silent Silver Winter".split()
TITLE_THINGS = (
    "Bridge Castle Clock Door Forest Garden Harbour House Island Journey Lake Letter Lighthouse Mountain Orchard Painter River "
    "Road Sailor Star Station Storm Tower Train Valley Village Voyage Window"
).split()

TOPICS = (
    "the bicycle rack|the broken window|the bus tickets|the car park|the charity walk|the choir practice|the cleaning rota|"
    "the invoice|the key to the hall|the lost umbrella|the missing parcel|the new timetable|the notice board|the piano|"
    "the reading group|the school visit|the spare chairs|the summer fair|the travel dates|the wedding flowers"
).split("|")
SUBJECTS = (
    "ballet|carpentry|chess|Chinese|cooking|dancing|drawing|English|French|gardening|German|guitar|Italian|juggling|painting|"
    "photography|piano|pottery|sewing|singing|Spanish|swimming|violin|weaving|yoga"
).split("|")

THINGS = (
    "the batteries|the blankets|the candles|the envelopes|the first-aid box|the flags|the folding chairs|the ink|the ladder|"
    "the light bulbs|the maps|the old photographs|the paint|the receipts|the ribbons|the scissors|the spare keys|the stamps|"
    "the tea cups|the tickets|the tool box|the torches|the visitor badges|the wrapping paper"
).split("|")
SPOTS = (
    "above the sink|at the back of the garage|behind the curtain|behind the front door|beside the printer|in a tin on the window sill|"
    "in the blue cabinet|in the bottom drawer|in the cellar|in the green box|in the hall cupboard|in the kitchen|in the old desk|"
    "in the red suitcase|in the top drawer|next to the coat stand|on the lowest shelf|on the piano|on the top shelf|under the counter|"
    "under the stairs"
).split("|")
PLACES = (
    "the bakery|the bank|the bookshop|the cinema|the clinic|the flower shop|the gallery|the garden centre|the library|the market hall|"
    "the museum|the post office|the swimming pool|the town hall|the toy shop|the travel agency"
).split("|")
EVENTS = (
    "the auction|the book sale|the concert|the dance|the exhibition|the fair|the film night|the market|the meeting|the parade|the picnic|"
    "the play|the quiz|the race|the reading|the school trip|the tasting|the tour|the wedding|the workshop"
).split("|")
HOUSES = "Bridge Street|Castle Hill|Harbour|Highfield|Larkspur|Market Square|Mill Lane|Millbrook|Northgate|Riverside|Station Road|Westgate".split(
    "|"
)
HOUSE_KINDS = "Book Room|Centre|Desk|Guest House|Library|Office|Shop|Studio".split("|")

NUMBER_WORDS = "zero one two three four five six seven eight nine".split()


@dataclass(frozen=True)
class Date:
    """A day of the year; `month` is 1-12. Ordered by (month, day)."""

    month: int
    day: int

    def __str__(self) -> str:
        return f"{self.day} {MONTHS[self.month - 1]}"


def person(rng: random.Random) -> str:
    """Return a full name, first name then surname."""
    return f"{rng.choice(FIRST_NAMES)} {rng.choice(SURNAMES)}"


def people(rng: random.Random, count: int) -> list[str]:
    """Return `count` full names that share neither a first name nor a surname."""
    return [
        f"{a} {b}"
        for a, b in zip(rng.sample(FIRST_NAMES, count), rng.sample(SURNAMES, count), strict=True)
    ]


def date(rng: random.Random) -> Date:
    """Return a date between 1 January and 28 December; day 29-31 is left out so that every month has every day."""
    return Date(rng.randint(1, 12), rng.randint(1, 28))


def day(rng: random.Random) -> str:
    """Return a weekday or a date: both read well after "on"."""
    return rng.choice(DAYS) if rng.random() < 0.5 else str(date(rng))


def time(rng: random.Random) -> str:
    """Return a half-hour of the working day, "8:00" to "18:30"."""
    return f"{rng.randint(8, 18)}:{rng.choice(('00', '30'))}"


def goods(rng: random.Random) -> str:
    """Return a thing for sale without its article, "green vase"."""
    return f"{rng.choice(LOOKS)} {rng.choice(GOODS)}"


def machine(rng: random.Random) -> str:
    """Return a thing that can be repaired without its article, "red kettle"."""
    return f"{rng.choice(LOOKS)} {rng.choice(MACHINES)}"


def book(rng: random.Random) -> str:
    """Return a book title, "The Quiet Harbour"."""
    return f"The {rng.choice(TITLE_LOOKS)} {rng.choice(TITLE_THINGS)}"


def house(rng: random.Random) -> str:
    """Return the name of a small business, "Millbrook Library"."""
    return f"{rng.choice(HOUSES)} {rng.choice(HOUSE_KINDS)}"


def code(rng: random.Random) -> str:
    """Return a reference, a letter and three different digits: "K-417"."""
    return f"{rng.choice('BCDFGHKLMNPRSTVWXZ')}-{''.join(rng.sample('123456789', 3))}"


def join_words(words: list[str]) -> str:
    """Return "a", "a and b" or "a, b and c"."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def plural(noun: str) -> str:
    """Return the plural of one of our nouns: "mugs", "boxes", "shelves"."""
    if noun.endswith("f"):
        return f"{noun[:-1]}ves"
    return f"{noun}es" if noun.endswith(("s", "x", "ch", "sh")) else f"{noun}s"


def upper_first(text: str) -> str:
    """Return `text` with its first letter in upper case and the rest as it is."""
    return text[:1].upper() + text[1:]
