"""Steps of a run's own trainer that leave no trace: their memory is measured, and everything is as it was afterwards.

A rehearsed step is a real one but for two things: its rows are random and as long as rows can be, and its gradients are zeroed
before the optimizer sees them. Legend: T tokens of a row.
"""

import contextlib
import gc
import logging
import random
from collections.abc import Iterable, Iterator
from typing import Any, Self

import numpy as np
import torch
from torch import nn

from sft_play.data.collate import Batch, TokenSequence
from sft_play.data.render import IGNORE_INDEX
from sft_play.errors import EnvironmentFault, ExitClass, first_line
from sft_play.plan.layout import Layout
from sft_play.plan.probe_fit import Point
from sft_play.training.classify import classify
from sft_play.training.memory import MemoryMeter
from sft_play.training.trainer import REAL_TOKENS, TARGETS, SftTrainer, for_a_step

logger = logging.getLogger(__name__)

CHUNK = 1 << 24  # elements that are summed at once: a CPU makes a copy of them in 64 bits
INITIAL_MICRO_STEP_ID = (
    -1
)  # DeepSpeed's: the next gradient is the first of a step, and added to nothing
BITS = {
    1: torch.uint8,
    2: torch.int16,
    4: torch.int32,
    8: torch.int64,
}  # integers by bytes of an element


class DryRun:
    """A context that measures steps; on leaving it, weights, buffers, gradients, optimizer and random state are as they were.

    `steps_optimizer` must be False where the optimizer's state is not to be lost, or does not belong to torch: on a resumed run,
    under DeepSpeed, which makes its own when it starts, and for paged optimizers, whose pages are never given back.
    Raises: EnvironmentFault on leaving, when a weight is not the one that was there.
    """

    def __init__(self, trainer: SftTrainer, memory: MemoryMeter, steps_optimizer: bool):
        self.trainer, self.memory, self.steps_optimizer = trainer, memory, steps_optimizer
        self.model: nn.Module = trainer.model_wrapped
        self.is_warm = False

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.memory.paused())
            stack.enter_context(_weights_checked(self.trainer.model))
            stack.enter_context(_random_state_kept(self.trainer.args.device))
            stack.enter_context(_modules_kept(self.model))
            stack.enter_context(_accumulating(self.trainer))
            stack.callback(self._clear)
            self.stack = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self.stack.__exit__(*error)

    def measure(self, layout: Layout) -> Point | None:
        """Return what a step of full rows takes on this rank; None where it runs out of memory.

        Under DeepSpeed, whose ranks would wait for this one within its passes, that is raised. The first call takes a step that is
        not counted: it brings what stays, such as the optimizer's state, workspaces and compiled kernels.
        """
        rows, length, accumulates = layout.sequences, layout.max_seq_len, layout.accumulates
        try:
            if not self.is_warm:
                self._step(1, length, accumulates)
                self.is_warm = True
            tokens, phases = self._step(rows, length, accumulates)
            return Point(tokens, layout.checkpointed_layers, accumulates, phases)
        except (MemoryError, RuntimeError) as error:
            if (
                self.trainer.is_deepspeed_enabled
                or classify(error).exit_class is not ExitClass.OUT_OF_MEMORY
            ):
                raise
            logger.info("probe of %d x %d tokens: %s", rows, length, first_line(error))
        self._drop_gradients()
        gc.collect()  # what the error's frames held
        torch.cuda.empty_cache()
        return None

    def _step(self, rows: int, length: int, accumulates: bool) -> tuple[int, dict[str, int]]:
        """Return the tokens of a micro-batch, and the peak of each phase."""
        batch = worst_case(self.trainer, rows, length)
        passes = [self._micro_step(dict(batch)) for _ in range(1 + accumulates)]
        peaks = dict(
            zip(
                ("forward", "backward"),
                map(max, *passes) if accumulates else passes[0],
                strict=True,
            )
        )
        if self.steps_optimizer:
            self.memory.reset()
            step_without_change(self.trainer.optimizer.optimizer)
            peaks["optimizer"] = self.memory.peak_bytes()
        self._drop_gradients()
        return batch["input_ids"].numel(), peaks

    def _micro_step(self, batch: Batch) -> tuple[int, int]:
        """Return the peaks of a forward and a backward pass, made as Trainer.training_step makes them."""
        trainer, labelled = self.trainer, len(batch[TARGETS])
        self.model.train()
        self.memory.reset()
        inputs = trainer._prepare_inputs(batch)
        with trainer.compute_loss_context_manager():
            loss = trainer.compute_loss(self.model, inputs, num_items_in_batch=labelled)
        del inputs
        forward = self.memory.peak_bytes()
        self.memory.reset()
        trainer.accelerator.backward(
            loss, **({"scale_wrt_gas": False} if trainer.is_deepspeed_enabled else {})
        )
        return forward, self.memory.peak_bytes()

    def _drop_gradients(self) -> None:
        if self.trainer.is_deepspeed_enabled:
            _drop_reduced_gradients(self.model.optimizer)
        self.model.zero_grad()

    def _clear(self) -> None:
        self._drop_gradients()
        if self.steps_optimizer:
            self.trainer.optimizer.optimizer.state.clear()
        torch.cuda.empty_cache()
        self.memory.reset()  # the run's own peak begins here


