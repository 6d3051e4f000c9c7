"""Variables that become a part of a chat template, so that whoever opens it has them. Pure."""

import json
import re
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from sft_play.config.sections.model import ModelSection
from sft_play.errors import ConfigError

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# What the template writes of the date: strftime_now("%d %b %Y")
CLOCK_CALL = re.compile(r"""strftime_now\(\s*(["'])(.*?)\1\s*\)""")
CLOCK_NAME = "strftime_now"
Template = str | dict[str, str]


def with_variables(template: Template, model: ModelSection) -> Template:
    """Return a template, or several by name, with model.template_kwargs and a fixed date.

    Whoever gives a variable a value of his own at use still has that one.
    Raises: ConfigError for a name or a date that cannot be one.
    """
    if isinstance(template, dict):
        return {name: with_variables(text, model) for name, text in template.items()}
    return _variables(model.template_kwargs) + _clock(template, model.template_date) + template


def _variables(values: Mapping[str, Any]) -> str:
    """Return the Jinja text that sets variables; `+%}` keeps a line break that follows."""
    parts: list[str] = []
    for name, value in values.items():
        if not NAME.fullmatch(name):
            raise ConfigError(
                f"model.template_kwargs: {name!r} cannot be a variable of a template; write its "
                "name as in the template, such as {enable_thinking: false}"
            )
        parts.append(
            f"{{% if {name} is not defined %}}{{% set {name} = {_jinja(value)} %}}{{% endif +%}}"
        )
    return "".join(parts)


def _jinja(value: Any) -> str:
    """Return a value as a literal of Jinja: JSON, but for null."""
    if isinstance(value, Mapping):
        pairs = (f"{json.dumps(str(key))}: {_jinja(inner)}" for key, inner in value.items())
        return f"{{{', '.join(pairs)}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(_jinja, value))}]"
    return "none" if value is None else json.dumps(value, ensure_ascii=False)


def _clock(template: str, date: str) -> str:
    """Return the macro that answers a template's questions for the date, "" where it asks none."""
    formats = dict.fromkeys(found[2] for found in CLOCK_CALL.finditer(template))
    if not formats or template.count(f"{CLOCK_NAME}(") != len(CLOCK_CALL.findall(template)):
        return ""
    try:
        today = datetime.strptime(date, "%Y-%m-%d")
    except ValueError:
        raise ConfigError(
            f"model.template_date={date}: no such day; write year-month-day, such as 2024-07-26"
        ) from None
    cases = "".join(
        f"{{%- if format == {json.dumps(wanted)} -%}}{today.strftime(wanted)}{{%- endif -%}}"
        for wanted in formats
    )
    return f"{{% macro {CLOCK_NAME}(format) %}}{cases}{{% endmacro +%}}"
