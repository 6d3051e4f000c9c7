"""A training step of a tiny model, as this project computes it and as transformers and PEFT do.

Legend: T tokens of a document, V vocabulary.
"""

import copy
import math
import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from peft import PeftModel
from peft.tuners.lora.layer import ParamWrapper
from tiny_models import TINY
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from sft_kernels.attention.forward import keep_soft_caps
from sft_kernels.install import fused_kernels_of
from sft_kernels.process import Process
from sft_kernels.training_setup import base_model_of
from sft_play.config.schema import Config
from sft_play.data.batch import Batch
from sft_play.data.collate import PackCollator, PadCollator, TrainRows
from sft_play.data.render import IGNORE_INDEX
from sft_play.models.fast import install_fused_kernels
from sft_play.models.lora import add_adapters
from sft_play.models.loss import sum_nll

CPU = torch.device("cpu")
# Longer than the sliding windows of the tiny models, and no multiple of a chunk of their mixers
LENGTHS = (19, 27, 9)
MAX_SEQ_LEN = 64
MIN_GRADIENT = 1e-2  # of a model's largest gradient: smaller ones are compared with that


@dataclass(frozen=True)
class Document:
    """A sample as a store gives it: ids and labels, each (T,)."""

    ids: np.ndarray
    labels: np.ndarray
    weights: np.ndarray | None = None
    images: tuple = ()


