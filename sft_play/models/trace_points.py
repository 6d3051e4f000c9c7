"""Traced steps of a model at a few sizes, from which `plan.traced` has the bytes of any layout.

`python -m sft_play.models.trace_points` is the process that the front end starts: a request on
stdin, the points on stdout, both JSON.
"""

import json
import sys
from dataclasses import asdict, replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import PreTrainedModel

from sft_play.config.schema import Config
from sft_play.errors import first_line
from sft_play.models.checkpointing import checkpoint_layers, decoder_layers
from sft_play.models.fake_kernels import fake_kernels
from sft_play.models.fake_model import build_on_meta, materialize
from sft_play.models.fast.install import fused_kernels_of, install_fused_kernels
from sft_play.models.step_meter import StepMeter, StepSetup
from sft_play.models.structure import UNBUILDABLE
from sft_play.plan.traced import SIZES, TracedPoint
from sft_play.process import Process


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Return {"answer": points and fused parts}, or {"refused": why the model cannot be traced}."""
    try:
        setup = StepSetup(
            config=Config.model_validate(request["settings"]),
            device=request["device"],
            checkpointed_layers=0,
            zero_stage=request["zero_stage"],
            accumulates=True,
        )
        return {"answer": trace_points(setup)}
    except UNBUILDABLE as error:
        return {"refused": f"{type(error).__name__}: {first_line(error)}"}


def trace_points(setup: StepSetup) -> dict[str, Any]:
    """Return the bytes of steps of all SIZES, with no layer checkpointed and with all of them.

    Raises: as `trace.trace_step`.
    """
    dtype = setup.compute_dtype
    process = Process.alone(torch.device(setup.device), dtype)
    model = build_on_meta(setup.config, dtype, setup.zero_stage)
    with FakeTensorMode(allow_non_fake_inputs=True), fake_kernels(setup.on_gpu):
        materialize(model, dtype if setup.zero_stage else None)  # DeepSpeed casts all weights
        kernels = install_fused_kernels(model, setup.config, process, setup.zero_stage)
        points = _measured(model.train(), setup)
    return {
        "points": [asdict(point) for point in points],
        "on": list(kernels.on),
        "off": dict(fused_kernels_of(model).off),
    }


def _measured(model: PreTrainedModel, setup: StepSetup) -> list[TracedPoint]:
    meter = StepMeter(model, setup)
    meter.hold_gradients()
    points = []
    for checkpointed in (0, len(decoder_layers(model))):
        checkpoint_layers(model, checkpointed)
        for size in SIZES:
            meter.setup = replace(setup, config=_with_tokens(setup.config, size.tokens))
            forward = meter.run_forward(size.rows)
            points.append(
                TracedPoint(
                    rows=size.rows,
                    tokens=size.tokens,
                    is_checkpointed=checkpointed > 0,
                    kept=forward.activations,
                    layers=forward.layers,
                    logits=forward.logits,
                    logits_kept=max(0, forward.logits_kept),
                    backward=meter.run_backward(forward),
                )
            )
    return points


def _with_tokens(config: Config, tokens: int) -> Config:
    return config.model_copy(
        update={"model": config.model.model_copy(update={"max_seq_len": tokens})}
    )


if __name__ == "__main__":
    print(json.dumps(answer(json.load(sys.stdin))))
