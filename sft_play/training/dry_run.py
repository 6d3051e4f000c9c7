"""Dry runs: steps of a run's loop that measure memory without changing anything.

A dry step differs from a real one in two things: its rows are random tokens of the full length, and
its gradients are zeroed before the optimizer step.
"""

import contextlib
import gc
import logging
from collections.abc import Iterator
from itertools import chain
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn

from sft_kernels.modules import bring_layer_of
from sft_kernels.sharded import is_sharded
from sft_kernels.training_setup import base_model_of
from sft_kernels.trees import Branch
from sft_play.data.batch import Batch
from sft_play.data.collate import TokenSequence
from sft_play.data.render import IGNORE_INDEX
from sft_play.data.store import Sample, Split
from sft_play.errors import EnvironmentFault, ExitClass, first_line
from sft_play.models.sharding import reshard
from sft_play.plan.probe_fit import ProbePoint
from sft_play.plan.step import Layout
from sft_play.training.batches import collate_for_step
from sft_play.training.checkpoints import read_generators, set_generators
from sft_play.training.checks import bit_sums
from sft_play.training.classify import classify
from sft_play.training.loop import TrainingLoop

logger = logging.getLogger(__name__)

# DeepSpeed's value before the first micro-step: the next gradient overwrites what is there
INITIAL_MICRO_STEP_ID = -1
MOST_SAMPLES = 1000  # samples with images that are inspected
TEXT_ID = 0  # mostly of padding


class DryRun:
    """A context that measures steps.

    On leaving, it restores buffers, gradients, optimizer state and random state, and checks that no
    weight has changed. `steps_optimizer` must be False if the optimizer's state must survive or
    cannot be dropped. This applies to resumed runs, to DeepSpeed (whose optimizer steps other
    tensors), and to paged optimizers (whose pages are never freed).

    Raises: EnvironmentFault on leaving, when a weight has changed.
    """

    def __init__(self, loop: TrainingLoop, steps_optimizer: bool):
        self.loop = loop
        self.engine = loop.engine
        self.memory = loop.memory
        self.steps_optimizer = steps_optimizer
        self.model: nn.Module = loop.engine.wrapped
        self.is_warm = False

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.memory.apart())
            stack.enter_context(_weights_checked(self.engine.model))
            stack.callback(set_generators, read_generators())
            stack.enter_context(_modules_kept(self.model))
            self.model.train()  # a model that was just loaded is partly in evaluation mode
            stack.callback(self._clear)
            self.stack = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self.stack.__exit__(*error)

    def measure(self, layout: Layout) -> ProbePoint | None:
        """Return the peak memory of a step of full rows on this rank; None if it does not fit.

        If ranks shard weights, the out-of-memory error is raised, because the others wait for
        this rank inside their passes. The first call runs a warm-up step that is not counted: it
        allocates persistent memory, e.g. optimizer state, workspaces and compiled kernels.
        """
        rows = layout.sequences
        length = layout.capacity
        try:
            if not self.is_warm:
                self._step(worst_case(self.loop, 1, length), layout.accumulates)
                self.is_warm = True
            batch = worst_case(self.loop, rows, length)
            peaks = self._step(batch, layout.accumulates)
            tokens = batch.ids.numel()  # padding included
            return ProbePoint(tokens, layout.checkpointed_layers, layout.accumulates, peaks)
        except (MemoryError, RuntimeError) as error:
            is_out_of_memory = classify(error).exit_class is ExitClass.OUT_OF_MEMORY
            engine = self.engine
            waits = engine.is_deepspeed or is_sharded(engine.model) or engine.shares_experts
            if waits or not is_out_of_memory:
                raise
            logger.info("probe of %d x %d tokens: %s", rows, length, first_line(error))
        self._drop_gradients()
        gc.collect()  # frees the tensors of the frames in the error's traceback
        torch.cuda.empty_cache()
        return None

    def _step(self, batch: Batch, accumulates: bool) -> dict[str, int]:
        """Return the peak of each phase, over two micro-batches if gradients accumulate.

        Each is one inside gradient accumulation: no all-reduce, and DeepSpeed takes no step.
        """
        self.memory.take_phases()
        for _ in range(1 + accumulates):
            self.loop.compute_gradients(batch, batch.loss.total_weight, is_last=False)
        if self.steps_optimizer:
            with self.memory.phase("optimizer"):
                step_without_change(self.engine.torch_optimizer)
        peaks = self.memory.take_phases()
        self._drop_gradients()
        return peaks

    def _drop_gradients(self) -> None:
        if self.engine.is_deepspeed:
            _drop_reduced_gradients(self.model.optimizer)
        self.model.zero_grad()

    def _clear(self) -> None:
        self._drop_gradients()
        if self.steps_optimizer:
            self.engine.torch_optimizer.state.clear()
        torch.cuda.empty_cache()
        self.engine.accelerator.sync_gradients = True


