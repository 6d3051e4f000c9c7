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
    turns,
)

from sft_play.data.render import (
    IGNORE_INDEX,
    render_prompt,
    stop_ids,
)
from sft_play.data.rows import Row
from sft_play.data.templates import pin_clock

GOLDEN = json.loads((TEMPLATES / "golden.json").read_text(encoding="utf-8"))


# What is trained, by eye


@pytest.mark.parametrize(("name", "marked"), EVERY)
def test_a_family_trains_the_answers_that_its_model_must_write(name: str, marked: bool) -> None:
    tok = family(name, marked)
    assert [trained(sample, tok) for sample in samples_of(conversation(name), tok)] == TRAINED[name]


@pytest.mark.parametrize(("name", "marked"), EVERY)
def test_a_family_has_its_golden_ids(name: str, marked: bool) -> None:
    tok = family(name, marked)
    samples = samples_of(conversation(name), tok)
    assert [{"text": shown(sample, tok), "ids": sample.ids} for sample in samples] == GOLDEN[name]


@pytest.mark.parametrize("name", FAMILIES)
def test_the_last_answer_alone_is_one_sample(name: str) -> None:
    tok = family(name)
    (sample,) = samples_of(conversation(name), tok, "last")
    assert trained(sample, tok) == TRAINED[name][-1][-1:]
    assert runs(sample)[0][0] == sample.answer_start


@pytest.mark.parametrize(("name", "marked"), EVERY)
@pytest.mark.parametrize("number", [-3, -1])
def test_the_prompt_of_use_is_what_stands_before_an_answer(
    name: str, marked: bool, number: int
) -> None:
    tok, messages = family(name, marked), conversation(name).messages
    messages = messages[: len(messages) + number + 1]
    sample = samples_of(Row(messages, "rows.jsonl:7"), tok)[-1]
    assert sample.ids[: sample.answer_start] == render_prompt(messages[:-1], tok)
    assert (
        sample.ids[: sample.answer_start]
        == tok(prompt_text(messages[:-1], tok), add_special_tokens=False)["input_ids"]
    )


@pytest.mark.parametrize(("name", "marked"), [(name, marked) for name, marked in EVERY if marked])
def test_our_mask_is_that_of_transformers_but_for_blanks_behind_the_stop_token(
    name: str, marked: bool
) -> None:
    tok, row = family(name, marked), conversation(name)
    sample = samples_of(row, tok)[-1]
    pin_clock(tok.chat_template)
    given = tok.apply_chat_template(
        turns(row.messages),
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    assert given["input_ids"] == sample.ids
    first = runs(sample)[0][
        0
    ]  # earlier answers are another sample's where the template rewrites them
    for index in range(first, len(sample.ids)):
        if bool(given["assistant_masks"][index]) != (sample.labels[index] != IGNORE_INDEX):
            assert not tok.decode(sample.ids[index]).strip()
            assert sample.ids[index - 1] in stop_ids(tok)
