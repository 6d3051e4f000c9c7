"""Tokenizers, templates and generation settings of hostile model folders: small on disk."""

import json
import os
from pathlib import Path
from typing import Any

from hostile_folders import (
    BASE,
    Damage,
    fifo_at,
    folder_at,
    link_at,
    sparse,
    with_text,
    with_values,
)

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


def tokenizers() -> dict[str, Damage]:
    """Return damages of tokenizer.json by name."""
    model, tokens = MODEL, TOKENS
    nested = {"type": "Sequence", "normalizers": []}
    for _ in range(100):
        nested = {"type": "Sequence", "normalizers": [nested]}
    return {
        "split-catastrophic": tokenizer(pre_tokenizer=split("(a+)+$")),
        "split-any": tokenizer(pre_tokenizer=split("(.*)*$x")),
        "split-words": tokenizer(pre_tokenizer=split(r"(\w+\s?)*\d\d\d$")),
        "split-possessive": tokenizer(pre_tokenizer=split(r"((.*)*)*y")),
        "split-back": tokenizer(pre_tokenizer=split(r"(.*)\1{3}$")),
        "split-repeat": tokenizer(pre_tokenizer=split("(x{1,30000}){1,30000}")),
        "split-invalid": tokenizer(pre_tokenizer=split("(")),
        "normalizer-regex": tokenizer(normalizer={"type": "Replace", "pattern": {"Regex": r"(\w+\s?)*\d\d\d$"}, "content": ""}),
        "explode-30": tokenizer(normalizer=replacing(30)),
        "explode-9": tokenizer(normalizer=replacing(9)),
        "explode-empty": tokenizer(normalizer={"type": "Replace", "pattern": {"String": ""}, "content": "a"}),
        "explode-prepend": tokenizer(normalizer={"type": "Prepend", "prepend": "a" * 10_000_000}),
        "normalizer-nested": tokenizer(normalizer=nested),
        "normalizer-unknown": tokenizer(normalizer={"type": "Nothing"}),
        "post-huge": with_post_processor(10**6),
        "vocab-text": tokenizer(model={**model, "vocab": "x"}),
        "vocab-list": tokenizer(model={**model, "vocab": [1]}),
        "vocab-values": tokenizer(model={**model, "vocab": {"a": "b"}}),
        "vocab-negative": tokenizer(model={**model, "vocab": {"a": -1}}),
        "vocab-huge-id": tokenizer(model={**model, "vocab": {**model["vocab"], "zz": 2**32 - 1}}),
        "vocab-empty": tokenizer(model={**model, "vocab": {}, "merges": []}),
        "vocab-same-ids": same_ids,
        "merges-nothing": tokenizer(model={**model, "merges": [["qq", "zz"]]}),
        "merges-text": tokenizer(model={**model, "merges": "x"}),
        "merges-number": tokenizer(model={**model, "merges": [5]}),
        "merges-one": tokenizer(model={**model, "merges": [["a"]]}),
        "no-model": tokenizer(model=None),
        "model-unknown": tokenizer(model={"type": "Nothing"}),
        "model-list": tokenizer(model=[1]),
        "added-million": tokenizer(added_tokens=tokens + added(1_000_000)),
        "added-100k": tokenizer(added_tokens=tokens + added(100_000)),
        "added-empty": tokenizer(added_tokens=tokens + added(1, content="")),
        "added-long": tokenizer(added_tokens=tokens + added(1, content="a" * 10_000_000)),
        "added-text": tokenizer(added_tokens="x"),
        "added-number": tokenizer(added_tokens=[5]),
        "added-huge-id": tokenizer(added_tokens=tokens + added(1, id=2**31)),
        "added-negative-id": tokenizer(added_tokens=tokens + added(1, id=-1)),
        "added-same": tokenizer(added_tokens=tokens + added(3, content="a")),
        "truncation": tokenizer(truncation={"max_length": 1, "strategy": "LongestFirst", "stride": 5, "direction": "Right"}),
        "padding": tokenizer(padding={"strategy": {"Fixed": 10**9}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0, "pad_token": "x"}),
        "decoder": tokenizer(decoder={"type": "Replace", "pattern": {"Regex": "(a|a)*$"}, "content": "b"}),
        "unigram": tokenizer(model={"type": "Unigram", "unk_id": 99, "vocab": [["a", 0.0]]}),
        "unigram-nan": tokenizer(model={"type": "Unigram", "unk_id": 0, "vocab": [["a", "x"]]}),
        "wordpiece": tokenizer(model={"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##", "max_input_chars_per_word": 100, "vocab": {"a": 0}}),
        **{f"config-{key}-{n}": with_values("tokenizer_config.json", **{key: value}) for key, values in {
            "eos_token": [5, [], {"a": 1}, None, "", "nothing", {"content": 5}, "x" * 10**6],
            "pad_token": [5, [], {"content": None}], "bos_token": [5, {"a": 1}],
            "tokenizer_class": [5, "Nothing", [], "LlamaTokenizer"], "extra_special_tokens": [5, [5], {"a": 5}, "x"],
            "chat_template": [5, [5], {"a": 5}, [{"name": 5, "template": 5}], [{"name": "default", "template": 5}]],
            "added_tokens_decoder": [5, [1], {"x": 5}, {"-1": {"content": "x"}}, {str(10**12): {"content": "x"}}],
            "model_max_length": ["x", -1, []], "auto_map": [5, {"AutoTokenizer": 5}], "padding_side": [5, "x"],
            "clean_up_tokenization_spaces": ["x"], "backend": [5], "additional_special_tokens": [5, [5]],
        }.items() for n, value in enumerate(values)},
    }  # fmt: skip


