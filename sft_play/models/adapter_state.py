"""The tensors of an adapter: how a run keeps them, and how PEFT's files have them.

Whatever writes an adapter, reads one or compares with one does it here, in the names and shapes of
PEFT's `adapter_model.safetensors`. A tensor that a run keeps in another shape is turned into that
of the file by `as_published`, and back by `as_kept`: both take tensors by the names of the model's
parameters, so the state of an optimizer can go through them as well.

Every rank must call each of these functions.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from peft import PeftModel, get_peft_model_state_dict
from torch import Tensor

ADAPTER = "default"  # PEFT's name of the one adapter


def as_published(model: PeftModel, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors by the names of a model's parameters in the shapes of an adapter's file."""
    return dict(tensors)


def as_kept(model: PeftModel, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors in the shapes of the model's parameters: the reverse of `as_published`."""
    return dict(tensors)


def published_state(model: PeftModel) -> dict[str, Tensor]:
    """Return the tensors of a model's adapter, in the names and shapes of its file."""
    tensors = as_published(model, model.state_dict())
    # by default PEFT would ask the hub whether the vocabulary was resized
    return get_peft_model_state_dict(model, tensors, ADAPTER, save_embedding_layers=False)


def load_published(model: PeftModel, folder: str | Path, is_trainable: bool = False) -> NamedTuple:
    """Give the adapter of a model the tensors in a folder.

    Return the names of those that are missing there, and of those that the model has no place for.
    """

    def reshape(module: PeftModel, tensors: dict[str, Tensor], *_: Any) -> None:
        tensors.update(as_kept(module, tensors))

    hook = model.register_load_state_dict_pre_hook(reshape)
    try:
        return model.load_adapter(str(folder), ADAPTER, is_trainable=is_trainable)
    finally:
        hook.remove()
