"""Merge an adapter into its base: tensor by tensor, or in memory if that is not possible.

Tensor by tensor, the model and its adapter are built without weights. PEFT's layers compute each
merged weight, in float32, from the tensor that is read. Every other tensor is copied. So the merge
needs memory only for one shard and the adapter, for any base size.

An adapter that was trained over a quantized base can be merged into the base as training used it.
That base is rounded to 4 bits or to float8, and unpacked again.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from peft.tuners.lora.layer import ParamWrapper
from peft.utils import ModulesToSaveWrapper, TrainableTokensWrapper
from torch import Tensor, nn
from transformers import BitsAndBytesConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import PrefixChange, revert_weight_conversion

from sft_kernels.e4m3.quantize import quantize_weight, why_not_quantized
from sft_kernels.e4m3.rows import FLOAT8
from sft_kernels.process import Process
from sft_play.config.schema import Config
from sft_play.errors import CheckpointError
from sft_play.models import bnb
from sft_play.models.adapter_state import ADAPTER
from sft_play.models.architecture import empty_model, empty_twin, replace_tensors
from sft_play.models.base_files import (
    base_tensors,
    plain_dtype,
    restore_untrained,
    stored_config,
    stored_format,
    write_config,
)
from sft_play.models.bnb import pack_4bit, packed_names, unpack_4bit
from sft_play.models.expert_adapters import load_frozen_adapter
from sft_play.models.experts import expert_weights
from sft_play.models.float8 import float8_candidates
from sft_play.models.load import config_to_load, load_base
from sft_play.models.shards import InFile, ShardWriter
from sft_play.models.stored_weights import Stored
from sft_play.plan.stored_as import keeps_mxfp4

Quantization = BitsAndBytesConfig | torch.dtype  # of bitsandbytes, or the dtype FLOAT8
Change = Callable[[Tensor], Tensor]  # of a weight in float32


class CannotStream(Exception):
    """The base's files do not contain the model's tensors one by one; the message says why."""


@dataclass
class Skeleton:
    """A model with its adapter, whose base weights are not in memory."""

    model: PreTrainedModel
    changes: dict[str, Change]  # by the name of the changed parameter
    deltas: dict[str, Callable[[], Tensor]]  # what is added to experts' parameters
    embedding: str  # the name of its weight
    untied_head: str | None  # name of an output head that changed and was tied before


@dataclass(frozen=True)
class Merge:
    """How an adapter is merged into its base."""

    config: Config
    adapter: Path
    dtype: torch.dtype | None = None  # of the result; None is each base tensor's dtype
    quantization: Quantization | None = None  # round the base as in training
    base_dtype: torch.dtype | None = None  # of the weights that were quantized in training


def merge_files(merge: Merge, target: Path) -> PreTrainedModel:
    """Write the merged weights and config.json to `target`; return the model without weights.

    Raises: CannotStream, before anything is written; CheckpointError for a broken adapter.
    """
    tensors = base_tensors(merge.config)
    skeleton = build_skeleton(merge)
    sources = match_tensors(skeleton, tensors)
    packed: set[str] = set()
    if merge.quantization is not None:
        packed = quantized_names(skeleton.model, merge)
        if any(name in skeleton.deltas for name in packed):
            raise CannotStream("experts that were packed in 4 bits are packed together")
    target.mkdir(parents=True, exist_ok=True)
    writer = ShardWriter(target)
    # a layer's experts are two parameters
    pieces = functools.lru_cache(maxsize=2)(functools.partial(_pieces, skeleton))
    for name, in_file in tensors.items():
        parameter = sources.get(name)
        merged = tensor = in_file[...]
        dtype = merge.dtype if tensor.is_floating_point() else None
        dtype = dtype or plain_dtype(in_file, tensor)
        if parameter in packed:
            merged = rounded_as_quantized(tensor.to(merge.base_dtype), merge.quantization)
        if parameter in skeleton.deltas:
            merged = merged.float() + pieces(parameter)[name]
        elif parameter in skeleton.changes:
            merged = skeleton.changes[parameter](in_float32(merged))
        writer.add(name, merged.to(dtype))
        head = skeleton.untied_head
        if head is not None and parameter == skeleton.embedding:
            writer.add(head, skeleton.changes[head](in_float32(tensor)).to(dtype))
    writer.close()
    dtype = merge.dtype
    if dtype is None and len(writer.float_types) == 1:
        (dtype,) = writer.float_types
    unties = skeleton.untied_head is not None
    write_config(merge.config, skeleton.model, target, dtype, unties)
    return skeleton.model


@torch.no_grad()
def merge_whole(merge: Merge, target: Path) -> PreTrainedModel:
    """Merge in memory; write the merged model to `target` and return it.

    This is for bases whose files contain other tensors than the model, e.g. experts in MXFP4.
    """
    plain = {"tuning.mode": "lora", "tuning.base_dtype": "auto"}
    # only weights are summed here; attention is not computed
    unquantized = merge.config.changed({**plain, "model.attn_implementation": "auto"})
    base = load_base(unquantized, Process.alone(torch.device("cpu")), dtype="auto")
    if merge.quantization is not None:
        for name in quantized_names(base, merge):
            weight = base.get_parameter(name)
            packed = rounded_as_quantized(weight.data.to(merge.base_dtype), merge.quantization)
            weight.data = packed.to(weight.dtype)
    merged = load_frozen_adapter(base, merge.adapter).merge_and_unload(safe_merge=True)
    if merge.dtype is not None:
        merged = merged.to(merge.dtype)
    merged.save_pretrained(target)
    write_config(merge.config, merged, target, merge.dtype, unties=False)
    restore_untrained(merge.config, merged, target)
    return merged


def build_skeleton(merge: Merge) -> Skeleton:
    """Return the model and the changes that the adapter makes to it.

    Raises: CannotStream if the model cannot be built this way; CheckpointError for an adapter that
    lacks tensors.
    """
    stored = config_to_load(merge.config)
    model = empty_model(stored, torch.float32, merge.config.model.trust_remote_code)
    without_memory(model)
    is_tied = getattr(model.config.get_text_config(), "tie_word_embeddings", False)
    adapted = load_frozen_adapter(model, merge.adapter)
    changes, deltas = find_changes(adapted)
    twin = plain_twin(model)
    names = {module: f"{name}.weight" for name, module in twin.named_modules()}
    embedding = names[twin.get_input_embeddings()]
    head = names.get(twin.get_output_embeddings())
    untied_head = None
    if is_tied and head in changes:
        if isinstance(model.get_output_embeddings(), LoraLayer):
            untied_head = head
        else:
            del changes[head]  # written together with the embedding
    return Skeleton(model, changes, deltas, embedding, untied_head)


def without_memory(model: PreTrainedModel) -> None:
    """Replace a model's meta weights by zeros that share one element.

    PEFT moves adapters to the device of their weight. On the meta device they would lose their
    values.
    """
    zero = torch.zeros(())

    def without_values(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, nn.Parameter):
            return tensor
        return nn.Parameter(zero.expand(tensor.shape), requires_grad=False)

    replace_tensors(model, without_values)


def find_changes(adapted: PeftModel) -> tuple[dict[str, Change], dict[str, Callable[[], Tensor]]]:
    """Return what an adapter changes in each parameter of its base."""
    changes: dict[str, Change] = {}
    deltas: dict[str, Callable[[], Tensor]] = {}
    for path, module in adapted.base_model.model.named_modules():
        name = path.replace(".base_layer", "")
        if isinstance(module, ParamWrapper):
            delta = functools.partial(module.get_delta_weight, ADAPTER)
            deltas[f"{name}.{module.parameter_name}"] = delta
        elif isinstance(module, LoraLayer):
            changes[f"{name}.weight"] = functools.partial(_merged, module)
        elif isinstance(module, TrainableTokensWrapper):
            changes[f"{name}.weight"] = functools.partial(_with_rows, module.token_adapter, name)
        elif isinstance(module, ModulesToSaveWrapper):
            for part, trained in module.modules_to_save[ADAPTER].named_parameters():
                changes[f"{name}.{part}"] = functools.partial(_replaced, trained, f"{name}.{part}")
    return changes, deltas


def match_tensors(skeleton: Skeleton, tensors: Mapping[str, InFile | Stored]) -> dict[str, str]:
    """Return the model's parameter for each tensor name of the base.

    Raises: CannotStream if a changed parameter is not stored in that form.
    """
    if not tensors:
        raise CannotStream("the base has no safetensors files here")
    shapes = {name: tuple(tensor.get_shape()) for name, tensor in tensors.items()}
    sources: dict[str, str] = {}
    for name, parameter in plain_twin(skeleton.model).state_dict().items():
        # a base may store as one tensor what transformers saves in pieces, e.g. Qwen3.5's experts
        pieces = {name: parameter} | as_saved(skeleton.model, name, parameter)
        for piece, tensor in pieces.items():
            if shapes.get(piece) == tuple(tensor.shape):
                sources[piece] = name
    known = set(sources.values())
    wanted = {*skeleton.changes, *skeleton.deltas} - {skeleton.untied_head}
    missing = sorted(wanted - known)
    if missing:
        raise CannotStream(f"{missing[0]} is not in the base's files by itself")
    return sources


def in_float32(tensor: Tensor) -> Tensor:
    """Return a copy in float32, because PEFT adds to its input tensor in place."""
    return tensor.to(torch.float32, copy=True)


def _merged(layer: LoraLayer, weight: Tensor) -> Tensor:
    """Return the merged weight of a linear layer, computed by PEFT."""
    base = layer.get_base_layer()
    empty = base.weight
    base.weight = nn.Parameter(weight, requires_grad=False)
    layer.merge(adapter_names=[ADAPTER])
    merged = base.weight.data
    layer.merged_adapters.clear()
    base.weight = empty
    return merged


def _with_rows(adapter: nn.Module, name: str, weight: Tensor) -> Tensor:
    """Return an embedding or head with the rows of trained tokens."""
    rows = adapter.trainable_tokens_delta[ADAPTER].data
    index = torch.tensor(adapter.token_indices[ADAPTER])
    if int(index.max()) >= len(weight):
        raise CheckpointError(
            f"{name}: the adapter trained the row of token {int(index.max())}, and the base has "
            f"{len(weight)} rows; merge it into the base that it was trained on"
        )
    return weight.index_copy(0, index, rows.to(weight))


def _replaced(trained: Tensor, name: str, weight: Tensor) -> Tensor:
    """Return a weight that was trained in full."""
    if trained.shape != weight.shape:
        raise CheckpointError(
            f"{name}: the adapter holds {tuple(trained.shape)}, and the base has "
            f"{tuple(weight.shape)}; merge it into the base that it was trained on"
        )
    return trained.detach().float()


def _pieces(skeleton: Skeleton, parameter: str) -> dict[str, Tensor]:
    """Return the change of each tensor of a parameter, which files may store in several tensors."""
    delta = skeleton.deltas[parameter]().detach().float()
    return {parameter: delta} | as_saved(skeleton.model, parameter, delta)


def plain_twin(model: PreTrainedModel) -> PreTrainedModel:
    """Return a model's empty twin without its adapters, with the conversions of saving."""
    twin: PreTrainedModel | None = vars(model).get("plain_twin")
    if twin is None:
        twin = vars(model)["plain_twin"] = empty_twin(model)
        conversions = get_model_conversion_mapping(twin, add_legacy=False)
        twin._weight_conversions = [
            entry for entry in conversions if not isinstance(entry, PrefixChange)
        ]
    return twin


