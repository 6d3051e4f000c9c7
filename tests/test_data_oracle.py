"""Samples equal what plain transformers writes: many row formats, templates and random texts."""

import json
import random
import re
from collections import Counter

import pytest
from families import FAMILIES, LLAMA3_WORDS, TEMPLATES, family, tokenizer
from record_files import cases, read_rows, write_rows
from renderings import EVERY, assert_consistent, conversation, runs, samples_of, shown, written
from transformers import PreTrainedTokenizerFast

from sft_play.data.render import RenderedSample, Renderer, RenderError, render_prompt, stop_ids
from sft_play.data.rows import Message, Row
from sft_play.data.templates import TURN_ENDS

GOLDEN = json.loads((TEMPLATES / "golden.json").read_text(encoding="utf-8"))
EOS = {
    "granite": "<|end_of_text|>",
    "minimax_m1": "<end_of_sentence>",
    "minimax_m2": "[e~[",
    "deepseek_v32": "<｜end▁of▁sentence｜>",
}
# Their prompt of use has a block that their conversations have not
OTHERWISE = ("gemma4_31b", "deepseek_v32")
OPENS = ("command_a", "glm5", "minimax_m2")  # a think block: such rows ask for DATA_REASONING
NAMES = sorted({path.stem for path in TEMPLATES.glob("*.jinja")} - {*OTHERWISE})


def tokenizer_of(name: str) -> PreTrainedTokenizerFast:
    if name in FAMILIES:
        return family(name)
    text = (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
    marks = tuple(mark for mark in TURN_ENDS if mark in text)
    return tokenizer(text, marks, EOS.get(name, "<|endoftext|>"), "<bos>", LLAMA3_WORDS)


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
            prompt = written(row.messages[:number], tok, prompt=True)
            live = written(row.messages[: number + 1], tok, prompt=False)
            assert live.startswith(prompt)
            answer = with_indent(live[len(prompt) :], message.content)
            due[tuple(tok(prompt, add_special_tokens=False)["input_ids"])] = message, answer
    met = []
    for sample in samples:
        assert_consistent(sample)
        assert sample.ids == tok(tok.decode(sample.ids), add_special_tokens=False)["input_ids"]
        assert sample.trained_tokens == sum(behind - first for first, behind in runs(sample))
        for first, behind in runs(sample):
            message, live = due[tuple(sample.ids[:first])]
            met.append(tuple(sample.ids[:first]))
            text = tok.decode(sample.ids[first:behind])
            is_stopped = any(tok.convert_ids_to_tokens(number) in live for number in stops)
            assert live.startswith(text) if is_stopped else text.startswith(live)
            assert message.content.strip() in text
            assert (message.reasoning or "").strip() in text
            ends = [place for place in range(first, behind) if sample.ids[place] in stops]
            assert ends == [behind - 1]
        assert sample.answer_start == runs(sample)[-1][0]
    assert Counter(met) == Counter(due.keys())


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> list[Row]:
    """A row of each of 21 formats."""
    folder = tmp_path_factory.mktemp("rows")
    records = [case["record"] for case in cases("rows", "oracle: ")]
    assert len(records) == 21
    found = []
    for number, record in enumerate(records):
        found += read_rows(write_rows(folder / f"{number}.jsonl", record))
    return found


@pytest.mark.parametrize("name", NAMES)
def test_every_answer_has_the_ids_and_labels_of_plain_transformers(name, rows):
    tok = tokenizer_of(name)
    for row, result in zip(rows, Renderer(tok).render(rows), strict=True):
        if name in OPENS:
            assert "DATA_REASONING" in str(result)
            continue
        assert_proven(row, result, tok)
        prompt = result[-1].ids[: result[-1].answer_start]
        assert prompt == render_prompt(row.messages[:-1], tok)


# Conversations with a system message and reasoning, as the family has them


@pytest.mark.parametrize(("name", "marked"), EVERY)
def test_a_family_has_its_golden_ids_and_trains_the_last_answer_alone(name, marked):
    tok = family(name, marked)
    samples = samples_of(conversation(name), tok)
    assert [{"text": shown(sample, tok), "ids": sample.ids} for sample in samples] == GOLDEN[name]
    (last,) = samples_of(conversation(name), tok, "last")
    assert last.ids == samples[-1].ids and runs(last) == runs(samples[-1])[-1:]


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
