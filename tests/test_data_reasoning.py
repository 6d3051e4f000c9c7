"""Reasoning under templates that open a think block in the prompt, close it, or leave it out."""

import copy
import json

import pytest
from families import LLAMA3_WORDS, family, tokenizer
from tokenizers import Tokenizer

from sft_play.data.render import IGNORE_INDEX, Renderer, RenderError, render_prompt
from sft_play.data.rows import Message, Row
from sft_play.data.thoughts import find_thought

MARKS = ("<|im_start|>", "<|im_end|>")
TURN = "{{ '<|im_start|>' + m['role'] + '\n' }}"
# As DeepSeek R1's distills: a block is opened, and what is before its end is left out of answers
R1 = (
    "{% for m in messages %}{% set c = m['content'].split('</think>')[-1] %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + c + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
)
# As Nemotron 3: an answer without reasoning has an empty block without line breaks
# As Qwen 3.5 without thinking: the prompt closes the block
CLOSED = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['role'] == 'assistant' %}"
    "{{ '<think>\n' + (m['reasoning_content'] or '') + '\n</think>\n\n' }}{% endif %}"
    "{{ m['content'] + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}"
    "{{ '<|im_start|>assistant\n<think>\n\n</think>\n\n' }}{% endif %}"
)
QUESTION = Message("user", "What is red?")
PLAIN = Message("assistant", "A rose.")
THOUGHT = Message("assistant", "A rose.", reasoning="It is a rose.")
INLINE = Message("assistant", "<think>\nIt is a rose.\n</think>\n\nA rose.")


def trained(template: str, answer: Message, reasoning: str = "keep") -> str:
    """Return what a row of one question trains, and check that the prompt is that of use."""
    tok = tokenizer(template, MARKS, "<|endoftext|>", None, LLAMA3_WORDS)
    row = Row((QUESTION, answer), "rows.jsonl:1")
    (result,) = Renderer(tok, "all", reasoning).render([row])
    if isinstance(result, RenderError):
        raise result
    (sample,) = result
    prompt = render_prompt([QUESTION], tok)
    assert sample.ids[: len(prompt)] == prompt
    assert sample.labels[: len(prompt)] == [IGNORE_INDEX] * len(prompt)
    return tok.decode(sample.labels[len(prompt) :])


def test_empty_keeps_the_reasoning_that_there_is_and_drop_does_not():
    assert trained(R1, THOUGHT, "empty") == "It is a rose.\n</think>\n\nA rose.<|im_end|>"
    for answer in (THOUGHT, INLINE):
        assert trained(R1, answer, "drop") == "\n</think>\n\nA rose.<|im_end|>"


def test_reasoning_behind_a_block_that_the_prompt_closed_names_both_remedies():
    assert trained(CLOSED, PLAIN) == "A rose.<|im_end|>"
    with pytest.raises(RenderError, match=r"the row has reasoning; DATA_REASONING=drop leaves"):
        trained(CLOSED, THOUGHT)
    assert trained(CLOSED, THOUGHT, "drop") == "A rose.<|im_end|>"
    for name, value in (
        ("enable_thinking", True),
        ("thinking", True),
        ("reasoning_effort", "high"),
    ):
        on, off = CLOSED.replace("\n\n</think>\n\n' }}{% endif %}", "\n' }}{% endif %}"), CLOSED
        assert on != off
        switched = f"{{% if {name} == {value!r} %}}" + on + "{% else %}" + off + "{% endif %}"
        for answer in (THOUGHT, INLINE):
            setting = rf"\{{{name}: {str(value).lower()}}}' trains it, DATA_REASONING=drop"
            with pytest.raises(RenderError, match=setting):
                trained(switched, answer)
            thinking = f"{{% set {name} = {value!r} %}}" + switched
            assert trained(thinking, answer) == "It is a rose.\n</think>\n\nA rose.<|im_end|>"


def test_a_field_of_a_message_is_no_variable_that_lets_the_model_think():
    template = "{% if messages[0].thinking or messages[0]['thinking'] %}{% endif %}" + CLOSED
    with pytest.raises(RenderError) as refused:
        trained(template, THOUGHT)
    assert "MODEL_TEMPLATE_KWARGS" not in str(refused.value)


def test_a_template_without_reasoning_has_it_in_the_answer_or_without_it():
    tok = family("chatml")
    row = Row((QUESTION, THOUGHT), "rows.jsonl:1")
    (kept,) = Renderer(tok).render([row])
    (inside,) = Renderer(tok).render([Row((QUESTION, INLINE), "rows.jsonl:1")])
    assert [sample.ids for sample in kept] == [sample.ids for sample in inside]
    labels = [label for label in kept[0].labels if label != IGNORE_INDEX]
    assert tok.decode(labels) == f"{INLINE.content}<|im_end|>"
    (note,) = kept[0].notes
    assert "written into the answer, as <think>" in note and "DATA_REASONING=drop" in note
    assert not inside[0].notes, "the row has it so"
    (dropped,) = Renderer(tok, "all", "drop").render([row])
    (plain,) = Renderer(tok).render([Row((QUESTION, PLAIN), "rows.jsonl:1")])
    assert dropped == plain


