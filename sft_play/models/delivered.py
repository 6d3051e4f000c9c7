"""Linear layers that compute with the weight that servers will run (`train.deliver_as`).

They round in the same way as the writer of the files (`models.compressed`), see
`sft_kernels.linears.delivered`.
"""

import contextlib
from collections.abc import Iterator

from peft.tuners.lora.layer import Linear as PeftLinear
from torch import nn
from transformers import PreTrainedModel

from sft_kernels.linears.delivered import DeliveredLinear, DeliveredLoraLinear
from sft_kernels.partitioned import is_partitioned
from sft_play.config.schema import Config
from sft_play.errors import ConfigError
from sft_play.models.experts import expert_weights


def deliver(model: PreTrainedModel, config: Config) -> None:
    """Round the linear layers of a model without adapters if train.deliver_as is set.

    Raises: ConfigError for a model that is not quantized here.
    """
    kind = config.train.deliver_as
    if kind is None:
        return
    from sft_play.models.compressed import Rounding, quantized_linears  # takes seconds to import

    if expert_weights(model):
        raise ConfigError(
            f"train.deliver_as={kind}: the experts of {type(model).__name__} are not rounded in "
            "training; set TRAIN_DELIVER_AS=null, and export the run as fp8 or int4"
        )
    linears = quantized_linears(model).chosen
    rounding = Rounding.of(kind, linears.values(), config.model.name)
    for name, linear in linears.items():
        if type(linear) is not nn.Linear or is_partitioned(linear.weight):
            raise ConfigError(
                f"train.deliver_as={kind}: {name} is quantized to 4 bits or sharded by ZeRO-3; "
                "set TRAIN_STRATEGY=fsdp or ddp, or MODEL_NAME to a base in 16 bits"
            )
        linear.__class__ = DeliveredLinear
        linear.rounding = rounding


def deliver_adapters(model: nn.Module) -> None:
    """Make PEFT's linear layers over rounded ones round the adapter, too."""
    for module in model.modules():
        if type(module) is PeftLinear and isinstance(module.base_layer, DeliveredLinear):
            module.__class__ = DeliveredLoraLinear


def rounds_inputs(model: nn.Module) -> bool:
    """Return whether linear layers of a model round their inputs."""
    delivered = (part.rounding for part in model.modules() if isinstance(part, DeliveredLinear))
    return any(rounding.scheme.input_activations is not None for rounding in delivered)


@contextlib.contextmanager
def as_trained(model: nn.Module) -> Iterator[None]:
    """Compute without rounding in this context, with the weights that are saved."""
    linears = [module for module in model.modules() if isinstance(module, DeliveredLinear)]
    for linear in linears:
        linear.is_rounded = False
    try:
        yield
    finally:
        for linear in linears:
            linear.is_rounded = True
