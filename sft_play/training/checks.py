"""Checks of a model before and during training.

Engine: libraries fall back to another wrapper without a message. Causality: an encoder, or a
model that reads its prompt in both directions, would learn to copy what it should predict.
Ranks: gradients are summed over ranks, but weights are not. A change that a single rank makes to
its weights therefore persists. `isolation` checks that packed documents are kept apart.

Legend: T tokens of a text, V vocabulary.
"""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from sft_kernels.e4m3.linear import has_float8
from sft_kernels.expert_modules import ranks_of_experts
from sft_kernels.process import Process
from sft_kernels.sharded import is_sharded
from sft_kernels.training_setup import base_model_of
from sft_play.errors import ConfigError, DivergedError, EnvironmentFault
from sft_play.models.adapter_state import part_of
from sft_play.models.delivered import rounds_inputs
from sft_play.models.experts import expert_weights
from sft_play.models.sharding import local_shard
from sft_play.training.memory import innermost

WRAPPERS_OF_STRATEGY = {
    "single": (None,),
    "ddp": ("DistributedDataParallel",),
    "fsdp": (None, "DistributedDataParallel"),  # DDP of adapters, over sharded weights
    "ep": (None, "DistributedDataParallel"),  # no wrapper if only experts are trained
    "deepspeed": ("DeepSpeedEngine",),
}
WRAPPERS = ("DistributedDataParallel", "DeepSpeedEngine", "DataParallel")
TEXT_TOKENS = 24
# Relative to the change of the last token's logits. Earlier logits are the same sums of the same
# numbers: 55 of 56 model types give the same bits. BERT with random weights moves them by 2e-3.
MAX_MOVED = 1e-4
MAX_MOVED_COARSE = 0.05  # an expert multiplies all tokens routed to it in one GEMM, in 16 bits
# A view of the same bytes as integers
INTEGER_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
SUMMED_AT_ONCE = 1 << 24  # elements: a CPU copies them to int64


def check_engine(model: nn.Module, strategy: str) -> None:
    """Raise EnvironmentFault unless the model has the wrapper that the strategy needs.

    Libraries fall back to another wrapper without a message.
    """
    wrapped = type(model).__name__
    found = wrapped if wrapped in WRAPPERS else None
    if found not in WRAPPERS_OF_STRATEGY[strategy]:
        raise EnvironmentFault(
            f"strategy={strategy} was planned, and the model is wrapped in {wrapped}; try make "
            "doctor"
        )
    for name, has_divided in (("fsdp", is_sharded(model)), ("ep", ranks_of_experts(model) > 1)):
        if has_divided != (strategy == name):
            raise EnvironmentFault(
                f"strategy={strategy} was planned, and the weights are "
                f"{'' if has_divided else 'not '}divided by {name}; try make doctor"
            )


def check_finite(model: nn.Module, step: int) -> None:
    """Raise DivergedError when a trained weight, or this rank's part of it, is NaN or infinite."""
    for name, parameter in _trained(model).items():
        if not torch.isfinite(local_shard(getattr(parameter, "ds_tensor", parameter))).all():
            raise DivergedError(
                f"{name} has NaN or infinity at step {step}: the run has diverged; try a lower "
                "TRAIN_LEARNING_RATE"
            )


def check_finite_optimizer(optimizer: Any, step: int) -> None:
    """Raise DivergedError when a moment of the optimizer is NaN or infinite."""
    for state in innermost(optimizer).state.values():
        for name, value in state.items():
            is_number = torch.is_tensor(value) and value.is_floating_point()
            if is_number and not torch.isfinite(local_shard(value)).all():
                raise DivergedError(
                    f"the optimizer's {name} has NaN or infinity at step {step}: the run has "
                    "diverged; try a lower TRAIN_LEARNING_RATE"
                )


