"""Pages from templates: text is escaped, no script runs and no other file is loaded."""

from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from sft_play.data.rows import make_visible

TEMPLATES = Path(__file__).parent / "templates"
GIB = 2**30
# style of what a score, a check or a run came to
TONES = {
    "better": "good",
    "worse": "bad",
    "no clear difference": "open",
    "passed": "good",
    "failed": "bad",
    "look": "open",
}


def render(template: str, **values: Any) -> str:
    """Return the page of a template in templates/."""
    return _environment().get_template(template).render(values)


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,  # a misspelt name is an error, not an empty place
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters.update(
        visible=lambda text: make_visible(str(text)),
        gib=gib,
        count=count,
        seconds=seconds,
        score=score,
        change=change,
    )
    environment.globals["tones"] = TONES
    return environment


def gib(size: int | None) -> str:
    """Return bytes as `1.23 GiB`, or a dash where they are not known."""
    return "–" if size is None else f"{size / GIB:.2f} GiB"


def count(number: float | None) -> str:
    """Return a whole number with separators, or a dash."""
    return "–" if number is None else f"{number:,.0f}"


def seconds(number: float | None) -> str:
    """Return seconds as `45.1 s`, `12 min 5 s` or `3 h 20 min`."""
    if number is None:
        return "–"
    if number < 60:
        return f"{number:.1f} s"
    minutes, rest = divmod(round(number), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def score(number: float | None) -> str:
    """Return a score with three decimals, or a dash."""
    return "–" if number is None else f"{number:.3f}"


def change(number: float | None) -> str:
    """Return the change of a score with its sign, or a dash."""
    return "–" if number is None else f"{number:+.3f}"
