"""A model to install fused kernels on, and how it will be trained."""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from types import MethodType
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from transformers import PreTrainedModel

from sft_kernels import partitioned
from sft_kernels.capture import ProofInputs, capture
from sft_kernels.modules import bring_layer_of, decoder_of
from sft_kernels.process import Process
from sft_kernels.sharded import gathered_unit, units_by_module

# What the backward pass of an autograd function returns: None for inputs without a gradient
Gradients = tuple[Tensor | None, ...]


class Unsupported(Exception):
    """Raised with the reason why a part of a model cannot be fused."""


@dataclass(frozen=True)
class TrainingSetup:
    """A model to install kernels on, and how it will be trained."""

    model: PreTrainedModel | PeftModel
    process: Process
    zero_stage: int = 0  # of DeepSpeed; 0 without it
    is_full: bool = False  # every weight is trained; otherwise the base is frozen
    is_quantized: bool = False  # the base is in 4 bits
    why_off: str | None = None  # why nothing is fused; documents are kept apart
    attention: str = "auto"  # transformers' implementation that was asked for
    longest_row: int | None = None  # tokens of the longest training row, if it is known
    encoders: tuple[nn.Module, ...] = ()  # parts of the model that read no text
    settings: tuple[str, ...] = ()  # of the caller, on which recorded proofs depend
    # the context of each proof, by its name
    timed: Callable[[str], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    # Modules of the current part that keep their original implementation: one reason each
    left_out: list[str] = field(default_factory=list)
    # The largest difference that each proof found: first in earlier starts, then in this one
    proved: dict[str, float] = field(default_factory=dict)
    newly_proved: dict[str, float] = field(default_factory=dict)
    _whole_units: set[nn.Module] = field(default_factory=set)

    @property
    def base(self) -> PreTrainedModel:
        """Return transformers' model, without the adapters around it."""
        return base_model_of(self.model)

    @cached_property
    def decoder(self) -> nn.Module:
        """Return the stack of layers, without the head."""
        return decoder_of(self.base)

    @property
    def on_gpu(self) -> bool:
        return self.process.is_gpu

    @cached_property
    def has_values(self) -> bool:
        """Return whether the weights have values to compute with.

        Weights in a trace have none, and neither do 4-bit weights sharded by ZeRO-3.
        """
        for parameter in self.base.parameters():
            if parameter.is_meta or isinstance(parameter, FakeTensor):
                return False
            if not partitioned.is_gatherable(parameter):
                return False
        return True

    @property
    def has_packed_parts(self) -> bool:
        """Return whether ZeRO-3 shards 4-bit weights, which cannot be gathered here."""
        return self.zero_stage == 3 and self.is_quantized

    @cached_property
    def is_traced(self) -> bool:
        """Return whether the weights are fake tensors, which only have shapes."""
        return any(isinstance(parameter, FakeTensor) for parameter in self.base.parameters())

    @cached_property
    def proof_inputs(self) -> ProofInputs:
        """Return the inputs on which modules are proved; the first use runs the decoder."""
        return capture(self.base, self.process, self.longest_row)

    @cached_property
    def _units(self) -> dict[nn.Module, Any]:
        return units_by_module(self.base)

    @cached_property
    def _partitioned_units(self) -> dict[nn.Module, nn.Module]:
        return partitioned.layers_by_module(self.base) if self.has_values else {}

    @property
    def divides_weights(self) -> bool:
        """Return whether the base weights are sharded across ranks, by FSDP or ZeRO-3."""
        return self.zero_stage == 3 or bool(self._units)

    @contextlib.contextmanager
    def gathered(self, module: nn.Module) -> Iterator[None]:
        """Keep a module's direct weights on the device if they are sharded or in host memory.

        Layers gather or load theirs themselves.
        """
        bring_layer_of(module, self.base)
        if module in self._partitioned_units:
            unit = self._partitioned_units[module]
            with partitioned.gathered_parameters(
                partitioned.unit_parameters(unit, self._partitioned_units)
            ):
                yield
            return
        unit = self._units.get(module)
        if unit is None or unit in self._whole_units:
            yield
            return
        self._whole_units.add(unit)
        try:
            with gathered_unit(unit):
                yield
        finally:
            self._whole_units.remove(unit)

    def without_reason(self, reasons: dict[nn.Module, str | None]) -> list[nn.Module]:
        """Return the modules without a reason against fusing; record the others' reasons.

        Raises: Unsupported if every module has a reason.
        """
        found = [module for module, reason in reasons.items() if reason is None]
        counts = Counter(filter(None, reasons.values()))
        if counts and not found:
            raise Unsupported(next(iter(counts)))
        for reason, count in counts.items():
            self.left_out.append(f"{count} of {len(reasons)}: {reason}")
        return found


def base_model_of(model: nn.Module) -> nn.Module:
    """Return transformers' model without the adapters around it."""
    return model.get_base_model() if isinstance(model, PeftModel) else model


def to_compute_dtype(x: Tensor) -> Tensor:
    """Return x in the dtype of matrix multiplications: autocast's dtype, or x's without it."""
    device = x.device.type
    if not torch.is_autocast_enabled(device):
        return x
    return x.to(torch.get_autocast_dtype(device))


def is_training(module: nn.Module) -> bool:
    """Return whether a forward pass belongs to a training step; fused code runs only there."""
    return module.training and torch.is_grad_enabled()


def fuse(modules: Iterable[nn.Module], function: Callable[..., Any]) -> None:
    """Set a function as the forward method of modules."""
    for module in modules:
        module.forward = MethodType(function, module)


def is_fused(module: nn.Module, function: Callable[..., Any]) -> bool:
    """Return whether a function was set as the forward method of a module."""
    return getattr(vars(module).get("forward"), "__func__", None) is function
