"""The whole table: each model type through the real loader, adapters and trainer, in each mode."""

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from architecture_steps import (
    CPU,
    MAX_SEQ_LEN,
    Gap,
    adapted,
    fused,
    gap,
    reference_step,
    relative,
    settings,
    trained_step,
)
from architecture_table import FAILS, MODES, REFUSED, YES, Row, recorded
from bitsandbytes.functional import dequantize_4bit
from bitsandbytes.nn import Linear4bit, Params4bit
from plain_peft import Saved, logits_of_saved, start_loader
from tiny_models import MODEL_TYPES, NEWER, TINY, tiny_model
from transformers import AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from sft_kernels.expert_modules import packed_weight
from sft_kernels.install import base_model_of, fused_kernels_of
from sft_play.data.collate import PackCollator
from sft_play.errors import ConfigError, EnvironmentFault
from sft_play.models.checkpointing import checkpoint_layers
from sft_play.models.expert_adapters import _without_gradient
from sft_play.training.checkpoints import write_weights
from sft_play.training.isolation import check_cross_document

pytestmark = pytest.mark.architectures

STEPS = 12
TEXT = list(range(40, 64))  # ids of a text that no run has seen
# Logits of the same weights: 4-bit products and merged sums in another order
SAME_LOGITS = 1e-4
LEARNING_RATES = {"lora": 0.01, "qlora": 0.01, "full": 0.003}


@pytest.fixture(scope="module")
def plain_loader():
    with start_loader() as loader:
        yield loader


@dataclass(frozen=True)
class Workshop:
    """What the fixtures give to a trial."""

    base_of: Callable[[str], Path]
    plan_run: Callable[..., Any]
    build_loop: Callable[..., Any]
    plain_loader: ProcessPoolExecutor
    folder: Path


NEWER_TYPES = [pytest.param(name, id=f"newer-{name}") for name in NEWER]


@pytest.mark.parametrize("model_type", [*MODEL_TYPES, *NEWER_TYPES])
def test_a_model_type_trains_packs_and_reloads_or_is_refused_in_words(
    model_type, request, base_of, plan_run, build_loop, plain_loader, tmp_path
):
    row = Row(model_type)
    workshop = Workshop(base_of, plan_run, build_loop, plain_loader, tmp_path)
    unable = None  # this machine, as CPUs are that unpack 4 bits wrongly
    for mode in MODES:
        try:
            row.trains[mode] = outcome(lambda mode=mode: try_to_train(workshop, row, mode))
        except EnvironmentFault as fault:
            unable = f"{mode}: {fault}"
            row.trains[mode] = "not tried: that CPU reads no 4 bits"
    row.packed = outcome(lambda: try_to_pack(row))
    if not unable or model_type in NEWER:
        request.node.user_properties.append(recorded(row))
    assert row.failures() == []
    if unable:
        pytest.skip(f"all but {unable}")


def outcome(attempt: Callable[[], str]) -> str:
    """Return what an attempt says, or how it was refused or failed."""
    try:
        return attempt()
    except ConfigError as error:
        return f"{REFUSED}{error}"
    except EnvironmentFault:
        raise
    except AssertionError as error:
        return f"{FAILS}{first_words(error)}"
    except Exception as error:  # noqa: BLE001 (a row of the table says what it was)
        return f"{FAILS}{type(error).__name__}: {first_words(error)}"


def first_words(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0][:200]


