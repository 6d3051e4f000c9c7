"""Bytes of one training step of a model, counted while its parts run, on real or fake tensors.

Tensors are counted by storage, from the operation that creates it until its last reference is
gone. Views share the storage of their base. Memory that a kernel needs only inside an operation is
not counted. The GPU's context, buffers of collectives, and the evaluation come from the closed form
of `plan.memory`.
"""

import weakref
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from bitsandbytes.optim import GlobalOptimManager
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from sft_play.config.schema import Config
from sft_play.models.fast.install import fused_kernels_of
from sft_play.models.fast.loss.head import fused_nll, is_loss_fused
from sft_play.models.losses import summed_nll
from sft_play.models.optimizers import OPTIMIZERS, hidden_matrices
from sft_play.models.parameters import adapter_parameters, base_tensors
from sft_play.plan.memory import StepBytes
from sft_play.plan.ranks import precision
from sft_play.process import DTYPES


class MemoryTracker(TorchDispatchMode):
    """A dispatch mode that counts the bytes of tensors that operations create or `track` gets."""

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
            if isinstance(value, Tensor):
                self._track_storage(value.untyped_storage())

    def reset_peak(self) -> int:
        """Reset the peak to the bytes that are alive now, and return them."""
        self.peak_bytes = self.live_bytes
        return self.live_bytes

    def _track_storage(self, storage: torch.UntypedStorage) -> None:
        address = storage._cdata
        if address in self._sizes:
            return
        self._sizes[address] = storage.nbytes()
        self.live_bytes += storage.nbytes()
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        weakref.finalize(storage, self._forget, address).atexit = False

    def _forget(self, address: int) -> None:
        self.live_bytes -= self._sizes.pop(address)


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the storages of `tensors`, each storage once."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    sizes = {storage._cdata: storage.nbytes() for storage in storages}
    return sum(sizes.values())


@dataclass(frozen=True)
class StepSetup:
    """A step to measure: a resolved config, and the parts of its plan that change the bytes."""

    config: Config
    device: str  # cpu, cuda
    checkpointed_layers: int
    zero_stage: int
    accumulates: bool  # gradients are kept through the next forward pass

    @property
    def compute_dtype(self) -> torch.dtype:
        """Return the dtype of matrix products."""
        return DTYPES[precision(self.config)]

    @property
    def on_gpu(self) -> bool:
        return self.device == "cuda"


@dataclass(frozen=True)
class MeasuredStep:
    """Bytes of a step on one device.

    The first five fields are held all the time; the others are what forward, backward and optimizer
    add to what is alive when they start.
    """

    weights: int  # of the base, 4-bit weights with their constants
    buffers: int
    adapters: int
    gradients: int  # when the step is complete
    optimizer: int | None  # None under DeepSpeed: the closed form has what a rank holds there
    activations: int  # alive when the output head starts
    activation_bytes_per_token: int
    activation_bytes_fixed: int
    logits: int  # the peak that head and loss add to the activations
    logits_kept: int  # what they keep for the backward pass
    forward: int  # the peak, in the head or in a layer before it
    backward: int  # the peak, activations and logits included
    optimizer_step: int
    accumulates: bool

    def phases(self, closed_form: StepBytes) -> StepBytes:
        """Return the bytes of each phase, from the closed form where nothing was measured."""
        phases = dict(closed_form.phases)
        if self.optimizer is not None:
            held = {
                "weights": self.weights + self.buffers,
                "adapters": self.adapters,
                "optimizer": self.optimizer,
            }
            phases = {name: replace(phase, **held) for name, phase in phases.items()}
            phases["load"] = replace(phases["load"], optimizer=0)
            accumulated = self.gradients if self.accumulates else 0
            phases["forward"] = replace(phases["forward"], gradients=accumulated)
            phases["backward"] = replace(phases["backward"], gradients=accumulated)
            phases["optimizer"] = replace(phases["optimizer"], gradients=self.gradients)
        phases["forward"] = replace(
            phases["forward"], activations=self.forward - self.logits, logits=self.logits
        )
        logits = max(0, self.logits_kept)
        phases["backward"] = replace(
            phases["backward"], activations=self.backward - logits, logits=logits
        )
        phases["optimizer"] = replace(phases["optimizer"], activations=self.optimizer_step)
        return StepBytes(phases)


def measure_step(model: PreTrainedModel, setup: StepSetup) -> MeasuredStep:
    """Return the bytes of a step of a model from `models.load`, which must be in training mode."""
    meter = StepMeter(model, setup)
    # first: it leaves the gradients that earlier micro-batches would leave
    optimizer = meter.step_optimizer()
    rows = setup.config.train.batch_size
    tokens = setup.config.model.max_seq_len
    one_row_more = meter.run_forward(rows + 1).activations
    forward = meter.run_forward(rows)
    backward_peak = meter.run_backward(forward)
    per_token = (one_row_more - forward.activations) // tokens
    return MeasuredStep(
        weights=storage_bytes(base_tensors(model)),
        buffers=storage_bytes(model.buffers()),
        adapters=storage_bytes(adapter_parameters(model)),
        gradients=sum(parameter.nbytes for parameter in meter.trained),
        optimizer=optimizer.state,
        activations=forward.activations,
        activation_bytes_per_token=per_token,
        activation_bytes_fixed=forward.activations - per_token * rows * tokens,
        logits=forward.logits,
        logits_kept=forward.logits_kept,
        forward=forward.peak,
        backward=backward_peak,
        optimizer_step=optimizer.temporary,
        accumulates=setup.accumulates,
    )


