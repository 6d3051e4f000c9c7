"""Model folders that are broken, or made to hang and to fill the memory: each small on disk."""

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

BASE = Path(__file__).resolve().parents[1] / "data" / "tiny_llama"
DEEP = "[" * 100_000 + "]" * 100_000
Damage = Callable[[Path], None]  # of a copy of the tiny model


def copied(target: Path) -> Path:
    """Return a copy of the tiny model, whose weights are a link."""
    shutil.copytree(BASE, target, ignore=lambda *_: ["model.safetensors"])
    (target / "model.safetensors").symlink_to(BASE / "model.safetensors")
    return target


def with_text(name: str, text: str | bytes) -> Damage:
    """Return a damage: a file has other bytes."""
    data = text.encode() if isinstance(text, str) else text
    return lambda folder: replaced(folder / name, data)


def replaced(path: Path, data: bytes) -> None:
    path.unlink(missing_ok=True)
    path.write_bytes(data)


def with_values(name: str, **values: Any) -> Damage:
    """Return a damage: a JSON file has other values."""

    def damage(folder: Path) -> None:
        path = folder / name
        path.write_text(json.dumps({**json.loads(path.read_text()), **values}))

    return damage


def config(**values: Any) -> Damage:
    return with_values("config.json", **values)


def sparse(name: str, size: int) -> Damage:
    """Return a damage: a file of zeros that takes no room on the disk."""

    def damage(folder: Path) -> None:
        replaced(folder / name, b"")
        os.truncate(folder / name, size)

    return damage


def folder_at(name: str) -> Damage:
    def damage(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).mkdir()

    return damage


def fifo_at(name: str) -> Damage:
    def damage(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)

    return damage


def link_at(name: str, target: str) -> Damage:
    def damage(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(target)

    return damage


def weights(header: str | bytes, length: int | None = None, tail: int = 0) -> Damage:
    """Return a damage: model.safetensors has another header."""
    data = header.encode() if isinstance(header, str) else header
    size = struct.pack("<Q", len(data) if length is None else length)
    return with_text("model.safetensors", size + data + bytes(tail))


def tensor(**values: Any) -> str:
    facts = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4], **values}
    return json.dumps({"model.norm.weight": facts})


def index(weight_map: Any) -> Damage:
    """Return a damage: an index in place of the one file of weights."""

    def damage(folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        text = json.dumps({"metadata": {}, "weight_map": weight_map})
        (folder / "model.safetensors.index.json").write_text(text)

    return damage


SIZES = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "num_key_value_heads",
    "head_dim",
)
WRONG = {
    "text": "12",
    "list": [12],
    "nan": float("nan"),
    "zero": 0,
    "huge": 10**12,
    "beyond": 10**400,
}
# of fields that are no sizes
OTHERS = {
    "model_type": [5, "", "x" * 10_000_000, "\ud800", None],
    "architectures": [5, [None], []],
    "text_config": [5],
    "max_position_embeddings": ["x", 10**400, None],
    "rope_parameters": [5, {"rope_type": 5}, {"factor": "x"},
                        {"factor": float("nan"), "original_max_position_embeddings": 5},
                        {"factor": 1e308, "original_max_position_embeddings": 10**300},
                        {"factor": [1], "original_max_position_embeddings": 5}],
    "rope_scaling": [5, {"type": []}],
    "quantization_config": [5, {"quant_method": 5},
                            {"quant_method": "fp8", "weight_block_size": ["a"]},
                            {"quant_method": "fp8", "weight_block_size": [0, 10**12]},
                            {"quant_method": "compressed-tensors", "config_groups": 5},
                            {"quant_method": "compressed-tensors", "config_groups": {"a": 5}},
                            {"quant_method": "compressed-tensors", "sparsity_config": 5},
                            {"quant_method": "compressed-tensors", "format": {}},
                            {"quant_algo": []}, {"bits": []}, {"quantization_config": 5}],
    "auto_map": [5, {"AutoConfig": 5}],
    "is_encoder_decoder": ["x"],
    "layer_types": [5, ["full_attention"] * 7],
    "eos_token_id": ["x", [], -1],
}  # fmt: skip


