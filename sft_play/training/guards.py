"""Guards of a run's steps: against NaN, and weights that no gradient reaches.

A loss that is NaN or infinite makes all gradients of its micro-batch NaN (`spread_nan`). The sum
over ranks makes the gradients of every rank NaN. All ranks therefore see it in the gradient norm of
the step, without a collective or a wait in a micro-step. torch's fused optimizers read the norm on
the device (found_inf) and write nothing; the host reads it one step later, when the GPU has long
computed it. Other optimizers wait for the norm of each step, and get no gradients. DeepSpeed and
the loss scaler of fp16 skip such a step themselves.

Every trained tensor except lora_A should get a gradient. The gradient of lora_A is zero while B
is zero, so B represents its module. Adapters of single experts are also excluded, because a router
may not choose an expert for long; training.experts counts those.
"""

import logging
import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from sft_kernels.process import Process
from sft_play.errors import DivergedError
from sft_play.models.sharding import local_shard
from sft_play.training.engine import Engine

logger = logging.getLogger(__name__)

NAMED = 4  # rows of a step, or modules, in a message
WATCHED_STEPS = 10  # after which a gradient that was always zero is no accident
COMPARED_NUMBERS = 4096  # of a tensor
GUARDS = "guards"  # their state in trainer_state.json
LEFT_OUT = ("lora_A", "lora_embedding_A", ".experts.")


class StepFacts(NamedTuple):
    """Facts of a step on this rank, perhaps still being copied from the GPU."""

    step: int
    values: Tensor  # (1 + micro-batches,): the gradient norm, and each loss
    arrival: torch.cuda.Event | None  # of the values in host memory
    is_bad: bool | None  # None: the norm decides
    was_applied: bool  # whether the optimizer may have applied the step anyway


class BadStep(NamedTuple):
    """One rank's report of a step that has NaN or infinity."""

    found: str  # "loss=nan" or "grad_norm=inf"
    rows: tuple[str, ...]  # of the first micro-batch whose loss is not finite


