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
    """Yield the tensors of safetensors files. Raises: ValueError for one that ends too early."""
    for path in files:
        damage = ValueError(f"{path.name} is damaged, or ends too early")
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8).ljust(8, b"\0"))
            if not 0 < length < path.stat().st_size:
                raise damage
            try:
                described = json.loads(file.read(length))
            except ValueError:
                raise damage from None
        described.pop("__metadata__", None)
        ends = (facts["data_offsets"][1] for facts in described.values())
        if 8 + length + max(ends, default=0) > path.stat().st_size:
            raise damage
        for name, facts in described.items():
            yield Header(name, facts["dtype"])
