"""Faults of sizes and work: small files that become large ones, and files that change meanwhile."""

import gzip
import json
import re
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import pyarrow as pa
import pyarrow.parquet as pq
from transformers import AutoTokenizer
from workbooks import SHARED, row, text, write_workbook

from faults.bench import Bench, Fault, Guard, Outcome
from faults.files import nothing, refused
from faults.front import config_of, of_environment
from sft_play.config.schema import Config
from sft_play.data import tokenize
from sft_play.data.files import parse_records, read_chunks
from sft_play.data.pipeline import build_run_data
from sft_play.data.row_formats import split_marked_text
from sft_play.data.tables import AS_CSV
from sft_play.errors import ExitClass

ROOT = Path(__file__).resolve().parents[2]
MIB = 1 << 20
CHAT = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
RATIO = Guard("sft_play.reading:refuse_bomb", nothing)
LONG = Guard("sft_play.data.text_files:MAX_LINE_BYTES", 1 << 30)
OLD_ENDS = re.compile(r"(?:\s|</?s>)+$")


def read(name: str, fill: Callable[[Path], object]) -> Callable[[Bench], Outcome]:
    """Return an injection: a data file is read to its end."""

    def inject(bench):
        path = bench.folder / name
        fill(path)
        bench.inject_now()
        return refused(lambda: [list(parse_records(chunk)) for chunk in read_chunks(path)])

    return inject


