"""Weight files, tensor by tensor: the memory is that of one shard, whatever the model's size."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from sft_play.errors import CheckpointError
from sft_play.runs.files import write_json

SHARD_BYTES = 1 << 30
CHECKED_AT_A_TIME = 1 << 24  # weights; the check makes copies
INDEX = "model.safetensors.index.json"


@dataclass
class ShardWriter:
    """Writes tensors to files of at most SHARD_BYTES, and the index of them."""

    folder: Path
    names: list[list[str]] = field(default_factory=list)  # of the tensors of each written file
    total: int = 0
    _held: dict[str, Tensor] = field(default_factory=dict)
    _bytes: int = 0

    def add(self, name: str, tensor: Tensor) -> None:
        """Add a tensor. Raises: CheckpointError where it holds NaN or infinity."""
        if not all(
            torch.isfinite(part).all() for part in tensor.flatten().split(CHECKED_AT_A_TIME)
        ):
            raise CheckpointError(f"{name}: the merged weight holds NaN or infinity")
        size = tensor.nbytes
        if self._held and self._bytes + size > SHARD_BYTES:
            self._flush()
        self._held[name] = tensor.contiguous()
        self._bytes += size

    def close(self) -> None:
        """Write what is left, give the files their names, and write the index."""
        self._flush()
        count = len(self.names)
        where: dict[str, str] = {}
        for number, names in enumerate(self.names, 1):
            name = f"model-{number:05d}-of-{count:05d}.safetensors"
            name = "model.safetensors" if count == 1 else name
            self._part(number).rename(self.folder / name)
            where.update(dict.fromkeys(names, name))
        if count > 1:
            metadata = {"total_size": self.total}
            write_json(self.folder / INDEX, {"metadata": metadata, "weight_map": where})

    def _flush(self) -> None:
        self.names.append(list(self._held))
        self.total += self._bytes
        save_file(self._held, self._part(len(self.names)), metadata={"format": "pt"})
        self._held, self._bytes = {}, 0

    def _part(self, number: int) -> Path:
        return self.folder / f"part-{number:05d}.safetensors"


def shapes_of(files: Mapping[str, Path]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors in files."""
    shapes: dict[str, tuple[int, ...]] = {}
    for path in sorted(set(files.values())):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                shapes[name] = tuple(file.get_slice(name).get_shape())
    return shapes


def read_in_order(files: Mapping[str, Path]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of files. A file is opened anew after SHARD_BYTES: its pages are freed."""
    by_file: dict[Path, list[str]] = {}
    for name, path in files.items():
        by_file.setdefault(path, []).append(name)
    for path, names in by_file.items():
        remaining = iter(names)
        name = next(remaining, None)
        while name is not None:
            read = 0
            with safe_open(path, framework="pt") as file:
                while name is not None and read < SHARD_BYTES:
                    tensor = file.get_tensor(name)
                    read += tensor.nbytes
                    yield name, tensor
                    del tensor
                    name = next(remaining, None)
