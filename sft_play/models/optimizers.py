"""The optimizers of train.optim, for a step that is measured; and Muon, which transformers lacks."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from bitsandbytes import optim as bnb_optim
from torch import nn
from torch.optim import AdamW, Optimizer
from transformers import Adafactor, PreTrainedModel


class Muon(Optimizer):
    """Muon for some matrices and AdamW for all other parameters, with one state and one schedule.

    The update of a matrix has the RMS of AdamW's (`match_rms_adamw`), so both have the learning
    rate and the weight decay of AdamW (Moonshot, arXiv 2502.16982).
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
                if own:
                    part.append({**group, "params": own})
        self.muon = torch.optim.Muon(by_muon, lr, adjust_lr_fn="match_rms_adamw")
        self.adamw = AdamW(by_adamw, lr, **options)
        super().__init__([*self.muon.param_groups, *self.adamw.param_groups], {"lr": lr})

    def step(self, closure: Callable[[], float] | None = None) -> None:
        """Step both. A checkpoint, LoRA+ or a schedule may have replaced groups and state."""
        assert closure is None, "the loss is computed before the step"
        for part, is_muon in ((self.muon, True), (self.adamw, False)):
            groups = self.param_groups
            part.param_groups = [group for group in groups if ("momentum" in group) == is_muon]
            part.state = self.state
            part.step()


def hidden_matrices(model: PreTrainedModel) -> list[nn.Parameter]:
    """Return what Muon steps: the trained 2-D weights of modules, but for embeddings and head."""
    left_out = {id(model.get_input_embeddings()), id(model.get_output_embeddings())}
    found = []
    for module in model.modules():
        weight = getattr(module, "weight", None)
        is_embedding = isinstance(module, nn.Embedding) or id(module) in left_out
        if isinstance(weight, nn.Parameter) and weight.ndim == 2 and not is_embedding:
            found.append(weight)
    return [weight for weight in found if weight.requires_grad]


# The optimizers that Trainer creates for train.optim. A paged state has the same bytes, but the
# driver may move them to the host.
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
