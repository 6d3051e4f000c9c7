"""Measure the bytes of one training step while its parts run, on real or fake tensors.

Tensors are counted by storage, from the operation that creates it until its last reference is gone.
Views share the storage of their base. Memory that a kernel needs only inside an operation is not
counted. The bytes that stay allocated between steps come from the closed form of `plan.memory`.
"""

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from sft_kernels.install import fused_kernels_of
from sft_kernels.loss.head import fused_nll, is_loss_fused, summed_nll
from sft_kernels.loss.tokens import LossTokens
from sft_kernels.process import DTYPES
from sft_play.config.schema import Config
from sft_play.models.checkpointing import checkpoint_layers
from sft_play.models.parameters import adapter_parameters, iter_base_tensors
from sft_play.plan.ranks import config_precision
from sft_play.plan.traced import TracedSize


class MemoryTracker(TorchDispatchMode):
    """A dispatch mode that counts the bytes of tensors from operations and from `track`."""

    def __init__(self) -> None:
        super().__init__()
        self.live_bytes = 0
        self.peak_bytes = 0
        self._sizes: dict[int, int] = {}  # bytes by address of the storage

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        self.track(tree_leaves(out))
        return out

    def track(self, values: Iterable[Any]) -> None:
        """Count the storages of all tensors among `values` that are not counted yet."""
        for value in values:
            if not isinstance(value, Tensor):
                continue
            storage = value.untyped_storage()
            address = storage._cdata
            if address in self._sizes:
                continue
            self._sizes[address] = storage.nbytes()
            self.live_bytes += storage.nbytes()
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)
            weakref.finalize(storage, self._forget, address).atexit = False

    def reset_peak(self) -> int:
        """Reset the peak to the bytes that are allocated now, and return them."""
        self.peak_bytes = self.live_bytes
        return self.live_bytes

    def _forget(self, address: int) -> None:
        self.live_bytes -= self._sizes.pop(address)


@dataclass(frozen=True)
class StepSetup:
    """The step to measure: a resolved config, and other facts that change the bytes."""

    config: Config
    device: str  # cpu, cuda
    zero_stage: int

    @property
    def compute_dtype(self) -> torch.dtype:
        """Return the dtype of matrix multiplications."""
        return DTYPES[config_precision(self.config)]


@dataclass(frozen=True)
class MicroBatchBytes:
    """The bytes of a micro-batch, besides those that stay allocated between steps.

    Gradients stay allocated between steps.
    """

    kept: int  # activations, when the output head starts
    layers: int  # the peak before the head starts
    logits: int  # the peak that head and loss add
    logits_kept: int  # what they save for the backward pass
    backward: int  # the peak of the backward pass until the layers are done
    end: int  # the peak after that: the gradient of the embedding


class Moment(NamedTuple):
    """A part of a micro-batch: its peak, and what is still allocated when it ends."""

    peak: int
    live: int


class StepMeter:
    """Runs micro-batches of one model and counts their bytes.

    Gradients of earlier micro-batches stay allocated, and the next ones are added to them.
    """

    def __init__(self, model: PreTrainedModel, setup: StepSetup):
        self.model = model
        self.setup = setup
        self.device = next(model.parameters()).device
        self.tracker = MemoryTracker()
        self.tracker.track(
            [*iter_base_tensors(model), *adapter_parameters(model), *model.buffers()]
        )
        self._moments: list[Moment] = []
        with self.tracker:
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.grad = torch.zeros_like(parameter)

    def measure(
        self, size: TracedSize, checkpointed_layers: int, runs_backward: bool = True
    ) -> MicroBatchBytes:
        """Run a micro-batch of full rows in which each token has a label; return its bytes.

        `backward` and `end` are 0 if the backward pass is not run.
        """
        checkpoint_layers(self.model, checkpointed_layers)
        head, embedding = self.model.get_output_embeddings(), self.model.get_input_embeddings()
        self._moments.clear()
        with (
            head.register_forward_pre_hook(lambda *_: self._end_moment()),
            embedding.register_forward_hook(self._watch_gradient),
            self.tracker,
        ):
            before = self.tracker.reset_peak()
            loss = self._loss(size)
            self._end_moment()
            if runs_backward:
                loss.backward()
                self._end_moment()
        layers, loss_made, *passed_back = self._moments
        peaks = [moment.peak - before for moment in passed_back]
        return MicroBatchBytes(
            kept=layers.live - before,
            layers=layers.peak - before,
            logits=loss_made.peak - layers.live,
            logits_kept=max(0, loss_made.live - layers.live),
            backward=peaks[0] if peaks else 0,
            end=max(peaks[1:], default=0),
        )

    def _end_moment(self) -> None:
        peak = self.tracker.peak_bytes
        self._moments.append(Moment(peak, self.tracker.reset_peak()))

    def _watch_gradient(self, embedding: nn.Module, inputs: Any, out: Tensor) -> None:
        """End a moment when the gradient of the embedding's output has been computed."""
        if out.requires_grad:
            out.register_hook(lambda _: self._end_moment())

    def _loss(self, size: TracedSize) -> Tensor:
        """Return the trainer's loss: the model runs under autocast, plain logits are in float32."""
        inputs = self._inputs(size)
        labels = torch.zeros_like(inputs["input_ids"])
        if is_loss_fused(self.model):
            targets = labels[:, 1:].flatten()  # a row's last token predicts nothing
            tokens = LossTokens(targets, targets, len(targets))
            return fused_nll(self.model, self._call_model, inputs, tokens)
        return summed_nll(self._call_model(**inputs).logits.float(), labels)

    def _call_model(self, **inputs: Any) -> Any:
        dtype = self.setup.compute_dtype
        # DeepSpeed casts the weights instead
        is_on = dtype.itemsize == 2 and not self.setup.zero_stage
        with torch.autocast(self.device.type, dtype, enabled=is_on):
            return self.model(**inputs, use_cache=False)

    def _inputs(self, size: TracedSize) -> dict[str, Tensor]:
        """Return full rows, with the (T, T) mask that transformers would create if one is needed.

        transformers creates a mask for packed and for padded rows, unless attention needs none.
        """
        config = self.setup.config
        rows, tokens = size
        attention = config.model.attn_implementation
        inputs = {"input_ids": torch.zeros(rows, tokens, dtype=torch.int64, device=self.device)}
        is_mask_made = config.train.packing or config.train.batch_size > 1
        is_unmasked = "attention" in fused_kernels_of(self.model).on
        if is_unmasked or attention == "flash_attention_2" or not is_mask_made:
            return inputs
        mask = torch.ones(rows, 1, tokens, tokens, dtype=torch.bool, device=self.device).tril()
        if attention == "eager":
            mask = torch.zeros_like(mask, dtype=self.setup.compute_dtype)
        return {**inputs, "attention_mask": mask}
