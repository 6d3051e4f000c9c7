"""Chat templates compiled without transformers, whose import takes seconds. Loads no torch."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sft_play.data.rows import Json
from sft_play.data.template_limits import limited
from sft_play.data.templates import CLOCK

# transformers' marks of what an assistant generates, which plain Jinja does not know
MARK_START = re.compile(r"\{%(-?)\s*generation\s*(-?)%\}")
MARK_END = re.compile(r"\{%(-?)\s*endgeneration\s*(-?)%\}")
Render = Callable[..., str | None]


def compile_template(source: str, special_tokens: Mapping[str, str]) -> Render:
    """Return a function of messages and tools: the text of a conversation, None if refused."""
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    # as transformers' own
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_template_error
    environment.globals["strftime_now"] = CLOCK.strftime
    try:
        compiled = environment.from_string(
            MARK_END.sub(r"{%\1 endif \2%}", MARK_START.sub(r"{%\1 if true \2%}", source))
        )
    except TemplateError:  # the run names the line and stops
        return lambda messages, tools=(): None

    def render(messages: Sequence[Json], tools: Sequence[Json] = ()) -> str | None:
        """Return the text of a conversation, None if the template refuses it."""
        with limited():
            try:
                return compiled.render(
                    messages=messages,
                    tools=list(tools) or None,
                    documents=None,
                    add_generation_prompt=False,
                    **special_tokens,
                )
            # a template may fail in any of these ways
            except (TemplateError, TypeError, ValueError, LookupError, ArithmeticError):
                return None

    return render


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _raise_template_error(message: str) -> None:
    from jinja2 import TemplateError

    raise TemplateError(message)
