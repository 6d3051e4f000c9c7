"""Find a model's chat template, and add variables to it. Loads no torch.

Image-text models may store it only in the files of their processor, next to chat_template.jinja
and tokenizer_config.json, which transformers' tokenizers read.
"""

import functools
import json
import logging
import re
from collections.abc import Callable, Mapping
from datetime import datetime
from itertools import chain, combinations
from pathlib import Path
from typing import Any

from sft_play import reading
from sft_play.config.sections.model import NAMED_TEMPLATE, ModelSection
from sft_play.data.limits import TEMPLATE_REMEDY, refuse_endless
from sft_play.data.rows import FORMS
from sft_play.data.templates import DEFAULT_TEMPLATE, RenderError, render_template
from sft_play.errors import ConfigError, EnvironmentFault
from sft_play.runs.model_folder import read_object

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# How a template writes the date: strftime_now("%d %b %Y")
CLOCK_CALL = re.compile(r"""strftime_now\(\s*(["'])(.*?)\1\s*\)""")
CLOCK_NAME = "strftime_now"
Template = str | dict[str, str]
logger = logging.getLogger(__name__)
FindFile = Callable[[str], Path | None]  # a file of the model by its name, None if it has none
# Read in this order if the tokenizer's templates do not include the requested one.
# transformers ignores the one in tokenizer_config.json if additional_chat_templates/ has files.
FILES = ("tokenizer_config.json", "chat_template.json", "processor_config.json")
TEMPLATE_FILE = "chat_template.jinja"
OTHER_TEMPLATES = "additional_chat_templates/*.jinja"  # by their names
# Templates of image-text models may accept contents only as lists of parts, and omit strings
# silently. This converts strings to parts, for the roles that need it. The line break ends the
# tag, so that the template still starts at the beginning of a line.
AS_PARTS = (
    "{%% set parts = namespace(messages=[]) %%}{%% for message in messages %%}"
    "{%% if message.content is string and message.role in %s %%}"
    "{%% set message = dict(message, content=[dict(type='text', text=message.content)]) %%}"
    "{%% endif %%}{%% set parts.messages = parts.messages + [message] %%}{%% endfor %%}"
    "{%% set messages = parts.messages %%}\n"
)
ROLES = (("user", "tool"), ("assistant",), ("system",))
# test conversations for a template; the second one is for templates without system messages
TRIED = FORMS["tried"]


def with_variables(template: Template, model: ModelSection) -> Template:
    """Return a template, or several by name, with model.template_kwargs and a fixed date.

    A value that is passed at inference takes precedence.
    Raises: ConfigError for an invalid name or date.
    """
    if isinstance(template, dict):
        return {name: with_variables(text, model) for name, text in template.items()}
    variables = _variables(model.template_kwargs)
    if template.startswith(variables):  # it is one that a run has saved, with its clock
        variables = ""
    return variables + _clock(template, model.template_date) + template


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
    """Return a value as a Jinja literal: JSON, except for null."""
    if isinstance(value, Mapping):
        pairs = (f"{json.dumps(str(key))}: {_jinja(inner)}" for key, inner in value.items())
        return f"{{{', '.join(pairs)}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(_jinja, value))}]"
    return "none" if value is None else json.dumps(value, ensure_ascii=False)


def _clock(template: str, date: str) -> str:
    """Return the macro that replaces a template's calls for the date, "" if there are none."""
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


def find_template(
    own: Any, find: FindFile, model: ModelSection, special_tokens: Mapping[str, str]
) -> Template:
    """Return the chat template that a run uses and saves, or several by name with a `default`.

    `own` is the tokenizer's template: a text, several by name, a list of these, or None. That in
    the folder of an adapter (model.adapter) comes first: the adapter was trained with it.
    Raises: ConfigError for settings, EnvironmentFault for a damaged file, DataError for a template
    that does not end.
    """
    template = _chosen(own, find, model)
    take_strings = functools.partial(_taking_strings, template, special_tokens)
    refuse_endless(take_strings, "the chat template", TEMPLATE_REMEDY)
    return with_variables(take_strings(), model)


