"""Ranks that hold a copy of the weights each: are the trained ones equal on all of them?

Gradients are summed over the ranks, weights are not: what one rank alone does to them stays.
"""

import torch
from torch.distributed.tensor import DTensor

from sft_play.errors import EnvironmentFault
from sft_play.process import Process

# A view of the same bytes as whole numbers, whose sum does not round
INTEGER_OF_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def has_equal_copies(model: torch.nn.Module, process: Process) -> bool:
    """Return whether every rank holds all trained weights, rounded alike. Every rank must call it.

    ZeRO-3 and FSDP give each rank a part, and GPUs of two kinds add in another order.
    """
    if any(map(_is_partitioned, _trained(model).values())):
        return False
    return len(set(process.gather(_device_name(process.device)))) == 1


def check_equal_ranks(model: torch.nn.Module, process: Process, step: int) -> None:
    """Compare the trained weights of all ranks, bit by bit. Every rank must call it.

    Raises: EnvironmentFault, on every rank, where they differ.
    """
    own = {name: bit_sum(parameter) for name, parameter in _trained(model).items()}
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


def bit_sum(tensor: torch.Tensor) -> int:
    """Return the sum of a tensor's elements read as whole numbers; one changed bit changes it."""
    bits = tensor.detach().contiguous().view(INTEGER_OF_SIZE[tensor.element_size()])
    return int(bits.sum(dtype=torch.int64))


def _trained(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def _is_partitioned(parameter: torch.nn.Parameter) -> bool:
    """Return whether a rank holds a part of it: under ZeRO-3 and FSDP."""
    return hasattr(parameter, "ds_tensor") or isinstance(parameter, DTensor)


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPUs"
