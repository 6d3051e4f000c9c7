"""Bytes of a run's step, exact, without its weights: the real model built from its config and stepped over tensors without data.

The architecture, its adapters, what bitsandbytes packs, the fused path and the checkpointed layers are the ones that a run has;
every storage that forward, backward and optimizer make is counted while it lives. What no process sees by itself is the closed
form's: the GPU's context, buffers of collectives, evaluation. Where autocast is on it is the CPU's, which leaves norms and
losses of 16-bit inputs in 16 bits; models like Llama compute those in float32 themselves.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from bitsandbytes import functional as bnb_functional
from bitsandbytes import optim as bnb_optim
from bitsandbytes.nn import Linear4bit, Params4bit
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.quantizers.auto import AutoHfQuantizer

from sft_play.config.backends import backend_of
from sft_play.config.schema import Config
from sft_play.errors import ConfigError, EnvironmentFault, first_line
from sft_play.models import bnb, lora
from sft_play.models.checkpointing import checkpoint_layers
from sft_play.models.fake_kernels import fake_kernels
from sft_play.models.fast.install import installed_on, make_fast
from sft_play.models.fast.loss import fused_nll, is_loss_fused
from sft_play.models.live_bytes import LiveBytes, storage_bytes
from sft_play.models.load import weight_dtype
from sft_play.models.losses import summed_nll
from sft_play.plan.memory import StepBytes
from sft_play.plan.model_shape import known_config
from sft_play.plan.precision import precision
from sft_play.plan.run_plan import PlannedRun
from sft_play.process import DTYPES, Process

# What Trainer makes of train.optim; a paged state has the same bytes, in memory that the driver may move to the host
OPTIMIZERS: dict[str, Any] = {
    "adamw_torch": torch.optim.AdamW,
    "adamw_torch_fused": partial(torch.optim.AdamW, fused=True),
    "adamw_8bit": partial(bnb_optim.AdamW, optim_bits=8),
    "paged_adamw_8bit": partial(bnb_optim.AdamW, optim_bits=8),
    "paged_adamw_32bit": bnb_optim.AdamW,
    "sgd": torch.optim.SGD,
}


@dataclass(frozen=True)
class Step:
    """What is traced: a resolved config and what of its plan a step hangs on."""

    config: Config
    device: str  # cpu, cuda
    checkpointed_layers: int
    zero_stage: int
    accumulates: bool  # gradients stay through the forward passes

    @property
    def compute_dtype(self) -> torch.dtype:
        """Type of the matrix products."""
        return DTYPES[precision(self.config)]

    @property
    def is_half(self) -> bool:
        return self.compute_dtype.itemsize == 2


@dataclass(frozen=True)
class Traced:
    """Bytes of a step on one device. What is held, then what forward, backward and optimizer add to what is held when they begin."""

    weights: int  # of the base, packed ones with their constants
    buffers: int
    adapters: int
    gradients: int  # when the step is complete
    optimizer: int | None  # None under DeepSpeed, where the closed form knows what a rank holds
    activations: int  # kept when the output head begins
    activation_bytes_per_token: int
    activation_bytes_fixed: int
    logits: int  # what head and loss add to that at most
    logits_kept: int  # and leave for the backward pass
    forward: int  # at most: with the logits, or in a layer before them
    backward: int  # at most, with activations and logits
    optimizer_step: int
    accumulates: bool

    def as_json(self) -> dict[str, int | None]:
        """Return the fields."""
        return asdict(self)

    def phases(self, closed: StepBytes) -> StepBytes:
        """Return the bytes of each phase; what is not traced comes from the closed form."""
        phases, logits = dict(closed.phases), max(0, self.logits_kept)
        if self.optimizer is not None:
            held = {
                "weights": self.weights + self.buffers,
                "adapters": self.adapters,
                "optimizer": self.optimizer,
            }
            phases = {name: replace(phase, **held) for name, phase in phases.items()}
            phases["load"] = replace(phases["load"], optimizer=0)
            while_forward = self.gradients if self.accumulates else 0
            for name, gradients in (
                ("forward", while_forward),
                ("backward", while_forward),
                ("optimizer", self.gradients),
            ):
                phases[name] = replace(phases[name], gradients=gradients)
        phases["forward"] = replace(
            phases["forward"], activations=self.forward - self.logits, logits=self.logits
        )
        phases["backward"] = replace(
            phases["backward"], activations=self.backward - logits, logits=logits
        )
        phases["optimizer"] = replace(phases["optimizer"], activations=self.optimizer_step)
        return StepBytes(phases)


def step_of(planned: PlannedRun) -> Step:
    """Return what a plan's run computes in a step.

    Raises: ConfigError for a backend whose code is not ours to trace.
    """
    plan = planned.plan
    backend = backend_of(planned.config)
    if not backend.is_traceable:
        raise ConfigError(
            f"EXACT=1 cannot trace tuning.backend={backend.name}, which brings its own model code; "
            "plan without EXACT, or set TUNING_BACKEND=bnb"
        )
    layout = plan.layout
    accumulates = layout.accumulates or layout.world_size > 1 or plan.zero_stage > 0
    return Step(
        planned.config, plan.ranks.device, layout.checkpointed_layers, plan.zero_stage, accumulates
    )


def trace(step: Step) -> Traced:
    """Return the bytes of a step. Every row is full and every token carries loss; packed rows are as long.

    Raises: EnvironmentFault when the model's config cannot be had; ConfigError when adapters match no layer.
    """
    model = build(step)
    with FakeTensorMode(allow_non_fake_inputs=True), fake_kernels(step.device == "cuda"):
        materialize(model, step)
        process = Process.alone(torch.device(step.device), step.compute_dtype)
        make_fast(model, step.config, process, step.zero_stage)
        checkpoint_layers(model, step.checkpointed_layers)
        return measure(model.train(), step)


def measure(model: PreTrainedModel, step: Step) -> Traced:
    """Return the bytes of a step of a model as `models.load` makes it, in training mode, with its data or without."""
    run = _Run(model, step)
    optimizer, transient = run.optimizer()  # first: it leaves the gradients of micro-batches before
    rows, tokens = step.config.train.batch_size, step.config.model.max_seq_len
    more = run.forward(rows + 1).kept
    forward = run.forward(rows)
    backward = run.backward(forward)
    per_token = (more - forward.kept) // tokens
    return Traced(
        weights=storage_bytes(weight_tensors(model)),
        buffers=storage_bytes(model.buffers()),
        adapters=storage_bytes(adapter_tensors(model)),
        gradients=sum(parameter.nbytes for parameter in run.trained),
        optimizer=optimizer,
        activations=forward.kept,
        activation_bytes_per_token=per_token,
        activation_bytes_fixed=forward.kept - per_token * rows * tokens,
        logits=forward.logits,
        logits_kept=forward.logits_kept,
        forward=forward.most,
        backward=backward,
        optimizer_step=transient,
        accumulates=step.accumulates,
    )


def architecture(config: Config) -> PretrainedConfig:
    """Return the transformers config of a model: of its folder, as known by name, or of the hub. Raises: EnvironmentFault."""
    name = config.model.name
    sizes = None if Path(name).is_dir() else known_config(name)
    if sizes is not None:
        model_type = {"gemma3": "gemma3_text"}.get(
            sizes["model_type"], sizes["model_type"]
        )  # known without the part that sees
        return AutoConfig.for_model(**{**sizes, "model_type": model_type})
    try:
        return AutoConfig.from_pretrained(
            name, revision=config.model.revision, trust_remote_code=config.model.trust_remote_code
        )
    except (OSError, ValueError, KeyError) as error:
        raise EnvironmentFault(
            f"model.name={name}: no config to trace could be loaded: {first_line(error)}"
        ) from None


def build(step: Step) -> PreTrainedModel:
    """Return the model that a run would load, on the meta device: quantised where the run's is, with its adapters."""
    config = step.config
    asked = config.model.attn_implementation
    options = (
        {}
        if asked == "auto"
        else {"attn_implementation": "sdpa" if asked == "flash_attention_2" else asked}
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            architecture(config),
            dtype=weight_dtype(config, step.compute_dtype),
            trust_remote_code=config.model.trust_remote_code,
            **options,
        )
    if config.tuning.mode == "qlora":
        quantise(model, bnb.quantization(config, step.compute_dtype, step.zero_stage))
    if config.tuning.mode != "full":
        model = lora.add_adapters(model, config)
    return model


