"""model.template_kwargs and model.template_date become a part of the template that is saved."""

import json

import pytest
from families import tokenizer
from transformers import AutoTokenizer

from sft_play.config.sections.model import ModelSection
from sft_play.data.render import render_prompt
from sft_play.data.rows import Message
from sft_play.data.template_sources import with_variables
from sft_play.errors import ConfigError
from sft_play.evaluation.reference import Reference
from sft_play.evaluation.reopened import Folder, reopen
from sft_play.inference.load import load_run

THINKING = (
    "{% for m in messages %}{{ '<|im_start|>' + m['content'] + '<|im_end|>' }}{% endfor %}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '<think></think>' }}{% endif %}"
)
DATED = (
    "{%- if not date_string is defined %}{%- if strftime_now is defined %}"
    '{%- set date_string = strftime_now("%d %b %Y") %}{%- else %}'
    "{%- set date_string = 'never' %}{%- endif %}{%- endif %}"
    "{{- 'Today: ' + date_string + strftime_now('%Y') }}{{ messages[0]['content'] }}"
)
MESSAGES = [{"role": "user", "content": "a"}]


def written(template: str, model: ModelSection, **at_use) -> str:
    """Return what plain transformers writes with the template that would be saved."""
    tok = tokenizer(None)
    changed = with_variables(template, model)
    return tok.apply_chat_template(MESSAGES, tokenize=False, chat_template=changed, **at_use)


def test_a_variable_is_set_for_all_and_may_be_given_another_value_at_use():
    off = ModelSection(template_kwargs={"enable_thinking": False})
    assert written(THINKING, ModelSection()) == "<|im_start|>a<|im_end|>"
    assert written(THINKING, off) == "<|im_start|>a<|im_end|><think></think>"
    assert written(THINKING, off, enable_thinking=True) == "<|im_start|>a<|im_end|>"


@pytest.mark.parametrize(
    "value", [True, None, 3, 0.5, 'a "null" or {{ x }} \\ \n', ["null", None], {"a": [False]}]
)
def test_a_value_of_any_kind_reaches_the_template(value):
    model = ModelSection(template_kwargs={"v": value})
    assert written("\n{{ v | tojson }}", model) == written(
        "\n{{ v | tojson }}", ModelSection(), v=value
    )


def test_a_date_is_the_same_whenever_and_wherever_it_is_asked():
    assert written(DATED, ModelSection()) == "Today: 26 Jul 20242024a"
    assert written(DATED, ModelSection(template_date="2026-01-02")) == "Today: 02 Jan 20262026a"
    with pytest.raises(ConfigError, match="no such day"):
        written(DATED, ModelSection(template_date="2026-02-31"))
    assert with_variables(THINKING, ModelSection()) == THINKING, "no date, no change"


def test_training_reads_the_date_that_is_saved():
    tok = tokenizer(None)
    tok.chat_template = with_variables(DATED, ModelSection(template_date="2026-01-02"))
    try:
        text = tok.decode(render_prompt([Message("user", "a")], tok))
    finally:
        tok.chat_template = None
    assert text == "Today: 02 Jan 20262026a"


def test_a_name_that_cannot_be_a_variable_is_refused():
    with pytest.raises(ConfigError, match="'enable thinking' cannot be a variable"):
        with_variables(THINKING, ModelSection(template_kwargs={"enable thinking": False}))


def test_a_run_saves_its_template_with_its_variables_and_plain_transformers_writes_the_same(
    plan_run, run_worker, tiny_base, tmp_path, opens_here
):
    own = tmp_path / "own.jinja"
    shipped = AutoTokenizer.from_pretrained(tiny_base).chat_template
    own.write_text("{{ greeting }}{{ strftime_now('%Y') }}" + shipped)
    settings = {
        "model.chat_template": own,
        "model.template_kwargs": "{greeting: Good day. }",
        "model.template_date": "2031-01-01",
        "train.max_steps": 1,
    }
    folder = plan_run(settings)
    assert run_worker(folder) == 0
    weights = folder.weights("lora")
    assert json.loads((weights / "stamp.json").read_text())["template"] == str(own)
    own.unlink()
    for opened in (AutoTokenizer.from_pretrained(weights), load_run(folder, "cpu").tokenizer):
        shown = opened.apply_chat_template(MESSAGES, tokenize=False)
        assert shown.startswith("Good day.2031")
    reference = Reference.read(folder.evaluation)
    assert reopen(Folder(weights, "float32", {"": "cpu"}), reference).faults() == []
