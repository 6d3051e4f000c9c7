"""Change weights while transformers reads them, so that no model is ever complete on one device."""

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from unittest.mock import patch

from torch import nn
from transformers import PreTrainedModel, core_model_loading, modeling_utils

SEQUENTIAL_LOAD = "HF_DEACTIVATE_ASYNC_LOAD"  # read by transformers


@contextlib.contextmanager
def changing_weights(
    layers_of: Callable[[PreTrainedModel], Iterable[nn.Module]],
    change: Callable[[nn.Parameter], None],
) -> Iterator[None]:
    """Let from_pretrained change each parameter of some layers once it was read and quantized.

    transformers reserves no memory of the GPU for the complete model.
    """
    set_weight = core_model_loading.set_param_for_module
    inside: set[nn.Module] = set()

    def set_and_change(model: PreTrainedModel, name: str, *args: Any) -> None:
        set_weight(model, name, *args)
        if not inside:
            for layer in layers_of(model):
                inside.update(layer.modules())
        holder, _, own = name.rpartition(".")
        module = model.get_submodule(holder)
        weight = module._parameters.get(own)
        if weight is not None and module in inside:
            change(weight)

    with (
        patch.object(core_model_loading, set_weight.__name__, set_and_change),
        patch.object(modeling_utils, "caching_allocator_warmup", lambda *_: None),
    ):
        yield


@contextlib.contextmanager
def one_tensor_at_a_time() -> Iterator[None]:
    """Let transformers read a tensor when it is needed.

    Its threads read ahead of what joins experts, and of what moves weights to the host: the GPU
    could hold up to twice the model's bytes.
    """
    before = os.environ.get(SEQUENTIAL_LOAD)
    os.environ[SEQUENTIAL_LOAD] = "1"
    try:
        yield
    finally:
        del os.environ[SEQUENTIAL_LOAD]
        if before is not None:
            os.environ[SEQUENTIAL_LOAD] = before