def configs() -> dict[str, Damage]:
    """Return damages of config.json by name."""
    found = {
        f"{name}-{word}": config(**{name: value}) for name in SIZES for word, value in WRONG.items()
    }
    for name, values in OTHERS.items():
        found |= {f"{name}-{n}": config(**{name: value}) for n, value in enumerate(values)}
    found["layers-1e9"] = config(num_hidden_layers=10**9)
    found["layers-1e5"] = config(num_hidden_layers=10**5)
    return found


def files() -> dict[str, Damage]:
    """Return damages of whole files by name."""
    found: dict[str, Damage] = {}
    for name in ("config.json", "tokenizer_config.json", "generation_config.json",
                 "special_tokens_map.json", "tokenizer.json"):  # fmt: skip
        texts = {"deep": DEEP, "deep-object": '{"a":' * 100_000 + "}" * 100_000, "empty": "",
                 "list": "[1]", "cut": '{"a": ', "not-utf8": b'{"a": "\xff\xfe"}'}  # fmt: skip
        found |= {f"{name}-{word}": with_text(name, text) for word, text in texts.items()}
        found[f"{name}-blank"] = sparse(name, 1 << 30)
        found[f"{name}-folder"] = (
            folder_at(name) if (BASE / name).exists() else lambda f, n=name: (f / n).mkdir()
        )
        found[f"{name}-fifo"] = fifo_at(name)
        found[f"{name}-device"] = link_at(name, "/dev/zero")
        found[f"{name}-dangling"] = link_at(name, "/nowhere/x")
        found[f"{name}-circle"] = link_at(name, name)
    text = (BASE / "config.json").read_text()
    found["config.json-bom"] = with_text("config.json", "\ufeff" + text)
    found["config.json-utf16"] = with_text("config.json", text.encode("utf-16"))
    found["config.json-deep-value"] = with_text(
        "config.json", text.replace("{", '{"x": ' + DEEP + ",", 1)
    )
    return found


def headers() -> dict[str, Damage]:
    """Return damages of the header of weights by name."""
    ok = tensor()
    return {
        "header-2^60": weights(ok, 1 << 60),
        "header-empty-file": with_text("model.safetensors", b""),
        "header-deep": weights(DEEP),
        "header-list": weights("[1]"),
        "header-tensor-text": weights('{"a": "x"}'),
        "header-no-dtype": weights('{"a": {"data_offsets": [0, 4], "shape": [1]}}', tail=4),
        "header-negative": weights(tensor(data_offsets=[-4, 4]), tail=4),
        "header-offsets-huge": weights(tensor(data_offsets=[0, 10**400]), tail=4),
        "header-offsets-float": weights(tensor(data_offsets=[0, 4.0]), tail=4),
        "header-shape": weights(tensor(shape=[10**9, 10**9]), tail=4),
        "header-shape-text": weights(tensor(shape="x"), tail=4),
        "header-metadata": weights('{"__metadata__": 5}'),
        "header-duplicate": weights(f"{ok[:-1]}, {ok[1:]}", tail=4),
        "header-overlap": weights(json.dumps({n: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]} for n in "ab"}), tail=4),
        "header-100MB": sparse_header(100 << 20),
        "header-many": weights(json.dumps({f"t{n}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for n in range(50_000)})),
        "header-fifo": fifo_at("model.safetensors"),
        "header-dangling": link_at("model.safetensors", "/nowhere/x"),
    }  # fmt: skip


def sparse_header(size: int) -> Damage:
    def damage(folder: Path) -> None:
        weights(b"", size)(folder)
        os.truncate(folder / "model.safetensors", size + 8 + 100)

    return damage


def indexes() -> dict[str, Damage]:
    """Return damages of the index of weights by name."""
    return {
        "index-outside": index({"a": "../../../../../../etc/passwd"}),
        "index-missing": index({"a": "b.safetensors"}),
        "index-long": index({"a": "b" * 10_000_000}),
        "index-nul": index({"a": "b\0c.safetensors"}),
        "index-surrogate": index({"a": "\ud800.safetensors"}),
        "index-list": index([1]),
        "index-null": index(None),
        "index-value-list": index({"a": [1]}),
        "index-itself": index({"a": "model.safetensors.index.json"}),
        "index-deep": lambda f: (index({})(f), with_text("model.safetensors.index.json", DEEP)(f))[0],
        "index-fifo": lambda f: (index({})(f), fifo_at("model.safetensors.index.json")(f))[0],
        "index-blank": lambda f: (index({})(f), sparse("model.safetensors.index.json", 1 << 30)(f))[0],
    }  # fmt: skip
