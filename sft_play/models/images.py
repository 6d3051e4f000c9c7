"""Describe how a model reads images: its batches' arguments, and which tokens see ahead."""

import contextlib
import functools
import inspect

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from sft_kernels.sharded import run_within
from sft_kernels.training_setup import base_model_of
from sft_play.config.schema import Config
from sft_play.data.collate import ImageInputs
from sft_play.data.processor import Processor
from sft_play.models.architecture import empty_twin, encoders_of

ROPE_INDEX = "get_rope_index"  # transformers' method if positions have three axes
# transformers' name for the function that numbers the images whose tokens see each other
BLOCKS = "get_block_sequence_ids_for_mask"


def image_inputs_of(
    model: nn.Module,
    config: Config,
    tokenizer: PreTrainedTokenizerBase,
    is_packed: bool = False,
    has_boundaries: bool = False,
) -> ImageInputs | None:
    """Return what builds the inputs of images for a model, None for a text-only model.

    With `has_boundaries`, packed batches have boundaries instead of a mask.
    """
    base = base_model_of(model)
    encoders = encoders_of(base)
    if not encoders:
        return None
    dtype = next(next(iter(encoders.values())).parameters()).dtype
    rope = None
    if is_packed:
        parts = empty_twin(base).modules()
        rope = next((part for part in parts if hasattr(part, ROPE_INDEX)), None)
    arguments = frozenset(inspect.signature(type(base).forward).parameters)
    gives_blocks = has_boundaries and reads_both_ways(base)
    return ImageInputs(Processor(config, tokenizer), arguments, dtype, rope, gives_blocks)


def trained_encoder_weights(model: nn.Module) -> list[nn.Parameter]:
    """Return the trained weights of encoders, including adapters."""
    base = base_model_of(model)
    encoders = encoders_of(base).values() if isinstance(base, PreTrainedModel) else ()
    weights = dict.fromkeys(weight for encoder in encoders for weight in encoder.parameters())
    return [weight for weight in weights if weight.requires_grad]


def keep_encoders_in_their_type(model: PreTrainedModel) -> None:
    """Let untrained 16-bit encoders compute as they do in inference: without autocast.

    Autocast would cast the inputs and outputs of their norms to float32 and back.
    """
    for encoder in encoders_of(model).values():
        run_within(encoder, functools.partial(_own_type, encoder))


def _own_type(encoder: nn.Module) -> contextlib.AbstractContextManager[None]:
    parameters = list(encoder.parameters())
    if any(each.requires_grad or each.dtype.itemsize != 2 for each in parameters):
        return contextlib.nullcontext()
    return torch.autocast(parameters[0].device.type, enabled=False)


def reads_both_ways(model: PreTrainedModel) -> bool:
    """Return whether the tokens of an image see each other, according to the class's code."""
    classes = {type(module) for module in model.modules() if isinstance(module, PreTrainedModel)}
    return any(BLOCKS in inspect.unwrap(one.forward).__code__.co_names for one in classes)
