"""Rendering with the templates of fourteen families: what is trained, by eye and by golden ids."""

import json

import pytest
from families import FAMILIES, TEMPLATES, family
from renderings import (
    EVERY,
    TRAINED,
    conversation,
    prompt_text,
    runs,
    samples_of,
    shown,
    trained,
)

from sft_play.data.render import (
    render_prompt,
)
from sft_play.data.rows import Row

GOLDEN = json.loads((TEMPLATES / "golden.json").read_text(encoding="utf-8"))


# What is trained, by eye


@pytest.mark.parametrize(("name", "marked"), EVERY)
def test_a_family_trains_the_answers_that_its_model_must_write(name, marked):
    tok = family(name, marked)
    assert [trained(sample, tok) for sample in samples_of(conversation(name), tok)] == TRAINED[name]


@pytest.mark.parametrize(("name", "marked"), EVERY)
def test_a_family_has_its_golden_ids(name, marked):
    tok = family(name, marked)
    samples = samples_of(conversation(name), tok)
    assert [{"text": shown(sample, tok), "ids": sample.ids} for sample in samples] == GOLDEN[name]


@pytest.mark.parametrize("name", FAMILIES)
def test_the_last_answer_alone_is_one_sample(name):
    tok = family(name)
    (sample,) = samples_of(conversation(name), tok, "last")
    assert trained(sample, tok) == TRAINED[name][-1][-1:]
    assert runs(sample)[0][0] == sample.answer_start


@pytest.mark.parametrize(("name", "marked"), EVERY)
@pytest.mark.parametrize("number", [-3, -1])
def test_the_prompt_of_use_is_what_stands_before_an_answer(name, marked, number):
    tok, messages = family(name, marked), conversation(name).messages
    messages = messages[: len(messages) + number + 1]
    sample = samples_of(Row(messages, "rows.jsonl:7"), tok)[-1]
    assert sample.ids[: sample.answer_start] == render_prompt(messages[:-1], tok)
    assert (
        sample.ids[: sample.answer_start]
        == tok(prompt_text(messages[:-1], tok), add_special_tokens=False)["input_ids"]
    )
