"""Trace the bytes of a run's step on a model without weights.

The model is built from its config.json, and a step runs on fake tensors. Architecture, adapters,
4-bit packing, fused kernels and checkpointed layers are those of the run. Autocast is the CPU's,
which leaves norms and losses of 16-bit inputs in 16 bits. Models like Llama cast those to float32
themselves.

Functions of torch and transformers are replaced by fakes that allocate what the real ones do on a
GPU: outputs, buffers and what is saved for backward. Kernels of this project define these
allocations next to their reference (`triton_kernels`).

A few sizes are traced, from which `plan.traced` computes the bytes of any layout. The process of
`models.structure` sends them as its answer.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn import functional
from transformers import PreTrainedModel, masking_utils

from sft_kernels.attention.reference import AllocatedFlashAttention
from sft_kernels.install import FusedKernels
from sft_kernels.needs import MIN_CAPABILITY
from sft_kernels.process import Process
from sft_kernels.training_setup import Gradients, to_compute_dtype
from sft_kernels.triton_kernels import tracing_gpu
from sft_play.config.schema import Config
from sft_play.errors import first_line
from sft_play.models.architecture import decoder_layers
from sft_play.models.fake_model import build_architecture, materialize, quantize_and_adapt
from sft_play.models.fast import install_fused_kernels
from sft_play.models.step_meter import MicroBatchBytes, StepMeter, StepSetup
from sft_play.models.stored_weights import replaced
from sft_play.models.structure import UNBUILDABLE
from sft_play.plan.traced import SIZES, ActivationGrowth, LayersGrowth, TracedSize, TracedStep

torch_attention = functional.scaled_dot_product_attention


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    *more: Any,
    **settings: Any,
) -> Tensor:
    """Return torch's attention on a GPU, in autocast's dtype.

    Real tensors get real attention: `recognize` uses numbers to find out what a module computes.
    """
    if not isinstance(query, FakeTensor):
        return torch_attention(query, key, value, attn_mask, *more, **settings)
    cast = [to_compute_dtype(tensor) for tensor in (query, key, value)]
    return AllocatedFlashAttention.apply(*cast, attn_mask)


class FakeGroupedProduct(torch.autograd.Function):
    """`functional.grouped_mm` for fake tensors in float32, which the original does not accept."""

    @staticmethod
    def forward(ctx, x: Tensor, other: Tensor, groups: int) -> Tensor:
        """Return (S, out) of x (S, in) and matrices (E, in, out); (E, in, out) of two matrices."""
        ctx.save_for_backward(x, other)
        if other.dim() == 2:
            return x.new_empty(groups, x.shape[0], other.shape[1])
        return x.new_empty(x.shape[0], other.shape[2])

    @staticmethod
    def backward(ctx, grad: Tensor) -> Gradients:
        """Return the gradients that are needed."""
        pairs = zip(ctx.saved_tensors, ctx.needs_input_grad, strict=False)
        gradients = [torch.empty_like(tensor) if needed else None for tensor, needed in pairs]
        return *gradients, None


def grouped_mm(x: Tensor, other: Tensor, *, offs: Tensor) -> Tensor:
    """Return `functional.grouped_mm` of two-dimensional x; allocate only its output."""
    return FakeGroupedProduct.apply(x, other, len(offs))


_is_autocast_enabled = torch.is_autocast_enabled


def is_autocast_enabled(device_type: str = "cpu") -> bool:
    """Return `torch.is_autocast_enabled`, with the CPU as default device instead of the GPU.

    PEFT calls it without a device, and does not cast 16-bit inputs under autocast.
    """
    return _is_autocast_enabled(device_type)


def dropout(tensor: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Return dropout as on a GPU, with a mask of one byte per element; a CPU stores floats."""
    return torch.native_dropout(tensor, p, True)[0] if p and training else tensor


# Functions that read the values of tensors, by module: fake tensors have no values
VALUE_READERS: dict[Any, dict[str, Any]] = {
    functional: {"grouped_mm": grouped_mm},
    # the step passes its mask for packed rows
    masking_utils: {"find_packed_sequence_indices": lambda position_ids: None},
}
GPU_KERNELS: dict[Any, dict[str, Any]] = {
    functional: {"scaled_dot_product_attention": scaled_dot_product_attention, "dropout": dropout},
    torch: {"is_autocast_enabled": is_autocast_enabled},
    torch.cuda: {"get_device_capability": lambda device=None: MIN_CAPABILITY},
}