def quantise(model: PreTrainedModel, quantization: Any) -> None:
    """Pack the linears of a model on the meta device that transformers packs when it loads one, by bitsandbytes' own code."""
    bnb_functional.quantize_blockwise(
        torch.zeros(1)
    )  # its table of 8-bit values is made once, and cannot be without data
    quantizer = AutoHfQuantizer.from_config(quantization, pre_quantized=False)
    quantizer.preprocess_model(model, device_map=None)
    for module in model.modules():
        if isinstance(module, Linear4bit):
            module.weight._quantize(torch.device("meta"))
    quantizer.postprocess_model(model)
    bnb.keep_differentiable(model)


def materialize(model: nn.Module, step: Step) -> None:
    """Turn all tensors of a model on the meta device into tensors without data on the CPU, so that autocast and devices hold."""
    made: dict[Tensor, Tensor] = {}  # tied weights stay one
    cast = (
        step.compute_dtype if step.zero_stage else None
    )  # DeepSpeed turns all weights to the type of the products
    for module in model.modules():
        for owned in (module._buffers, module._parameters):
            for name, tensor in owned.items():
                if tensor is not None and tensor not in made:
                    made[tensor] = _materialized(tensor, cast)
                owned[name] = made.get(tensor)


def _materialized(tensor: Tensor, cast: torch.dtype | None) -> Tensor:
    if not isinstance(tensor, nn.Parameter):
        return torch.empty_like(tensor, device="cpu")
    dtype = cast if cast and tensor.is_floating_point() else tensor.dtype
    data = torch.empty(
        tensor.shape, dtype=dtype, device="cpu"
    )  # empty_like of bitsandbytes' class is refused by torch 2.11
    made = nn.Parameter(data, requires_grad=tensor.requires_grad)
    if isinstance(tensor, Params4bit):
        state = tensor.quant_state
        for owner in (state, state.state2) if state.nested else (state,):
            owner.absmax, owner.code = (
                torch.empty_like(part, device="cpu") for part in (owner.absmax, owner.code)
            )
        state.offset = torch.empty_like(state.offset, device="cpu") if state.nested else None
        made.quant_state = state
    return made