# Answers that begin with line breaks, where the tokenizer has a token for two of them


@pytest.fixture(scope="module")
def joining():
    """A tokenizer that reads the prompt's last line break and the answer's first as one token."""
    tok = copy.deepcopy(family("chatml"))
    state = json.loads(tok.backend_tokenizer.to_str())
    state["model"]["vocab"]["ĊĊ"] = len(tok)
    state["model"]["merges"].insert(0, ["Ċ", "Ċ"])
    tok._tokenizer = Tokenizer.from_str(json.dumps(state))
    assert len(tok("\n\n", add_special_tokens=False)["input_ids"]) == 1
    return tok


def test_an_answer_that_begins_with_a_line_break_follows_the_prompt_of_use(joining):
    row = Row((QUESTION, Message("assistant", "\nA rose.")), "rows.jsonl:1")
    ((sample,),) = Renderer(joining).render([row])
    prompt = render_prompt([QUESTION], joining)
    assert sample.ids[: len(prompt)] == prompt and sample.answer_start == len(prompt)
    answer = joining("\nA rose.<|im_end|>", add_special_tokens=False)["input_ids"]
    assert sample.ids[len(prompt) :] == sample.labels[len(prompt) :] == answer


def test_of_a_conversation_such_an_answer_is_a_sample_of_its_own(joining):
    first, second = Message("assistant", "\nA rose."), Message("assistant", "The sea.")
    again = Message("user", "What is blue?")
    for answers in ((second, first), (first, second)):
        row = Row((QUESTION, answers[0], again, answers[1]), "rows.jsonl:1")
        (samples,) = Renderer(joining).render([row])
        shown = [joining.decode([id_ for id_ in sample.labels if id_ >= 0]) for sample in samples]
        assert sorted(shown) == ["\nA rose.<|im_end|>", "The sea.<|im_end|>"]
    assert shown == sorted(shown)
    prompt = render_prompt([QUESTION, first, again], joining)
    assert samples[1].ids[: len(prompt)] == prompt, "as use reads the history, in joined tokens"


QUOTES = [
    "End it with `</think>` and continue.",
    "```\n<think>\nA rose?\n</think>\n\n```\nThat is a block.",
    "The tag </think>\n\nends a thought, and <think> begins one.",
]


@pytest.mark.parametrize("content", QUOTES)
@pytest.mark.parametrize("name", ["qwen3", "chatml", "deepseek_r1", "harmony"])
def test_an_answer_that_quotes_the_marks_is_trained_whole(content, name):
    tok = family(name)
    row = Row((QUESTION, Message("assistant", content)), "rows.jsonl:1")
    for reasoning in ("empty", "drop"):
        ((sample,),) = Renderer(tok, "all", reasoning).render([row])
        text = tok.decode([label for label in sample.labels if label >= 0])
        assert text.count(content) == 1
        assert text.rpartition(content)[2].startswith(("<|im_end|>", "<｜end", "<|return|>"))


@pytest.mark.parametrize(
    ("content", "reasoning", "answer"),
    [
        ("<think>\nWhy?\n</think>\n\nSo.", "Why?", "So."),
        ("<think>Why?</think>So.", "Why?", "So."),
        ("\n<think>\nQuote </think>\n\nSo.", "Quote", "So."),
        (
            "<think>\nWhy?\n</think>\n\nSo, and </think> ends it.",
            "Why?",
            "So, and </think> ends it.",
        ),
        ("Why?\n</think>\n\nSo.", "Why?", "So."),
        ("[THINK]Why?[/THINK]So.", "Why?", "So."),
        ("Here are my reasoning steps:\nWhy?\n[BEGIN FINAL RESPONSE]\nSo.", "Why?", "So."),
        ("<seed:think>Why?</seed:think>\n    So.", "Why?", "    So."),
    ],
)
def test_reasoning_within_a_content_is_found(content, reasoning, answer):
    assert find_thought(content) == (reasoning, answer)


@pytest.mark.parametrize("content", [*QUOTES, "So.", "<think>\nWhy?", "</think>\n\nSo."])
def test_what_only_looks_like_reasoning_is_none(content):
    assert find_thought(content) is None


def ids_of(tok, answer: Message, reasoning: str = "empty") -> list[list[int]]:
    row = Row((QUESTION, answer), "rows.jsonl:1")
    (samples,) = Renderer(tok, "all", reasoning).render([row])
    assert not isinstance(samples, RenderError), samples
    return [(sample.ids, sample.labels) for sample in samples]


