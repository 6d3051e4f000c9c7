"""sft_play.data.render: what is trained of a row, to the token; the tokenizers are built here."""

import copy
import re

import pytest
from families import LLAMA3_WORDS, family, tokenizer
from renderings import CHATML, row, samples_of, trained
from tokenizers import processors
from transformers import PreTrainedTokenizerFast

from sft_play.data.render import (
    IGNORE_INDEX,
    RenderedSample,
    Renderer,
    RenderError,
    render_prompt,
    stop_ids,
)
from sft_play.data.rows import Message, Row
from sft_play.data.templates import DEFAULT_TEMPLATE, template_text
from sft_play.errors import DataError, ExitClass

PLAIN = (  # no token of its own, and no stop
    "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)


ONE_TURN = Row((Message("user", "q"), Message("assistant", "a")), "rows.jsonl:7")


def render(given: Row, tok: PreTrainedTokenizerFast) -> RenderedSample:
    """The one sample of a row, or its error raised."""
    (samples,) = Renderer(tok).render([given])
    if isinstance(samples, RenderError):
        raise samples
    (sample,) = samples
    return sample


# Answers and their stop tokens


ASKS = "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
BARS = "{% for m in messages %}{{ '|' + m['content'] }}{% endfor %}" + ASKS.replace(
    "assistant:", "|"
)
MARKED = (
    "{% for m in messages %}{{ m['role'] + ':' }}"
    "{% if m['role'] == 'user' %}{{ m['content'] + '\n' }}"
    "{% else %}{% generation %}{{ m['content'] }}{% endgeneration %}{% endif %}{% endfor %}"
) + ASKS
ENDS_BETWEEN = (
    "{% for m in messages %}{{ m['role'] + ':' + m['content'] }}"
    "{{ '|' if m['role'] == 'user' else '' if loop.last else eos_token }}{% endfor %}"
) + ASKS
LINES = PLAIN.replace("'assistant:'", "'assistant:\n\n'").replace("': ' +", "':\n\n' +")
SPACE = PLAIN.replace("'assistant:'", "'assistant: '")
TRAINED = {  # template, options of the tokenizer, messages, and what each sample trains
    "answers without a stop end with eos, each in a sample of its own": (
        PLAIN, {}, ["What is red?", "A rose.", "And blue?", "The sea."],
        [[" A rose.\n<eos>"], [" The sea.\n<eos>"]]),
    "eos is trained where the template marks answers, too": (
        MARKED, {}, ["a", "b", "c", "d"], [["b<eos>"], ["d<eos>"]]),
    "turns between that end with eos are one sample": (
        ENDS_BETWEEN, {}, ["a", "b", "c", "d"], [["b<eos>", "d<eos>"]]),
    "blanks at the end of an answer, where offsets leave blanks out": (
        BARS, {"trim_offsets": True}, ["a", "b  c   "], [["b  c   <eos>"]]),
    "a tokenizer joins the blanks at the end of a prompt": (
        LINES, {"words": LLAMA3_WORDS}, ["a", "b"], [["b\n<eos>"]]),
    "a tokenizer drops the end of a prompt": (
        SPACE, {"drops_blanks": True}, ["a", "b c", "d", "e"], [["bc\n<eos>"], ["e\n<eos>"]]),
}  # fmt: skip


@pytest.mark.parametrize("case", TRAINED.values(), ids=TRAINED)
def test_answers_are_trained_with_their_end(case):
    template, options, contents, expected = case
    tok = tokenizer(template, **options)
    samples = samples_of(row(*contents), tok)
    assert [trained(sample, tok) for sample in samples] == expected
    if template == PLAIN:
        text = "user: What is red?\nassistant: A rose.\n"
        last = "user: And blue?\nassistant: The sea.\n<eos>"
        assert [tok.decode(sample.ids) for sample in samples] == [f"{text}<eos>", text + last]


def test_a_stop_token_inside_an_answer_is_refused_and_inside_a_question_is_not():
    tok = tokenizer(CHATML)
    for stop in ("<|im_end|>", "<eos>"):
        (error,) = Renderer(tok, tokens_in_text="allow").render([row("q", f"before {stop} after")])
        assert isinstance(error, RenderError)
        assert re.search(
            r"rows.jsonl:7: messages\[1\] contains .* which ends an answer", str(error)
        )
    assert trained(render(row("What is <|im_end|>?", "a mark"), tok), tok) == ["a mark<|im_end|>"]


def test_stops_are_eos_and_the_ends_of_turns_that_the_tokenizer_has():
    for name, stops in (
        ("chatml", {"<|im_end|>"}),
        ("llama3", {"<|eot_id|>"}),
        ("gemma", {"<end_of_turn>"}),
        ("phi3", {"<|end|>"}),
        ("vicuna", set()),
        ("harmony", {"<|return|>", "<|call|>"}),  # and not what ends a part of an answer
    ):
        tok = family(name)
        assert set(tok.convert_ids_to_tokens(sorted(stop_ids(tok)))) == {tok.eos_token, *stops}


# Templates


def test_a_model_without_a_template_is_rendered_in_plain_words():
    tok = tokenizer(None)
    rendered = render(row("What is red?", "A rose.", "And blue?", "The sea."), tok)
    assert (
        tok.decode(rendered.ids) == "### User:\nWhat is red?\n\n### Assistant:\nA rose.<eos>\n\n"
        "### User:\nAnd blue?\n\n### Assistant:\nThe sea.<eos>\n\n"
    )
    assert trained(rendered, tok) == ["A rose.<eos>", "The sea.<eos>"]
    assert (template_text(tok), template_text(tokenizer(CHATML))) == (DEFAULT_TEMPLATE, CHATML)


def test_a_base_model_with_a_beginning_of_text_sees_it_once():
    tok = tokenizer(None, bos="<bos>")
    assert (
        tok.decode(render(row("a", "b"), tok).ids)
        == "<bos>### User:\na\n\n### Assistant:\nb<eos>\n\n"
    )
    assert (
        tok.decode(render_prompt([Message("user", "a")], tok))
        == "<bos>### User:\na\n\n### Assistant:\n"
    )


def beginning(chat_template: str | None) -> PreTrainedTokenizerFast:
    """A tokenizer that writes bos before every text of its own accord."""
    tok = copy.deepcopy(tokenizer(chat_template, bos="<bos>"))
    tok.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", tok.bos_token_id)]
    )
    assert tok("a")["input_ids"][0] == tok.bos_token_id
    return tok