def template(text: str) -> Damage:
    return with_text("chat_template.jinja", text)


WRITES = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"


def templates() -> dict[str, Damage]:
    """Return damages of the chat template by name."""
    found = {
        "recursion": "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}",
        "recursion-two": "{% macro f(x) %}{{ g(x) }}{% endmacro %}{% macro g(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}",
        "recursion-tree": "{% macro f(x) %}{{ f(x) }}{{ f(x) }}{% endmacro %}{{ f(1) }}",
        "recursive-loop": "{% for a in [1] recursive %}{{ loop([1]) }}{% endfor %}",
        "caller": "{% macro f() %}{% call f() %}{{ caller() }}{% endcall %}{% endmacro %}{{ f() }}",
        "times": "{{ 'x' * 10**10 }}",
        "times-11": "{{ 'x' * 10**11 }}",
        "list-times": "{{ ([1] * 10**10)|length }}",
        "range": "{{ range(10**9)|list }}",
        "range-ok": "{{ (range(99999)|list * 10**5)|length }}",
        "center": "{{ 'a'|center(10**10) }}",
        "center-9": "{{ 'a'|center(10**9)|length }}",
        "center-twice": "{{ 'a'|center(10**9) ~ 'a'|center(10**9) ~ 'a'|center(10**9) }}",
        "indent": "{{ ('a\n' * 10**6)|indent(10**5) }}",
        "format": "{{ '%10000000000d' % 5 }}",
        "format-filter": "{{ '%10000000000d'|format(5) }}",
        "format-method": "{{ '{:10000000000d}'.format(5) }}",
        "ljust": "{{ 'a'.ljust(10**10) }}",
        "zfill": "{{ 'a'.zfill(10**10) }}",
        "replace": "{{ ('a' * 10**6)|replace('a', 'b' * 10**6) }}",
        "join": "{{ range(99999)|join('x' * 10**6) }}",
        "tojson": "{{ ('\\u0001' * 10**9)|tojson }}",
        "expandtabs": "{{ '\t'.expandtabs(10**10) }}",
        "power": "{{ (10**(10**10)) is odd }}",
        "power-9": "{{ (7**(10**9)) is odd }}",
        "power-8": "{{ (7**(10**8)) is odd }}",
        "power-string": "{{ 10**10**5 }}",
        "big-ints": "{% set n = namespace(x=7**10**6) %}{% for a in range(40) %}{% set n.x = n.x * n.x %}{% endfor %}",
        "batch": "{{ [1]|batch(10**9, 0)|list }}",
        "slice": "{{ [1]|slice(10**9)|list }}",
        "wordwrap": "{{ ('a ' * 10**7)|wordwrap(5) }}",
        "lipsum": "{{ lipsum(n=10**9) }}",
        "lipsum-max": "{{ lipsum(n=1, min=10**9, max=10**9+1) }}",
        "cycler": "{% set c = cycler(*range(99999)) %}{% for a in range(99999) %}{% for b in range(99999) %}{{ c.next() }}{% endfor %}{% endfor %}",
        "doubling": "{% set n = namespace(x='x'*1000) %}{% for a in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
        "list-doubling": "{% set n = namespace(x=[1]) %}{% for a in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
        "sort": "{{ (range(99999)|list * 10**3)|sort|length }}",
        "urlize": "{{ ('http://a.' * 10**6)|urlize }}",
        "striptags": "{{ ('<!--' * 10**6)|striptags }}",
        "round": "{{ 5|round(10**10) }}",
        "filesize": "{{ 10**400|filesizeformat }}",
        "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "text-nested-parens": "{{ " + "(" * 100_000 + "1" + ")" * 100_000 + " }}",
        "text-nested-200": "{{ " + "(" * 250 + "1" + ")" * 250 + " }}",
        "text-nested-if": "{% if 1 %}" * 10_000 + "{% endif %}" * 10_000,
        "text-nested-if-50": "{% if 1 %}" * 50 + "{% endif %}" * 50,
        "text-nested-for": "{% for a in [1] %}" * 25 + "{% endfor %}" * 25,
        "text-nested-lists": "{{ " + "[" * 50_000 + "]" * 50_000 + " }}",
        "text-not": "{{ " + "not " * 50_000 + "1 }}",
        "text-minus": "{{ " + "-" * 50_000 + "1 }}",
        "text-filters": "{{ 1" + "|string" * 50_000 + " }}",
        "text-plus": "{{ 1" + "+1" * 50_000 + " }}",
        "text-concat": "{{ 1" + "~1" * 50_000 + " }}",
        "text-dots": "{{ a" + ".b" * 50_000 + " }}",
        "text-elif": "{% if 0 %}" + "{% elif 0 %}" * 20_000 + "{% endif %}",
        "text-constant": "{{ 'x' * 10**11 }}{{ [0] * 10**11 }}",
        "text-constant-power": "{% if 9**9**9 %}{% endif %}",
        "text-unclosed": "{% if",
        "text-10MB": "{# x #}" * 1_500_000,
        "text-10MB-output": "{{ 1 }}" * 1_500_000,
        "include": "{% include 'x' %}",
        "extends": "{% extends '/etc/passwd' %}",
        "import": "{% import 'x' as y %}",
        "attributes": "{{ ''.__class__.__mro__ }}",
        "self": "{{ self.__init__.__globals__ }}",
        "raise": "{{ raise_exception('x' * 10**7) }}",
        "assert-messages": "{{ messages.append(1) }}",
    }  # fmt: skip
    damages = {name: template(text + WRITES) for name, text in found.items()}
    return damages | {
        "only-recursion": template("{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}"),
        "empty": template(""),
        "binary": with_text("chat_template.jinja", bytes(range(256))),
        "nul": template("\0" + WRITES),
        "huge": sparse("chat_template.jinja", 1 << 30),
        "fifo": fifo_at("chat_template.jinja"),
        "device": link_at("chat_template.jinja", "/dev/zero"),
        "folder": folder_at("chat_template.jinja"),
        "dangling": link_at("chat_template.jinja", "/nowhere"),
        "additional-fifo": lambda f: ((f / "additional_chat_templates").mkdir(), os.mkfifo(f / "additional_chat_templates" / "x.jinja"))[0],
        "additional-dir": lambda f: (f / "additional_chat_templates").write_text("x"),
    }  # fmt: skip


def generation() -> dict[str, Damage]:
    values = {"eos_token_id": ["x", [], ["x"], -1, 10**12, {}], "max_length": ["x", -1], "temperature": ["x", -1, []],
              "top_k": ["x", -5], "do_sample": ["x"], "transformers_version": [5], "num_beams": ["x", -1], "cache_implementation": [5, "x"], "watermarking_config": [5, {"x": 1}], "nothing": [5, {"a": []}]}  # fmt: skip
    return {
        f"{key}-{n}": with_values("generation_config.json", **{key: value})
        for key, each in values.items()
        for n, value in enumerate(each)
    }
