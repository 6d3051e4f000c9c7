"""Blanks around messages under templates that trim them: kept, or said with the rows."""

import pytest
from families import family
from renderings import samples_of, trained

from sft_play.data.rows import Message, Row

CODE = "    return x + 1"
TRIMS = ("llama3", "gemma", "llama2", "command_r")


def row(content: str, question: str = "Complete f.") -> Row:
    return Row((Message("user", question), Message("assistant", content)), "r:1")


@pytest.mark.parametrize("name", [*TRIMS, "chatml", "qwen3", "harmony", "mistral", "default"])
@pytest.mark.parametrize("content", [CODE, "\treturn x", f"\n{CODE}\n\n    # done"])
def test_the_indentation_of_an_answer_is_trained(name, content):
    tok = family(name)
    (sample,) = samples_of(row(content), tok)
    (text,) = trained(sample, tok)
    assert content.lstrip("\n") in text
    assert tok.decode(sample.ids).count(content.strip()) == 1
    (plain,) = samples_of(row(content.strip()), tok)
    assert sample.ids[: sample.answer_start] == plain.ids[: plain.answer_start]


@pytest.mark.parametrize("name", TRIMS)
@pytest.mark.parametrize(
    "given", [row("x\n"), row("\n\n\nx"), row("x", "Why?\n"), row(f"\n\n\n{CODE}")]
)
def test_other_blanks_are_trimmed_as_the_template_does_and_said(name, given):
    (sample,) = samples_of(given, family(name))
    (note,) = sample.notes
    assert "the chat template trims messages" in note
    contents = [message.content for message in given.messages]
    if CODE not in contents[1]:
        (bare,) = samples_of(row(contents[1].strip(), contents[0].strip()), family(name))
        assert (sample.ids, sample.labels) == (bare.ids, bare.labels) and not bare.notes


@pytest.mark.parametrize("name", ["chatml", "default", "harmony"])
def test_nothing_is_said_where_nothing_is_trimmed(name):
    (sample,) = samples_of(row("x\n", "Why?\n"), family(name))
    assert not sample.notes
