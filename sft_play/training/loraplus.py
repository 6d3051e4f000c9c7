"""LoRA+: a higher learning rate for the B matrices (Hayou et al., arXiv 2402.12354).

As in peft.optimizers.create_loraplus_optimizer, B and DoRA's magnitudes get the higher rate. Here
the optimizer is the one of train.optim, with its weight decay, and whole modules keep their rate.
"""

from torch import nn
from torch.optim import Optimizer

FASTER = ("lora_B", "lora_embedding_B", "lora_magnitude_vector")


def raise_learning_rate_of_b(optimizer: Optimizer, model: nn.Module, ratio: float) -> None:
    """Move the parameters of B to groups of their own, with `ratio` times the learning rate.

    Call it before the first step and before a schedule is made. The first group keeps its rate: it
    is the one that Trainer logs.
    """
    faster_ids: set[int] = set()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and any(word in name for word in FASTER):
            faster_ids.add(id(parameter))
    assert faster_ids, "no adapter has a B matrix"
    for group in list(optimizer.param_groups):
        faster = [parameter for parameter in group["params"] if id(parameter) in faster_ids]
        if not faster:
            continue
        group["params"] = [part for part in group["params"] if id(part) not in faster_ids]
        options = {name: value for name, value in group.items() if name != "params"}
        optimizer.add_param_group({**options, "params": faster, "lr": ratio * group["lr"]})
