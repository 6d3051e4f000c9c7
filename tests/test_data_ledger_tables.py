"""The ledger as a person reads it: its numbers, read back from the text."""

from dataclasses import replace
from pathlib import Path

import pytest
from record_files import run_data, write_rows

from sft_play.data.ledger import MAX_COLUMNS, Ledger, PaddedTokens, ledger_lines


def written(path: Path, counts: range) -> Path:
    counted = {n: " ".join(map(str, range(1, n + 1))) for n in counts}
    rows = [{"question": f"Count to {n}.", "answer": text} for n, text in counted.items()]
    return write_rows(path, *rows)


def columns(lines: list[str]) -> dict[str, dict[str, float]]:
    """Return the first table of the text as {split: {label: number}}, labels shortened."""
    table = lines[: lines.index("")] if "" in lines else lines
    splits = table[0].split()
    read: dict[str, dict[str, float]] = {split: {} for split in splits}
    for line in table[1:]:
        label, *cells = [cell.strip() for cell in line.strip().split("  ") if cell.strip()]
        for split, cell in zip(splits, cells, strict=False):
            read[split][label.split(":")[0]] = float(cell.rstrip("%").replace(",", ""))
    return read


@pytest.fixture(scope="module")
def mixed_ledger(tokenizer, tmp_path_factory) -> Ledger:
    """Two weighted sources, one with long rows; held-out rows, a repeated and an empty row."""
    folder = tmp_path_factory.mktemp("check")
    short = written(folder / "short.jsonl", range(1, 40))
    long = written(folder / "long.jsonl", range(30, 70))
    with short.open("a") as file:
        file.write('{"question": "Count to 3!", "answer": "1 2 3"}\n{"question": "Hm?"}\n')
    sources = [{"path": str(short), "weight": 3}, {"path": str(long), "weight": 1}]
    policies = {"on_bad_row": "quarantine", "on_overlap": "drop", "max_lost": 0.9}
    return run_data(short, tokenizer, 64, train_path=sources, val_size=0.1, **policies).ledger


def test_the_rows_that_are_printed_add_up(mixed_ledger):
    for split, facts in columns(ledger_lines(mixed_ledger)).items():
        assert facts["rows in"] == facts["= used"] + sum(
            count for label, count in facts.items() if label.startswith("+ ")
        ), split
    train = columns(ledger_lines(mixed_ledger))["train"]
    assert train["+ bad_row"] == 1
    assert train["+ too_long"] > 0
    assert train["+ held_out"] > 0
    assert train["rows in"] == 81


def test_the_numbers_that_are_printed_are_those_of_the_ledger(mixed_ledger):
    for split, printed in columns(ledger_lines(mixed_ledger)).items():
        facts = mixed_ledger.as_json()["splits"][split]
        assert printed["rows in"] == facts["rows_in"]
        assert printed["tokens"] == facts["tokens"]
        assert printed["trained tokens"] == facts["trained_tokens"]
        assert printed["share of tokens that is trained"] == pytest.approx(
            100 * facts["trained_tokens"] / facts["tokens"], abs=0.005
        )
        assert printed["longest, of model.max_seq_len=64"] == facts["lengths"]["max"] <= 64
        assert printed["repeated rows, in the same words"] == facts["duplicates"]["normalized"]


def test_several_sources_have_a_line_each_with_their_share_of_an_epoch(mixed_ledger):
    lines = ledger_lines(mixed_ledger)
    start = next(number for number, line in enumerate(lines) if line.startswith("sources of train"))
    cells = [line.split() for line in lines[start + 1 : start + 3]]
    assert [Path(line[0]).name for line in cells] == ["short.jsonl", "long.jsonl"]
    assert [float(line[-1].rstrip("%")) for line in cells] == pytest.approx([75, 25], abs=1)


def test_a_plain_set_takes_at_most_25_lines_and_no_line_wraps(
    tokenizer, rows, tmp_path, mixed_ledger
):
    paths = {"val_path": str(rows["val"]), "test_path": str(rows["val"])}
    settings = {**paths, "cache_dir": str(tmp_path), "on_overlap": "allow"}
    plain = ledger_lines(run_data(rows["train"], tokenizer, 2048, **settings).ledger)
    assert len(plain) <= 25
    assert "" not in plain, "one source a split: no table of sources"
    assert max(map(len, plain + ledger_lines(mixed_ledger))) <= MAX_COLUMNS


def printed_of(tokenizer, train: Path, max_seq_len: int, **data: object) -> dict:
    val = written(train.with_name("val.jsonl"), range(1, 4))
    settings = {"val_path": str(val), "on_overlap": "drop", "max_lost": 0.9, **data}
    return columns(ledger_lines(run_data(train, tokenizer, max_seq_len, **settings).ledger))


def test_training_rows_that_are_evaluated_on_are_counted(tokenizer, tmp_path):
    printed = printed_of(tokenizer, written(tmp_path / "train.jsonl", range(2, 9)), 2048)
    assert printed["train"]["also validation rows, to the letter"] == 2
    assert printed["train"]["+ evaluated_on"] == 2
    assert "also validation rows, to the letter" not in printed["validation"]


@pytest.mark.parametrize(("policy", "label"), [("split", "split"), ("truncate_left", "truncated")])
def test_shortened_rows_are_among_those_that_are_used(policy, label, tokenizer, tmp_path):
    train = written(tmp_path / "train.jsonl", range(5, 60))
    printed = printed_of(tokenizer, train, 64, too_long=policy)["train"]
    assert 0 < printed[f"of them {label}"] <= printed["= used"] == 55


def test_padding_is_told_where_it_is_known(mixed_ledger):
    assert not [line for line in ledger_lines(mixed_ledger) if line.startswith("padding")]
    told = ledger_lines(replace(mixed_ledger, padding=PaddedTokens(900, 1800, 1000)))
    (line,) = [line for line in told if line.startswith("padding")]
    assert all(figure in line for figure in ("50.0%", "10.0%", "1.80"))


def test_rows_whose_answers_look_doubtful_are_counted_in_one_note(tokenizer, tmp_path):
    answers = [
        "<p>Red.</p>",
        "N/A",
        "-",
        " null ",
        "1 < 2, so a<b>c",
        "NULL pointers",
        "Red.",
        "Red.",
    ]
    rows = [{"question": f"What is {n}?", "answer": answer} for n, answer in enumerate(answers)]
    path = write_rows(tmp_path / "a.jsonl", *rows, rows[-1])
    val = written(tmp_path / "b.jsonl", range(2, 5))
    data = run_data(path, tokenizer, 2048, val_path=str(val), max_lost=0.9)
    assert data.ledger.notes == [
        "of 9 rows 2 have HTML tags in an answer, 3 have an answer like N/A, NULL or -, "
        "1 repeat another"
    ]
