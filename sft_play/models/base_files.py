"""Read what a base's files contain without loading its model, and write a saved model's files.

A saved model includes the base's config.json, its processors and its untrained tensors.
transformers would write a new config.json without the values that are defaults of its version. It
would also save only the tensors that its class loads. A head that drafts tokens (MTP) would be
lost.

A base with model.add_tokens is read as if its files contained the tokens' rows. All code that reads
it gets a config.json with the larger vocabulary. It also gets an embedding and an output head with
the new rows, which are the mean of all others. So adapters, quantization, FSDP, ZeRO-3 and merging
need no special code, and every rank reads the same numbers.

Legend: V rows of the files, R rows including those of the added tokens, D features.
"""

import contextlib
import logging
import shutil
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from os.path import commonprefix
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.utils import (
    CONFIG_NAME,
    IMAGE_PROCESSOR_NAME,
    PROCESSOR_NAME,
    VIDEO_PROCESSOR_NAME,
)

from sft_play.config.schema import Config
from sft_play.config.sections.model import EMBEDDINGS, HEADS
from sft_play.data.tokenizer import fetch_file, load_tokenizer
from sft_play.errors import CheckpointError, ConfigError, EnvironmentFault, first_line
from sft_play.models import stored_weights
from sft_play.models.architecture import auto_class_of, encoders_of
from sft_play.models.parameters import dtype_name
from sft_play.models.shards import InFile, ShardWriter, files_in, tensor_files, tensors_in
from sft_play.models.stored_weights import (
    Stored,
    as_plain,
    reading_as_plain,
    reading_changed,
    stored_shape,
)
from sft_play.plan.stored_as import SECTIONS, StoredAs, stored_as
from sft_play.runs.files import read_json, rename, write_json
from sft_play.runs.model_folder import read_headers

logger = logging.getLogger(__name__)

PROCESSOR_FILES = (PROCESSOR_NAME, IMAGE_PROCESSOR_NAME, VIDEO_PROCESSOR_NAME)


class VocabularyGrowth(NamedTuple):
    """The number of rows of a vocabulary, in a base's files and with the added tokens."""

    before: int  # V
    after: int  # R


@dataclass(frozen=True)
class GrownTensor:
    """A tensor in a file whose first dimension gets more rows. It is read when it is indexed."""

    stored: Any
    rows: int

    def __getitem__(self, index: Any) -> Tensor:
        """Return rows (R, ...) in the file's dtype."""
        weight = self.stored[...]  # (V, ...)
        # in float64, so that the summation order does not change the rounded mean
        mean = weight.mean(0, keepdim=True, dtype=torch.float64).to(weight.dtype)
        return torch.cat([weight, mean.expand(self.rows - len(weight), *mean.shape[1:])])[index]

    def get_shape(self) -> list[int]:
        """Return the shape including the new rows."""
        return [self.rows, *self.stored.get_shape()[1:]]

    def get_dtype(self) -> str:
        """Return the dtype by its name in the file."""
        return self.stored.get_dtype()


def stored_config(config: Config) -> PretrainedConfig:
    """Return the config of the base's files with the rows of model.add_tokens.

    Raises: EnvironmentFault if it cannot be read.
    """
    stored = _config_of_files(config)
    return grow_config(stored, growth_of_base(config, stored))


def growth_of_base(
    config: Config, stored: PretrainedConfig | None = None
) -> VocabularyGrowth | None:
    """Return how the vocabulary of the base grows with model.add_tokens, None if it does not.

    `stored` is the config of the base's files, if it was read before.
    """
    if not config.model.add_tokens:
        return None
    rows = (stored or _config_of_files(config)).get_text_config().vocab_size
    needed = max(load_tokenizer(config).convert_tokens_to_ids(config.model.add_tokens)) + 1
    return VocabularyGrowth(rows, needed) if needed > rows else None


