"""sft_play.data.template_sources: which of a model's chat templates a run uses and saves."""

import json
import logging
from pathlib import Path

import pytest
from families import tokenizer as made_tokenizer
from renderings import samples_of, trained
from transformers import AutoTokenizer

from sft_play.config.schema import Config
from sft_play.data.render import render_prompt
from sft_play.data.rows import Message, Row
from sft_play.data.template_sources import TRIED
from sft_play.data.templates import DEFAULT_TEMPLATE, ChatTemplate
from sft_play.data.tokenizer import load_tokenizer
from sft_play.errors import ConfigError, EnvironmentFault
from sft_play.models.export import with_eos

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content "
    "+ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|im_start|>assistant\n' }}{% endif %}"
)
RAG = "{{ 'Documents. ' }}" + CHATML
TOOLS = "{{ 'Tools. ' }}" + CHATML
NAMED = [{"name": "default", "template": CHATML}, {"name": "rag", "template": RAG}]
# As published, in their essentials: contents are lists of parts
SMOLVLM = (
    "<|im_start|>{% for message in messages %}{{ message['role'] | capitalize }}"
    "{% if message['content'][0]['type'] == 'image' %}{{ ':' }}{% else %}{{ ': ' }}{% endif %}"
    "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{ line['text'] }}"
    "{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
LLAVA = (
    "{% for message in messages %}{% if message['role'] != 'system' %}"
    "{{ message['role'].upper() + ': ' }}{% endif %}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}"
    "{% if message['role'] != 'assistant' %}{{ content['text'] + ' ' }}{% else %}"
    "{% generation %}{{ content['text'] + eos_token }}{% endgeneration %}{% endif %}{% endfor %}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)
MIXED = (  # parts of questions, strings of answers, and no system message
    "{% for message in messages %}{% if message.role == 'user' %}"
    "{% for part in message.content %}{{ part.text }}{% endfor %}|"
    "{% elif message.role == 'assistant' %}{{ message.content + '<|im_end|>' }}{% endif %}"
    "{% endfor %}"
)
BOTH = (
    "{% for message in messages %}{{ message.role }}: {% if message.content is string %}"
    "{{ message.content }}{% else %}{% for part in message.content %}{{ part.text }}{% endfor %}"
    "{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
QUESTION = (Message("user", "What is red?"),)
ANSWERED = (*QUESTION, Message("assistant", "A rose."))


@pytest.fixture
def folder(tmp_path) -> Path:
    """The folder of a tokenizer without a chat template."""
    made_tokenizer(None).save_pretrained(tmp_path)
    return tmp_path


def config_of(folder: Path, setting: str | None = None) -> Config:
    return Config.model_validate({"model": {"name": str(folder), "chat_template": setting}})


def load(folder: Path, setting: str | None = None):
    return load_tokenizer(config_of(folder, setting))


def set_config(folder: Path, **values) -> None:
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def prompt(tok) -> str:
    return tok.decode(render_prompt(QUESTION, tok))


def write_named(folder: Path, form: str) -> None:
    """Write two templates by name, in one of the ways that transformers reads."""
    if form == "list":
        set_config(folder, chat_template=NAMED)
        return
    others = folder / "additional_chat_templates"
    others.mkdir()
    (others / "rag.jinja").write_text(RAG)
    if form == "files":
        (folder / "chat_template.jinja").write_text(CHATML)
    else:
        set_config(folder, chat_template=CHATML)


@pytest.mark.parametrize("form", ["list", "files", "files next to a config"])
def test_of_several_templates_the_default_one_is_used_and_name_takes_another(folder, form):
    write_named(folder, form)
    plain, rag = load(folder), load(folder, "name:rag")
    assert plain.chat_template == {"default": CHATML, "rag": RAG}
    assert prompt(plain).startswith("<|im_start|>user")
    assert prompt(rag).startswith("Documents. <|im_start|>user")
    assert rag.chat_template == {"default": RAG, "rag": RAG}
    (sample,) = samples_of(Row(ANSWERED, "rows.jsonl:1"), plain)
    assert trained(sample, plain) == ["A rose.<|im_end|>"]


def test_rows_with_tools_have_the_template_for_tools(folder):
    set_config(folder, chat_template=[*NAMED, {"name": "tool_use", "template": TOOLS}])
    template = ChatTemplate(load(folder))
    messages = [{"role": "user", "content": "What is red?"}]
    assert template.render_prompt(messages).startswith("<|im_start|>")
    assert template.render_prompt(messages, [{"type": "function"}]).startswith("Tools. ")


@pytest.mark.parametrize("setting", [None, "name:rag"])
def test_what_is_saved_opens_the_same_and_keeps_the_other_templates(folder, tmp_path, setting):
    write_named(folder, "list")
    tok = load(folder, setting)
    saved = tmp_path / "adapter"
    with_eos(tok, tok.convert_tokens_to_ids("<|im_end|>")).save_pretrained(saved)
    messages = [{"role": "user", "content": "What is red?"}]
    for opened in (load(saved), AutoTokenizer.from_pretrained(saved)):
        assert set(opened.chat_template) == {"default", "rag"}
        ids = opened.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
        assert ids == render_prompt(QUESTION, tok)


@pytest.mark.parametrize(
    ("templates", "setting", "message"),
    [
        (NAMED, "name:chat", "=name:chat: none .* is named chat; it has default, rag: set MODEL_"),
        (NAMED[1:], None, "=null: none .* is named default; it has rag: set .*=name:rag$"),
        (CHATML, "name:rag", "=name:rag: none .* it has default: set .*=name:default$"),
        (None, "name:rag", "=name:rag: the model has no chat template; leave it out"),
    ],
)
def test_a_name_that_there_is_not_is_an_error_with_those_that_there_are(
    folder, templates, setting, message
):
    set_config(folder, chat_template=templates)
    with pytest.raises(ConfigError, match=message):
        load(folder, setting)


@pytest.mark.parametrize("entry", ["rag", {"name": "rag"}])
def test_a_list_that_holds_no_named_templates_is_refused(folder, entry):
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": [entry]}))
    with pytest.raises(EnvironmentFault, match=r"objects with name and template; correct it in"):
        load(folder)


def test_a_template_is_read_from_four_files_the_first_one_counts(folder):
    def ends_with(text: str) -> str:
        return f"{{{{ '{text}' }}}}{CHATML}"

    (folder / "processor_config.json").write_text(json.dumps({"chat_template": ends_with("4")}))
    assert prompt(load(folder)).startswith("4")
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": ends_with("3")}))
    assert prompt(load(folder)).startswith("3")
    set_config(folder, chat_template=ends_with("2"))
    assert prompt(load(folder)).startswith("2")
    (folder / "chat_template.jinja").write_text(ends_with("1"))
    assert prompt(load(folder)).startswith("1")


def test_a_model_in_the_hubs_cache_has_the_template_of_its_processor(tmp_path, monkeypatch):
    from huggingface_hub import constants

    commit = "0" * 40
    snapshot = tmp_path / "models--owner--name" / "snapshots" / commit
    made_tokenizer(None).save_pretrained(snapshot)
    (snapshot / "config.json").write_text('{"model_type": "llama"}')
    (snapshot / "chat_template.json").write_text(json.dumps({"chat_template": CHATML}))
    (tmp_path / "models--owner--name" / "refs").mkdir()
    (tmp_path / "models--owner--name" / "refs" / "main").write_text(commit)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert load(Path("owner/name")).chat_template == CHATML


@pytest.mark.parametrize(
    ("jinja", "text"),
    [
        (SMOLVLM, "<|im_start|>User: What is red?<|im_end|>\nAssistant: A rose.<|im_end|>\n"),
        (LLAVA, "USER: What is red? ASSISTANT: A rose.<eos>"),
        (MIXED, "What is red?|A rose.<|im_end|>"),
    ],
)
def test_a_template_that_takes_parts_alone_is_saved_as_one_that_takes_strings(
    folder, tmp_path, jinja, text
):
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": jinja}))
    tok = load(folder)
    strings = [{"role": "user", "content": "What is red?"}]
    strings.append({"role": "assistant", "content": "A rose."})
    parts = [
        {**message, "content": [{"type": "text", "text": message["content"]}]}
        for message in strings
    ]
    assert ChatTemplate(tok).render_conversation(strings) == text
    (sample,) = samples_of(Row(ANSWERED, "rows.jsonl:1"), tok)
    assert tok.decode(sample.ids) == text
    assert trained(sample, tok)[0].strip().startswith("A rose.<")

    saved = tmp_path / "adapter"
    with_eos(tok, tok.convert_tokens_to_ids("<|im_end|>")).save_pretrained(saved)
    opened = AutoTokenizer.from_pretrained(saved)
    assert opened.apply_chat_template(strings, tokenize=False) == text
    if jinja is not MIXED:  # that one takes strings of answers
        assert opened.apply_chat_template(parts, tokenize=False) == text
    assert load(saved).chat_template == opened.chat_template


def test_an_answer_of_idefics_ends_at_its_turns_end_rather_than_at_eos(tmp_path):
    marks = ("<|im_start|>", "<end_of_utterance>")
    made_tokenizer(None, marks).save_pretrained(tmp_path)
    jinja = SMOLVLM.replace("<|im_end|>", "<end_of_utterance>")
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": jinja}))
    tok = load(tmp_path)
    (sample,) = samples_of(Row(ANSWERED, "rows.jsonl:1"), tok)
    assert trained(sample, tok) == [" A rose.<end_of_utterance>"]


@pytest.mark.parametrize("jinja", [CHATML, BOTH, DEFAULT_TEMPLATE, "{{ 'nothing' }}", "{% broken"])
def test_a_template_that_takes_strings_or_nothing_is_left_as_it_is(folder, jinja):
    (folder / "chat_template.jinja").write_text(jinja)
    assert load(folder).chat_template == jinja


def test_the_first_line_of_a_template_is_written_alike_with_parts(folder):
    jinja = "  {% if true %}\n" + SMOLVLM + "{% endif %}"
    (folder / "chat_template.jinja").write_text(jinja)
    assert prompt(load(folder)).startswith("<|im_start|>User: What is red?")


def test_one_line_says_that_there_is_no_template(folder, caplog):
    with caplog.at_level(logging.INFO, "sft_play"):
        assert load(folder).chat_template == DEFAULT_TEMPLATE
        load(folder)
        load(folder, "default")
    (line,) = [text for text in caplog.messages if "no chat template" in text]
    assert "### User:" in line and "MODEL_CHAT_TEMPLATE=" in line


def test_both_tries_hold_a_question_and_an_answer():
    assert all({"user", "assistant"} <= {turn["role"] for turn in turns} for turns in TRIED)