def of_bytes(data: bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(data)


def repeated(path: Path) -> None:
    """Write one text of 256 KiB, which 1,000 rows have."""
    indices = pa.array([0] * 1000, pa.int32())
    column = pa.DictionaryArray.from_arrays(indices, ["word " * (MIB // 20)])
    pq.write_table(pa.table({"text": column}), path, compression="zstd")


def compressed_arrow(path: Path) -> None:
    table = pa.table({"text": ["word " * (2 * MIB)]})
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.ipc.new_file(path, table.schema, options=options) as file:
        file.write_table(table)


def tiny_rows(path: Path) -> None:
    """Write 430,000 times one row, in some KB."""
    line = json.dumps({"messages": CHAT}) + "\n"
    with pa.CompressedOutputStream(str(path), "zstd") as file:
        file.write(line.encode() * 430_000)


def read_sheet_of(rows: str, shared: str = "x") -> Callable[[Bench], Outcome]:
    """Return an injection: a workbook is read."""

    def inject(bench):
        return read("a.xlsx", lambda path: write_workbook(path, rows, shared=shared))(bench)

    return inject


def tokenized(
    bench: Bench,
    rows: list[dict],
    meanwhile: Callable[[Path], object] = nothing,
    moment: str = "count_tokenizing_processes",
) -> Outcome:
    """Tokenize rows; something is done to their file when a function of `tokenize` is called."""
    path = bench.folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"train_path": str(path), "cache_dir": str(bench.folder / "cache")}
    settings = {"model": {"max_seq_len": 512}, "data": data}
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "data" / "tiny_llama")

    function = getattr(tokenize, moment)

    def with_fault(*words):
        meanwhile(path)
        return function(*words)

    bench.inject_now()
    with patch.object(tokenize, moment, with_fault):
        return refused(lambda: build_run_data(Config.model_validate(settings), tokenizer))


def changed(meanwhile: Callable[[Path], object], moment: str) -> Callable[[Bench], Outcome]:
    rows = [{"messages": CHAT, "id": number} for number in range(20)]
    return lambda bench: tokenized(bench, rows, meanwhile, moment)


def edit(path: Path) -> None:
    path.write_text(path.read_text().replace('"q"', '"Q"'))


def row_with(**values: object) -> Callable[[Bench], Outcome]:
    rows = [{"messages": CHAT}] * 20
    return lambda bench: tokenized(bench, [*rows, {"messages": CHAT, **values}])


def marked(bench: Bench) -> Outcome:
    turns = split_marked_text("Human: q\n\nAssistant: a" + "</s>" * 12_000 + "b", "text")
    assert turns[-1]["content"].endswith("</s>b")
    return Outcome(0, "")


def aliases() -> str:
    lines = (f"x{n}: &x{n} {{<<: [*x{n - 1}, *x{n - 1}], k{n}: 1}}" for n in range(1, 31))
    return "\n".join(["x0: &x0 {k0: 1}", *lines])


def deep(levels: int) -> list:
    value: list = []
    for _ in range(levels):
        value = [value]
    return value


def of_data(
    name: str, injected: str, inject: Callable[[Bench], Outcome], guard: Guard, *says: str
) -> Fault:
    return Fault(name, injected, inject, ExitClass.DATA, says, guard, 5, is_quick=True)


UNPACK = "they are rows, unpack it first with gzip -dk or zstd -d"
REWRITE = "write them as JSON lines"
WITHOUT_ENDS = "sft_play.data.row_formats:_without_ends"
ROWS = (
    of_data(
        "size-blank-gzip",
        "some KB of gzip are millions of blank lines",
        read("a.jsonl.gz", of_bytes(gzip.compress(b"\n" * 6 * MIB))),
        RATIO,
        "a.jsonl.gz: cannot be read: ",
        UNPACK,
    ),
    of_data(
        "size-parquet-dictionary",
        "a Parquet file of some hundred bytes has one text of 256 KiB in 1,000 rows",
        read("a.parquet", repeated),
        RATIO,
        "a.parquet: cannot be read: ",
        REWRITE,
    ),
    of_data(
        "size-arrow-buffers",
        "a compressed buffer of an Arrow file becomes a thousand times as large",
        read("a.arrow", compressed_arrow),
        RATIO,
        "a.arrow: cannot be read: ",
        REWRITE,
    ),
    of_data(
        "size-row-jsonl",
        "one row of JSONL has 17 MiB",
        read("a.jsonl", of_bytes(b'{"text": "' + b"a" * 17 * MIB + b'"}\n')),
        LONG,
        "a.jsonl:1: a line of more than 16 MiB",
        "leave them out: cat ",
    ),
    of_data(
        "size-row-json",
        "one row of a JSON list has 17 MiB",
        read("a.json", of_bytes(b'[{"text": "' + b"a" * 17 * MIB + b'"}]')),
        LONG,
        "a.json[0]: more than 16 MiB without an end",
        "split this row",
    ),
    of_data(
        "size-text",
        "a text file without a line break has 17 MiB",
        read("a.txt", of_bytes(b"word " * (17 * MIB // 5))),
        LONG,
        "a.txt:1: a line of more than 16 MiB",
        "split -C 8m",
    ),
    of_data(
        "size-row-csv",
        "a row of CSV continues over 17 MiB of quoted lines",
        read(
            "a.csv", of_bytes(b"text\n" + b'"aaaaaaaaaaaaaaaaaaaaaaaaaaaaa\n",' * (17 * MIB // 34))
        ),
        Guard("sft_play.data.tables:MAX_FIELD_CHARACTERS", 1 << 30),
        "a.csv:2: a quote is opened in this row and never closed, or it has more than 16 MiB",
        "split it",
    ),
    of_data(
        "size-tiny-rows",
        "some KB of zstd are 430,000 times one row",
        read("a.jsonl.zst", tiny_rows),
        RATIO,
        "a.jsonl.zst: cannot be read: ",
        UNPACK,
    ),
    of_data(
        "size-sheet",
        "a cell of an Excel file of some KB has 64 MiB",
        read_sheet_of(row(text("a" * 64 * MIB))),
        RATIO,
        "a.xlsx: cannot be read: ",
        AS_CSV,
    ),
    of_data(
        "size-shared-text",
        "all cells of an Excel file have one text, which it has once",
        read_sheet_of(SHARED * 1000, shared="word " * 2000),
        RATIO,
        "a.xlsx: cannot be read: ",
        AS_CSV,
    ),
    of_data(
        "size-far-row",
        "the second row of a sheet is its 1,048,600th",
        read_sheet_of(row(text("q"), text("a"), number=(1 << 20) + 24)),
        Guard("sft_play.data.tables:MAX_SHEET_ROWS", 1 << 40),
        "a.xlsx:1048577: no sheet has so many rows",
        "save it again",
    ),
    of_data(
        "size-damaged-sheet",
        "a number in an Excel file is none",
        read_sheet_of(row('<c t="n"><v>abc</v></c>')),
        Guard("sft_play.data.tables:OF_A_WRONG_VALUE", ()),
        "a.xlsx: no .xlsx file, or a damaged one (invalid literal",
        AS_CSV,
    ),
    of_data(
        "size-changed-file",
        "a data file is edited while it is tokenized",
        changed(edit, "count_tokenizing_processes"),
        Guard("sft_play.data.sources:Source.refuse_change", nothing),
        "rows.jsonl: written to while it was tokenized",
        "start again",
    ),
    of_data(
        "size-removed-file",
        "a data file is removed while it is tokenized",
        changed(lambda path: path.unlink(missing_ok=True), "StoreSummary"),
        Guard(
            "sft_play.data.sources:Source.states",
            lambda source: [(each.stat().st_size,) for each in source.files],
        ),
        "rows.jsonl: removed while it was read",
        "put it back",
    ),
    of_data(
        "size-deep-variable",
        "a variable of the chat template is nested 500 deep in one row",
        row_with(chat_template_kwargs={"a": deep(500)}),
        Guard("sft_play.data.calls:MAX_DEPTH", 10_000),
        "rows.jsonl:21: chat_template_kwargs is nested more than 100 deep",
        "write it flatter",
    ),
    of_data(
        "size-half-character-in-key",
        "a key of a variable contains half of a surrogate pair",
        row_with(chat_template_kwargs={"\ud800": 1}),
        Guard("sft_play.data.calls:check_encodable", nothing),
        "rows.jsonl:21: chat_template_kwargs contains half of a surrogate pair",
    ),
    Fault(
        "size-marks",
        "a conversation in one text has 12,000 marks of an end",
        marked,
        ExitClass.DONE,
        (),
        Guard(WITHOUT_ENDS, lambda words: OLD_ENDS.sub("", words).strip()),
        0.5,
        is_quick=True,
    ),
    Fault(
        "size-aliases",
        "<< in a config merges the mapping before twice, 30 times over",
        config_of(aliases()),
        ExitClass.CONFIG,
        ("a.yaml:12: ", "aliases repeat values", "write out what is needed"),
        Guard("sft_play.config.yaml_source:MOST_VALUES", 200_000),
        5,
        is_quick=True,
    ),
    Fault(
        "size-device",
        "CONFIG=/dev/zero, which never ends",
        of_environment(CONFIG="/dev/zero"),
        ExitClass.CONFIG,
        ("/dev/zero: cannot be read: a device, not a regular file", "name that"),
        Guard("sft_play.reading:refuse_special", nothing),
        5,
        is_quick=True,
    ),
)