class StepGuard:
    """Finds the steps that have NaN or infinity, and stops the run or skips them.

    `rows_of(step, micro_batch)` names the rows of a micro-batch of this rank.
    """

    def __init__(
        self,
        process: Process,
        policy: str = "stop",
        most_skipped: int = 0,
        rows_of: Callable[[int, int], Sequence[str]] = lambda step, micro_batch: (),
    ):
        self.process = process
        self.skips = policy == "skip"
        self.most_skipped = most_skipped
        self.rows_of = rows_of
        self.skipped: list[int] = []  # skipped steps
        self._facts: deque[StepFacts] = deque()

    def record(
        self, engine: Engine, step: int, norm: Tensor | float, losses: Sequence[Tensor]
    ) -> Tensor:
        """Prevent the optimizer from applying a step that is not finite.

        Call it right before the optimizer step.
        `losses` are those of the step's micro-batches. Returns a tensor on the device: whether the
        step counts.
        """
        device = self.process.device
        norm = torch.as_tensor(norm, dtype=torch.float32, device=device).reshape(())
        values = torch.stack([norm, *(loss.float() for loss in losses)])
        is_finite = torch.isfinite(norm)
        is_bad: bool | None = None
        was_applied = False
        optimizer = engine.torch_optimizer
        if engine.config.train.fp16:
            # a norm that overflows is handled by the loss scaler, which waits for each step, too
            is_bad = bool(self.process.max(int(not torch.isfinite(values[1:]).all())))
            is_finite = torch.tensor(not is_bad, device=device)
        elif engine.is_deepspeed:
            was_applied = engine.wrapped.was_step_applied()
        elif optimizer.defaults.get("fused") and not engine.trains_divided:
            # torch's fused optimizers read it on the device, for plain tensors
            optimizer.found_inf = 1.0 - is_finite.float()
        elif not is_finite:
            optimizer.zero_grad(set_to_none=True)  # it skips parameters without a gradient
        arrival = None
        if values.device.type == "cuda":
            values = values.to("cpu", non_blocking=True)
            arrival = torch.cuda.Event()
            arrival.record()
        self._facts.append(StepFacts(step, values, arrival, is_bad, was_applied))
        return is_finite

    def flush(self, learning_rate: float, keeps_last: bool = False) -> None:
        """Raise the error of the steps so far that have NaN or infinity. Every rank must call it.

        With `keeps_last` the last step is checked later if its values are still being copied.
        Raises: DivergedError, on every rank, for a bad step that was not skipped.
        """
        keeps_last = keeps_last and bool(self._facts) and self._facts[-1].arrival is not None
        while len(self._facts) > keeps_last:
            facts = self._facts.popleft()
            if facts.arrival is not None:
                facts.arrival.synchronize()
            is_bad = facts.is_bad
            if is_bad is None:
                is_bad = not math.isfinite(facts.values[0])
            if is_bad:
                self._handle(facts, learning_rate)

    def _handle(self, facts: StepFacts, learning_rate: float) -> None:
        ranks = self.process.gather(self._describe(facts))
        # the first rank whose loss is not finite, otherwise the norm
        bad = next((rank for rank in ranks if rank.found.startswith("loss")), ranks[0])
        where = f"{bad.found} at step {facts.step}"
        remedy = f"try TRAIN_LEARNING_RATE={learning_rate / 10:g}"
        if not self.skips:
            raise DivergedError(
                f"{where}: the run has diverged; {remedy}, TRAIN_ON_NONFINITE=skip to leave such "
                f"a step out, or TRAIN_RESUME_FROM an earlier checkpoint{_named(bad.rows)}"
            )
        if facts.was_applied:
            raise DivergedError(
                f"{where}: DeepSpeed has trained it anyway; leave bf16.check_grad_overflow "
                "out of DEEPSPEED_CONFIG"
            )
        self.skipped.append(facts.step)
        if len(self.skipped) > self.most_skipped:
            raise DivergedError(
                f"{where}: {len(self.skipped)} steps were not finite, and "
                f"train.max_skipped_steps={self.most_skipped}: the run has diverged; {remedy}, "
                f"or TRAIN_RESUME_FROM an earlier checkpoint{_named(bad.rows)}"
            )
        if self.process.is_main:
            rows = _named(bad.rows)
            logger.warning("%s: it is left out, and no weight has changed%s", where, rows)

    def _describe(self, facts: StepFacts) -> BadStep:
        norm, *losses = facts.values.tolist()
        bad = [number for number, loss in enumerate(losses) if not math.isfinite(loss)]
        if not bad:
            return BadStep(f"grad_norm={norm}", ())
        rows = self.rows_of(facts.step, bad[0])
        return BadStep(f"loss={losses[bad[0]]}", tuple(rows))

    def correct_log(self, logs: dict[str, float], step: int, steps: int) -> None:
        """Correct the logged mean loss: only count the trained steps among `steps` up to `step`."""
        left_out = sum(number > step - steps for number in self.skipped)
        if not left_out:
            return
        if not math.isfinite(logs.get("grad_norm", 0.0)):
            del logs["grad_norm"]
        if left_out == steps:
            del logs["loss"]
        else:
            logs["loss"] *= steps / (steps - left_out)


def _named(rows: Sequence[str]) -> str:
    return f"; its rows: {_listed(rows)}" if rows else ""


def _listed(names: Sequence[str]) -> str:
    """Return the first names, and how many more there are."""
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return f"{', '.join(names[:NAMED])}{more}"


