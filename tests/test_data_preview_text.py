"""sft_play.data.preview: sequences in a terminal, with and without colors."""

import pytest
from html_pages import Page
from previews import LEDGER, shown

from sft_play.data import preview
from sft_play.data.preview import in_marks, make_visible, print_sequences
from sft_play.data.preview_page import render_page


def test_text_without_colours_marks_what_is_trained(tokenizer):
    told = in_marks(shown(tokenizer, "Red\tor\nblue?", "Red 🙂", note="7 tokens were cut"))
    assert told.splitlines()[1:] == [
        "┄┄ 7 tokens were cut",
        "<|user|>Red⇥\tor↵",
        "blue?<|assistant|>⟦Red 🙂<|end|>⟧",
    ]
    assert told.splitlines()[0].startswith("── train  rows.jsonl:1  ")
    assert told.splitlines()[0].endswith(" trained  (longest)")


def test_nothing_in_a_row_commands_a_terminal(tokenizer):
    told = in_marks(
        shown(
            tokenizer,
            "\x1b[2J\x07 \u202eright to left \u200b\u00a0\r\x85",
            "\x9b31m",
            place="a\x1bb:1",
        )
    )
    assert [
        character
        for character in told
        if (ord(character) < 32 and character != "\n") or 127 <= ord(character) < 160
    ] == []
    assert "⟨U+001B⟩[2J⟨U+0007⟩ ⟨U+202E⟩right to left ⟨U+200B⟩⟨U+00A0⟩⟨U+000D⟩⟨U+0085⟩" in told


def test_joined_emoji_and_letters_stay_joined():
    for text in ("👩‍👩‍👧‍👦", "🏴󠁧󠁢󠁥󠁮󠁧󠁿", "می‌خواهم", "日本\u3000語", "é"):
        assert make_visible(text) == text


def test_a_long_sample_loses_its_middle_in_the_terminal_alone(tokenizer):
    sequence = shown(tokenizer, "word " * 900, "end")
    told = in_marks(sequence)
    tokens = sum(len(span.ids) for span in sequence.documents[0].spans)
    hidden = tokens - preview.MAX_TOKENS
    assert f"{hidden:,} tokens more, on the page" in told
    assert told.count("word") < Page(render_page({}, LEDGER, [sequence])).pre.count("word") == 900


def test_seams_of_a_packed_sequence_are_named(tokenizer):
    told = in_marks(shown(tokenizer, "One", "1", documents=2))
    assert [line.split("  ")[0] for line in told.splitlines() if line.startswith("┄┄")] == [
        "┄┄ document 1: rows.jsonl:1",
        "┄┄ document 2: rows.jsonl:1",
    ]
    assert told.count("⟦1<|end|>⟧") == 2
    assert in_marks(shown(tokenizer, "One", "1", documents=9)).endswith(
        "┄┄ 5 documents more, on the page\n"
    )


@pytest.mark.parametrize(
    ("no_color", "environ", "has_colour"),
    [(False, {}, True), (True, {}, False), (False, {"NO_COLOR": "1"}, False)],
)
def test_a_terminal_gets_colours_unless_they_are_unwanted(
    no_color, environ, has_colour, tokenizer, monkeypatch, capsys
):
    monkeypatch.delenv("NO_COLOR", raising=False)
    for name, value in {"FORCE_COLOR": "1", "TERM": "xterm-256color", **environ}.items():
        monkeypatch.setenv(name, value)
    print_sequences([shown(tokenizer, "Red [bold]or[/bold] :smile:", "x" * 300)], no_color)
    told = capsys.readouterr().out
    assert ("\x1b[1;32m" in told, "⟦" in told) == (has_colour, not has_colour)
    assert "Red [bold]or[/bold] :smile:" in told, "a row is no markup"
    assert "x" * 300 in told, "a line is the terminal's to wrap"
