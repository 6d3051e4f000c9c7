"""Fused kernels for transformers' models, proven on each model before it trains.

    print(sft_kernels.fuse(model))   # what is fused, what is not and why, and how exactly
    sft_kernels.undo(model)

`fuse` comes after PEFT's adapters are added. Nothing else changes: transformers' Trainer, TRL's
SFTTrainer and accelerate train the model. Modules without torch can be imported without it.
"""

from importlib import import_module
from typing import Any

__all__ = ["Fused", "fuse", "undo"]


def __getattr__(name: str) -> Any:
    """Return a public name, whose module imports torch."""
    if name in __all__:
        return getattr(import_module("sft_kernels.fuse_model"), name)
    raise AttributeError(f"sft_kernels has no {name}")
