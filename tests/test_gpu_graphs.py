"""Layers replayed as CUDA graphs on a GPU: the same step, without memory that grows, and faster."""

import re
import time
from typing import Any

import pytest
import torch
from make_runs import check_losses, run_make
from test_fast_graphs import micro_batches
from test_gpu import needs_two
from test_gpu_fast import loss_of, make, on_gpu
from test_gpu_stops import losses_of

from sft_play.data import packing
from sft_play.models.fast.graphs.decoder import (
    GraphedDecoder,
    accumulators_for_recordings,
    record_on_gpu,
)
from sft_play.runs.folder import RunFolder
from sft_play.training.batches import LOSS_POSITIONS, LOSS_TARGETS

pytestmark = pytest.mark.gpu
STEPS = 40


def batches(count: int, is_packed: bool, in_one_row: bool) -> list[dict[str, Any]]:
    """Return micro-batches on the GPU."""
    found = []
    for batch in micro_batches(count, is_packed, in_one_row):
        named = {**batch, "positions": batch[LOSS_POSITIONS], "targets": batch[LOSS_TARGETS]}
        moved = {}
        for name, value in named.items():
            moved[name] = value.cuda() if isinstance(value, torch.Tensor) else value
        found.append(moved)
    return found


def gradients_of(model: Any, batch: dict[str, Any]) -> list[torch.Tensor]:
    model.zero_grad()
    (loss_of(model, batch, torch.bfloat16) / 100).backward()
    return [p.grad.float().clone() for p in model.parameters() if p.requires_grad]


@pytest.mark.parametrize(
    "is_packed, in_one_row",
    [(True, False), (True, True), (False, False)],
    ids=["packed", "in-one-row", "padded"],
)
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3"])
def test_a_captured_step_is_one_that_was_not(name, is_packed, in_one_row, monkeypatch):
    monkeypatch.setattr(packing, "ROW_STEP", 8)
    model = on_gpu(name, "lora", torch.bfloat16)
    make(model, "lora", torch.bfloat16)
    accumulators = accumulators_for_recordings(model)
    steps = batches(60, is_packed, in_one_row)
    expected = [gradients_of(model, batch) for batch in steps]
    base = model.get_base_model().get_decoder()
    decoder = base.forward = GraphedDecoder(model, record_on_gpu)
    held = []
    for batch, wanted in zip(steps, expected, strict=True):
        found = gradients_of(model, batch)
        for gradient, other in zip(found, wanted, strict=True):
            assert float((gradient - other).norm()) <= 2e-2 * float(other.norm())
        del found
        held.append((decoder.counts.replayed, torch.cuda.memory_allocated()))
    assert decoder.counts.stopped is None, decoder.counts.stopped
    assert decoder.counts.replayed >= 10
    recorded = {memory for replayed, memory in held if replayed == decoder.counts.replayed}
    assert len(recorded) == 1, "a replay allocates nothing that stays"
    del accumulators


@pytest.mark.parametrize(
    "target, mode",
    [
        ("train-bnb", "lora"),
        ("train-bnb", "qlora"),
        pytest.param("train-distributed", "lora", marks=needs_two),
    ],
)
def test_a_run_replays_its_layers_and_learns_the_same(tmp_path, target, mode):
    found = {}
    for graphs in ("false", "true"):
        words = {
            "CONFIG": "configs/tiny.yaml",
            "TUNING_MODE": mode,
            "NUM_GPUS": "2" if target == "train-distributed" else "1",
            "TRAIN_CUDA_GRAPHS": graphs,
            "TRAIN_MAX_STEPS": str(STEPS),
            "TRAIN_LOGGING_STEPS": "1",
            "TRAIN_LEARNING_RATE": "1e-3",
            "TRAIN_SAVE_STRATEGY": "no",
            "TRAIN_PREDICT_WITH_GENERATE": "false",
        }
        started = time.monotonic()
        run_make(target, tmp_path / graphs, 400, **words)
        folder = RunFolder(tmp_path / graphs / "run")
        found[graphs] = losses_of(folder)
        report = folder.read_report()
        seconds = time.monotonic() - started
        print(
            f"\n{target} {mode} graphs={graphs}: {report.tokens_per_second:.0f} tokens/s, {seconds:.0f} s"
        )
    log = (folder.logs / "rank-0.log").read_text()
    (line,) = re.findall(r"cuda graphs: (\d+) of \d+ micro-batches replayed, which", log)
    assert int(line) >= STEPS // 2, log[-2000:]
    check_losses(*(list(found[graphs].values()) for graphs in ("true", "false")))
