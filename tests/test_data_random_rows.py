"""Rendering of random conversations, beside what transformers itself writes."""

import random
import re
from collections import Counter

import pytest
from families import FAMILIES, family
from renderings import EVERY, prompt_text, runs, written
from transformers import PreTrainedTokenizerFast

from sft_play.data.render import (
    IGNORE_INDEX,
    RenderedSample,
    Renderer,
    RenderError,
    stop_ids,
)
from sft_play.data.rows import Message, Row


def with_indent(live: str, content: str) -> str:
    """Return an answer with the indentation that templates trim: two blanks or more, or a tab."""
    indent = re.match(r"\s*?( [ \t]+|\t[ \t]*|)(?=\S)", content)[1]
    before, answer, after = live.rpartition(content.strip())
    return live if before.endswith(indent) else before + indent + answer + after


def assert_proven(
    row: Row, samples: tuple[RenderedSample, ...], tok: PreTrainedTokenizerFast
) -> None:
    """Assert that every answer is trained once, after its prompt, up to its stop token.

    Its text is the one that the template writes when the answer is the last message.
    """
    stops = stop_ids(tok)
    due = {}  # ids of a prompt: the answer that has to follow
    for number, message in enumerate(row.messages):
        if message.role == "assistant":
            prompt = prompt_text(row.messages[:number], tok)
            live = written(row.messages[: number + 1], tok, prompt=False)[len(prompt) :]
            due[tuple(tok(prompt, add_special_tokens=False)["input_ids"])] = (
                message,
                with_indent(live, message.content),
            )
    met = []
    for sample in samples:
        assert len(sample.ids) == len(sample.labels)
        assert all(
            label in (IGNORE_INDEX, token)
            for label, token in zip(sample.labels, sample.ids, strict=True)
        )
        assert sample.ids == tok(tok.decode(sample.ids), add_special_tokens=False)["input_ids"]
        assert sample.trained_tokens == sum(behind - first for first, behind in runs(sample))
        for first, behind in runs(sample):
            message, live = due[tuple(sample.ids[:first])]
            met.append(tuple(sample.ids[:first]))
            text, stop = tok.decode(sample.ids[first:behind]), tok.decode(sample.ids[behind - 1])
            assert (
                text.startswith(live)
                if not any(tok.convert_ids_to_tokens(number) in live for number in stops)
                else live.startswith(text)
            )
            assert message.content.strip() in text
            assert (message.reasoning or "").strip() in text
            assert sample.ids[behind - 1] in stops and stops.isdisjoint(
                sample.ids[first : behind - 1]
            )
            assert text.endswith(stop)
        assert sample.answer_start == runs(sample)[-1][0]
    assert Counter(met) == Counter(due.keys())


PIECES = [
    *("A rose", " is red.", "\n", "\n\n", "  ", "\t", "naïve", "e\u0301", "🙂", "👩‍🚀", "日本語"),
    *("\u2028", "\u00a0", "12", "345", "a", "'s", "x", "<|im_start|>", "user\n", "[INST]"),
    *("[/INST]", "<<SYS>>", "### Response:\n", "USER:", " ASSISTANT:", "<think>", "{{ 1 + 1 }}"),
    *("{% if x %}", "assistant", "<|end|>", "</s>", "<|im_end|>", "<s>"),
]


def random_text(rng: random.Random) -> str:
    likely = PIECES if rng.random() < 0.3 else PIECES[:18]
    text = "".join(rng.choices(likely, k=rng.randint(1, 12)))
    return text if text.strip() else text + "."


def random_row(name: str, rng: random.Random) -> Row:
    known = FAMILIES[name]
    messages = [Message("system", random_text(rng))] if known.system and rng.random() < 0.5 else []
    for _ in range(rng.randint(1, 4)):
        thought = random_text(rng).strip() if known.reasoning and rng.random() < 0.7 else None
        messages += [
            Message("user", random_text(rng)),
            Message("assistant", random_text(rng), thought),
        ]
    return Row(tuple(messages), "rows.jsonl:7")


REASONS = (
    "which ends an answer",
    "straddles the end of the prompt",
    "token twice",
    "leaves out or changes",
    "generation marks",
    "otherwise once it is answered",
)


@pytest.mark.parametrize("count", [30, pytest.param(300, marks=pytest.mark.long)])
@pytest.mark.parametrize(("name", "marked"), EVERY)
def test_a_random_conversation_is_proven_or_refused_by_name(name, marked, count):
    tok, rng = family(name, marked), random.Random(f"{name} {marked}")
    rows = [random_row(name, rng) for _ in range(count)]
    results = Renderer(tok, tokens_in_text="allow").render(rows)
    for row, result in zip(rows, results, strict=True):
        if isinstance(result, RenderError):
            assert str(result).startswith("rows.jsonl:7: ")
            assert any(reason in str(result) for reason in REASONS), result
        else:
            assert_proven(row, result, tok)
    assert sum(not isinstance(result, RenderError) for result in results) > count // 3
