"""Tokenizers, templates and generation settings of hostile model folders: small on disk."""

import json
from pathlib import Path
from typing import Any

from hostile_folders import BASE, Damage, with_text, with_values

TEXT = json.loads((BASE / "tokenizer.json").read_text())
MODEL, TOKENS = TEXT["model"], TEXT["added_tokens"]


def tokenizer(**values: Any) -> Damage:
    return with_values("tokenizer.json", **values)


def split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def replacing(times: int) -> dict[str, Any]:
    each = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 8}
    return {"type": "Sequence", "normalizers": [each] * times}


def added(count: int, **values: Any) -> list[dict[str, Any]]:
    facts = {
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    }
    return [{"id": 3000 + n, "content": f"<{n}>", **facts, **values} for n in range(count)]


def same_ids(folder: Path) -> None:
    """Give all tokens one id."""
    tokenizer(model={**MODEL, "vocab": dict.fromkeys(MODEL["vocab"], 5)})(folder)


def with_post_processor(pieces: int) -> Damage:
    """Return a damage: a template of so many pieces is put around each text."""
    piece = {"SpecialToken": {"id": "<|end|>", "type_id": 0}}
    tokens = {"<|end|>": {"id": "<|end|>", "ids": [1], "tokens": ["<|end|>"]}}
    single = {"type": "TemplateProcessing", "single": [piece] * pieces, "pair": []}
    return tokenizer(post_processor={**single, "special_tokens": tokens})


WORDPIECE = tokenizer(model={"type": "WordPiece", "unk_token": "[UNK]", "vocab": {"a": 0},
                             "continuing_subword_prefix": "##", "max_input_chars_per_word": 9})  # fmt: skip
# that fail on a row, or do not end
TOKENIZERS = {
    "split-catastrophic": tokenizer(pre_tokenizer=split("(a+)+$")),
    "explode-30": tokenizer(normalizer=replacing(30)),
    "wordpiece": WORDPIECE,
}


def template(text: str) -> Damage:
    return with_text("chat_template.jinja", text)


WRITES = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
RECURSION = "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}"
# that end with an error or at a limit, by what they do: the first of a kind, and others
TEMPLATES = {
    "recursion": (
        RECURSION,
        "{% macro f(x) %}{{ g(x) }}{% endmacro %}{% macro g(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}",
        "{% macro f(x) %}{{ f(x) }}{{ f(x) }}{% endmacro %}{{ f(1) }}",
    ),
    "caller": ("{% macro f() %}{% call f() %}{{ caller() }}{% endcall %}{% endmacro %}{{ f() }}",),
    "times": ("{{ 'x' * 10**10 }}", "{{ 'x' * 10**11 }}"),
    "center": (
        "{{ 'a'|center(10**10) }}",
        "{{ 'a'|center(10**9)|length }}",
        "{{ 'a'|center(10**9) ~ 'a'|center(10**9) ~ 'a'|center(10**9) }}",
    ),
    "format": (
        "{{ '%10000000000d' % 5 }}",
        "{{ '%10000000000d'|format(5) }}",
        "{{ '{:10000000000d}'.format(5) }}",
    ),
    "indent": ("{{ ('a\n' * 10**6)|indent(10**5) }}",),
    "power": (
        "{{ (10**(10**10)) is odd }}",
        "{{ (7**(10**9)) is odd }}",
        "{{ (7**(10**8)) is odd }}",
        "{{ 10**10**5 }}",
    ),
    "tojson": ("{{ ('\\u0001' * 10**9)|tojson }}",),
    "loops": ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",),
}
