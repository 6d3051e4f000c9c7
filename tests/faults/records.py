"""Faults of data files: Arrow types that say much in few bytes, files that are cut off or damaged."""

import contextlib
import gzip
import os
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from faults.bench import Bench, Guard, Outcome
from faults.disks import in_child
from faults.files import nothing, refused
from faults.sizes import RATIO, REWRITE, of_bytes, of_data, read
from sft_play.data.files import read_chunks

ROWS_OF_A_FILE = 20_000
LINE = b'{"text": "a"}\n'


def arrow(column: pa.Array) -> Callable[[Path], object]:
    """Return what writes an Arrow file of one compressed column."""

    def fill(path):
        table = pa.table({"text": column})
        options = pa.ipc.IpcWriteOptions(compression="zstd")
        with pa.ipc.new_file(path, table.schema, options=options) as file:
            file.write_table(table)

    return fill


def one_run() -> pa.Array:
    """Return one text of 1 KB, which all rows have."""
    ends = pa.array([ROWS_OF_A_FILE], pa.int32())
    return pa.RunEndEncodedArray.from_arrays(ends, ["word " * 200])


def equal_views() -> pa.Array:
    """Return lists that all have the same 1,000 elements."""
    starts, sizes = ([number] * 1000 for number in (0, 1000))
    kind = pa.int32()
    return pa.ListViewArray.from_arrays(
        pa.array(starts, kind), pa.array(sizes, kind), pa.array(["x"] * 1000)
    )


def cut_stream(path: Path) -> None:
    table = pa.table({"text": ["a"] * 100})
    with pa.ipc.new_stream(path, table.schema) as file:
        file.write_table(table, max_chunksize=10)
    path.write_bytes(path.read_bytes()[:-8])


def cut_while_read(bench: Bench) -> Outcome:
    """Another program cuts an Arrow file off while it is read."""
    path = bench.folder / "a.arrow"
    table = pa.table({"text": ["x" * 1000] * ROWS_OF_A_FILE})
    with pa.ipc.new_file(path, table.schema) as file:
        file.write_table(table, max_chunksize=1000)

    def read_on():
        for _ in read_chunks(path):
            os.truncate(path, path.stat().st_size // 10)

    return in_child(bench, lambda: refused(read_on))


def names_twice(path: Path) -> None:
    pq.write_table(pa.Table.from_arrays([pa.array(["a"])] * 2, ["text", "text"]), path)


ANEW = "download or write it again"
ROWS = (
    of_data(
        "arrow-runs",
        "an Arrow file says once that one text is in 20,000 rows (run-end encoding)",
        read("a.arrow", arrow(one_run())),
        RATIO,
        "a.arrow: cannot be read: ",
        REWRITE,
    ),
    of_data(
        "arrow-views",
        "all lists of an Arrow file are views of the same elements",
        read("a.arrow", arrow(equal_views())),
        RATIO,
        "a.arrow: cannot be read: ",
        REWRITE,
    ),
    of_data(
        "arrow-nulls",
        "an Arrow file of some hundred bytes has a million rows of nothing",
        read("a.arrow", arrow(pa.nulls(10**6))),
        RATIO,
        "a.arrow: cannot be read: ",
        REWRITE,
    ),
    of_data(
        "arrow-cut-while-read",
        "another program cuts an Arrow file off while it is read",
        cut_while_read,
        Guard("pyarrow:OSFile", pa.memory_map),
        "a.arrow: cannot be read: File too short",
    ),
    of_data(
        "arrow-cut-stream",
        "an Arrow stream breaks off between two batches",
        read("a.arrow", cut_stream),
        Guard("sft_play.data.arrow:END_OF_STREAM", b""),
        "a.arrow: not a complete Arrow stream",
        ANEW,
    ),
    of_data(
        "parquet-names",
        "two columns of a Parquet file have one name",
        read("a.parquet", names_twice),
        Guard("sft_play.data.arrow:_check_names", nothing),
        "a.parquet: two columns are named 'text'",
        "rename one",
    ),
    of_data(
        "damaged-gzip",
        "a bit of a compressed file flips",
        read("a.jsonl.gz", of_bytes(gzip.compress(LINE * 100)[:-8] + bytes(8))),
        Guard("sft_play.data.files:_errors_naming", contextlib.nullcontext),
        "a.jsonl.gz: no gzip file, or a damaged one",
        "compress it again",
    ),
    of_data(
        "wide-encoding",
        "a file of rows is UTF-16",
        read("a.jsonl", of_bytes((LINE * 3).decode().encode("utf-16"))),
        Guard("sft_play.data.text_files:refuse_wide_encoding", nothing),
        "a.jsonl: ",
        "iconv",
    ),
)
