"""What can be said of fused modules without values, in a trace: whether they run, and their shapes.

A module that its structure has recognised may still be called in another way. A run finds that in
its proof; a trace finds it here, so that it counts the bytes of the code that the run will use.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from sft_play.models.fast.capture import PACKED, PLAIN, Call, Kind, as_it_was, shape_of
from sft_play.models.fast.setup import TrainingSetup


def why_not_alike(
    kind: Kind,
    fused: Callable[[nn.Module], Callable[..., Any]],
    setup: TrainingSetup,
    fused_call: Callable[[Call, str], Call] | None,
) -> str | None:
    """Return why the fused code of a kind of modules is not used, None where it is.

    It is where it runs, with outputs of the shapes of the module's own. The arguments are those of
    `proof.prove`.
    """
    sample = setup.proof_inputs.samples.get(kind)
    if sample is None:
        return "no token of the proof reached it"
    module = sample.module
    name = type(module).__name__
    device = next(setup.base.parameters()).device
    dtype = setup.process.compute_dtype
    is_half = dtype.itemsize == 2 and not setup.zero_stage
    for batch, call in sample.calls.items():
        # where both are called in one way, one batch shows the shapes
        if batch == PACKED and fused_call is None and PLAIN in sample.calls:
            continue
        given = fused_call(call, batch) if fused_call is not None else call
        with as_it_was(module, device), torch.autocast(device.type, dtype, enabled=is_half):
            module.train()
            try:
                computed = shape_of(fused(module)(*given.args, **given.kwargs))
            except (TypeError, ValueError, RuntimeError, AttributeError, IndexError) as error:
                return f"{name} is called in another way ({type(error).__name__})"
        if computed != call.shape:
            return f"{name} computes something else (shapes {call.shape} and {computed})"
    return None
