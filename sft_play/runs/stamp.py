"""The stamp on every checkpoint and adapter: what it was made of, and who may go on from it. Loads no torch.

A stamp is read before a weight is loaded; a difference that would train or load something else silently is refused.
"""

import hashlib
import json
from importlib import metadata
from pathlib import Path
from typing import Any

from sft_play.config.schema import Config
from sft_play.errors import CheckpointError
from sft_play.runs.files import read_json, write_json

NAME = "stamp.json"
SAMPLE_BYTES = 1 << 16
SAMPLES = 64
PACKAGES = (
    "torch",
    "transformers",
    "accelerate",
    "peft",
    "bitsandbytes",
    "deepspeed",
    "liger-kernel",
    "unsloth",
)
# What a resume must agree on. World size and strategy may change: optimizer state is checked by the trainer.
BINDING = (
    "backend",
    "mode",
    "quantisation",
    "base_model",
    "base_revision",
    "base_digest",
    "adapter",
    "template_digest",
)


def versions() -> dict[str, str]:
    """Return the installed versions of the packages that shape a run."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def wanted(config: Config) -> dict[str, Any]:
    """Return the part of a stamp that follows from the config and the base model's files alone."""
    lora, quantised = config.tuning.lora, config.tuning.mode == "qlora"
    return {
        "backend": config.tuning.backend,
        "mode": config.tuning.mode,
        "quantisation": f"{config.tuning.bnb_4bit_quant_type}, double {config.tuning.bnb_4bit_use_double_quant}"
        if quantised
        else "none",
        "base_model": config.model.name,
        "base_revision": config.model.revision,
        "base_digest": digest_of_model(Path(config.model.name))
        if Path(config.model.name).is_dir()
        else None,
        "adapter": None if config.tuning.mode == "full" else lora.model_dump(),
        "seed": config.train.seed,
        "data_seed": config.train.data_seed,
    }


def write(folder: Path, stamp: dict[str, Any]) -> None:
    """Stamp a folder of weights. Written last: its presence says that the files before it are whole."""
    write_json(folder / NAME, stamp)


def read(folder: Path) -> dict[str, Any]:
    """Return a folder's stamp. Raises CheckpointError where there is none or it cannot be read."""
    try:
        return read_json(folder / NAME)
    except FileNotFoundError:
        raise CheckpointError(
            f"{folder}: no {NAME}: not a complete checkpoint or adapter of SFT-Play; choose another"
        ) from None
    except ValueError as error:
        raise CheckpointError(
            f"{folder / NAME}: cannot be read ({error}); choose another checkpoint"
        ) from None


def differences(stamp: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Return a sentence for each binding fact in which two stamps differ; facts that either side lacks are skipped.

    Two local bases of one digest are the same base, wherever they lie.
    """
    is_moved = stamp.get("base_digest") is not None and stamp.get("base_digest") == other.get(
        "base_digest"
    )
    return [
        f"{name}: the checkpoint has {_short(stamp[name])}, this run {_short(other[name])}"
        for name in BINDING
        if name in stamp
        and name in other
        and stamp[name] != other[name]
        and not (name == "base_model" and is_moved)
    ]


def refuse_mismatch(
    folder: Path, other: dict[str, Any], allow_backend_change: bool = False
) -> dict[str, Any]:
    """Return the stamp of `folder` when a run that is stamped `other` may go on from it.

    Raises: CheckpointError that lists what differs and what to type instead.
    """
    stamp = read(folder)
    differing = differences(stamp, other)
    if allow_backend_change:
        differing = [
            line for line in differing if not line.startswith(("backend:", "quantisation:"))
        ]
    if not differing:
        return stamp
    same = f"TUNING_BACKEND={stamp.get('backend')} TUNING_MODE={stamp.get('mode')}"
    raise CheckpointError(
        f"{folder} cannot be resumed by this run:\n  "
        + "\n  ".join(differing)
        + f"\nResume it with what it was trained with ({same}), or start anew "
        "without train.resume_from. TRAIN_ALLOW_BACKEND_CHANGE=true lets another backend go on with it at your own risk."
    )


def latest_checkpoint(path: Path) -> Path:
    """Return the checkpoint that `train.resume_from` means: the folder itself, or the newest stamped one of a run.

    Raises: CheckpointError when there is none.
    """
    if not path.is_dir():
        raise CheckpointError(
            f"train.resume_from={path}: no such folder; `make runs` lists the runs"
        )
    if (path / "trainer_state.json").exists():
        return path
    folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    found = [
        child
        for child in folder.glob("checkpoint-*")
        if (child / NAME).exists() and child.name.rpartition("-")[2].isdigit()
    ]
    if not found:
        raise CheckpointError(
            f"train.resume_from={path}: holds no complete checkpoint (checkpoint-N/{NAME}); choose another run or start anew"
        )
    return max(found, key=lambda child: int(child.name.rpartition("-")[2]))


def digest_of_text(*texts: str) -> str:
    """Return a short SHA-256 of texts, each with its length."""
    total = hashlib.sha256()
    for text in texts:
        data = text.encode()
        total.update(f"{len(data)}:".encode() + data)
    return total.hexdigest()[:16]


def digest_of_model(folder: Path) -> str:
    """Return a short SHA-256 of a model folder: config.json, and size, head, tail and 64 samples of each weight file.

    Hashing all of 140 GB takes minutes; training changes every block, so that samples tell two sets of weights apart.
    """
    total = hashlib.sha256()
    for path in sorted(
        [folder / "config.json", *folder.glob("*.safetensors"), *folder.glob("*.bin")]
    ):
        if not path.is_file() or path.name == "training_args.bin":
            continue
        size = path.stat().st_size
        total.update(f"{path.name}:{size}".encode())
        with path.open("rb") as file:
            for start in sorted(
                {min(i * size // SAMPLES, max(size - SAMPLE_BYTES, 0)) for i in range(SAMPLES + 1)}
            ):
                file.seek(start)
                total.update(file.read(SAMPLE_BYTES))
    return total.hexdigest()[:16]


def _short(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)
