"""Rows that a run holds out by itself: by what is asked, by the row, or by a column's value."""

import json
from pathlib import Path
from typing import Any

import pytest
from record_files import run_data, write_rows

from sft_play.data.cache import read_bad_rows
from sft_play.data.chunk_tokenizer import hash_row
from sft_play.data.ledger import EqualRows, ledger_lines
from sft_play.data.rows import Message, Row
from sft_play.errors import DataError

Records = list[dict[str, Any]]


def write(path: Path, records: Records) -> str:
    if path.suffix == ".csv":
        lines = [",".join(f'"{value}"' for value in record.values()) for record in records]
        path.write_text("\n".join([",".join(records[0]), *lines]))
    else:
        write_rows(path, *records)
    return str(path)


@pytest.fixture
def built(tmp_path, tokenizer):
    """A function that returns the data of a run over some records, in a file of that name."""

    def build(
        records: Records,
        file: str = "rows.jsonl",
        val: Records | None = None,
        max_seq_len: int = 512,
        **data: Any,
    ):
        if val is not None:
            data["val_path"] = write(tmp_path / f"val_{file}", val)
        return run_data(Path(write(tmp_path / file, records)), tokenizer, max_seq_len, **data)

    return build


def asked(split, tokenizer) -> set[str]:
    return {tokenizer.decode(sample.prompt) for sample in split}


def answers(questions: int, count: int) -> Records:
    return [
        {"question": f"What is {n}?", "answer": f"It is {n}, {k}.", "topic": f"t{n % 4}", "id": n}
        for n in range(questions)
        for k in range(count)
    ]


AS_MESSAGES = {
    "prompt": lambda row: {"prompt": row["question"], "completion": row["answer"]},
    "messages": lambda row: {
        "messages": [
            {"role": "system", "content": f"Be {row['answer']}"},
            {"role": "user", "content": row["question"]},
            {"role": "assistant", "content": row["answer"]},
        ]
    },
    "sharegpt": lambda row: {
        "conversations": [
            {"from": "human", "value": row["question"]},
            {"from": "gpt", "value": row["answer"]},
        ]
    },
    "question": lambda row: row,
}


@pytest.mark.parametrize("file", ["rows.jsonl", "rows.parquet"])
@pytest.mark.parametrize("shape", AS_MESSAGES)
def test_no_question_is_trained_and_evaluated(shape, file, built, tokenizer):
    data = built([AS_MESSAGES[shape](row) for row in answers(20, 8)], file)
    assert len(data.validation) == 8 and len(data.train) == 152
    ledger = data.ledger.splits["train"]
    assert ledger.overlap == {"validation": EqualRows(0, 0, 0)}
    assert ledger.duplicates.questions == 19 * 7
    if shape != "messages":  # the system messages differ
        assert not asked(data.train, tokenizer) & asked(data.validation, tokenizer)


def test_a_question_in_other_case_and_spacing_is_the_same():
    def hashes(question: str, answer: str = "yes", **more):
        return hash_row(
            Row((Message("user", question), Message("assistant", answer, **more)), "a:1")
        )

    one = hashes("Is it  caf\u00e9 \uff11?")
    for same in ("is it CAFE\u0301 1", "Is\u00a0it\ncafé 1"):
        assert hashes(same, "no").question == one.question
        assert hashes(same, "no").normalized != one.normalized == hashes(same).normalized
    assert hashes("Is it tea 1?").question != one.question