def test_the_template_alone_writes_the_beginning_of_a_conversation():
    tok = beginning("{{ bos_token }}" + CHATML)
    rendered = render(ONE_TURN, tok)
    assert rendered == render(ONE_TURN, tokenizer("{{ bos_token }}" + CHATML, bos="<bos>"))
    assert (
        rendered.ids.count(tok.bos_token_id)
        == render_prompt(ONE_TURN.messages[:-1], tok).count(tok.bos_token_id)
        == 1
    )


def test_a_row_that_cannot_be_rendered_is_an_error_of_the_data_and_harms_no_other():
    tok = family("gemma")
    good, bad = row("q", "a"), row("q", "a", system="s")
    first, error, last = Renderer(tok).render([good, bad, good])
    assert first == last == samples_of(good, tok)
    assert isinstance(error, DataError)
    assert error.exit_class == ExitClass.DATA
    assert (
        str(error)
        == "rows.jsonl:7: the chat template refuses the conversation: System role not supported"
    )


def test_a_row_without_an_answer_is_refused():
    with pytest.raises(RenderError, match=r"rows.jsonl:7: no message is the assistant's"):
        render(row("q"), tokenizer(CHATML))


# Tokens


@pytest.mark.parametrize("trim_offsets", [False, True])
def test_a_token_over_the_seam_is_refused_by_name(trim_offsets):
    words = r"rows.jsonl:7: the token ' .+' straddles the end of the prompt of messages\[1\]"
    with pytest.raises(RenderError, match=words):
        render(row("What is red?", "A rose."), tokenizer(SPACE, trim_offsets=trim_offsets))


def test_a_tokenizer_that_lacks_a_character_of_an_answer_is_refused():
    tok = copy.deepcopy(tokenizer(CHATML))
    tok.backend_tokenizer.normalizer = None
    tok.backend_tokenizer.decoder = None  # which reads bytes back as other characters
    with pytest.raises(RenderError, match=r"the tokens of messages\[1\] read .* not the answer"):
        render(row("q", "naïve"), tok)


def test_a_tokenizer_that_spells_its_stop_token_out_is_refused():
    tok = copy.deepcopy(tokenizer(CHATML))
    tok.backend_tokenizer.encode_special_tokens = True
    with pytest.raises(
        RenderError,
        match=r"rows.jsonl:7: the tokenizer does not read '<\|im_end\|>' "
        r"after messages\[1\] as its stop token",
    ):
        render(ONE_TURN, tok)


def test_truncation_that_is_left_set_on_a_tokenizer_cuts_nothing():
    tok = copy.deepcopy(tokenizer(CHATML))
    tok.backend_tokenizer.enable_truncation(4)
    tok.backend_tokenizer.enable_padding(length=400)
    assert render(ONE_TURN, tok) == render(ONE_TURN, tokenizer(CHATML))


# Plain text


def test_a_plain_text_is_trained_but_for_its_first_token_and_ends_with_eos():
    tok = tokenizer(CHATML, bos="<bos>")
    (sample,) = samples_of(Row((), "r:1", text="A rose is red."), tok)
    assert tok.decode(sample.ids) == "A rose is red.<eos>"
    assert sample == RenderedSample(sample.ids, [IGNORE_INDEX, *sample.ids[1:]], 0)
    assert samples_of(Row((), "r:1", text="A rose is red.<eos>"), tok) == (sample,)


def test_a_plain_text_begins_as_the_tokenizer_begins_texts():
    tok = beginning(CHATML)
    (sample,) = samples_of(Row((), "r:1", text="A rose."), tok)
    assert tok.decode(sample.ids) == "<bos>A rose.<eos>"
    assert sample.labels == [IGNORE_INDEX, *sample.ids[1:]]
    assert samples_of(Row((), "r:1", text="<bos>A rose."), tok) == (sample,)
    (error,) = Renderer(tok).render([Row((), "r:1", text="<bos><bos>A rose.")])
    assert str(error).startswith("r:1: the text begins with the beginning-of-text token twice")


@pytest.mark.parametrize("end", ["<eos>", "<|im_end|>", "<|im_end|>\n", "<eos> \n\n"])
def test_a_plain_text_that_has_an_end_gets_no_second_one(end):
    tok = tokenizer(CHATML)
    (sample,) = samples_of(Row((), "r:1", text=f"A rose.{end}"), tok)
    assert tok.decode(sample.ids) == f"A rose.{end}"
    (sample,) = samples_of(Row((), "r:1", text=f"A {end} rose.\n"), tok)
    assert tok.decode(sample.ids) == f"A {end} rose.\n<eos>"
