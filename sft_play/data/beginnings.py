"""The beginning of a source's files, from which all its rows are estimated. Loads no torch."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from sft_play.config.schema import DataSection
from sft_play.data.files import Chunk, read_chunks
from sft_play.data.rows import MAX_HELD_OUT_ROWS

READ_BYTES = 16 << 20  # of each source


@dataclass(frozen=True)
class Beginning:
    """The first READ_BYTES of a source, or all of a smaller one."""

    chunks: tuple[Chunk, ...]
    rows: int  # that were read
    all_rows: float  # of the source; estimated by the size of its files where more is left

    @property
    def is_estimated(self) -> bool:
        return self.all_rows > self.rows


def read_beginning(files: Iterable[Path]) -> Beginning:
    """Return the beginning of files, in their order. Raises DataError."""
    files = tuple(files)
    chunks = []
    bytes_read = 0
    for chunk in chain.from_iterable(map(read_chunks, files)):
        chunks.append(chunk)
        bytes_read += chunk.bytes_read
        if bytes_read >= READ_BYTES:
            break
    rows = sum(len(chunk.records) for chunk in chunks)
    share = 1.0
    if bytes_read >= READ_BYTES:
        share = max(1.0, sum(file.stat().st_size for file in files) / bytes_read)
    return Beginning(tuple(chunks), rows, rows * share)


def held_out_share(data: DataSection, rows: float) -> float:
    """Return which part of `rows` training rows is held out for evaluation."""
    return 0.0 if data.val_path else min(data.val_size, MAX_HELD_OUT_ROWS / max(1.0, rows))
