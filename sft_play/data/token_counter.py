"""Counts the tokens of rows without transformers, whose import takes seconds. Loads no torch.

For planning alone: what a run trains on comes from `render.Renderer`, which also checks it.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from sft_play.config.schema import Config
from sft_play.data.rows import Row
from sft_play.data.template_limits import limited
from sft_play.data.template_variables import with_variables
from sft_play.data.templates import CLOCK, DEFAULT_TEMPLATE, read_template, template_messages
from sft_play.errors import EnvironmentFault
from sft_play.plan.model_shape import find_file

if TYPE_CHECKING:
    import jinja2
    import tokenizers

# transformers' marks of what an assistant generates, which plain Jinja does not know
MARK_START = re.compile(r"\{%(-?)\s*generation\s*(-?)%\}")
MARK_END = re.compile(r"\{%(-?)\s*endgeneration\s*(-?)%\}")
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token")


@dataclass(frozen=True)
class TokenCounter:
    """A tokenizer and the chat template that it renders rows with."""

    tokenizer: "tokenizers.Tokenizer"
    template: str
    special_tokens: Mapping[str, str]  # by the names that templates use

    @classmethod
    def find(cls, config: Config, environ: Mapping[str, str]) -> Self | None:
        """Return the counter of a local model or one in the hub's cache.

        None where it is in neither, or in a format that needs conversion.
        Raises: EnvironmentFault for a damaged file; ConfigError for model.chat_template.
        """
        model = config.model

        def find(file: str) -> Path | None:
            return find_file(model.name, file, model.revision, environ)

        path = find("tokenizer.json")
        settings_path = find("tokenizer_config.json")
        if path is None or settings_path is None:
            return None
        settings = _read_object(settings_path)
        template_path = find("chat_template.jinja")
        if model.chat_template is not None:
            template = read_template(model.chat_template)
        elif template_path is not None:
            template = template_path.read_text(encoding="utf-8")
        else:
            template = _default_of(settings.get("chat_template"))
        template = with_variables(template or DEFAULT_TEMPLATE, model)
        return cls(_load(path), template, _special_tokens(settings))

    @classmethod
    def of(cls, tokenizer: Any) -> Self:
        """Return the counter of a tokenizer of transformers."""
        template = _default_of(tokenizer.chat_template)
        return cls(tokenizer.backend_tokenizer, template, tokenizer.special_tokens_map)

    def count(self, rows: Sequence[Row]) -> list[int | None]:
        """Return the tokens of each row, None for one that the template does not take."""
        texts: list[str | None] = []
        for row in rows:
            with limited():
                texts.append(self._text(row))
        given = [text for text in texts if text is not None]
        encodings = self.tokenizer.encode_batch_fast(given, add_special_tokens=False)
        lengths = iter([len(encoding.ids) for encoding in encodings])
        return [None if text is None else next(lengths) for text in texts]

    def _text(self, row: Row) -> str | None:
        from jinja2 import TemplateError

        if row.text is not None or row.segments:
            begin = self.special_tokens.get("bos_token", "")
            return f"{begin}{row.plain_text}{self.special_tokens.get('eos_token', '')}"
        try:
            return self._compiled.render(
                messages=template_messages(row.messages),
                tools=list(row.tools) or None,
                documents=None,
                add_generation_prompt=False,
                **self.special_tokens,
            )
        # a template may fail in any of these ways; the run names such rows and stops
        except (TemplateError, TypeError, ValueError, LookupError, ArithmeticError):
            return None

    @cached_property
    def _compiled(self) -> "jinja2.Template":
        """The template in an environment like transformers'."""
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_template_error
        environment.globals["strftime_now"] = CLOCK.strftime
        source = MARK_START.sub(r"{%\1 if true \2%}", self.template)
        return environment.from_string(MARK_END.sub(r"{%\1 endif \2%}", source))


def _load(path: Path) -> "tokenizers.Tokenizer":
    import tokenizers

    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # noqa: BLE001 - the library raises no other class
        raise EnvironmentFault(f"{path}: no tokenizer: {error}; download the model again") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _read_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise EnvironmentFault(
            f"{path}: not valid JSON: {error}; download the model again"
        ) from None
    if not isinstance(value, dict):
        raise EnvironmentFault(f"{path}: holds no object; download the model again")
    return value


def _default_of(template: Any) -> str:
    """Return the template for conversations, of several by name the one named default."""
    if isinstance(template, list):
        template = {entry["name"]: entry["template"] for entry in template}
    if isinstance(template, dict):
        template = template.get("default")
    return template or ""


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the special tokens of a tokenizer_config.json, which has texts or objects."""
    tokens = {}
    for name in SPECIAL_TOKENS:
        token = settings.get(name)
        if isinstance(token, dict):
            token = token.get("content")
        if isinstance(token, str):
            tokens[name] = token
    return tokens


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _raise_template_error(message: str) -> None:
    from jinja2 import TemplateError

    raise TemplateError(message)