def talk(*contents: str, trained: tuple[bool, ...] = ()) -> Row:
    messages = []
    for number, content in enumerate(contents):
        is_trained = trained[number // 2] if trained and number % 2 else True
        role = ("user", "assistant")[number % 2]
        messages.append(Message(role, content, is_trained=is_trained))
    return Row(tuple(messages), "a:1")


def test_the_question_is_what_stands_before_the_last_trained_answer():
    long = hash_row(talk("a", "b", "c", "d"))
    assert long.question == hash_row(talk("a", "b", "c", "e")).question
    assert long.question != hash_row(talk("a", "x", "c", "d")).question
    assert hash_row(talk("a", "b", "c", "d", trained=(True, False))).question == (
        hash_row(talk("a", "e")).question
    )


def test_a_text_and_an_answer_to_nothing_ask_what_they_say():
    one, other = (hash_row(Row((), "a:1", text=text)) for text in ("one", "other"))
    assert one.question == one.normalized != other.question == other.normalized
    alone = [hash_row(Row((Message("assistant", text),), "a:1")) for text in ("one", "other")]
    assert alone[0].question != alone[1].question
    signs = [hash_row(talk(question, "yes")).question for question in ("?!", "!?")]
    assert signs[0] != signs[1]


@pytest.mark.parametrize(("split_by", "held", "topics"), [("id", 8, 4), ("topic", 40, 3)])
@pytest.mark.parametrize("file", ["rows.jsonl", "rows.parquet", "rows.csv"])
def test_rows_of_one_value_in_a_column_are_on_one_side(
    split_by, held, topics, file, built, tokenizer
):
    data = built(answers(20, 8), file, split_by=split_by)
    assert len(data.validation) == held
    asked_for = asked(data.train, tokenizer)
    numbers = {int(text.split("What is ")[1].split("?")[0]) % 4 for text in asked_for}
    assert len(numbers) == topics
    assert split_by not in " ".join(data.ledger.splits["train"].notes)


def test_a_column_may_be_a_path(built):
    records = [{**row, "meta": {"of": row.pop("topic")}} for row in answers(20, 2)]
    data = built(records, split_by="meta.of")
    assert len(data.validation) == 10


def test_by_row_answers_of_a_question_part_and_the_ledger_counts_it(built):
    data = built(answers(20, 8), split_by="row", val_size=0.1)
    assert len(data.validation) == 16
    ledger = data.ledger.splits["train"]
    assert ledger.overlap["validation"].normalized == 0
    count = ledger.overlap["validation"].questions
    assert 0 < count < 144
    assert any(
        f"{count} training rows ask what validation rows ask" in note for note in ledger.notes
    )
    shown = [line.split() for line in ledger_lines(data.ledger)]
    assert ["also", "validation", "rows,", "by", "question", str(count)] in shown


def test_files_that_the_user_names_are_compared_by_question_and_drop_questions_works(built):
    train = [*answers(30, 2), {"question": "Alone?", "answer": "Yes."}]
    val = [{"question": "what is 3", "answer": "Three."}, {"question": "Alone?", "answer": "Yes."}]
    data = built(train, val=val[:1])
    assert len(data.train) == 61
    ledger = data.ledger.splits["train"]
    assert ledger.overlap == {"validation": EqualRows(0, 0, 2)}
    (note,) = [note for note in ledger.notes if "ask" in note]
    assert note.endswith("DATA_ON_OVERLAP=drop_questions")
    data = built(train, val=val, on_overlap="drop_questions")
    assert len(data.train) == 58
    ledger = data.ledger.splits["train"]
    assert ledger.tally.dropped["question_evaluated_on"] == 3
    assert not [note for note in ledger.notes if "ask what" in note]
    assert len(built(train, val=val, on_overlap="drop").train) == 60


def test_rows_without_a_value_are_bad_rows_with_a_remedy_that_works(built):
    records = answers(20, 2)
    records[3]["topic"] = None
    with pytest.raises(DataError, match=r"rows.jsonl:4: no value in data.split_by=topic"):
        built(records, split_by="topic")
    for file in ("rows.jsonl", "rows.parquet"):
        with pytest.raises(DataError, match="or to one of question, answer, topic, id\n"):
            built(records, file, split_by="topics")
    data = built(records, split_by="topic", on_bad_row="quarantine")
    assert data.ledger.splits["train"].tally.dropped["bad_row"] == 1
    (aside,) = read_bad_rows(data.sources)["train"]
    assert json.loads(aside.raw) == records[3]  # as it is in the file
    assert len(built(records, split_by="prompt").validation) == 2


def test_one_question_alone_cannot_be_split_but_by_row(built):
    with pytest.raises(DataError, match=r"data.split_by=prompt .* or DATA_SPLIT_BY=row"):
        built(answers(1, 20))
    assert len(built(answers(1, 20), split_by="row").validation) == 1
    with pytest.raises(DataError, match=r"set DATA_VAL_PATH$"):
        built(answers(1, 1))


def test_the_same_rows_in_other_files_and_orders_are_held_out(built, tmp_path):
    records = answers(40, 2)
    one = built(records, "one.jsonl")
    held = {one.validation[i].ids.tobytes() for i in range(len(one.validation))}
    first, second = records[:30], records[30:]
    paths = [write(tmp_path / "b.jsonl", second), write(tmp_path / "a.jsonl", first)]
    other = built([], "empty.jsonl", train_path=paths)
    assert {other.validation[i].ids.tobytes() for i in range(len(other.validation))} == held


def test_the_prompt_and_the_row_share_a_cache_entry_and_a_column_has_its_own(built):
    by = {
        split_by: built(answers(20, 2), split_by=split_by) for split_by in ("prompt", "row", "id")
    }
    folders = {split_by: data.sources["train"][0].folder for split_by, data in by.items()}
    assert folders["prompt"] == folders["row"] != folders["id"]