@torch.no_grad()
def check_causality(model: nn.Module, vocabulary: int, device: torch.device) -> None:
    """Raise ConfigError if changing the last token of a text moves the logits of earlier ones.

    It checks evaluation and training mode: some models mask differently. Every rank must call it.
    """
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(vocabulary, (1, TEXT_TOKENS), generator=generator)
    changed = ids.clone()
    changed[0, -1] = (changed[0, -1] + 1) % vocabulary
    limit = MAX_MOVED_COARSE if rounds_coarsely(model) else MAX_MOVED
    with modes_restored(model):
        for mode in (False, True):
            model.train(mode)
            one, other = (_logits(model, text.to(device)) for text in (ids, changed))
            change = (one - other).abs().amax(-1)  # (T,)
            moved, own = change[:-1].max().item(), change[-1].item()
            if moved > limit * own:  # NaN is reported by the first evaluation
                base = base_model_of(getattr(model, "module", model))
                raise ConfigError(
                    f"model.name={base.name_or_path}: {type(base).__name__} sees tokens that come "
                    f"later: changing the last one moves earlier logits by {moved:.2g}, and its "
                    f"own by {own:.2g}; set MODEL_NAME to a causal language model"
                )


def _logits(model: nn.Module, ids: Tensor) -> Tensor:
    """Return the logits (T, V) of ids (1, T), with the same dropout at every call."""
    gpus = [ids.device] if ids.device.type == "cuda" else []
    with torch.random.fork_rng(devices=gpus):
        torch.manual_seed(0)
        return model(input_ids=ids, use_cache=False).logits[0].float()


@contextlib.contextmanager
def modes_restored(model: nn.Module) -> Iterator[None]:
    """Restore the mode of every module, training or evaluation, on leaving."""
    was_training = {module: module.training for module in model.modules()}
    try:
        yield
    finally:
        for module, mode in was_training.items():
            module.training = mode


def rounds_coarsely(model: nn.Module) -> bool:
    """Return whether rounding can change the chosen expert or the float8 value."""
    return bool(expert_weights(model)) or has_float8(model) or rounds_inputs(model)


def has_equal_copies(model: nn.Module, process: Process) -> bool:
    """Return whether every rank has all trained weights, rounded alike. Every rank must call it.

    ZeRO-3 and FSDP give each rank a part. GPUs of two kinds sum in a different order.
    """
    for parameter in _trained(model).values():
        if hasattr(parameter, "ds_tensor") or isinstance(parameter, DTensor):
            return False
    name = torch.cuda.get_device_name(process.device) if process.device.type == "cuda" else "CPUs"
    return len(set(process.gather(name))) == 1


def check_equal_ranks(model: nn.Module, process: Process, step: int) -> None:
    """Compare the trained weights of all ranks, bit by bit. Every rank must call it.

    Experts that only one rank has are left out.
    Raises: EnvironmentFault, on every rank, if they differ.
    """
    own = bit_sums(pair for pair in _trained(model).items() if part_of(pair[1]) is None)
    sums = process.gather(own)
    for rank, others in enumerate(sums):
        differing = [name for name in own if others[name] != sums[0][name]]
        if differing:
            raise EnvironmentFault(
                f"{len(differing)} of {len(own)} trained tensors of rank {rank} are not those of "
                f"rank 0 at step {step}, {differing[0]} first: a GPU computes wrongly "
                "(nvidia-smi -q -d ECC counts its errors), or the ranks did not train together; "
                "resume from an earlier checkpoint without that GPU"
            )


def bit_sums(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, int]:
    """Return the sum of each tensor's elements read as integers; one changed bit changes it.

    For tensors that ZeRO-3 or FSDP shards, it is the sum of this rank's part. The sums, modulo
    2^64, do not round. Waits for the GPU once.
    """
    sums: dict[str, Tensor] = {}
    for name, tensor in tensors:
        flat = local_shard(getattr(tensor, "ds_tensor", tensor)).detach().reshape(-1)
        parts = flat.view(INTEGER_OF_SIZE[flat.element_size()]).split(SUMMED_AT_ONCE)
        sums[name] = torch.stack([part.sum(dtype=torch.int64) for part in parts]).sum()
    if not sums:
        return {}
    device = next(iter(sums.values())).device  # a model placed by a device map is on several
    numbers = torch.stack([number.to(device) for number in sums.values()]).tolist()
    return dict(zip(sums, numbers, strict=True))


def _trained(model: nn.Module) -> dict[str, torch.nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}