def read_config(config: Config) -> PretrainedConfig:
    """Return the config of the base's files. Raises: OSError, ValueError, KeyError."""
    model = config.model
    return AutoConfig.from_pretrained(
        model.name, revision=model.revision, trust_remote_code=model.trust_remote_code
    )


def _config_of_files(config: Config) -> PretrainedConfig:
    try:
        return read_config(config)
    except (OSError, ValueError, KeyError) as error:
        raise EnvironmentFault(
            f"model.name={config.model.name}: the weights could not be loaded: "
            f"{first_line(error)}; see that the folder is whole, or get the model again"
        ) from error


def stores_own_head(config: Config, stored: PretrainedConfig) -> bool:
    """Return whether the files store a head that differs from the embedding config ties it to.

    transformers then ties neither, unless it shards the weights as it reads them.
    """
    model_class = auto_class_of(stored)._model_mapping.get(type(stored), None)
    tied = getattr(model_class, "_tied_weights_keys", None)
    is_tied = getattr(stored.get_text_config(), "tie_word_embeddings", False)
    if not (is_tied and isinstance(tied, dict)):
        return False
    files = {_ending(name): (name, path) for name, path in tensor_files(config).items()}
    for pair in tied.items():
        found = [files[end] for end in map(_ending, pair) if end in files]
        head_and_embedding = [tensor[...] for tensor in tensors_in(dict(found)).values()]
        if len(found) == 2 and not torch.equal(*head_and_embedding):
            return True
    return False


def _ending(name: str) -> str:
    """Return a tensor's module and kind, which have the same names in the file and the class."""
    return ".".join(name.split(".")[-2:])


def stored_format(config: Config, stored: PretrainedConfig) -> StoredAs | None:
    """Return the quantization of the base's weight files, None for 16 or 32 bits."""
    try:
        headers = list(read_headers(sorted(set(tensor_files(config).values()))))
    except (SafetensorError, OSError, ValueError):  # loading the weights reports why
        headers = []
    return stored_as(stored.to_dict(), headers)


def base_tensors(config: Config) -> Mapping[str, InFile | Stored | GrownTensor]:
    """Return the tensors of a base's files by name, with quantized tensors dequantized.

    Embedding and head include the rows of model.add_tokens.
    """
    tensors = tensors_in(tensor_files(config))
    found = stored_format(config, _config_of_files(config))
    if found is not None:
        tensors = as_plain(tensors, found.block, dtype=getattr(torch, found.dtype))
    return grow_tensors(tensors, growth_of_base(config))


def plain_dtype(in_file: InFile | Stored, tensor: Tensor) -> torch.dtype:
    """Return the dtype in which an unquantized checkpoint stores a tensor that was read."""
    return in_file.dtype if isinstance(in_file, Stored) else tensor.dtype


def reading_stored(
    found: StoredAs, device: torch.device, keeps_experts: bool
) -> contextlib.AbstractContextManager[None]:
    """Return the context in which `from_pretrained` reads weights stored in format `found`.

    With `keeps_experts`, MXFP4 experts are packed again without loss.
    """
    way = "as its experts stay" if keeps_experts else found.way
    logger.info("model: stored as %s, %s", found.name, way)
    if found.way == "packed":
        return contextlib.nullcontext()
    return reading_as_plain(found.block, device if device.type == "cuda" else None)


def plain_reading(config: Config) -> dict[str, Any] | None:
    """Return how a process without SFT-Play reads a base as unquantized, None if not needed."""
    found = stored_format(config, _config_of_files(config))
    if found is None or found.way == "packed":
        return None
    return {"module": stored_weights.__file__, "block": found.block}


def copy_processors(config: Config, target: Path) -> None:
    """Copy the base's processor files, and its code if it is trusted, next to saved weights."""
    paths = [fetch_file(config.model, name) for name in PROCESSOR_FILES]
    stored = fetch_file(config.model, CONFIG_NAME)
    if config.model.trust_remote_code and stored is not None:
        paths += stored.parent.glob("*.py")
    for path in paths:
        if path is not None:
            shutil.copyfile(path, target / path.name)