def try_to_train(workshop: Workshop, row: Row, mode: str) -> str:
    """Train some steps as the worker does, save, and load what was saved in plain PEFT."""
    base = workshop.base_of(row.model_type)
    changes = {
        "model.name": base,
        "tuning.mode": mode,
        "train.max_steps": STEPS,
        "train.learning_rate": LEARNING_RATES[mode],
    }
    folder = workshop.plan_run(changes, may_trace=False)  # plans have tests of their own
    trainer, _ = workshop.build_loop(folder)
    if trainer.order.layout.is_packed:
        vocabulary = trainer.engine.model.config.get_text_config().vocab_size
        check_cross_document(trainer.engine.model, trainer.collator, vocabulary, CPU)
    before = trained_weights(trainer.engine.model)
    trainer.start()
    trainer.train()
    unmoved = _without_gradient(trainer.engine.model)  # what chooses the tokens of sparse attention
    still = [
        name
        for name, weight in trained_weights(trainer.engine.model).items()
        if torch.equal(weight, before[name]) and not name.startswith(unmoved)
    ]
    assert not still, f"{len(still)} of {len(before)} trained weights did not move, {still[0]}"
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert sum(losses[-3:]) < sum(losses[:3]), f"the loss did not fall: {losses}"
    if mode == "lora":
        kernels = fused_kernels_of(trainer.engine.model)
        row.on = dict(kernels.on)
        row.off = dict(kernels.off)
    row.reloads[mode] = outcome(lambda: try_to_reload(workshop, trainer, base, mode))
    return YES


def trained_weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: parameter.detach().clone()
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }


def try_to_reload(workshop: Workshop, trainer: Any, base: Path, mode: str) -> str:
    weights = workshop.folder / mode
    write_weights(trainer.engine, weights)
    saved = Saved(base, weights)
    if mode == "qlora":
        saved = Saved(
            dequantized(trainer.engine.model, base, workshop.folder / "dequantized"), weights
        )
    if mode == "full":
        saved = Saved(weights, None)
    with torch.no_grad():
        ours = trainer.engine.model.eval()(input_ids=torch.tensor([TEXT])).logits[0]
    theirs = workshop.plain_loader.submit(logits_of_saved, saved, TEXT).result()
    difference = relative(ours, torch.tensor(theirs))
    assert difference <= SAME_LOGITS, f"logits differ by {difference:.1g}"
    return YES


@torch.no_grad()
def dequantized(model: torch.nn.Module, base: Path, folder: Path) -> Path:
    """Write a base whose weights are those that the 4-bit ones of a model stand for."""
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    for name, module in base_model_of(model).named_modules():
        for parameter_name, packed in packed_weights(module).items():
            target = plain.get_submodule(name.replace(".base_layer", ""))
            values = dequantize_4bit(packed.data, packed.quant_state)
            if isinstance(target, Conv1D):  # GPT-2's, which holds its weight transposed
                values = values.T
            target.get_parameter(parameter_name).copy_(values)
    plain.save_pretrained(folder)
    return folder


def packed_weights(module: torch.nn.Module) -> dict[str, Params4bit]:
    """Return the 4-bit weights of a linear layer or of a module of experts, by name."""
    if isinstance(module, Linear4bit):
        return {"weight": module.weight}
    names = getattr(module, "parametrizations", {})
    found = {name: packed_weight(module, name) for name in names}
    return {name: packed for name, packed in found.items() if packed is not None}


def try_to_pack(row: Row) -> str:
    """Compare packed, padded and checkpointed steps with plain ones, in modes lora and full."""
    for mode in ("lora", "full"):
        config = settings(mode)
        plain = adapted(tiny_model(row.model_type), config)
        reference = reference_step(plain)
        made = fused(plain, config)
        collator = PackCollator(0, MAX_SEQ_LEN, fused_kernels_of(made).reads_boundaries)
        check_cross_document(made, collator, TINY.vocabulary, CPU)
        compare("padded", mode, gap(reference, trained_step(made, is_packed=False)))
        compare("packed", mode, gap(reference, trained_step(made, is_packed=True)))
        checkpoint_layers(made, 1)
        compare("checkpointed", mode, gap(reference, trained_step(made, is_packed=True)))
    return "exact"


def compare(what: str, mode: str, found: Gap) -> None:
    assert found.is_rounding, (
        f"{what} {mode}: loss differs by {found.loss:.0e}, logits by {found.logits:.0e}, "
        f"gradients by {found.gradients:.0e}"
    )
