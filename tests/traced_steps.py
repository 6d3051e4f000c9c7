"""Steps of a model with and without data, as the trace counts them."""

from collections.abc import Iterable

import torch
from torch import Tensor
from transformers import PreTrainedModel

from sft_kernels.process import Process
from sft_play.config.schema import Config
from sft_play.models.fake_model import build_architecture, quantize_and_adapt
from sft_play.models.load import load_model
from sft_play.models.step_meter import MicroBatchBytes, StepMeter, StepSetup
from sft_play.models.trace import tracing
from sft_play.plan.traced import TracedSize

SIZE = TracedSize(3, 24)


def build_on_meta(config: Config, compute_dtype: torch.dtype) -> PreTrainedModel:
    """Return the model that a run would load, on the meta device, quantized and with adapters."""
    model = build_architecture(config, compute_dtype)
    return quantize_and_adapt(model, config, compute_dtype, zero_stage=0)


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the storages of `tensors`, each storage once."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def loaded(step: StepSetup) -> PreTrainedModel:
    """Return the real model of a step on a CPU, in training mode."""
    process = Process.alone(torch.device("cpu"), step.compute_dtype)
    return load_model(step.config, process).train()


def real_point(step: StepSetup, layers: int = 0, size: TracedSize = SIZE) -> MicroBatchBytes:
    """Return the bytes of a micro-batch with data."""
    return StepMeter(loaded(step), step).measure(size, layers)


def traced_point(step: StepSetup, layers: int = 0, size: TracedSize = SIZE) -> MicroBatchBytes:
    """Return the bytes of a micro-batch without data."""
    model = build_on_meta(step.config, step.compute_dtype)
    with tracing(model, step):
        return StepMeter(model.train(), step).measure(size, layers)
