"""The stamp on every checkpoint and adapter: what it was made of, and who may continue from it.

Loads no torch. A stamp is read before a weight is loaded; a difference that would silently train or
load something else is refused.
"""

import hashlib
import json
import platform
from dataclasses import asdict, dataclass, fields
from importlib import metadata
from pathlib import Path
from typing import Any

import sft_play
from sft_play.config.schema import Config
from sft_play.errors import CheckpointError
from sft_play.runs.files import Json, read_json, write_json

NAME = "stamp.json"
SAMPLE_BYTES = 1 << 16
SAMPLES = 64
PACKAGES = "torch transformers accelerate peft bitsandbytes deepspeed liger-kernel unsloth".split()
# What to type for a fact by which a checkpoint cannot be resumed
OTHER_BACKEND = (
    "set TUNING_BACKEND={then.backend} TUNING_MODE={then.mode}, or "
    "TRAIN_ALLOW_BACKEND_CHANGE=true to resume it with another backend at your own risk"
)
REMEDIES = {
    "backend": OTHER_BACKEND,
    "quantisation": OTHER_BACKEND,
    "mode": "set TUNING_MODE={then.mode}",
    "precision": "set TRAIN_BF16=true for bf16, TRAIN_FP16=true for fp16, neither for float32",
    "base_digest": "the weights or config.json of {now.base_model} have changed since: put them "
    "back, or set MODEL_NAME to a copy of the base as it was",
    "tokenizer_digest": "the tokenizer of {now.base_model} has changed since: put its files back; "
    "{folder}/tokenizer.json has the run's vocabulary",
    "template_digest": "the chat template ({now.template}) has changed since",
}
SHAPE = {"r", "alpha", "dropout", "target_modules", "use_rslora"}  # settings of tuning.lora
# Facts that may be null or empty in a stamp
MAY_BE_EMPTY = """
base_revision base_digest adapter neftune_noise_alpha rope_scaling data_seed deepspeed_digest
""".split()


@dataclass(frozen=True, kw_only=True)
class Binding:
    """What a resume must agree on.

    World size and strategy may change: the trainer checks the optimizer. The last three facts are
    None as long as the tokenizer is not loaded.
    """

    backend: str
    mode: str
    quantisation: str
    base_model: str
    base_revision: str | None
    base_digest: str | None  # None for a base on the hub
    adapter: Json | None  # settings of tuning.lora; None of a full run
    neftune_noise_alpha: float | None
    rope_scaling: Json  # the settings that are not null
    precision: str | None = None
    tokenizer_digest: str | None = None
    template_digest: str | None = None


@dataclass(frozen=True, kw_only=True)
class Stamp(Binding):
    """The facts of stamp.json."""

    run: str
    run_id: str
    config: Json  # every setting of the run
    dtypes: dict[str, list[str]]  # of trained and frozen weights, as they were loaded
    seed: int
    data_seed: int | None
    data_digest: str
    deepspeed_digest: str | None
    effective_batch: int  # rows per step
    global_step: int
    strategy: str
    template: str
    versions: dict[str, str]
    world_size: int
    merged: bool = False  # the weights are those of an adapter merged into its base
    batch_unit: str = "sample"  # what effective_batch counts: row, if some rows are several samples


OPTIONAL = ("merged", "batch_unit")
REQUIRED = [field.name for field in fields(Stamp) if field.name not in OPTIONAL]


def own_version() -> str:
    """Return the version of SFT-Play, with the beginning of the SHA-256 of its sources."""
    package = Path(sft_play.__file__).parent
    total = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        total.update(path.read_bytes())
    return f"{sft_play.__version__}+{total.hexdigest()[:8]}"


def versions() -> dict[str, str]:
    """Return the installed versions of the packages that shape a run."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def wanted_stamp(config: Config) -> Binding:
    """Return the part of a stamp that follows only from the config and the base model's files."""
    tuning = config.tuning
    quantisation = "none"
    if tuning.mode == "qlora":
        double = tuning.bnb_4bit_use_double_quant
        quantisation = f"{tuning.bnb_4bit_quant_type}, double {double}"
    if tuning.has_float8_base:
        quantisation = "float8 e4m3, a scale a row"
    adapter = None
    if tuning.mode != "full":
        # every other setting stands there if it has another value than usual: so a stamp does
        # not change if a version adds a setting
        lora = tuning.lora
        adapter = {**lora.model_dump(include=SHAPE), **lora.model_dump(exclude_defaults=True)}
    base = Path(config.model.name)
    return Binding(
        backend=tuning.backend,
        mode=tuning.mode,
        quantisation=quantisation,
        base_model=config.model.name,
        base_revision=config.model.revision,
        base_digest=digest_of_model(base) if base.is_dir() else None,
        adapter=adapter,
        neftune_noise_alpha=config.train.neftune_noise_alpha,
        rope_scaling=config.model.rope_scaling.model_dump(exclude_none=True),
    )


def write(folder: Path, stamp: Stamp) -> None:
    """Stamp a folder of weights, last: its presence says that the files before it are complete."""
    facts = asdict(stamp)
    if not stamp.merged:
        del facts["merged"]
    write_json(folder / NAME, facts)