def weight_tensors(model: nn.Module) -> Iterator[Tensor]:
    """Yield a model's parameters that are no adapters, with the constants of packed ones."""
    for name, parameter in model.named_parameters():
        if ".lora_" not in name:
            yield parameter
            yield from _constants(getattr(parameter, "quant_state", None))


def _constants(state: bnb_functional.QuantState | None) -> Iterator[Tensor]:
    if state is not None:
        yield from (state.absmax, state.code)
        if state.nested:
            yield state.offset
            yield from _constants(state.state2)


def adapter_tensors(model: nn.Module) -> Iterator[Tensor]:
    """Yield the parameters of adapters."""
    return (parameter for name, parameter in model.named_parameters() if ".lora_" in name)


def optimizer_of(parameters: list[nn.Parameter], optim: str, on_gpu: bool) -> torch.optim.Optimizer:
    """Return the optimizer that Trainer makes of `train.optim`."""
    options = {"foreach": True} if on_gpu and optim in ("adamw_torch", "sgd") else {}
    with unset_fake_temporarily():  # bitsandbytes makes tables of 8-bit values
        return OPTIMIZERS[optim](parameters, lr=0.0, **options)


def state_bytes(optimizer: torch.optim.Optimizer, on_gpu: bool) -> int:
    """Return the bytes of an optimizer's state on its device, where plain AdamW keeps the count of its steps on the CPU."""
    counts_elsewhere = (
        on_gpu and isinstance(optimizer, torch.optim.AdamW) and not optimizer.defaults["fused"]
    )
    tensors = [
        value
        for state in optimizer.state.values()
        for name, value in state.items()
        if isinstance(value, Tensor) and not (counts_elsewhere and name == "step")
    ]
    return storage_bytes(tensors)


