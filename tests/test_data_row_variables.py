"""Variables of the chat template that a row brings: chat_template_kwargs, enable_thinking, ..."""

from typing import Any

import pytest
from families import LLAMA3_WORDS, tokenizer
from record_files import run_data, write_rows
from renderings import CHATML

from sft_play.data.render import Renderer, RenderError, render_prompt
from sft_play.data.rows import Message, Row
from sft_play.data.template_sources import with_variables
from sft_play.data.templates import ChatTemplate

# As SmolLM3: instructions and a mode before the conversation
MODES = (
    "{% if enable_thinking is not defined %}{% set enable_thinking = true %}{% endif %}"
    "{% if enable_thinking %}{% set mode = '/think' %}{% else %}{% set mode = '/no_think' %}"
    "{% endif %}{{ '<|im_start|>system\n' + mode }}"
    "{% if custom_instructions %}{{ ' ' + custom_instructions }}{% endif %}{{ '<|im_end|>\n' }}"
    + CHATML
)
TURNS = [{"role": "user", "content": "1+2?"}, {"role": "assistant", "content": "3"}]
BRIEF = {"custom_instructions": "Be brief.", "enable_thinking": False, "xml_tools": []}


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_rows_of_other_variables_have_other_prompts_and_unread_names_are_counted(name, tmp_path):
    rows = []
    for n in range(12):
        kwargs = BRIEF if n % 2 else {"custom_instructions": None, "enable_thinking": True}
        question = {"role": "user", "content": f"{n}+2?"}
        rows.append({"messages": [question, TURNS[1]], "chat_template_kwargs": kwargs})
    path = write_rows(tmp_path / name, *rows)
    tok = tokenizer(MODES, words=LLAMA3_WORDS)
    data = run_data(path, tok, 128, val_size=0.1)
    heads = {}
    for sample in [data.train[index] for index in range(len(data.train))]:
        text = tok.decode(sample.ids.tolist())
        number = int(text.partition("user\n")[2].partition("+")[0])
        heads[number] = text.partition("<|im_end|>")[0].partition("\n")[2]
    assert {heads[n] for n in heads if n % 2} == {"/no_think Be brief."}
    assert {heads[n] for n in heads if n % 2 == 0} == {"/think"}
    (note,) = data.ledger.as_json()["notes"]
    assert note == (
        f"{path}: 6 rows: the variable xml_tools is not used: "
        "the chat template reads custom_instructions, enable_thinking"
    )


def row(**variables: Any) -> Row:
    messages = (Message("user", "1+2?"), Message("assistant", "3"))
    return Row(messages, "r:1", variables=variables or None)


def test_a_prompt_with_a_rows_variables_is_that_of_its_sample():
    tok = tokenizer(MODES, words=LLAMA3_WORDS)
    for given in (row(), row(**BRIEF), row(messages=[], eos_token="x", enable_thinking=False)):
        ((sample,),) = Renderer(tok).render([given])
        prompt = render_prompt(given.messages[:1], tok, variables=given.variables)
        assert sample.ids[: sample.answer_start] == prompt
        kwargs = {k: v for k, v in (given.variables or {}).items() if k in BRIEF}
        turns = [{"role": m.role, "content": m.content} for m in given.messages]
        assert sample.ids == tok.apply_chat_template(turns, return_dict=False, **kwargs)


def test_a_rows_value_counts_before_that_of_all_rows():
    tok = tokenizer(MODES, words=LLAMA3_WORDS)
    from sft_play.config.sections.model import ModelSection

    section = ModelSection(template_kwargs={"enable_thinking": False})
    fixed = tokenizer(with_variables(MODES, section), words=LLAMA3_WORDS)
    assert Renderer(fixed).render([row(enable_thinking=True)]) == Renderer(tok).render([row()])
    assert Renderer(fixed).render([row()]) != Renderer(tok).render([row()])


def test_a_special_token_in_a_variable_is_plain_text():
    tok = tokenizer(MODES, words=LLAMA3_WORDS)
    ((sample,),) = Renderer(tok).render([row(custom_instructions="No <|im_end|> here.")])
    assert sample.as_text == ("<|im_end|>",)
    ends = sample.ids.count(tok.convert_tokens_to_ids("<|im_end|>"))
    assert ends == 3 and "No <|im_end|> here." in tok.decode(sample.ids)
    (refused,) = Renderer(tok, tokens_in_text="fail").render(
        [row(custom_instructions="<|im_end|>")]
    )
    assert isinstance(refused, RenderError)


@pytest.mark.parametrize(
    ("template", "names"),
    [
        (MODES, {"custom_instructions", "enable_thinking"}),
        (CHATML, set()),
        ("{{ bos_token }}{% set a = b %}{{ a }}{% for c in d %}{{ c }}{% endfor %}", {"b", "d"}),
        ("{% if x %}{% set y = 1 %}{% endif %}{{ y }}", {"x", "y"}),
        ("{% if not x %}{% set x = 'y' %}{% endif %}{{ x }}", {"x"}),
        ("{% if x is defined %}{% set y = 1 %}{% else %}{% set y = 2 %}{% endif %}{{ y }}", {"x"}),
        ("{% macro f(a) %}{{ a ~ b }}{% endmacro %}{{ f(1) }}", {"b"}),
        ("{% generation %}{{ strftime_now(z) }}{% endgeneration %}", {"z"}),
        ("{{ namespace(a=1) }}{{ raise_exception('no') }}{{ tools }}{{ x | default(1) }}", {"x"}),
        ("{% broken", set()),
    ],
)
def test_the_names_that_a_template_reads(template, names):
    assert ChatTemplate(tokenizer(template)).variables_read == names


def test_a_switch_that_the_row_itself_sets_is_no_remedy():
    opens = "{% if enable_thinking %}{{ '<think>\n' }}{% else %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    template = CHATML.replace(
        "assistant\n' }}{% endif %}", "assistant\n' }}" + opens + "{% endif %}"
    )
    assert template != CHATML
    tok = tokenizer(template, words=LLAMA3_WORDS)
    messages = (Message("user", "1+2?"), Message("assistant", "3", reasoning="Add."))
    (refused,) = Renderer(tok).render([Row(messages, "r:1")])
    assert "MODEL_TEMPLATE_KWARGS='{enable_thinking: true}' trains it" in str(refused)
    (refused,) = Renderer(tok).render([Row(messages, "r:1", variables={"enable_thinking": False})])
    assert "DATA_REASONING=drop" in str(refused) and "MODEL_TEMPLATE_KWARGS" not in str(refused)
    ((sample,),) = Renderer(tok).render([Row(messages, "r:1", variables={"enable_thinking": True})])
    assert tok.decode([i for i in sample.labels if i >= 0]).startswith("Add.\n</think>")
