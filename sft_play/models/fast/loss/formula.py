"""What a model computes from the output of its head: logits as they are, scaled, or capped.

    logits = cap(scale * scores),  cap(z) = softcap * tanh(z / softcap)

The code of the model's class runs on stubs, as in `recognise`: no weights are read.
"""

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from transformers import PreTrainedModel

from sft_play.models.fast.recognise import Stub, numbers, own_result
from sft_play.models.sharding import shallow_copy

TOKENS = 2
SCORES = 5
FLOAT32_EPSILON = 1e-5  # models return logits in float32
LARGE = 100.0  # scores at which any cap of interest bends


@dataclass(frozen=True)
class HeadFormula:
    """How logits follow from the scores of an output head."""

    scale: float = 1.0
    softcap: float | None = None

    def logits(self, scores: Tensor) -> Tensor:
        """Return the logits of scores."""
        scaled = scores * self.scale
        if self.softcap is None:
            return scaled
        return torch.tanh(scaled / self.softcap) * self.softcap


class StubOutput:
    """The output of a stack of layers; whatever else a model asks it for is None."""

    def __init__(self, hidden: Tensor):
        self.last_hidden_state = hidden

    def __getitem__(self, index: int) -> Tensor | None:
        return self.last_hidden_state if index == 0 else None

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


def head_formula_of(base: PreTrainedModel, head: nn.Module) -> HeadFormula | None:
    """Return how a model's logits follow from its head's scores, None if in no known way.

    `head` is the module that computes the scores, or a wrapper around it.
    """
    with unset_fake_temporarily():
        hidden = numbers(1, TOKENS, SCORES)
        scores = hidden * LARGE
    output = StubOutput(hidden)
    children: dict[str, nn.Module] = {}
    for name, child in base.named_children():
        if child is head:
            children[name] = Stub(lambda x: x * LARGE)
            children[name].weight = hidden  # models cast its input to the dtype of its weight
        else:
            children[name] = DecoderStub(child, output)
    copied = shallow_copy(base)
    vars(copied)["_modules"] = children
    copied.config = copy.copy(base.config)
    copied.config.dtype = torch.float32  # Unsloth's models round their logits to it
    with unset_fake_temporarily():
        ids = torch.zeros(1, TOKENS, dtype=torch.int64, device="cpu")
    result = own_result(copied, input_ids=ids)
    logits = getattr(result, "logits", None)
    if not isinstance(logits, Tensor) or logits.shape != scores.shape:
        return None
    with unset_fake_temporarily():
        return _fitting(scores, logits.double(), _softcap(base))


class DecoderStub(nn.Module):
    """A stack of layers that returns one output for any input; it has the same attributes."""

    def __init__(self, decoder: nn.Module, output: StubOutput):
        super().__init__()
        for name, value in vars(decoder).items():
            if not name.startswith("_") and name != "forward":
                vars(self)[name] = value
        self.output = output

    def forward(self, *_: Any, **__: Any) -> StubOutput:
        """Return the output."""
        return self.output


def _fitting(scores: Tensor, logits: Tensor, softcap: float | None) -> HeadFormula | None:
    """Return the formula that gives these logits."""
    plain = HeadFormula(scale=float(logits.flatten()[0] / scores.flatten()[0]))
    candidates = [HeadFormula(), plain]
    if softcap is not None:
        candidates.append(HeadFormula(softcap=softcap))
    for formula in candidates:
        if torch.allclose(logits, formula.logits(scores), rtol=FLOAT32_EPSILON, atol=0):
            return formula
    return None


def _softcap(base: PreTrainedModel) -> float | None:
    return getattr(base.config.get_text_config(), "final_logit_softcapping", None)