GEMMA4 = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    "{# <|channel>thought #}"
)
PARTS = [
    ("harmony", None, "<|channel|>analysis<|message|>It is a rose.<|end|>"),
    ("qwen3", None, "<think>\nIt is a rose.\n</think>\n\n"),
    (None, GEMMA4, "<|channel>thought\nIt is a rose.\n<channel|>"),
    (None, GEMMA4.replace("<|channel>thought", "[THINK]"), "[THINK]It is a rose.[/THINK]"),
    (None, CLOSED.replace("<think>\n\n</think>\n\n", ""), "<think>\nIt is a rose.\n</think>\n\n"),
]


@pytest.mark.parametrize(("name", "template", "written"), PARTS)
def test_reasoning_within_the_content_trains_as_the_field_does(name, template, written):
    tok = family(name) if name else tokenizer(template, MARKS, "<|endoftext|>", None, LLAMA3_WORDS)
    assert ids_of(tok, INLINE) == ids_of(tok, THOUGHT)
    both = Message("assistant", INLINE.content, reasoning=THOUGHT.reasoning)
    assert ids_of(tok, both) == ids_of(tok, THOUGHT), "and not twice"
    ((_, labels),) = ids_of(tok, INLINE)
    assert tok.decode([label for label in labels if label >= 0]).startswith(written)
    assert ids_of(tok, INLINE, "drop") == ids_of(tok, PLAIN, "drop")


# As Kimi K2 Thinking: an empty block before every answer of a conversation
EMPTY = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] }}"
    "{% if m['role'] == 'assistant' %}{{ '<think></think>' }}{% endif %}"
    "{{ m['content'] + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant' }}{% endif %}"
)


# As DeepSeek V3.1 while it thinks: the conversation has an empty block where the prompt opens one
SHUT = EMPTY.replace("<|im_start|>assistant'", "<|im_start|>assistant<think>'")


@pytest.mark.parametrize("answer", [THOUGHT, INLINE])
def test_reasoning_stands_in_the_block_that_the_prompt_opens(answer):
    assert trained(SHUT, answer) == "It is a rose.</think>A rose.<|im_end|>"


# As Solar Open: <|end|> ends every part of an answer, and the base does not stop there
PARTS = (
    "{% for m in messages %}{{ '<|begin|>' + m['role'] }}{% if m['reasoning'] %}"
    "{{ '<|think|>' + m['reasoning'] + '<|end|><|begin|>assistant' }}{% endif %}"
    "{{ '<|content|>' + m['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|begin|>assistant' }}{% endif %}"
)


def test_eos_ends_an_answer_if_every_part_has_an_end():
    tok = tokenizer(PARTS, ("<|end|>", "<|flush|>"), "<|endoftext|>", None, LLAMA3_WORDS)
    tok.base_stops = ("<|flush|>",)
    ((sample,),) = Renderer(tok).render([Row((QUESTION, THOUGHT), "rows.jsonl:1")])
    assert tok.decode([label for label in sample.labels if label >= 0]) == (
        "<|think|>It is a rose.<|end|><|begin|>assistant<|content|>A rose.<|end|><|endoftext|>"
    )


# As LFM 2.5: a field is written without line breaks, and an answer as it stands
TIGHT = (
    "{% for m in messages %}" + TURN + "{% if m['reasoning_content'] %}"
    "{{ '<think>' + m['reasoning_content'] + '</think>' }}{% endif %}"
    "{{ m['content'] + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def test_reasoning_within_an_answer_stays_where_the_template_writes_its_marks():
    tok = tokenizer(TIGHT, MARKS, "<|endoftext|>", None, LLAMA3_WORDS)
    assert trained(TIGHT, THOUGHT) == "<think>It is a rose.</think>A rose.<|im_end|>"
    both = Message("assistant", INLINE.content, reasoning=THOUGHT.reasoning)
    for answer in (INLINE, both):
        assert trained(TIGHT, answer) == f"{INLINE.content}<|im_end|>"
        ((sample,),) = Renderer(tok).render([Row((QUESTION, answer), "rows.jsonl:1")])
        assert "trained as it stands" in sample.notes[0]


def test_an_error_names_drop_only_where_the_row_trains_without_its_reasoning():
    """As Llama 3.1, which writes no words next to a call."""
    call = {"type": "function", "function": {"name": "look", "arguments": {}}}
    written = "(m['tool_calls'] | tojson if m['tool_calls'] else m['content'])"
    template = family("chatml").chat_template.replace("message['content']", written)
    template = template.replace("message.content", written).replace("m[", "message[")
    tok = tokenizer(template, MARKS, "<|endoftext|>", None, LLAMA3_WORDS)
    for content, reasoning in (("", "Look."), ("<think>\nLook.\n</think>\n\n", None)):
        answer = Message("assistant", content, reasoning, (call,))
        (refused,) = Renderer(tok).render([Row((QUESTION, answer), "r:1")])
        assert str(refused).endswith(
            "DATA_REASONING=drop trains the answers without their reasoning"
        )
        assert ids_of(tok, answer, "drop")
    beside = Message("assistant", "I look.", "Look.", (call,))
    (refused,) = Renderer(tok).render([Row((QUESTION, beside), "r:1")])
    assert "DATA_REASONING" not in str(refused)
