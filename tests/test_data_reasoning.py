"""Reasoning under templates that open a think block in the prompt, close it, or leave it out."""

import copy
import json

import pytest
from families import LLAMA3_WORDS, family, tokenizer
from tokenizers import Tokenizer

from sft_play.data.files import refuse_bad_rows
from sft_play.data.render import IGNORE_INDEX, Renderer, RenderError, render_prompt
from sft_play.data.rows import BadRow, Message, Row
from sft_play.errors import DataError

MARKS = ("<|im_start|>", "<|im_end|>")
TURN = "{{ '<|im_start|>' + m['role'] + '\n' }}"
# As DeepSeek R1's distills: a block is opened, and what is before its end is left out of answers
R1 = (
    "{% for m in messages %}{% set c = m['content'].split('</think>')[-1] %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + c + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
)
# As Nemotron 3: an answer without reasoning has an empty block without line breaks
NEMOTRON = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['role'] == 'assistant' %}"
    "{% if m['reasoning_content'] %}{{ '<think>\n' + m['reasoning_content'] + '\n</think>\n' }}"
    "{% else %}{{ '<think></think>' }}{% endif %}{% endif %}"
    "{{ m['content'] + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '<think></think>' }}"
    "{% else %}{{ '<think>\n' }}{% endif %}{% endif %}"
)
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


@pytest.mark.parametrize("answer", [THOUGHT, INLINE])
def test_reasoning_trains_behind_the_think_block_that_the_prompt_opens(answer):
    assert trained(R1, answer) == "It is a rose.\n</think>\n\nA rose.<|im_end|>"
    assert trained(NEMOTRON, THOUGHT) == "It is a rose.\n</think>\nA rose.<|im_end|>"


@pytest.mark.parametrize("template", [R1, NEMOTRON])
def test_an_answer_without_reasoning_names_the_setting_that_trains_it(template):
    with pytest.raises(RenderError, match=r"opens a think block .* DATA_REASONING=empty trains"):
        trained(template, PLAIN)


@pytest.mark.parametrize(
    ("template", "end"),
    [(R1, "\n</think>\n\n"), (NEMOTRON, "\n</think>\n")],
    ids=["r1", "nemotron"],
)
@pytest.mark.parametrize("reasoning", ["empty", "drop"])
def test_an_empty_block_ends_as_the_template_ends_one(template, end, reasoning):
    assert trained(template, PLAIN, reasoning) == f"{end}A rose.<|im_end|>"


def test_empty_keeps_the_reasoning_that_there_is_and_drop_does_not():
    assert trained(R1, THOUGHT, "empty") == "It is a rose.\n</think>\n\nA rose.<|im_end|>"
    for answer in (THOUGHT, INLINE):
        assert trained(R1, answer, "drop") == "\n</think>\n\nA rose.<|im_end|>"


def test_reasoning_behind_a_block_that_the_prompt_closed_names_both_remedies():
    assert trained(CLOSED, PLAIN) == "A rose.<|im_end|>"
    with pytest.raises(RenderError, match=r"the row has reasoning; DATA_REASONING=drop leaves"):
        trained(CLOSED, THOUGHT)
    assert trained(CLOSED, THOUGHT, "drop") == "A rose.<|im_end|>"
    for name in ("enable_thinking", "thinking"):
        on, off = CLOSED.replace("\\n</think>\\n\\n' }}{% endif %}", "' }}{% endif %}"), CLOSED
        switched = "{% if " + name + " %}" + on + "{% else %}" + off + "{% endif %}"
        with pytest.raises(
            RenderError, match=rf"\{{{name}: true}}' trains it, DATA_REASONING=drop"
        ):
            trained(switched, THOUGHT)


def test_a_field_of_a_message_is_no_variable_that_lets_the_model_think():
    template = "{% if messages[0].thinking or messages[0]['thinking'] %}{% endif %}" + CLOSED
    with pytest.raises(RenderError) as refused:
        trained(template, THOUGHT)
    assert "MODEL_TEMPLATE_KWARGS" not in str(refused.value)


# As GLM 4.7: a block is opened in the prompt, and an answer without reasoning has its end alone
ENDED = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] }}{% if m['role'] == 'assistant' %}"
    "{% if m['reasoning_content'] %}{{ '<think>' + m['reasoning_content'] }}{% endif %}"
    "{{ '</think>' }}{% endif %}{{ m['content'] + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant<think>' }}{% endif %}"
)


