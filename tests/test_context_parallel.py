"""Ranks that share rows have the loss and the gradients of one rank, for documents cut anywhere."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from architecture_steps import Document, Gap, Step, adapted, fused, gap, gradients_of, settings
from rank_processes import run_two
from tiny_models import tiny_model
from torch import distributed

from sft_kernels.install import fused_kernels_of
from sft_kernels.process import Process
from sft_play.data.batch import Batch
from sft_play.data.collate import PackCollator, PadCollator, TrainRows
from sft_play.data.render import IGNORE_INDEX
from sft_play.models.context import ContextGroup, RowPart, context_group
from sft_play.models.loss import sum_nll
from sft_play.training.batches import collate_for_step

# Of documents: some begin, some end and some lie across where a row of 64 or 72 tokens is cut
LENGTHS = (1, 19, 2, 27, 9)
MAX_SEQ_LEN = 64
# windows, norms of heads, soft caps, sinks with experts, values of other sizes, trained weights
CASES = {
    "llama": ("llama", "lora"),
    "one head of keys": ("mistral", "lora", 1),
    "llama in full": ("llama", "full"),
    "gemma3": ("gemma3", "lora"),
    "gemma2": ("gemma2", "lora"),
    "gpt_oss": ("gpt_oss", "lora"),
    "qwen3_moe": ("qwen3_moe", "lora"),
    "deepseek_v3": ("deepseek_v3", "full"),
    "phi3": ("phi3", "lora"),
}
# of all cases, and of three of them
LAYOUTS = ("packed", "padded", "labels of one rank", "weighed")
IN_ALL_LAYOUTS = ("llama", "gemma3", "gpt_oss")


def documents(layout: str) -> list[Document]:
    draw = np.random.default_rng(0)
    made = []
    for number, length in enumerate(LENGTHS):
        ids = draw.integers(2, 2304, size=length)
        labels = ids.copy()
        labels[: 1 + length // 4] = IGNORE_INDEX
        if layout == "labels of one rank" and number < len(LENGTHS) - 1:
            labels[:] = IGNORE_INDEX
        weights = None
        if layout == "weighed":
            weights = np.where(np.arange(length) % 3, 1.0, 0.25).astype(np.float32)
        made.append(Document(ids, labels, weights))
    return made


def batch_of(model, layout: str, part: RowPart | None = None) -> Batch:
    rows = TrainRows(documents(layout))
    if layout == "padded":
        chosen = [rows[index] for index in (1, 3, 4)]
        return collate_for_step(PadCollator(0, MAX_SEQ_LEN), chosen, part)
    collator = PackCollator(0, MAX_SEQ_LEN, varlen=True, in_one_row=True)
    return collate_for_step(collator, [rows[range(len(LENGTHS))]], part)


def step_of(model, batch: Batch, tokens: float, context: ContextGroup | None = None) -> Step:
    model.zero_grad()
    if context is not None:
        batch = context.shared(batch)
    loss = sum_nll(model, model, batch) / tokens
    loss.backward()
    return Step(loss.item(), [], gradients_of(model))


def run(folder: Path, world_size: int) -> int:
    """Be a rank: compare each case's step with that of one rank; rank 0 writes the gaps."""
    distributed.init_process_group("gloo", world_size=world_size)
    rank = distributed.get_rank()
    process = Process(rank, rank, world_size, torch.device("cpu"))
    context = context_group(process, world_size)
    part = context.part
    found: dict[str, dict[str, float]] = {}
    for name, (model_type, mode, *key_heads) in CASES.items():
        chosen = settings(mode)
        heads = dict(zip(["num_key_value_heads"], key_heads, strict=False))
        model = fused(adapted(tiny_model(model_type, **heads), chosen), chosen)
        assert "attention" in fused_kernels_of(model).on
        for layout in LAYOUTS if name in IN_ALL_LAYOUTS else LAYOUTS[:1]:
            whole = batch_of(model, layout)
            tokens = whole.loss.total_weight
            one = step_of(model, whole, tokens)
            shared = step_of(model, batch_of(model, layout, part), tokens, context)
            found[f"{name}, {layout}"] = vars(gap_of(one, summed(shared)))
    if rank == 0:
        (folder / f"{world_size}.json").write_text(json.dumps(found))
    distributed.destroy_process_group()
    return 0


def summed(step: Step) -> Step:
    """Return a step of all ranks: DDP's mean, times the number of ranks."""
    total = torch.tensor(step.loss, dtype=torch.float64)
    distributed.all_reduce(total)
    for gradient in step.gradients.values():
        distributed.all_reduce(gradient)
    return Step(total.item(), [], step.gradients)


def gap_of(one: Step, two: Step) -> Gap:
    return gap(
        dataclasses.replace(one, logits=[torch.ones(1)]),
        dataclasses.replace(two, logits=[torch.ones(1)]),
    )


@pytest.fixture(scope="module")
def gaps(tmp_path_factory):
    """The gaps of two ranks."""
    folder = tmp_path_factory.mktemp("ranks")
    assert run_two(run, folder, 2) == [0, 0]
    found = json.loads((folder / "2.json").read_text())
    return {name: Gap(**values) for name, values in found.items()}


def test_shared_rows_train_as_those_of_one_rank(gaps):
    assert len(gaps) == len(CASES) + len(IN_ALL_LAYOUTS) * (len(LAYOUTS) - 1)
    assert all(gap.is_rounding for gap in gaps.values()), gaps