class GradientWatch:
    """Waits for the first gradient of each trained tensor, for WATCHED_STEPS steps at most.

    It reads from the GPU only until every tensor has had a gradient: usually in the first step.
    """

    def __init__(self, process: Process, policy: str = "stop"):
        self.process = process
        self.stops = policy == "stop"
        self._waiting: dict[str, nn.Parameter] | None = None
        self._is_done = False

    def record(self, engine: Engine, step: int, steps: int) -> None:
        """Record the gradients of `step`, one of `steps` steps, before they are zeroed.

        Every rank must call it.

        Raises: DivergedError with the modules whose adapters never got a gradient.
        """
        if self._is_done:
            return
        if self._waiting is None:
            self._waiting = watched_tensors(engine.model)
            for name in moved(self._waiting) if step > 1 else ():  # before the run was resumed
                del self._waiting[name]
        if self._waiting:
            find = moved if engine.is_deepspeed else with_gradient
            for name in find(self._waiting):
                del self._waiting[name]
        if step >= min(WATCHED_STEPS, steps):
            self._raise_if_missed(step)

    def _raise_if_missed(self, steps: int) -> None:
        """Report the tensors for which no rank has seen a gradient. Raises: DivergedError."""
        self._is_done = True
        missed = set.intersection(*map(set, self.process.gather(list(self._waiting or {}))))
        self._waiting = None
        if not missed:
            return
        names = sorted({module_of(name) for name in missed})
        cause = f"{_listed(names)}: to be trained, and no gradient has reached it in {steps} steps"
        if self.stops and any("lora_" in name for name in missed):
            raise DivergedError(
                f"{cause}; leave it out of TUNING_LORA_TARGET_MODULES, or set "
                "TRAIN_ON_UNTRAINED=warn to continue without it"
            )
        if self.process.is_main:
            logger.warning("warning: %s", cause)


class WeightChangeCheck:
    """Some numbers of every trained tensor at the start, to compare them after training.

    `has_moved` is True if they had changed before the run was resumed.
    """

    def __init__(self, model: nn.Module, process: Process, has_moved: bool = False):
        self.model = model
        self.process = process
        self.before = self.sample()
        self._had_moved = has_moved

    def sample(self) -> list[torch.Tensor]:
        """Return the first numbers of this rank's part of each trained tensor."""
        trained = filter(lambda parameter: parameter.requires_grad, self.model.parameters())
        held = (local_shard(getattr(tensor, "ds_tensor", tensor)).detach() for tensor in trained)
        return [tensor.flatten()[:COMPARED_NUMBERS].clone() for tensor in held]

    def has_moved(self) -> bool:
        """Return whether a number has changed on any rank. Every rank must call it."""
        pairs = zip(self.before, self.sample(), strict=True)
        has_changed = self._had_moved or any(not torch.equal(*pair) for pair in pairs)
        return any(self.process.gather(has_changed))

    def raise_if_unmoved(self, steps: int, learning_rate: float) -> None:
        """Raise DivergedError on every rank if none of the numbers has changed on any rank."""
        if not self.has_moved():
            dtype = str(self.before[0].dtype).removeprefix("torch.")
            raise DivergedError(
                f"no weight has changed in {steps} steps: updates of train.learning_rate="
                f"{learning_rate:g} are lost in {dtype}; raise TRAIN_LEARNING_RATE, or set "
                "MODEL_DTYPE=float32"
            )


def watched_tensors(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the trained tensors that should get a gradient, by name."""
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
    largest = [_largest(local_shard(waiting[name].grad)) for name in names]
    values = torch.stack([value.to(largest[0].device) for value in largest]).tolist()
    # NaN is a gradient, too
    return [name for name, value in zip(names, values, strict=True) if value != 0]


def moved(waiting: dict[str, nn.Parameter]) -> list[str]:
    """Return the names of the tensors that are not zero; B is zero before its first gradient.

    DeepSpeed has already stepped and keeps no gradients. At stage 3, this rank's part is checked.
    """
    found = []
    for name, parameter in waiting.items():
        begins_as_zero = "lora_B" in name or "lora_embedding_B" in name
        if not begins_as_zero or getattr(parameter, "ds_tensor", parameter).detach().any():
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


def _largest(gradient: Tensor) -> Tensor:
    """Return the largest magnitude of a gradient, 0 for an empty part; float32."""
    if not gradient.numel():
        return torch.zeros((), device=gradient.device)
    return torch.linalg.vector_norm(gradient.float(), torch.inf)