@dataclass(frozen=True)
class _Forward:
    """A forward pass: its loss, and bytes beyond those that lived before it."""

    loss: Tensor
    before: int
    kept: int  # when the head begins
    logits: int  # what head and loss add to that at most
    logits_kept: int  # and leave
    most: int


class _Run:
    """The parts of a step of one model, their bytes counted."""

    def __init__(self, model: PreTrainedModel, step: Step):
        self.model, self.step, self.live, self.at_head = model, step, LiveBytes(), (0, 0)
        self.device = next(model.parameters()).device
        self.trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.live.count([*weight_tensors(model), *adapter_tensors(model), *model.buffers()])

    def optimizer(self) -> tuple[int | None, int]:
        """Return the bytes of the state, and what a step needs beside it. Gradients stay, if the step accumulates."""
        state, transient, on_gpu = None, 0, self.step.device == "cuda"
        with self.live:
            for parameter in self.trained:
                parameter.grad = torch.zeros_like(parameter)
            if not self.step.zero_stage:
                optimizer = optimizer_of(self.trained, self.step.config.train.optim, on_gpu)
                optimizer.step()
                state, before = state_bytes(optimizer, on_gpu), self.live.restart()
                optimizer.step()
                transient = self.live.peak - before
            for parameter in () if self.step.accumulates else self.trained:
                parameter.grad = None
        return state, transient

    def forward(self, rows: int) -> _Forward:
        """Return what a forward pass over full rows needs."""
        hook = self.model.get_output_embeddings().register_forward_pre_hook(self._head_begins)
        try:
            with self.live:
                before = self.live.restart()
                loss = self._loss(rows)
                kept, in_layers = self.at_head
                most = max(in_layers, self.live.peak) - before
                return _Forward(
                    loss, before, kept - before, self.live.peak - kept, self.live.now - kept, most
                )
        finally:
            hook.remove()

    def backward(self, forward: _Forward) -> int:
        """Return the most that lives in the backward pass beyond what did before the forward pass."""
        with self.live:
            self.live.restart()
            forward.loss.backward()
        return self.live.peak - forward.before

    def _head_begins(self, *_: Any) -> None:
        in_layers = self.live.peak
        self.at_head = self.live.restart(), in_layers

    def _loss(self, rows: int) -> Tensor:
        """As the trainer computes it: the model under autocast, whole logits in float32."""
        inputs = self._inputs(rows)
        labels = torch.zeros_like(inputs["input_ids"])
        if is_loss_fused(self.model):
            targets = labels[:, 1:].flatten()  # a row's last token predicts nothing
            return fused_nll(self.model, self._wrapped, inputs, targets, targets)
        return summed_nll(self._wrapped(**inputs).logits.float(), labels)

    def _wrapped(self, **inputs: Any) -> Any:
        # DeepSpeed's weights have the type themselves
        with torch.autocast(
            self.device.type,
            self.step.compute_dtype,
            enabled=self.step.is_half and not self.step.zero_stage,
        ):
            return self.model(**inputs, use_cache=False)

    def _inputs(self, rows: int) -> dict[str, Tensor]:
        """Full rows; attention that needs a mask gets the whole one that transformers makes of packed and of padded rows."""
        config, tokens = self.step.config, self.step.config.model.max_seq_len
        inputs = {"input_ids": torch.zeros(rows, tokens, dtype=torch.int64, device=self.device)}
        implementation, has_mask = (
            config.model.attn_implementation,
            config.train.packing or config.train.batch_size > 1,
        )
        if (
            "attention" in installed_on(self.model).on
            or implementation == "flash_attention_2"
            or not has_mask
        ):
            return inputs
        allowed = torch.ones(rows, 1, tokens, tokens, dtype=torch.bool, device=self.device).tril()
        return {
            **inputs,
            "attention_mask": allowed
            if implementation != "eager"
            else torch.zeros_like(allowed, dtype=self.step.compute_dtype),
        }
