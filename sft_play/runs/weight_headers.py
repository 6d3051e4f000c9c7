"""What a model's safetensors files say of their tensors: names and types, read without torch."""

import json
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple


class Header(NamedTuple):
    """A tensor as a safetensors file describes it."""

    name: str
    dtype: str  # F32, BF16, F8_E4M3, I8 ...


def read_headers(files: Iterable[Path]) -> Iterator[Header]:
    """Yield the tensors of safetensors files. Raises: ValueError for a file that is none."""
    for path in files:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8).ljust(8, b"\0"))
            if length > path.stat().st_size:
                raise ValueError(f"{path} is no complete safetensors file")
            described = json.loads(file.read(length))
        for name, facts in described.items():
            if name != "__metadata__":
                yield Header(name, facts["dtype"])
