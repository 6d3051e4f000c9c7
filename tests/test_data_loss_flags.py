"""sft_play.data: answers that a flag of their message excludes from loss are context alone."""

from pathlib import Path
from typing import Any

import pytest
from families import family, tokenizer
from record_files import read_rows, read_tasks, write_rows
from renderings import CHATML, EVERY, assert_consistent, row, runs, samples_of, shown

from sft_play.config.schema import Config
from sft_play.data.chunk_tokenizer import ChunkTokenizer, TokenizedChunk
from sft_play.data.rows import Message, Row
from sft_play.errors import DataError


def turn(role: str, content: str, **flags: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **flags}


def chat(*flags: dict[str, Any]) -> dict[str, Any]:
    """One question and answer for each set of flags, which the answer has."""
    turns = []
    for number, of_answer in enumerate(flags):
        turns += [turn("user", f"q{number}"), turn("assistant", f"a{number}", **of_answer)]
    return {"messages": turns}


def tokenize(path: Path, tok: Any, **changes: Any) -> TokenizedChunk:
    """The samples of a file, as a process of `tokenize` makes them."""
    model = {"max_seq_len": changes.pop("max_seq_len", 512)}
    (task,) = read_tasks(path)
    config = Config.model_validate({"model": model, "data": changes})
    return ChunkTokenizer(config, tok)(task)


def excluding(number: int) -> Row:
    """Three questions and answers, of which one answer is excluded."""
    whole = row("What is red?", "A rose.", "And blue?", "The sea.", "And green?", "The grass.")
    messages = list(whole.messages)
    answer = messages[2 * number + 1]
    messages[2 * number + 1] = Message("assistant", answer.content, is_trained=False)
    return Row(tuple(messages), whole.origin)


@pytest.mark.parametrize(("name", "marked"), EVERY)
def test_the_other_answers_are_trained_exactly_as_without_the_flag(name, marked):
    tok = family(name, marked)
    whole = row("What is red?", "A rose.", "And blue?", "The sea.", "And green?", "The grass.")

    def answers(given: Row) -> list[tuple[list[int], list[int]]]:
        """What the model reads before each trained answer, and the answer."""
        found = []
        for sample in samples_of(given, tok):
            assert_consistent(sample)
            for first, behind in runs(sample):
                found.append((sample.ids[:first], sample.ids[first:behind]))
        return found

    every = answers(whole)
    for number in range(3):
        assert answers(excluding(number)) == [*every[:number], *every[number + 1 :]]


def test_the_ledger_counts_excluded_answers_and_rows_of_them_alone(tmp_path):
    off: dict[str, Any] = {"weight": 0}
    path = write_rows(tmp_path / "a.jsonl", chat(off, {}, off), chat({}), chat(off, off))
    done = tokenize(path, tokenizer(CHATML))
    assert done.tally.untrained == {"excluded": 4}
    assert done.tally.dropped == {"all_excluded": 1}
    assert (done.tally.rows_in, done.tally.rows_used, done.bad_rows) == (3, 2, [])
    last = tokenize(path, tokenizer(CHATML), train_on="last")
    assert last.tally.dropped == {"all_excluded": 2}


def test_pieces_of_a_split_row_without_a_trained_answer_are_dropped(tmp_path):
    path = write_rows(tmp_path / "a.jsonl", chat({"weight": 0}, {"weight": 0}, {}))
    whole = tokenize(path, tokenizer(CHATML)).samples
    split = tokenize(path, tokenizer(CHATML), max_seq_len=8, too_long="split")
    assert split.tally.trained_tokens + split.tally.lost_trained_tokens == whole.trained.sum()
    kept = len(split.samples.ids)
    assert whole.trained[-kept:].sum() == split.samples.trained.sum() + (
        split.tally.lost_trained_tokens
    )


def test_segments_are_trained_as_their_labels_say(tmp_path):
    tok = tokenizer(CHATML, bos="<bos>")
    segments = [("<bos>Ask: ", False), ("a rose", True), (" red.<eos>", True), ("\n", False)]
    record = {"segments": [{"label": label, "text": text} for text, label in segments]}
    (read,) = read_rows(write_rows(tmp_path / "a.jsonl", record))
    (sample,) = samples_of(read, tok)
    assert shown(sample, tok) == "<bos>Ask: ⟦a rose red.<eos>⟧\n"
    assert_consistent(sample)
    assert tok.decode(sample.ids[: sample.answer_start]) == "<bos>Ask: "
    with pytest.raises(DataError, match=r"segments\[0\] is .*; a segment is \{.label.: true or"):
        read_rows(write_rows(tmp_path / "b.jsonl", {"segments": [{"label": 2, "text": "x"}]}))


# Conversations that the assistant begins

REFUSING = tokenizer(  # as Gemma's and Mistral's own
    "{% if messages[messages[0]['role'] == 'system']['role'] != 'user' %}"
    "{{ raise_exception('Roles must alternate') }}{% endif %}" + CHATML
)


def test_a_greeting_is_context_or_left_out_and_counted(tmp_path):
    greeting = [turn("assistant", "Hello."), turn("user", "q"), turn("assistant", "a")]
    path = write_rows(
        tmp_path / "a.jsonl", {"messages": greeting}, {"messages": [turn("system", "s"), *greeting]}
    )
    kept = tokenize(path, family("chatml"))
    assert kept.tally.untrained == {"greeting": 2}
    text = family("chatml").decode(kept.samples.ids)
    assert text.count("Hello.") == 2
    assert kept.samples.trained.sum() == 4  # a and its stop token, twice
    left_out = tokenize(path, REFUSING)
    assert left_out.tally.untrained == {"greeting_left_out": 2}
    assert "Hello" not in REFUSING.decode(left_out.samples.ids)
    assert left_out.tally.rows_used == 2
