"""Read and write weight files tensor by tensor: this needs memory for only one shard."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import try_to_load_from_cache
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from sft_play.config.schema import Config
from sft_play.errors import CheckpointError
from sft_play.runs.files import rename, write_json

SHARD_BYTES = 1 << 30
CHECKED_AT_A_TIME = 1 << 24  # weights; the check makes copies


@dataclass
class ShardWriter:
    """Writes tensors to files of at most SHARD_BYTES, and their index."""

    folder: Path
    names: list[list[str]] = field(default_factory=list)  # of the tensors in each written file
    total: int = 0
    float_types: set[torch.dtype] = field(default_factory=set)  # of the tensors
    _held: dict[str, Tensor] = field(default_factory=dict)
    _bytes: int = 0

    def add(self, name: str, tensor: Tensor) -> None:
        """Add a tensor. Raises: CheckpointError if it contains NaN or infinity."""
        parts = tensor.flatten().split(CHECKED_AT_A_TIME)
        # torch has no isfinite for 8 bits
        if tensor.dtype.itemsize > 1 and not all(torch.isfinite(part).all() for part in parts):
            raise CheckpointError(f"{name}: the merged weight holds NaN or infinity")
        if tensor.is_floating_point():
            self.float_types.add(tensor.dtype)
        if self._held and self._bytes + tensor.nbytes > SHARD_BYTES:
            self._flush()
        self._held[name] = tensor.contiguous()
        self._bytes += tensor.nbytes

    def close(self) -> None:
        """Write the remaining tensors, rename the files, and write the index."""
        self._flush()
        count = len(self.names)
        where: dict[str, str] = {}
        for number, names in enumerate(self.names, 1):
            name = f"model-{number:05d}-of-{count:05d}.safetensors"
            name = SAFE_WEIGHTS_NAME if count == 1 else name
            rename(self._part(number), self.folder / name)
            where.update(dict.fromkeys(names, name))
        if count > 1:
            index = {"metadata": {"total_size": self.total}, "weight_map": where}
            write_json(self.folder / SAFE_WEIGHTS_INDEX_NAME, index)

    def _flush(self) -> None:
        self.names.append(list(self._held))
        self.total += self._bytes
        save_file(self._held, self._part(len(self.names)), metadata={"format": "pt"})
        self._held, self._bytes = {}, 0

    def _part(self, number: int) -> Path:
        return self.folder / f"part-{number:05d}.safetensors"


@dataclass
class Reader:
    """Reads files one after another; each is reopened after SHARD_BYTES to free its pages."""

    _path: Path | None = None
    _file: safe_open | None = None
    _read: int = 0

    def open(self, path: Path) -> safe_open:
        """Return an open file."""
        if path != self._path or self._read >= SHARD_BYTES:
            self._path, self._file, self._read = path, safe_open(path, framework="pt"), 0
        return self._file

    def read(self, path: Path, name: str) -> Tensor:
        """Return a tensor of a file."""
        tensor = self.open(path).get_tensor(name)
        self._read += tensor.nbytes
        return tensor


@dataclass(frozen=True)
class InFile:
    """A tensor in a file, read when it is indexed, like safetensors' slices."""

    reader: Reader
    path: Path
    name: str

    def __getitem__(self, index: Any) -> Tensor:
        return self.reader.read(self.path, self.name)[index]

    def get_shape(self) -> list[int]:
        return self.reader.open(self.path).get_slice(self.name).get_shape()

    def get_dtype(self) -> str:
        return self.reader.open(self.path).get_slice(self.name).get_dtype()


def tensor_files(config: Config) -> dict[str, Path]:
    """Return the file of each tensor of a base, if the base is on disk or in the hub's cache."""
    folder = Path(config.model.name)
    if folder.is_dir():
        return files_in(folder)

    def in_cache(name: str) -> Path | None:
        path = try_to_load_from_cache(config.model.name, name, revision=config.model.revision)
        return Path(path) if isinstance(path, str) else None

    return _files(in_cache)


def files_in(folder: Path) -> dict[str, Path]:
    """Return the file of each tensor in a folder."""
    return _files(lambda name: folder / name if (folder / name).is_file() else None)


def _files(find: Callable[[str], Path | None]) -> dict[str, Path]:
    """Return the file of each tensor; like transformers, prefer one file to an index of shards."""
    single = find(SAFE_WEIGHTS_NAME)
    if single:
        with safe_open(single, framework="pt") as file:
            return dict.fromkeys(file.keys(), single)
    index = find(SAFE_WEIGHTS_INDEX_NAME)
    if index is None:
        return {}
    names = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    shards = {name: find(name) for name in set(names.values())}
    return {tensor: shards[name] for tensor, name in names.items() if shards[name]}


def tensors_in(files: Mapping[str, Path]) -> dict[str, InFile]:
    """Return the tensors of files by name, sorted by file."""
    reader = Reader()
    ordered = sorted(files.items(), key=lambda item: item[1])
    return {name: InFile(reader, path, name) for name, path in ordered}