@dataclass(frozen=True)
class OptimizerBytes:
    """Bytes of an optimizer: its state, and the peak that a step allocates in addition."""

    state: int | None  # None under DeepSpeed
    temporary: int


@dataclass(frozen=True)
class ForwardPass:
    """The loss of a forward pass, and its bytes beyond those that were alive before it."""

    loss: Tensor
    before: int  # bytes alive before it
    activations: int  # alive when the head starts
    logits: int  # the peak that head and loss add to the activations
    logits_kept: int  # what they keep for the backward pass
    layers: int  # the peak before the head starts

    @property
    def peak(self) -> int:
        """The peak, in the head or in a layer before it."""
        return max(self.layers, self.activations + self.logits)


class StepMeter:
    """Runs the parts of a step of one model and counts their bytes."""

    def __init__(self, model: PreTrainedModel, setup: StepSetup):
        self.model = model
        self.setup = setup
        self.device = next(model.parameters()).device
        self.trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.tracker = MemoryTracker()
        self.tracker.track([*base_tensors(model), *adapter_parameters(model), *model.buffers()])
        self._at_head = 0  # bytes alive when the head starts
        self._peak_before_head = 0

    def step_optimizer(self) -> OptimizerBytes:
        """Take two optimizer steps, of which the first creates the state.

        Gradients are kept if the step accumulates.
        """
        state = None
        temporary = 0
        self.hold_gradients()
        with self.tracker:
            if not self.setup.zero_stage:
                on_gpu = self.setup.on_gpu
                optimizer = make_optimizer(self.model, self.setup.config.train.optim, on_gpu)
                optimizer.step()
                state = state_bytes(optimizer, on_gpu)
                before = self.tracker.reset_peak()
                optimizer.step()
                temporary = self.tracker.peak_bytes - before
            if not self.setup.accumulates:
                for parameter in self.trained:
                    parameter.grad = None
        return OptimizerBytes(state, temporary)

    def hold_gradients(self) -> None:
        """Leave the gradients that earlier micro-batches would leave."""
        with self.tracker:
            for parameter in self.trained:
                parameter.grad = torch.zeros_like(parameter)

    def run_forward(self, rows: int) -> ForwardPass:
        """Run a forward pass over `rows` full rows."""
        head = self.model.get_output_embeddings()
        hook = head.register_forward_pre_hook(self._note_head_begins)
        tracker = self.tracker
        try:
            with tracker:
                before = tracker.reset_peak()
                loss = self._loss(rows)
                return ForwardPass(
                    loss=loss,
                    before=before,
                    activations=self._at_head - before,
                    logits=tracker.peak_bytes - self._at_head,
                    logits_kept=tracker.live_bytes - self._at_head,
                    layers=self._peak_before_head - before,
                )
        finally:
            hook.remove()

    def run_backward(self, forward: ForwardPass) -> int:
        """Run the backward pass; return its peak beyond what was alive before the forward pass."""
        with self.tracker:
            self.tracker.reset_peak()
            forward.loss.backward()
        return self.tracker.peak_bytes - forward.before

    def _note_head_begins(self, *_: Any) -> None:
        self._peak_before_head = self.tracker.peak_bytes
        self._at_head = self.tracker.reset_peak()

    def _loss(self, rows: int) -> Tensor:
        """Return the loss as the trainer does: model under autocast, plain logits in float32."""
        inputs = self._inputs(rows)
        labels = torch.zeros_like(inputs["input_ids"])
        if is_loss_fused(self.model):
            targets = labels[:, 1:].flatten()  # a row's last token predicts nothing
            return fused_nll(self.model, self._call_model, inputs, targets, targets)
        return summed_nll(self._call_model(**inputs).logits.float(), labels)

    def _call_model(self, **inputs: Any) -> Any:
        dtype = self.setup.compute_dtype
        # DeepSpeed casts the weights instead
        is_on = dtype.itemsize == 2 and not self.setup.zero_stage
        with torch.autocast(self.device.type, dtype, enabled=is_on):
            return self.model(**inputs, use_cache=False)

    def _inputs(self, rows: int) -> dict[str, Tensor]:
        """Return full rows, with the (T, T) mask that transformers would create if one is needed.

        It creates a mask for packed and for padded rows, unless attention needs none.
        """
        config = self.setup.config
        tokens = config.model.max_seq_len
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


def make_optimizer(model: PreTrainedModel, optim: str, on_gpu: bool) -> torch.optim.Optimizer:
    """Return the optimizer that Trainer creates for `train.optim`."""
    options: dict[str, Any] = {}
    if on_gpu and optim in ("adamw_torch", "sgd"):
        options["foreach"] = True
    if optim == "muon":
        options["matrices"] = hidden_matrices(model)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if "8bit" in optim:  # as Trainer, which keeps embeddings in 32 bits
        manager = GlobalOptimManager.get_instance()
        manager.initialize()
        for module in model.modules():
            if isinstance(module, nn.Embedding):
                manager.register_module_override(module, "weight", {"optim_bits": 32})
    with unset_fake_temporarily():  # bitsandbytes creates tables of 8-bit values
        return OPTIMIZERS[optim]([{"params": trained}], lr=0.0, **options)


def state_bytes(optimizer: torch.optim.Optimizer, on_gpu: bool) -> int:
    """Return the bytes of an optimizer's state on its device.

    On a GPU plain AdamW keeps its step counters on the CPU, so they do not count.
    """
    is_plain_adamw = isinstance(optimizer, torch.optim.AdamW) and not optimizer.defaults["fused"]
    skipped = {"step"} if on_gpu and is_plain_adamw else set()
    tensors = []
    for state in optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, Tensor) and name not in skipped:
                tensors.append(value)
    return storage_bytes(tensors)