def read_stamp(folder: Path) -> Stamp:
    """Return a folder's stamp. Raises CheckpointError if there is none or it lacks a fact."""
    path = folder / NAME
    try:
        facts = read_json(path)
    except FileNotFoundError:
        raise CheckpointError(
            f"{folder}: no {NAME}: not a complete checkpoint or adapter of SFT-Play; choose another"
        ) from None
    except ValueError as error:
        raise CheckpointError(
            f"{path}: cannot be read ({error}); choose another checkpoint"
        ) from None
    lacking = _lacking(facts)
    if lacking:
        raise CheckpointError(
            f"{path}: has no {', '.join(lacking)}, so it is not known what would be resumed; it "
            "was edited, or written by an older version: choose another checkpoint"
        )
    return Stamp(**{name: facts[name] for name in (*REQUIRED, *OPTIONAL) if name in facts})


def _lacking(facts: Any) -> list[str]:
    """Return the facts that a stamp must have and has not."""
    if not isinstance(facts, dict):
        return REQUIRED
    return [
        name
        for name in REQUIRED
        if name not in facts or (facts[name] in (None, "", {}, []) and name not in MAY_BE_EMPTY)
    ]


def differences(stamp: Binding, now: Binding, then: str = "the checkpoint has") -> list[str]:
    """Return a sentence for each binding fact in which a stamp differs from what is known now.

    `then` is the text before what the stamp has. The front end knows less than the worker. Two
    local bases with the same digest are the same base, wherever they are.
    """
    is_moved = stamp.base_digest is not None and stamp.base_digest == now.base_digest
    found = []
    for name in (field.name for field in fields(Binding)):
        saved, current = getattr(stamp, name), getattr(now, name)
        is_unknown = current is None and name not in MAY_BE_EMPTY  # as yet
        if saved == current or is_unknown or (name == "base_model" and is_moved):
            continue
        found.append(f"{name}: {then} {_short(saved)}, this run {_short(current)}")
    return found


def refuse_mismatch(folder: Path, now: Binding, allow_backend_change: bool = False) -> Stamp:
    """Return the stamp of `folder` when a run of which `now` is known may continue from it.

    Raises: CheckpointError that lists what differs and what to type instead.
    """
    stamp = read_stamp(folder)
    differing = differences(stamp, now)
    if allow_backend_change:
        allowed = ("backend:", "quantisation:")
        differing = [line for line in differing if not line.startswith(allowed)]
    if not differing:
        return stamp
    lines = []
    for line in differing:
        remedy = REMEDIES.get(line.partition(":")[0], "leave that setting out")
        lines.append(f"  {line}; {remedy.format(folder=folder, then=stamp, now=now)}")
    for place in ("../../adapter", "../../model", "."):  # a checkpoint may be rotated
        path = (folder / place / "chat_template.jinja").resolve()
        is_asked = differing[-1].startswith("template_digest:") and path.is_file()
        if is_asked and digest_of_text(path.read_text("utf-8")) == stamp.template_digest:
            lines.append(f"  MODEL_CHAT_TEMPLATE={path} resumes it with the run's template")
            break
    raise CheckpointError(
        f"{folder} cannot be resumed by this run:\n" + "\n".join(lines) + "\nTo start a new run, "
        "leave out TRAIN_RESUME_FROM and set a new RUN."
    )


def stamp_of_base(folder: Path, now: Binding) -> Stamp:
    """Return the stamp of trained weights whose run still names what they were trained with.

    Raises: CheckpointError that lists what differs and what to put back.
    """
    stamp = read_stamp(folder)
    differing = differences(stamp, now, "trained with")
    if not differing:
        return stamp
    if stamp.base_digest is not None and not Path(now.base_model).is_dir():
        raise CheckpointError(
            f"{folder}: its base {now.base_model} is not there; it was moved, or the run was "
            "copied to this machine. Type MODEL_NAME=<folder> with the folder where it is now."
        )
    facts = "\n  ".join(differing)
    raise CheckpointError(
        f"{folder} was not trained with what its run has now:\n  {facts}\n"
        f"Put back the files of {stamp.base_model} and the run's config.yaml as they were in "
        "training, or train again"
    )


def digest_of_text(*texts: str) -> str:
    """Return a short SHA-256 of texts, each with its length."""
    total = hashlib.sha256()
    for text in texts:
        data = text.encode()
        total.update(f"{len(data)}:".encode() + data)
    return total.hexdigest()[:16]


def digest_of_model(folder: Path) -> str:
    """Return a short SHA-256 of a model folder.

    It covers config.json, and size, head, tail and 64 samples of each weight file. Hashing all of
    140 GB takes minutes; training changes every block, so samples tell two sets of weights apart.
    """
    total = hashlib.sha256()
    paths = [folder / "config.json", *folder.glob("*.safetensors"), *folder.glob("*.bin")]
    for path in sorted(paths):
        if not path.is_file() or path.name == "training_args.bin":
            continue
        size = path.stat().st_size
        total.update(f"{path.name}:{size}".encode())
        last = max(size - SAMPLE_BYTES, 0)
        starts = {min(number * size // SAMPLES, last) for number in range(SAMPLES + 1)}
        with path.open("rb") as file:
            for start in sorted(starts):
                file.seek(start)
                total.update(file.read(SAMPLE_BYTES))
    return total.hexdigest()[:16]


def _short(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)
