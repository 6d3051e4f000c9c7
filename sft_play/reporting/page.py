"""Pages and model cards from templates, and the report of a run. Loads no torch.

In HTML text is escaped, no script runs and no other file is loaded.
"""

import logging
import re
import shlex
from dataclasses import asdict
from functools import cache, partial
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, TemplateError

from sft_play.data.images import DAMAGED, IMAGE_FORMATS, encode_small
from sft_play.data.rows import make_visible
from sft_play.errors import SftPlayError, first_line
from sft_play.plan.devices import GIB
from sft_play.progress import duration
from sft_play.reporting import charts
from sft_play.reporting.run_facts import RunFacts
from sft_play.reporting.verdict import NO_CLAIM
from sft_play.runs.files import write_json, write_text
from sft_play.runs.folder import RunFolder

THUMBNAIL = 256  # pixels of a side, at most
TEMPLATES = Path(__file__).parent / "templates"
# style of what a score, a check or a run came to
TONES = {
    "better": "good",
    "worse": "bad",
    "no clear difference": "open",
    **dict.fromkeys(NO_CLAIM, "open"),
    "passed": "good",
    "failed": "bad",
    "look": "open",
}
# facts of a run in report.json
IN_JSON = """
run model facts verdict rows_scored improved worsened memory times ledger checks settings command
""".split()

logger = logging.getLogger(__name__)

# of damaged, missing or foreign files, and of values that the page cannot show
PAGE_ERRORS = (
    OSError,
    SftPlayError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    ArithmeticError,
    TemplateError,
)


def render(template: str, **values: Any) -> str:
    """Return the text of a template in templates/."""
    return _environment().get_template(template).render(values)


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=lambda name: name.endswith(".html.j2"),
        undefined=StrictUndefined,  # a misspelt name is an error, not an empty place
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters.update(
        visible=lambda text: make_visible(str(text)),
        code=code,
        quoted=shlex.quote,
        gib=shown_gib,
        count=count,
        seconds=seconds,
        thumbnail=thumbnail,
        score=partial(in_form, ".3f"),
        change=partial(in_form, "+.3f"),
        figures=partial(in_form, ".4g", unknown=""),
        public=public_name,
        cell=lambda text: text.replace("|", "\\|"),
        repr=repr,
    )
    environment.globals["tones"] = TONES
    return environment


def code(text: object) -> str:
    """Return a text as a code span of Markdown, in which neither HTML nor a link means anything."""
    visible = make_visible(" ".join(str(text).splitlines()))
    ticks = "`" * (1 + max(map(len, re.findall("`+", visible)), default=0))
    space = " " if "`" in visible else ""
    return f"{ticks}{space}{visible}{space}{ticks}"


def public_name(source: str) -> str:
    """Return a path without its folders, which may be private, and any other text as it is."""
    return Path(source).name if Path(source).is_absolute() else source


def thumbnail(path: str) -> str:
    """Return an image as a data: URI of a JPEG, "" if its file is gone or damaged."""
    from PIL import Image, ImageOps

    try:
        with Image.open(path, formats=IMAGE_FORMATS) as opened:
            opened.draft("RGB", (THUMBNAIL, THUMBNAIL))  # a large JPEG at a part of its size
            shown = ImageOps.exif_transpose(opened).convert("RGB")
    except DAMAGED:
        return ""
    return encode_small(shown, THUMBNAIL)


def in_form(form: str, number: float | None, unknown: str = "–") -> str:
    """Return a number in a form such as `.3f`, or a dash."""
    return unknown if number is None else format(number, form)


count = partial(in_form, ",.0f")


def shown_gib(size: int | None) -> str:
    """Return bytes as `1.23 GiB`, or a dash if they are not known."""
    return "–" if size is None else f"{size / GIB:.2f} GiB"


def seconds(number: float | None) -> str:
    """Return seconds as `45.1 s`, `12 min 5 s` or `3 h 20 min`."""
    if number is None:
        return "–"
    return f"{number:.1f} s" if number < 60 else duration(round(number))


def write_report(folder: RunFolder) -> Path:
    """Write what the folder of a run says of it; return the path of report.html."""
    facts = RunFacts.read(folder)
    write_json(folder.path / "report.json", report_json(facts))
    path = folder.path / "report.html"
    write_text(path, report_page(facts))
    return path


def write_report_or_warn(folder: RunFolder) -> None:
    """Write the report of a run that has ended. A fault of it is one warning, and no error.

    The run's own end, and its exit class, must not depend on a page about it.
    """
    try:
        write_report(folder)
    except PAGE_ERRORS as error:
        logger.warning(
            "%s cannot be written: %s; run.json has the end of the run",
            folder.path / "report.html",
            first_line(error),
            exc_info=logger.isEnabledFor(logging.DEBUG),
        )


def report_json(facts: RunFacts) -> dict[str, object]:
    """Return report.json: what the page shows, but for what run.json holds already."""
    values = {name: getattr(facts, name) for name in IN_JSON}
    scores = [{**asdict(score), "outcome": score.outcome} for score in facts.scores]
    return {**values, "folder": str(facts.folder.path), "scores": scores}


def report_page(facts: RunFacts) -> str:
    """Return the page of a run."""
    lengths = [
        charts.histogram(f"Lengths of {split} samples, tokens", histogram)
        for split, histogram in facts.lengths.items()
    ]
    return render(
        "report.html.j2",
        facts=facts,
        report=facts.report,
        curves=charts.history_charts([(facts.run, facts.report.history or [])]),
        lengths=[drawing for drawing in lengths if drawing is not None],
    )