def refuse_other_processors(config: Config, weights: Path) -> None:
    """Raise CheckpointError if the base's processor is not the one the weights were trained with.

    Otherwise images would be resized or cropped differently.
    """
    for name in PROCESSOR_FILES:
        saved, own = weights / name, fetch_file(config.model, name)
        if own is not None and saved.is_file() and saved.read_bytes() != own.read_bytes():
            raise CheckpointError(
                f"{saved} is what the run trained with, and {own} differs, so images would be read "
                f"otherwise; put the base's file back: cp {saved} {own}"
            )


def write_config(
    config: Config, model: PreTrainedModel, target: Path, dtype: torch.dtype | None, unties: bool
) -> None:
    """Write the base's config.json next to 16- or 32-bit weights of `dtype` (None: several types).

    `unties`: the output head is no longer tied to the embedding. A stretched rope is taken from the
    model.
    """
    stored = fetch_file(config.model, CONFIG_NAME)
    if config.model.rope_scaling.rope_type or stored is None:
        model.config.architectures = [type(model).__name__]
        model.config.save_pretrained(target)
        stored = target / CONFIG_NAME
    values = read_json(stored)
    values.setdefault("architectures", [type(model).__name__])
    text = values.get("text_config")
    for part in (values, text) if isinstance(text, dict) else (values,):
        for section in SECTIONS:
            part.pop(section, None)
        if unties:
            part["tie_word_embeddings"] = False
        if config.model.add_tokens and (part is text or "vocab_size" in part or text is None):
            part["vocab_size"] = model.config.get_text_config().vocab_size
        if dtype is not None and ("dtype" in part or "torch_dtype" in part or part is values):
            part["torch_dtype" if "torch_dtype" in part else "dtype"] = dtype_name(dtype)
    write_json(target / CONFIG_NAME, values)


def restore_untrained(config: Config, model: PreTrainedModel, folder: Path) -> None:
    """Write the base's original tensors into a saved model, bit by bit, if they were not trained.

    They are the tensors of frozen encoders and those that the model's class does not load. For a
    quantized base they are its stored numbers. All tensors get the names of the base's files,
    because transformers saves some models under other names. The files that transformers saved stay
    unchanged if the base has no local safetensors files, or if the model is in 4 bits.
    """
    base = base_tensors(config)
    if not base or getattr(model, "hf_quantizer", None) is not None:
        return
    encoders: tuple[str, ...] = ()
    if not config.tuning.trains_encoders:
        encoders = tuple(f"{name}." for name in encoders_of(model))
    loaded = loaded_names(model, base)
    kept = {name for name, own in loaded.items() if own is None or own.startswith(encoders)}
    saved = files_in(folder)
    replaced = {loaded[name] for name in kept}
    trained = loaded_names(model, saved)
    renamed = names_in_base(trained, loaded)
    tensors = tensors_in(saved)
    turned = {
        name
        for name, tensor in tensors.items()
        if are_experts_transposed(tensor, base.get(renamed.get(name, name)))
    }
    if not (kept or renamed or turned):
        return
    staging = folder / "complete"
    staging.mkdir()
    writer = ShardWriter(staging)
    for name, in_file in tensors.items():
        if trained[name] is None or trained[name] not in replaced:
            tensor = in_file[...]
            if name in turned:
                tensor = tensor.transpose(1, 2).contiguous()
            writer.add(renamed.get(name, name), tensor)
    for name, in_file in base.items():
        if name in kept:
            tensor = in_file[...]
            writer.add(name, tensor.to(plain_dtype(in_file, tensor)))
    writer.close()
    for path in {*saved.values(), *folder.glob("*.safetensors.index.json")}:
        path.unlink()
    for path in staging.iterdir():
        rename(path, folder / path.name)
    staging.rmdir()
    logger.info("model: %d tensors are the base's own, as they were", len(kept))


