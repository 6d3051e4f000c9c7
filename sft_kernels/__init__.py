"""Fused kernels for transformers' models, proven on each model before it trains.

    print(sft_kernels.fuse(model))   # what is fused, what is not and why, and how exactly
    sft_kernels.undo(model)

`fuse` comes after PEFT's adapters are added; any trainer trains the model. `float8` stores the
weights under adapters in float8, and `documents` names the documents of a packed row.

Each part of a model has a package: `attention`, `experts`, `linears`, `loss`, `mixers` and `norms`;
`e4m3` stores base weights. An `install_` function in each finds the modules of its part and sets
their fused forward methods. The package's other modules contain the formula first, then a reference
in torch, then the kernel if there is one. All packages use the modules next to them:

    install        installs one part after the other on a loaded model: start reading here
    fuse_model     `fuse` and `undo`, which give any trainer the same
    training_setup the model, and how it will be trained; `process` says where
    recognize      what a module computes, found from its structure
    capture        real inputs of the modules
    trial          a module's original and fused code on those inputs
    proof          whether outputs and gradients of both are the same
    boundaries     where the documents of a packed batch begin; `packed` shows them to modules
    trees          the same for samples with shared beginnings
    needs          the parts, and what their kernels need; without torch
    sharded        parameters of FSDP2; `partitioned` those of ZeRO
"""

from importlib import import_module
from typing import Any

MODULES = dict.fromkeys(("Fused", "documents", "fuse", "undo"), "fuse_model") | {
    "float8": "e4m3.linear"
}
__all__ = [*MODULES]


def __getattr__(name: str) -> Any:
    """Return a public name, whose module imports torch."""
    if name in MODULES:
        return getattr(import_module(f"sft_kernels.{MODULES[name]}"), name)
    raise AttributeError(f"sft_kernels has no {name}")