def test_an_answer_that_has_the_end_of_a_block_alone_trains_an_empty_one():
    """Opened and closed marks begin alike: the text is not cut at their first difference."""
    assert trained(ENDED, PLAIN, "empty") == "</think>A rose.<|im_end|>"
    assert trained(ENDED, THOUGHT) == "It is a rose.</think>A rose.<|im_end|>"


@pytest.mark.parametrize(
    ("opened", "closed"),
    [
        ("<think>", "</think>"),
        ("<|channel>thought", "<channel|>"),
        ("<|START_THINKING|>", "<|END_THINKING|>"),
    ],
)
def test_an_empty_block_that_only_the_prompt_has_is_read_before_the_answer(opened, closed):
    """As Gemma 4 31B and DeepSeek V3.2 without thinking: the prompt of use decides."""
    template = "{% for m in messages %}" + TURN + "{{ m['content'] }}"
    template += "{{ '<|im_end|>' }}{% endfor %}{% if add_generation_prompt %}"
    template += "{{ '<|im_start|>assistant\n" + opened + "\n" + closed + "' }}{% endif %}"
    assert trained(template, PLAIN) == "A rose.<|im_end|>"
    with pytest.raises(RenderError, match=r"closes the think block .* DATA_REASONING=drop"):
        trained(template, THOUGHT)
    assert trained(template, THOUGHT, "drop") == "A rose.<|im_end|>"


def test_marks_of_command_a_open_a_block_too():
    template = (
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] }}"
        "{% if m['reasoning_content'] %}"
        "{{ '<|START_THINKING|>' + m['reasoning_content'] + '<|END_THINKING|>' }}{% endif %}"
        "{{ '<|START_TEXT|>' + m['content'] + '<|im_end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant<|START_THINKING|>' }}{% endif %}"
    )
    end = "<|END_THINKING|><|START_TEXT|>A rose.<|im_end|>"
    assert trained(template, PLAIN, "empty") == end
    assert trained(template, THOUGHT) == f"It is a rose.{end}"


def test_a_template_without_reasoning_names_the_setting_that_leaves_it_out():
    tok = family("chatml")
    row = Row((QUESTION, THOUGHT), "rows.jsonl:1")
    (kept,) = Renderer(tok).render([row])
    assert "DATA_REASONING=drop trains the answers without it" in str(kept)
    (dropped,) = Renderer(tok, "all", "drop").render([row])
    (plain,) = Renderer(tok).render([Row((QUESTION, PLAIN), "rows.jsonl:1")])
    assert dropped == plain


def test_every_answer_of_a_conversation_has_its_own_block():
    tok = tokenizer(R1, MARKS, "<|endoftext|>", None, LLAMA3_WORDS)
    messages = (QUESTION, THOUGHT, Message("user", "What is blue?"), PLAIN)
    (samples,) = Renderer(tok, "all", "empty").render([Row(messages, "rows.jsonl:1")])
    assert [tok.decode([id_ for id_ in sample.labels if id_ >= 0]) for sample in samples] == [
        "It is a rose.\n</think>\n\nA rose.<|im_end|>",
        "\n</think>\n\nA rose.<|im_end|>",
    ]
    assert "It is a rose." not in tok.decode(samples[1].ids), "as the model reads it at use"


def test_a_cause_of_the_template_that_most_rows_have_is_one_message_with_what_to_type():
    try:
        trained(R1, PLAIN)
    except RenderError as error:
        reason = str(error).partition(": ")[2]
    bad = [BadRow(f"rows.jsonl:{number}", reason, "") for number in range(600)]
    with pytest.raises(DataError) as refused:
        refuse_bad_rows(bad, 1000)
    first, second = str(refused.value).splitlines()
    assert "DATA_REASONING=empty" in first and second.startswith("so it is with 600 of 1,000 rows")


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
    (samples,) = Renderer(joining).render([Row((QUESTION, first, again, second), "rows.jsonl:1")])
    shown = [joining.decode([id_ for id_ in sample.labels if id_ >= 0]) for sample in samples]
    assert shown == ["\nA rose.<|im_end|>", "The sea.<|im_end|>"]
    prompt = render_prompt([QUESTION, first, again], joining)
    assert samples[1].ids[: len(prompt)] == prompt, "as use reads the history, in joined tokens"
    (samples,) = Renderer(joining).render([Row((QUESTION, second, again, first), "rows.jsonl:1")])
    shown = [joining.decode([id_ for id_ in sample.labels if id_ >= 0]) for sample in samples]
    assert sorted(shown) == ["\nA rose.<|im_end|>", "The sea.<|im_end|>"]
