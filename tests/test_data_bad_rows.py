"""sft_play.data: one message for one cause, and what was read before an error."""

import pytest
from families import tokenizer
from record_files import write_rows
from renderings import CHATML

from sft_play.config.schema import Config
from sft_play.data.files import refuse_bad_rows
from sft_play.data.ledger import DataAccount
from sft_play.data.rows import BadRow
from sft_play.data.sources import find_sources
from sft_play.data.tokenize import tokenize_sources
from sft_play.errors import DataError


def error_of(rows: list[BadRow], rows_read: int) -> list[str]:
    with pytest.raises(DataError) as error:
        refuse_bad_rows(rows, rows_read)
    return str(error.value).splitlines()


def test_one_cause_of_nearly_all_rows_is_one_message():
    rows = [BadRow(f"a.jsonl:{n}", f"answer is {n}, not a text", "") for n in range(1, 99)]
    rows.insert(0, BadRow("a.jsonl:100", "question is empty", ""))
    assert error_of(rows, 100) == [
        "a.jsonl:1: answer is 1, not a text",
        "so it is with 98 of 100 rows, the first of them named",
    ]
    lines = error_of(rows, 1000)
    assert lines[-2] == "... and 94 more bad rows"
    assert "quarantine" in lines[-1]


def test_a_template_that_refuses_every_row_is_named_with_what_to_type():
    reason = "the chat template refuses the conversation: System role not supported"
    lines = error_of([BadRow(f"a.jsonl:{n}", reason, "") for n in range(50)], 50)
    assert lines[0] == f"a.jsonl:0: {reason}"
    assert "MODEL_CHAT_TEMPLATE=default" in lines[2]
    assert len(lines) == 3


def test_the_account_says_what_was_read_before_an_error(tmp_path):
    good = [{"question": f"q{n}", "answer": "a"} for n in range(3000)]
    config = Config.model_validate({
        "model": {"max_seq_len": 64},
        "data": {
            "train_path": str(write_rows(tmp_path / "train.jsonl", *good)),
            "val_path": str(write_rows(
                tmp_path / "val.jsonl", *good[:2500], {"question": "q", "answer": 1}
            )),
            "cache_dir": str(tmp_path / "cache"),
        },
    })  # fmt: skip
    account = DataAccount()
    sources = find_sources(config)
    with pytest.raises(DataError, match=r"val.jsonl:2501: answer is 1, not a text"):
        tokenize_sources(config, sources, tokenizer(CHATML), account)
    assert account.lines() == [
        "read before the error:",
        f"  train {tmp_path}/train.jsonl (1 file): 3,000 rows read",
        f"  validation {tmp_path}/val.jsonl (1 file): 2,501 rows read, bad_row 1",
    ]
    facts = account.as_json()
    assert facts["complete"] is False
    assert facts["sources"][1]["tally"]["dropped"] == {"bad_row": 1}