def worst_case(loop: TrainingLoop, rows: int, length: int) -> Batch:
    """Return a micro-batch of `rows` rows padded to `length` tokens, collated as in the run.

    Every token except the first is labeled. Each row is one token short, so that anything padding
    needs, e.g. a mask, is allocated as well. In a run with images, each row starts with the
    samples that have the most image tokens.
    """
    vocabulary = loop.engine.model.config.get_text_config().vocab_size
    generator = np.random.default_rng(0)
    dense = image_samples(loop, length - 1)
    seen = np.concatenate([np.zeros(0, np.int64), *(sample.ids for sample in dense)])
    images = tuple(chain.from_iterable(sample.images for sample in dense))
    sequences = []
    for _ in range(rows):
        drawn = generator.integers(vocabulary, size=max(2, length - 1) - len(seen))
        # the id of an image placeholder would require that image
        ids = np.concatenate([seen, np.where(np.isin(drawn, seen), TEXT_ID, drawn)])
        labels = np.concatenate([[IGNORE_INDEX], ids[1:]])
        tree = (Branch(0, len(ids)),)
        if loop.order.layout.tree_tokens is not None and len(ids) > 2:
            tree = Branch(0, 2), Branch(1, len(ids) - 2)
        sequences.append(TokenSequence(ids, labels, (tree,), images=(images,)))
    part = loop.loss.context and loop.loss.context.part
    return collate_for_step(loop.collator, sequences, part)


def image_samples(loop: TrainingLoop, length: int) -> list[Sample]:
    """Return samples that fill `length` tokens with as many pixels as the training rows have.

    They are the same on every rank; empty in a run on text.
    """
    samples = loop.rows.samples
    if not isinstance(samples, Split) or loop.collator.images is None:
        return []
    found: list[Sample] = []
    density = samples.pixels / samples.lengths
    for index in np.argsort(-density, kind="stable")[:MOST_SAMPLES].tolist():
        sample = samples[index]
        if sample.images and len(sample.ids) <= length:
            found.append(sample)
            length -= len(sample.ids)
    return found


def step_without_change(optimizer: torch.optim.Optimizer) -> None:
    """Step an optimizer without state on zero gradients; every weight keeps its bits.

    The moments are then zero, and so is the update: p - lr * 0 / (0 + epsilon) is p, also for a
    negative zero. Weight decay is off: its fused multiplication could make that zero positive.
    """
    groups = optimizer.param_groups
    optimizer.zero_grad(set_to_none=False)
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
    """Raise EnvironmentFault on leaving when a parameter or buffer has changed."""
    reshard(model)
    before = digest(model)
    yield
    reshard(model)
    after = digest(model)
    changed = [name for name in before if after.get(name) != before[name]]
    if changed or after.keys() != before.keys():
        raise EnvironmentFault(
            f"train.probe: {len(changed)} tensors are not as they were before the probe, "
            f"{changed[:1]} first; set TRAIN_PROBE=false"
        )


def digest(model: nn.Module) -> dict[str, int]:
    """Return the sum of the bits of each parameter and buffer."""
    return bit_sums(_read_in_place(model))


def _read_in_place(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of each module by name, while its layer's weights are on the device."""
    base = base_model_of(model)
    seen: set[Tensor] = set()  # tied tensors count once
    for prefix, module in model.named_modules():
        bring_layer_of(module, base)
        named = chain(module.named_parameters(recurse=False), module.named_buffers(recurse=False))
        for name, tensor in named:
            if tensor not in seen:
                seen.add(tensor)
                yield f"{prefix}.{name}", tensor


@contextlib.contextmanager
def _modules_kept(model: nn.Module) -> Iterator[None]:
    """Restore buffers, training modes and other plain attributes of modules.

    Examples are the cached length of rotary embeddings, and the counters of DDP and DeepSpeed.
    """
    plain = bool | int | float | str | None
    states = []
    for module in model.modules():
        values = {name: value for name, value in vars(module).items() if isinstance(value, plain)}
        copies = [(name, own, own.clone()) for name, own in module.named_buffers(recurse=False)]
        states.append((module, values, copies))
    yield
    for module, values, copies in states:
        vars(module).update(values)
        for name, own, content in copies:
            setattr(module, name, own.copy_(content))


def _drop_reduced_gradients(optimizer: Any) -> None:
    """Drop the reduced gradients that DeepSpeed's optimizer keeps for the next micro-batch.

    DeepSpeed's step does the same when gradients overflow.
    """
    optimizer.zero_grad()
    # ZeRO stages 1 and 2; at stage 3 the next gradient overwrites the last one
    if hasattr(optimizer, "all_grad_tensors"):
        optimizer.micro_step_id = INITIAL_MICRO_STEP_ID
        for kept in (optimizer.all_grad_tensors, optimizer.averaged_gradients):
            kept.update(dict.fromkeys(kept))