def are_experts_transposed(saved: InFile | Stored, base: InFile | Stored | None) -> bool:
    """Return whether saved experts have inputs and outputs swapped relative to the base's files.

    transformers transposes the experts of Qwen3-VL-MoE when it loads them, but not when it saves
    them.
    """
    if base is None:
        return False
    found, wanted = tuple(saved.get_shape()), tuple(base.get_shape())
    return len(found) == 3 and found != wanted and (found[0], found[2], found[1]) == wanted


def names_in_base(
    saved: Mapping[str, str | None], base: Mapping[str, str | None]
) -> dict[str, str]:
    """Return the base's name of each saved tensor that has a different name in the base.

    Both arguments map names in files to the model's tensors. If one tensor is stored in several
    pieces, e.g. experts, pieces with equal name endings are matched.
    """
    by_tensor: dict[str, list[str]] = defaultdict(list)
    for name, own in base.items():
        if own is not None and name not in saved:
            by_tensor[own].append(name)
    found: dict[str, str] = {}
    for name, own in saved.items():
        candidates = by_tensor.get(own or "", [])
        if name not in base and candidates:
            found[name] = max(candidates, key=partial(_equal_ending, name.split(".")))
    return found


def _equal_ending(words: list[str], other: str) -> int:
    """Return how many of the last words of two dotted names are equal."""
    return len(commonprefix((words[::-1], other.split(".")[::-1])))  # noqa: RUF071 - no paths


def loaded_names(model: PreTrainedModel, names: Iterable[str]) -> dict[str, str | None]:
    """Return the model's tensor that each file tensor becomes, None if it becomes none."""
    mapping = get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    own = model.state_dict()
    found: dict[str, str | None] = {}
    for name in names:
        renamed, _ = rename_source_key(name, renamings, converters, model.base_model_prefix, own)
        found[name] = renamed if renamed in own else None
    return found


def grow_config(stored: PretrainedConfig, growth: VocabularyGrowth | None) -> PretrainedConfig:
    """Return the config of a base's files with the number of rows of the grown vocabulary."""
    for part in (stored, stored.get_text_config()) if growth else ():
        if getattr(part, "vocab_size", None) == growth.before:
            part.vocab_size = growth.after
    return stored


def grow_tensors(tensors: Mapping[str, Any], growth: VocabularyGrowth | None) -> Mapping[str, Any]:
    """Return the tensors of a base's files, with the new rows in the embedding and the head.

    Raises: ConfigError if the embedding has an unknown name.
    """
    grown = dict(tensors)
    modules = {name: name.split(".")[-2:][0] for name in tensors}
    for name, tensor in tensors.items() if growth else ():
        is_matrix = modules[name] in EMBEDDINGS | HEADS  # or a bias of the head
        if is_matrix and stored_shape(tensor)[0] == growth.before:
            lazy = GrownTensor(tensor, growth.after)
            grown[name] = lazy[...] if isinstance(tensor, Tensor) else lazy
    if growth and tensors and not EMBEDDINGS.intersection(modules.values()):
        raise ConfigError(
            "model.add_tokens: the base's files have no embedding under a name that is known "
            f"({', '.join(sorted(EMBEDDINGS))}); add the tokens and their rows to the base by "
            "yourself, and name them in TUNING_LORA_TRAINABLE_TOKENS"
        )
    return grown


def reading_grown(growth: VocabularyGrowth | None) -> contextlib.AbstractContextManager[None]:
    """Return the context in which `from_pretrained` reads a base with the new rows."""
    if growth is None:
        return contextlib.nullcontext()
    logger.info("model.add_tokens: the vocabulary of %d rows is read with %d", *growth)
    return reading_changed(lambda tensors: grow_tensors(tensors, growth))
