"""What is to be trained and gets no gradient: found in the first steps of a run.

lora_A is left out: its gradient is zero while B is, so B speaks for its module. So are the adapters
of single experts, which a router may leave out for long; training.expert_use counts those.
"""

import logging
from typing import TYPE_CHECKING

import torch
from torch import nn

from sft_play.errors import DivergedError
from sft_play.models.sharding import own_part
from sft_play.process import Process

if TYPE_CHECKING:
    from sft_play.training.trainer import SftTrainer

logger = logging.getLogger(__name__)

STEPS = 10  # after which a gradient that was always zero is no accident
NAMED = 4  # modules in a message
LEFT_OUT = ("lora_A", "lora_embedding_A", ".experts.")


class GradientWatch:
    """Waits for the first gradient of each tensor that is trained, for STEPS steps at most.

    It reads the GPU only in steps before the last tensor has had one: usually the first step alone.
    """

    def __init__(self, process: Process, policy: str = "stop"):
        self.process = process
        self.stops = policy == "stop"
        self._waiting: dict[str, nn.Parameter] | None = None
        self._steps = 0
        self._has_judged = False

    def look(self, trainer: "SftTrainer") -> None:
        """Look at the gradients of a step, before they are zeroed. Every rank must call it.

        Raises: DivergedError with the modules whose adapters never got a gradient.
        """
        if self._has_judged:
            return
        if self._waiting is None:
            self._waiting = watched(trainer.model)
        self._steps += 1
        if self._waiting:
            seen = moved if trainer.is_deepspeed_enabled else with_gradient
            for name in seen(self._waiting):
                del self._waiting[name]
        steps_left = trainer.state.max_steps - trainer.state.global_step - 1
        if self._steps >= STEPS or steps_left <= 0:
            self._judge()

    def _judge(self) -> None:
        """Name what no rank has seen a gradient of. Raises: DivergedError."""
        self._has_judged = True
        missed = set.intersection(*map(set, self.process.gather(list(self._waiting or {}))))
        self._waiting = None
        if not missed:
            return
        names = sorted({module_of(name) for name in missed})
        more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
        cause = (
            f"{', '.join(names[:NAMED])}{more}: to be trained, and no gradient has reached it in "
            f"{self._steps} steps"
        )
        if self.stops and any("lora_" in name for name in missed):
            raise DivergedError(
                f"{cause}; leave it out of TUNING_LORA_TARGET_MODULES, or set "
                "TRAIN_ON_UNTRAINED=warn to go on without it"
            )
        if self.process.is_main:
            logger.warning("warning: %s", cause)


def watched(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the trained tensors that a gradient is expected for, by name."""
    return {
        name: parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and not any(word in name for word in LEFT_OUT)
    }


def with_gradient(waiting: dict[str, nn.Parameter]) -> list[str]:
    """Return the names of the tensors whose gradient is not zero."""
    names = [name for name, parameter in waiting.items() if parameter.grad is not None]
    if not names:
        return []
    largest = [_largest(own_part(waiting[name].grad)) for name in names]
    values = torch.stack([value.to(largest[0].device) for value in largest]).tolist()
    # NaN is a gradient, too
    return [name for name, value in zip(names, values, strict=True) if value != 0]


def moved(waiting: dict[str, nn.Parameter]) -> list[str]:
    """Return the names of the tensors that are not zero, as B is before its first gradient.

    DeepSpeed has stepped, and keeps no gradients; of stage 3 this rank's part is looked at.
    """
    found = []
    for name, parameter in waiting.items():
        begins_as_zero = "lora_B" in name or "lora_embedding_B" in name
        own = getattr(parameter, "ds_tensor", parameter)
        if not begins_as_zero or own.detach().any():
            found.append(name)
    return found


def module_of(name: str) -> str:
    """Return the module of the base model that a tensor's name belongs to."""
    return (
        name.removeprefix("base_model.model.")
        .replace(".base_layer", "")
        .partition(".lora_")[0]
        .removesuffix(".weight")
    )


def _largest(gradient: torch.Tensor) -> torch.Tensor:
    """Return the largest magnitude of a gradient, 0 for an empty part; float32."""
    if not gradient.numel():
        return torch.zeros((), device=gradient.device)
    return torch.linalg.vector_norm(gradient.float(), torch.inf)