def _chosen(own: Any, find: FindFile, model: ModelSection) -> Template:
    setting = model.chat_template
    if setting == "default":
        return DEFAULT_TEMPLATE
    if model.has_template_file:
        return read_text(Path(model.chat_template))
    wanted = "default" if setting is None else setting.removeprefix(NAMED_TEMPLATE)
    named = _completed(_by_name(own), find, wanted)
    of_adapter = templates_in(Path(model.adapter)) if model.adapter else {}
    if of_adapter and of_adapter != named:
        _say_template_of(model.adapter, model.name)
        named = of_adapter
    if not named and setting is None:
        _say_without_template(model.name)
        return DEFAULT_TEMPLATE
    if not named:
        raise ConfigError(
            f"model.chat_template={setting}: the model has no chat template; leave it out"
        )
    if wanted not in named:
        names = sorted(named)
        raise ConfigError(
            f"model.chat_template={setting or 'null'}: none of the model's chat templates is named "
            f"{wanted}; it has {', '.join(names)}: "
            f"set MODEL_CHAT_TEMPLATE={NAMED_TEMPLATE}{names[0]}"
        )
    template = named[wanted]
    return {**named, "default": template} if len(named) > 1 else template


def _completed(named: dict[str, str], find: FindFile, wanted: str = "default") -> dict[str, str]:
    """Return templates by name with those of other files, until the wanted one is there."""
    for file in FILES:
        path = None if {wanted, "default"} <= named.keys() else find(file)
        if path is not None:
            named = {**_by_name(read_object(path).get("chat_template")), **named}
    return named


def templates_in(folder: Path) -> dict[str, str]:
    """Return the chat templates in a folder by their names; {} if there are none."""
    named = {path.stem: read_text(path) for path in folder.glob(OTHER_TEMPLATES)}
    if (folder / TEMPLATE_FILE).is_file():
        named["default"] = read_text(folder / TEMPLATE_FILE)
    files = {path.name: path for path in folder.glob("*.json")}
    return _completed(named, files.get)


def _by_name(templates: Any) -> dict[str, str]:
    if not templates:
        return {}
    if isinstance(templates, list):
        try:
            return {entry["name"]: entry["template"] for entry in templates}
        except (KeyError, TypeError):
            raise EnvironmentFault(
                "chat_template: a list must contain objects with name and template; correct it in "
                "the model's folder, or set MODEL_CHAT_TEMPLATE to a Jinja file"
            ) from None
    return dict(templates) if isinstance(templates, Mapping) else {"default": templates}


@functools.cache  # one line a process
def _say_template_of(adapter: str, base: str) -> None:
    logger.info(
        "template: that of the adapter %s, with which it was trained; %s has another or none; "
        "MODEL_CHAT_TEMPLATE=mine.jinja sets another",
        adapter,
        base,
    )


@functools.cache  # one line a process
def _say_without_template(name: str) -> None:
    logger.info(
        "template: %s has no chat template; the built-in plain-text one is used, which writes "
        "### User: before a question; MODEL_CHAT_TEMPLATE=mine.jinja sets another",
        name,
    )


def read_text(path: Path) -> str:
    """Return the template in a file. Raises: ConfigError for an unreadable one."""
    try:
        return reading.read_bytes(path).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise ConfigError(
            f"model.chat_template={path}: {reason}; write the path of a Jinja file, "
            "name: and the name of one of the model's, or default; without it the model's is used"
        ) from None


def _taking_strings(template: Template, special_tokens: Mapping[str, str]) -> Template:
    """Return a template, or several by name, that accepts contents which are strings.

    A template that loses texts in any form is unchanged.
    """
    if isinstance(template, Mapping):
        return {name: _taking_strings(text, special_tokens) for name, text in template.items()}
    forms = []
    for count in range(len(ROLES) + 1):
        for chosen in combinations(ROLES, count):
            roles = tuple(chain.from_iterable(chosen))
            forms.append(AS_PARTS % (roles,) + template if roles else template)
    for messages in TRIED:
        for form in forms:
            try:
                text = render_template(form, messages, special_tokens)
            except RenderError:  # of one that cannot be compiled, the run names the line and stops
                continue
            if all(message["content"] in text for message in messages):
                return form
    return template