def as_saved(model: PreTrainedModel, name: str, tensor: Tensor) -> dict[str, Tensor]:
    """Return a parameter as transformers saves it: under another name, or in pieces."""
    twin = plain_twin(model)
    if not twin._weight_conversions:
        return {name: tensor}
    try:
        return revert_weight_conversion(twin, {name: tensor})
    except (RuntimeError, ValueError, KeyError, IndexError):
        return {}  # it is saved together with others


def training_quantization(
    config: Config, compute_dtype: torch.dtype
) -> tuple[str, Quantization] | None:
    """Return how a run's base was quantized, in words and as a config; None if it was not.

    If the files of the base are in 4 bits, training used them as they are.
    """
    found = stored_format(config, stored_config(config))
    if found is not None and found.way == "packed":
        return None
    if config.tuning.mode == "qlora":
        return "rounded to 4 bits", bnb.quantization_config(config, compute_dtype)
    if config.tuning.has_float8_base:
        return "rounded to float8", FLOAT8
    return None


def quantized_names(model: PreTrainedModel, merge: Merge) -> set[str]:
    """Return the names of the parameters that training rounded in a model of this kind.

    Experts in MXFP4 are not included, because training did not change them. The model may have
    adapters and no weights.
    """
    if isinstance(merge.quantization, BitsAndBytesConfig):
        names = packed_names(model, merge.quantization)
        found = stored_format(merge.config, stored_config(merge.config))
        if keeps_mxfp4(merge.config, found):
            names -= {weight.name for weight in expert_weights(empty_twin(model))}
        return names
    return {f"{name}.weight" for name in float8_candidates(empty_twin(model)).quantized}


def rounded_as_quantized(weight: Tensor, quantization: Quantization) -> Tensor:
    """Return a weight with the values that a quantized base computes with."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if isinstance(quantization, BitsAndBytesConfig):
        return unpack_4bit(pack_4bit(weight.to(device), quantization)).to(weight.device)
    found = quantize_weight(weight)
    if why_not_quantized(weight, found) is not None:
        return weight
    return found.dequantized(torch.float32)