@contextlib.contextmanager
def fake_kernels(is_gpu: bool) -> Iterator[None]:
    """Replace the functions that read values, and those that need a GPU if the run is on one."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(tracing_gpu(is_gpu))
        for table in (VALUE_READERS, GPU_KERNELS if is_gpu else {}):
            for owner, fakes in table.items():
                stack.enter_context(replaced(owner, **fakes))
        yield


TracedModule = Mapping[TracedSize, MicroBatchBytes]


@contextlib.contextmanager
def tracing(model: PreTrainedModel, setup: StepSetup) -> Iterator[FusedKernels]:
    """Give a meta model fake tensors and the run's kernels; yield the kernels."""
    dtype = setup.compute_dtype
    process = Process.alone(torch.device(setup.device), dtype)
    with FakeTensorMode(allow_non_fake_inputs=True), fake_kernels(setup.device == "cuda"):
        materialize(model, dtype if setup.zero_stage else None)  # DeepSpeed casts all weights
        yield install_fused_kernels(model, setup.config, process, setup.zero_stage)


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Return {"answer": the trace}, or {"refused": why the model cannot be traced}."""
    try:
        setup = StepSetup(
            config=Config.model_validate(request["settings"]),
            device=request["device"],
            zero_stage=request["zero_stage"],
        )
        return {"answer": asdict(trace_step(setup))}
    except UNBUILDABLE as error:
        return {"refused": f"{type(error).__name__}: {first_line(error)}"}


def trace_step(setup: StepSetup) -> TracedStep:
    """Return the growth of a step with no layer checkpointed, and with all of them.

    A deep model is cut to two small depths, because each period of layers adds the same number of
    bytes.

    Raises: EnvironmentFault without a config.json; ConfigError when adapters match no layer.
    """
    dtype = setup.compute_dtype
    is_full = setup.config.tuning.mode == "full"
    model = build_architecture(setup.config, dtype)
    depth = len(decoder_layers(model))
    cuts = cut_depths(layer_signatures(model, setup.config))
    cut_layers(model, max(cuts))  # first: adapters and 4-bit weights of all layers need a minute
    model = quantize_and_adapt(model, setup.config, dtype, setup.zero_stage)
    periods = 0.0
    with tracing(model, setup) as kernels:
        cut = fewer = measure_sizes(model.train(), setup)
        if len(cuts) == 2:
            cut_layers(model, cuts[1])
            fewer = measure_sizes(model, setup, runs_backward=is_full)
            periods = (depth - cuts[0]) / (cuts[0] - cuts[1])
    has_pairs = "attention" not in kernels.on

    def growth(name: str) -> ActivationGrowth:
        found = {size: getattr(each, name) for size, each in cut[0].items()}
        return ActivationGrowth.through(found, has_pairs)

    plain, checkpointed = (
        _deeper(measured, of_fewer, periods, is_full, has_pairs)
        for measured, of_fewer in zip(cut, fewer, strict=True)
    )
    return TracedStep(
        plain=plain,
        checkpointed=checkpointed,
        logits=growth("logits"),
        logits_kept=growth("logits_kept"),
        end=growth("end"),
        on=tuple(kernels.on),
        off=kernels.off,
        in_one_row=kernels.in_one_row,
    )


def layer_signatures(model: PreTrainedModel, config: Config) -> list[Any]:
    """Return what distinguishes each decoder layer from others: parameters, type and adapters.

    If one projection makes inputs of all layers (Gemma 3n, 4 E2B), no layer can be removed.
    """
    text = model.config.get_text_config()
    types = getattr(text, "layer_types", None) or ()
    is_shared = bool(getattr(text, "hidden_size_per_layer_input", 0))
    lora = config.tuning.lora
    chosen = lora.layers_to_transform
    targets = () if isinstance(lora.target_modules, str) else lora.target_modules
    modules = (*targets, *(lora.modules_to_save or ()))
    signatures: list[Any] = []
    for number, layer in enumerate(decoder_layers(model)):
        shapes = [(name, tuple(weight.shape)) for name, weight in layer.named_parameters()]
        layer_type = types[number] if number < len(types) else None
        has_adapters = chosen is None or number in chosen
        named = [name for name in modules if f".{number}." in f".{name}."]
        own = number if is_shared else None
        signatures.append((shapes, layer_type, has_adapters, named, own))
    return signatures


def cut_depths(signatures: Sequence[Any]) -> tuple[int, ...]:
    """Return the depths to trace: a few layers and a period fewer; all layers if that is all.

    >>> cut_depths("aaaaaaaa"), cut_depths("dababababab"), cut_depths("abcd")
    ((3, 2), (5, 3), (4,))
    """
    depth = len(signatures)
    for period in range(1, depth // 2):
        for first in range(depth // 2):
            later = signatures[first:]
            if later[period:] == later[:-period]:
                fewer = first + max(period, 2)
                if fewer + period < depth:
                    return fewer + period, fewer
                break
    return (depth,)


def cut_layers(model: PreTrainedModel, depth: int) -> None:
    """Remove the decoder layers after the first `depth`."""
    last = decoder_layers(model)[-1]
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) and module[-1] is last:
            del module[depth:]
    model.config.get_text_config().num_hidden_layers = depth


def measure_sizes(
    model: PreTrainedModel, setup: StepSetup, runs_backward: bool = True
) -> list[TracedModule]:
    """Return the bytes of micro-batches of all SIZES, with no layer checkpointed and with all."""
    meter = StepMeter(model, setup)
    found = []
    for checkpointed in (0, len(decoder_layers(model))):
        found.append({size: meter.measure(size, checkpointed, runs_backward) for size in SIZES})
    return found


def _deeper(
    cut: TracedModule, fewer: TracedModule, periods: float, is_full: bool, has_pairs: bool
) -> LayersGrowth:
    """Return the growth of a model that is deeper than `cut` by `periods` times the difference.

    Over a frozen base, all peaks grow exactly by the bytes that the layers save. If weights are
    trained, the backward pass frees their casts and creates their gradients.
    """
    deeper = []
    for name in ("kept", "layers", "backward"):
        measured = name if is_full else "kept"
        sizes = {}
        for size, each in cut.items():
            period = getattr(each, measured) - getattr(fewer[size], measured)
            sizes[size] = getattr(each, name) + round(periods * period)
        deeper.append(ActivationGrowth.through(sizes, has_pairs))
    return LayersGrowth(*deeper)
