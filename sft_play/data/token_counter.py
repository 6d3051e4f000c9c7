"""Counts the tokens of rows without transformers, whose import takes seconds. Loads no torch.

For planning alone: what a run trains on comes from `render.Renderer`, which also checks it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from sft_play.config.schema import Config
from sft_play.data.rows import Row
from sft_play.data.template_sources import Template, find_template, read_object
from sft_play.data.templates import DEFAULT_TEMPLATE, Render, compile_template, template_messages
from sft_play.errors import EnvironmentFault
from sft_play.plan.model_shape import find_file

if TYPE_CHECKING:
    import tokenizers

ADDITIONAL_TEMPLATES = "additional_chat_templates/*.jinja"
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

        None if it is in neither, or in a format that needs conversion.
        Raises: EnvironmentFault for a damaged file; ConfigError for model.chat_template.
        """
        model = config.model

        def find(file: str) -> Path | None:
            return find_file(model.name, file, model.revision, environ)

        path = find("tokenizer.json")
        settings_path = find("tokenizer_config.json")
        if path is None or settings_path is None:
            return None
        special_tokens = _special_tokens(read_object(settings_path))
        files = {file.stem: file for file in settings_path.parent.glob(ADDITIONAL_TEMPLATES)}
        template_path = find("chat_template.jinja")
        if template_path is not None:
            files["default"] = template_path
        named = {name: file.read_text(encoding="utf-8") for name, file in files.items()}
        template = find_template(named, find, model, special_tokens)
        return cls(_load(path), _choose_default(template), special_tokens)

    @classmethod
    def of(cls, tokenizer: Any) -> Self:
        """Return the counter of a tokenizer of transformers."""
        template = _choose_default(tokenizer.chat_template)
        return cls(tokenizer.backend_tokenizer, template, tokenizer.special_tokens_map)

    def count(self, rows: Sequence[Row]) -> list[int | None]:
        """Return the tokens of each row, None for one that the template does not take."""
        texts = [self._text(row) for row in rows]
        given = [text for text in texts if text is not None]
        encodings = self.tokenizer.encode_batch_fast(given, add_special_tokens=False)
        lengths = iter([len(encoding.ids) for encoding in encodings])
        return [None if text is None else next(lengths) for text in texts]

    def _text(self, row: Row) -> str | None:
        if row.text is not None or row.segments:
            begin = self.special_tokens.get("bos_token", "")
            return f"{begin}{row.plain_text}{self.special_tokens.get('eos_token', '')}"
        return self._render(template_messages(row.messages), row.tools)

    @cached_property
    def _render(self) -> Render:
        return compile_template(self.template, self.special_tokens)


def _load(path: Path) -> "tokenizers.Tokenizer":
    import tokenizers

    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # noqa: BLE001 - the library raises no other class
        raise EnvironmentFault(f"{path}: no tokenizer: {error}; download the model again") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _choose_default(template: Template | None) -> str:
    return template["default"] if isinstance(template, dict) else template or DEFAULT_TEMPLATE


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