def worst_case(trainer: SftTrainer, rows: int, length: int) -> Batch:
    """Return a micro-batch of `rows` rows of `length` tokens, all but the first labelled, collated as the run does it.

    A row lacks one token, so that whatever padding calls for, such as a mask, is there as well.
    """
    vocabulary = trainer.model.get_input_embeddings().num_embeddings
    generator = np.random.default_rng(0)
    sequences = []
    for _ in range(rows):
        ids = generator.integers(vocabulary, size=max(2, length - 1))
        sequences.append(
            TokenSequence(ids, np.concatenate([[IGNORE_INDEX], ids[1:]]), (len(ids),), len(ids))
        )
    batch = for_a_step(trainer.data_collator, sequences)
    del batch[REAL_TOKENS]
    return batch


def step_without_change(optimizer: torch.optim.Optimizer) -> None:
    """Step an optimizer that has no state yet on gradients of zero, and leave every weight as it is, to the bit.

    Its moments are then zero, and so is the update: p - lr * 0 / (0 + epsilon) is p, also for a negative zero. Weight decay is off,
    since in a fused multiplication it would turn that one positive.
    """
    groups = optimizer.param_groups
    torch._foreach_zero_(
        [
            parameter.grad
            for group in groups
            for parameter in group["params"]
            if parameter.grad is not None
        ]
    )
    decays = [group["weight_decay"] for group in groups]
    try:
        for group in groups:
            group["weight_decay"] = 0.0
        optimizer.step()
    finally:
        for group, decay in zip(groups, decays, strict=True):
            group["weight_decay"] = decay


@contextlib.contextmanager
def _weights_checked(model: nn.Module) -> Iterator[None]:
    before = digest(model)
    yield
    after = digest(model)
    changed = [name for name in before if after.get(name) != before[name]]
    if changed or after.keys() != before.keys():
        raise EnvironmentFault(
            f"train.probe: {len(changed)} tensors are not as they were before the probe, {changed[:1]} first; set TRAIN_PROBE=false"
        )


def digest(model: nn.Module) -> dict[str, int]:
    """Return the sum of the bits of every parameter and buffer, as integers of an element's size, modulo 2^64; shards under ZeRO-3."""
    sums = {
        name: _sum_of_bits(getattr(tensor, "ds_tensor", tensor)) for name, tensor in _tensors(model)
    }
    return dict(zip(sums, torch.stack(list(sums.values())).tolist(), strict=True))


def _tensors(model: nn.Module) -> Iterable[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _sum_of_bits(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.detach().reshape(-1)
    parts = flat.view(BITS[flat.element_size()]).split(CHUNK)
    return torch.stack([part.sum(dtype=torch.int64) for part in parts]).sum()


@contextlib.contextmanager
def _random_state_kept(device: torch.device) -> Iterator[None]:
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        yield
    random.setstate(python)
    np.random.set_state(numpy)


@contextlib.contextmanager
def _modules_kept(model: nn.Module) -> Iterator[None]:
    """Put back buffers, modes, and what modules note in plain values: how far rotary embeddings have grown, what DDP and DeepSpeed count."""
    modules = list(model.modules())
    plain = [
        {
            name: value
            for name, value in vars(module).items()
            if isinstance(value, bool | int | float | str | None)
        }
        for module in modules
    ]
    buffers = [
        {
            name: (buffer, buffer.clone())
            for name, buffer in module._buffers.items()
            if buffer is not None
        }
        for module in modules
    ]
    yield
    for module, values, kept in zip(modules, plain, buffers, strict=True):
        vars(module).update(values)
        for name, (buffer, content) in kept.items():
            module._buffers[name] = buffer.copy_(content)


@contextlib.contextmanager
def _accumulating(trainer: SftTrainer) -> Iterator[None]:
    """Take every backward pass for one that others follow: no rank waits for another, nothing is stepped."""
    state = trainer.accelerator.gradient_state
    was_synced = state.sync_gradients
    state._set_sync_gradients(False)
    try:
        with trainer.accelerator.no_sync(trainer.model_wrapped):
            yield
    finally:
        state._set_sync_gradients(was_synced)


def _drop_reduced_gradients(optimizer: Any) -> None:
    """Drop what DeepSpeed's optimizer has reduced and keeps for the next micro-batch, as its own step does when gradients overflow."""
    optimizer.zero_grad()
    if hasattr(
        optimizer, "all_grad_tensors"
    ):  # stages 1 and 2; at stage 3 the next gradient takes the place of what is there
        optimizer.micro_step_id = INITIAL_MICRO_STEP_ID
        for kept in (optimizer.all_grad_tensors, optimizer.averaged_gradients):
            kept.update(dict.fromkeys(kept))
