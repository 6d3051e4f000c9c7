"""The optimizers of train.optim, and Muon, which transformers' Trainer does not create."""

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from bitsandbytes import optim as bnb_optim
from torch import nn
from torch.optim import AdamW, Optimizer
from transformers import Adafactor, PreTrainedModel


class Muon(Optimizer):
    """Muon for some matrices and AdamW for all other parameters, with one state and one schedule.

    The update of a matrix has the RMS of AdamW's update (`match_rms_adamw`), so both use AdamW's
    learning rate and weight decay (Moonshot, arXiv 2502.16982).
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        lr: float,
        matrices: Iterable[nn.Parameter],
        **options: Any,
    ):
        chosen = set(map(id, matrices))
        by_muon, by_adamw = [], []
        for group in groups:
            for part, is_chosen in ((by_muon, True), (by_adamw, False)):
                own = [each for each in group["params"] if (id(each) in chosen) == is_chosen]
                part.append({**group, "params": own})
        self.muon = torch.optim.Muon(by_muon, lr, adjust_lr_fn="match_rms_adamw")
        self.adamw = AdamW(by_adamw, lr, **options)
        super().__init__([*self.muon.param_groups, *self.adamw.param_groups], {"lr": lr})

    def step(self, closure: None = None) -> None:
        """Step both optimizers. Loading a checkpoint has replaced groups and state."""
        for part, is_muon in ((self.muon, True), (self.adamw, False)):
            groups = self.param_groups
            part.param_groups = [group for group in groups if ("momentum" in group) == is_muon]
            part.state = self.state
            part.step()


def hidden_matrices(model: PreTrainedModel) -> list[nn.Parameter]:
    """Return what Muon steps: the trained 2-D weights of modules, except embeddings and head."""
    head = model.get_output_embeddings()
    left_out = [each for each in model.modules() if each is head or isinstance(each, nn.Embedding)]
    others = {id(module.weight) for module in left_out}
    return [
        weight
        for name, weight in model.named_parameters()
        if weight.ndim == 2 and name.endswith(".weight") and id(weight) not in others
    ]


# The optimizers that Trainer creates for train.optim. A paged state has the same size, but the
# driver may move it to the host.
OPTIMIZERS: dict[str, Any] = {
    "adamw_torch": AdamW,
    "adamw_torch_fused": partial(AdamW, fused=True),
    "adamw_8bit": partial(bnb_optim.AdamW, optim_bits=8),
    "paged_adamw_8bit": partial(bnb_optim.AdamW, optim_bits=8),
    "paged_adamw_32bit": bnb_optim.AdamW,
    "muon": partial(Muon, fused=True),
    "adafactor": partial(Adafactor, scale_parameter=False, relative_step=False),
    "lion": bnb_optim.Lion,
    "lion_8bit": partial(bnb_optim.Lion, optim_bits=8),
    "sgd": torch.optim.SGD,
}