def documents(vocabulary: int = TINY.vocabulary) -> list[Document]:
    """Return three documents; prompts and some later tokens have no label."""
    draw = random.Random(0)
    made: list[Document] = []
    for length in LENGTHS:
        ids = np.array([draw.randrange(2, vocabulary) for _ in range(length)])
        labels = ids.copy()
        labels[: length // 3] = IGNORE_INDEX
        labels[length // 2] = IGNORE_INDEX
        made.append(Document(ids, labels))
    return made


@dataclass(frozen=True)
class Step:
    """What a step computes from the documents."""

    loss: float  # mean over the labeled tokens, in nats
    logits: list[Tensor]  # of each document, (T, V)
    gradients: dict[str, Tensor]  # of each trained weight


@dataclass(frozen=True)
class Gap:
    """The largest difference of two steps, relative to the largest number of each tensor."""

    loss: float
    logits: float
    gradients: float

    @property
    def is_rounding(self) -> bool:
        """Return whether the differences are those of float32 sums in another order."""
        return self.loss <= 1e-6 and self.logits <= 1e-5 and self.gradients <= 2e-5


def gap(one: Step, two: Step) -> Gap:
    """Return how much two steps differ, infinitely where other weights have gradients."""
    return Gap(
        loss=abs(one.loss - two.loss) / abs(one.loss),
        logits=max(relative(a, b) for a, b in zip(one.logits, two.logits, strict=True)),
        gradients=_gap_of_gradients(one.gradients, two.gradients),
    )


def _gap_of_gradients(one: dict[str, Tensor], two: dict[str, Tensor]) -> float:
    if one.keys() != two.keys():
        return float("inf")
    largest = max(gradient.abs().max().item() for gradient in one.values())
    # Some gradients are zero but for rounding, such as that of the bias of keys
    least = MIN_GRADIENT * largest
    return max(relative(gradient, two[name], least) for name, gradient in one.items())


def relative(one: Tensor, two: Tensor, least: float = 0.0) -> float:
    """Return the largest difference over the largest element of `one`; infinite for NaN."""
    difference = (one - two).abs().max().item()
    scale = max(one.abs().max().item(), least)
    return difference / scale if math.isfinite(difference) else float("inf")


def settings(mode: str, **lora: Any) -> Config:
    """Return the settings of a run of small adapters."""
    return Config.model_validate({"tuning": {"mode": mode, "lora": {"r": 4, **lora}}})


def adapted(model: PreTrainedModel, config: Config) -> PreTrainedModel | PeftModel:
    """Return the model with adapters that change its output, as it is for mode full."""
    if config.tuning.mode == "full":
        return model
    with_adapters = add_adapters(model, config)
    torch.manual_seed(1)
    for name, parameter in with_adapters.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)  # zeros would give lora_A no gradient
    return with_adapters.train()


def fused(model: nn.Module, config: Config) -> nn.Module:
    """Return a copy of the model with all fused kernels that prove themselves."""
    made = copy.deepcopy(model)
    keep_soft_caps(base_model_of(made))  # as where it is loaded
    install_fused_kernels(made, config, Process.alone(CPU))
    return made


def reference_step(model: nn.Module, samples: list[Document] | None = None) -> Step:
    """Return the step of plain transformers and PEFT: each document by itself, no mask, no padding."""
    model.zero_grad()
    if getattr(model.config, "attn_logit_softcapping", None):
        model.set_attn_implementation("eager")  # sdpa leaves the cap out, without a word
    samples = samples or documents()
    labelled = sum(int((sample.labels != IGNORE_INDEX).sum()) for sample in samples)
    total = 0.0
    logits: list[Tensor] = []
    for sample in samples:
        scores = model(input_ids=torch.from_numpy(sample.ids)[None]).logits[0]
        total += add_gradients(scores, sample.labels, labelled)
        logits.append(scores.detach())
    return Step(total, logits, gradients_of(model))


def add_gradients(scores: Tensor, labels: np.ndarray, labelled: int) -> float:
    """Add the gradients of a document's share of the loss; return the share."""
    loss = functional.cross_entropy(
        scores[:-1].float(),
        torch.from_numpy(labels[1:]),
        ignore_index=IGNORE_INDEX,
        reduction="sum",
    )
    (loss / labelled).backward()
    return loss.item() / labelled


def trained_step(model: nn.Module, is_packed: bool) -> Step:
    """Return the step as a run computes it: its collator, its loss, one batch of all documents."""
    model.zero_grad()
    batch = batch_of(model, is_packed)
    loss = loss_of(model, batch)
    loss.backward()
    return Step(loss.item(), logits_of(model, batch, is_packed), gradients_of(model))


def batch_of(model: nn.Module, is_packed: bool) -> Batch:
    """Return the documents as one micro-batch of a run: packed into one row, or padded."""
    rows = TrainRows(documents())
    indices = range(len(LENGTHS))
    if is_packed:
        one_row = fused_kernels_of(model).in_one_row
        collator = PackCollator(
            0, MAX_SEQ_LEN, fused_kernels_of(model).reads_boundaries, in_one_row=one_row
        )
        half = len(indices) // 2
        sequences = [indices[:half], indices[half:]] if one_row else [indices]
        batch = collator([rows[sequence] for sequence in sequences])
        assert len(batch.ids) == 1
        return batch
    return PadCollator(0, MAX_SEQ_LEN)([rows[index] for index in indices])


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    """Return the loss of a whole step of one micro-batch, as `TrainingLoop.compute_loss` does."""
    return sum_nll(model, model, batch) / batch.loss.total_weight


@torch.no_grad()
def logits_of(model: nn.Module, batch: Batch, is_packed: bool) -> list[Tensor]:
    """Return each document's logits (T, V) of the same batch, in training mode as before."""
    logits = model(**batch.arguments).logits  # (1, all T, V) or (documents, longest T, V)
    if not is_packed:
        return [row[:length] for row, length in zip(logits, LENGTHS, strict=True)]
    return list(logits[0, : sum(LENGTHS)].split(LENGTHS))


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    """Return a copy of every gradient."""
    return {
        name: parameter.grad.clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def without_gradient(model: nn.Module) -> list[str]:
    """Return the names of trained weights that the last step did not reach.

    An expert whose adapter was not reached is named by its number: `...experts.lora_A.weight[3]`.
    """
    names: list[str] = []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if parameter.grad is None or not parameter.grad.any():
            names.append(name)
        elif _experts_of(model, name) > 1:
            by_expert = _by_expert(name, parameter.grad, _experts_of(model, name))
            is_reached = by_expert.flatten(1).any(dim=1)
            names += [f"{name}[{expert}]" for expert in (~is_reached).nonzero().flatten().tolist()]
    return names


def _experts_of(model: nn.Module, name: str) -> int:
    """Return how many experts share an adapter's weight, 1 for that of an ordinary layer."""
    wrapper = model.get_submodule(name.rpartition(".lora_")[0]) if ".lora_" in name else None
    return wrapper.num_experts if isinstance(wrapper, ParamWrapper) else 1


def _by_expert(name: str, weight: Tensor, experts: int) -> Tensor:
    """Return PEFT's adapter weight of E experts by expert: A is (E * r, in), B is (out, r * E)."""
    if "lora_A" in name:
        return weight.unflatten(0, (experts, -1))
    return weight.unflatten(1, (-1, experts)).movedim(-1, 0)
