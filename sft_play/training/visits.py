"""A model whose modules are visited once, and not in each micro-step."""

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def visited_once(model: torch.nn.Module) -> Iterator[None]:
    """Let `train` and `parameters` of a model visit its modules once in this context.

    Trainer calls the first in each micro-step, and the second for zeroing and for clipping the
    gradients. A model of 48 layers with adapters has some 3,600 modules, all of which the host
    would visit each time.
    """
    kind = type(model)
    model.train()  # a model that was just loaded is partly in evaluation mode
    every = list(model.parameters())

    def parameters(recurse: bool = True) -> Iterator[torch.nn.Parameter]:
        return iter(every) if recurse else kind.parameters(model, recurse=False)

    def train(mode: bool = True) -> torch.nn.Module:
        return model if mode == model.training else kind.train(model, mode)

    instance = vars(model)
    instance |= {"parameters": parameters, "train": train}
    try:
        yield
    finally:
        del instance["parameters"], instance["train"]
