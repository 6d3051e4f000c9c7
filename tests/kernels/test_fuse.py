"""sft_kernels.fuse: any trainer gets the losses and gradients of the original implementation, and undo restores it."""

import os
import subprocess
import sys
import tomllib
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import tiny_model, with_adapters
from torch import nn
from torch.utils.data import Dataset
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    DataCollatorWithFlattening,
    Trainer,
    TrainingArguments,
)

import sft_kernels
from sft_kernels.training_setup import base_model_of

ROOT = Path(__file__).resolve().parents[2]
TYPES = ["llama", "gemma2", "gpt_oss", "qwen3_5", "deepseek_v3", "lfm2"]
LENGTHS = (17, 1, 30, 9)


def drawn(*shape: int) -> torch.Tensor:
    return torch.randint(5, 200, shape, generator=torch.Generator().manual_seed(0))


def padded() -> dict[str, torch.Tensor]:
    ids = drawn(2, 40)
    labels, mask = ids.clone(), torch.ones_like(ids)
    labels[:, :10] = labels[1, 30:] = -100
    mask[1, 30:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def step(model: nn.Module, **inputs: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """Return the output of a training step, and the gradients of its loss."""
    model.zero_grad()
    output = model(**inputs)
    output.loss.backward()
    named = model.named_parameters()
    return output, {name: one.grad.clone() for name, one in named if one.grad is not None}


def assert_near(
    found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], allowed: float = 1e-5
) -> None:
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert (found[name] - gradient).norm() <= allowed * gradient.norm(), name


@pytest.mark.parametrize("model_type", TYPES)
def test_labels_give_the_own_loss_without_logits_and_undo_gives_the_own_code(model_type):
    model = with_adapters(tiny_model(model_type))
    before = {name: {*vars(module)} for name, module in model.named_modules()}
    own, gradients = step(model, **padded())
    fused = sft_kernels.fuse(model)
    assert {"attention", "linears", "loss"} <= fused.kernels.on.keys()
    assert all(f"{name}: differs by" in str(fused) for name in fused.proofs)
    output, found = step(model, **padded())
    assert output.logits is None
    assert output.loss.item() == pytest.approx(own.loss.item(), rel=1e-6)
    assert_near(found, gradients)
    evaluated = model.eval()(**padded())
    assert evaluated.logits.shape[:2] == (2, 40)
    assert evaluated.loss.item() == pytest.approx(own.loss.item(), rel=1e-6)
    sft_kernels.undo(model.train())
    again, found = step(model, **padded())
    assert torch.equal(again.loss, own.loss)
    assert all(torch.equal(found[name], gradient) for name, gradient in gradients.items())
    assert {name: {*vars(module)} for name, module in model.named_modules()} == before


@pytest.mark.parametrize("named_by", ["position_ids", "cu_seq_lens_q"])
@pytest.mark.parametrize("model_type", TYPES)
def test_documents_of_a_packed_row_are_those_of_separate_rows(model_type, named_by):
    model = with_adapters(tiny_model(model_type))
    ends = torch.tensor([0, *LENGTHS]).cumsum(0)
    ids = drawn(1, sum(LENGTHS))
    labels = ids.clone()
    labels[0, ends[:-1]] = -100
    count = int((labels != -100).sum())
    loss, gradients = 0.0, {}
    for begin, end in pairwise(ends.tolist()):
        if end - begin > 1:
            own, found = step(model, input_ids=ids[:, begin:end], labels=labels[:, begin:end])
            share = (end - begin - 1) / count
            loss += share * own.loss.item()
            for name, gradient in found.items():
                gradients[name] = gradients.get(name, 0) + share * gradient
    sft_kernels.fuse(model)
    packed: dict[str, Any] = {
        "position_ids": torch.cat([torch.arange(length) for length in LENGTHS])[None]
    }
    if named_by == "cu_seq_lens_q":
        for side in "qk":
            packed |= {f"cu_seq_lens_{side}": ends.int(), f"max_length_{side}": max(LENGTHS)}
    output, found = step(model, input_ids=ids, labels=labels, **packed)
    assert output.loss.item() == pytest.approx(loss, rel=1e-6)
    assert_near(found, gradients)


# depth first: samples of 16, 13, 19 and 14 tokens
TREE = ((0, 16), (9, 4), (9, 10), (12, 2))


@pytest.mark.parametrize("model_type", [*TYPES, "mamba2"])
def test_samples_that_begin_alike_have_their_losses_in_one_row(model_type):
    model = tiny_model(model_type)
    if model_type != "mamba2":
        model = with_adapters(model)
    row = drawn(1, 5 + sum(new for _, new in TREE))
    samples, path, place = [(row[:, :5], 0)], row[:, :0], 5
    for shared, new in TREE:
        path = torch.cat((path[:, :shared], row[:, place : place + new]), 1)
        samples.append((path, shared))
        place += new
    labels = row.clone()
    labels[0, [0, 5]] = -100  # nothing is before them
    count = int((labels != -100).sum())
    loss, gradients = 0.0, {}
    for ids, shared in samples:
        own_labels = ids.clone()
        own_labels[0, : max(1, shared)] = -100
        own, found = step(model, input_ids=ids, labels=own_labels)
        share = int((own_labels != -100).sum()) / count
        loss += share * own.loss.item()
        for name, gradient in found.items():
            gradients[name] = gradients.get(name, 0) + share * gradient
    sft_kernels.fuse(model)
    named = sft_kernels.documents(5, TREE)
    if model_type == "mamba2":
        with pytest.raises(ValueError, match=r"takes no trees: the state of .* cannot branch"):
            model(input_ids=row, labels=labels, **named)
        return
    output, found = step(model, input_ids=row, labels=row, **named)  # labels of those are ignored
    assert output.loss.item() == pytest.approx(loss, rel=1e-6)
    # transformers' scan of Qwen3.5 rounds as much when its chunks are shorter
    assert_near(found, gradients, 3e-5 if model_type == "qwen3_5" else 1e-5)


def test_a_tuple_has_the_loss_first():
    model = with_adapters(tiny_model("llama"))
    own = model(**padded()).loss
    sft_kernels.fuse(model)
    loss, logits = model(**padded(), return_dict=False)[:2]
    assert loss.item() == pytest.approx(own.item(), rel=1e-6) and logits is None


def test_weights_under_adapters_train_in_float8_and_refuse_to_be_merged():
    model = with_adapters(tiny_model("llama"))
    own, gradients = step(model, **padded())
    outlier = model.base_model.model.model.layers[0].mlp.up_proj.base_layer
    outlier.weight.data[0, 0] = 1e6
    kept = sft_kernels.float8(model)
    assert list(kept) == ["base_model.model.model.layers.0.mlp.up_proj"]
    assert "outliers" in kept.popitem()[1]
    outlier.weight.data[0, 0] = 0.0
    float8 = [name for name, one in model.named_parameters() if one.dtype == torch.float8_e4m3fn]
    assert len(float8) == 7 * len(model.base_model.model.model.layers) - 1
    assert "linears" in sft_kernels.fuse(model).kernels.on
    output, found = step(model, **padded())
    assert output.loss.item() == pytest.approx(own.loss.item(), rel=0.02)
    for name, gradient in gradients.items():
        assert (found[name] - gradient).norm() <= 0.3 * gradient.norm(), name
    with pytest.raises(ValueError, match="cannot be merged into float8"):
        model.merge_adapter()


def test_4_bit_weights_on_a_cpu_keep_their_gradients():
    """bitsandbytes repacks them in an evaluation, as a proof is, and then has no gradient."""
    packing = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32)
    base = AutoModelForCausalLM.from_pretrained(
        ROOT / "data" / "tiny_llama",
        quantization_config=packing,
        device_map={"": "cpu"},
        dtype=torch.float32,
    )
    model = with_adapters(base)
    own, gradients = step(model, **padded())
    assert "linears" in sft_kernels.fuse(model).kernels.on
    output, found = step(model, **padded())
    assert output.loss.item() == pytest.approx(own.loss.item(), rel=1e-6)
    assert_near(found, gradients)


def test_float32_weights_train_under_autocast_as_with_their_own_code():
    model = with_adapters(tiny_model("llama"))
    assert next(model.parameters()).dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        own, gradients = step(model, **padded())
        kernels = sft_kernels.fuse(model, compute_dtype=torch.bfloat16).kernels
        output, found = step(model, **padded())
    assert {"attention", "linears", "loss"} <= kernels.on.keys()
    assert output.loss.item() == pytest.approx(own.loss.item(), rel=2e-3)
    for name, gradient in gradients.items():
        assert (found[name] - gradient).norm() <= 0.05 * gradient.norm(), name


def test_saved_files_and_generated_ids_are_those_of_the_own_code(tmp_path):
    model = with_adapters(tiny_model("llama")).eval()
    own = model.generate(input_ids=drawn(1, 12), max_new_tokens=8, do_sample=False)
    model.save_pretrained(tmp_path / "own")
    sft_kernels.fuse(model)
    fused = model.eval().generate(input_ids=drawn(1, 12), max_new_tokens=8, do_sample=False)
    model.save_pretrained(tmp_path / "fused")
    assert torch.equal(own, fused)
    for path in (tmp_path / "own").iterdir():
        assert (tmp_path / "fused" / path.name).read_bytes() == path.read_bytes(), path.name


class Rows(Dataset):
    """Rows of different lengths."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        ids = drawn(64)[index : index + 8 + index % 9].tolist()
        return {"input_ids": ids, "labels": [-100, -100, *ids[2:]]}


@pytest.mark.parametrize("checkpointing", [False, True])
def test_transformers_trainer_has_the_same_losses(checkpointing, tmp_path):
    losses = []
    for is_fused in (False, True):
        model = with_adapters(tiny_model("llama"))
        if is_fused:
            sft_kernels.fuse(model)
        settings = TrainingArguments(
            str(tmp_path),
            max_steps=4,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            gradient_checkpointing=checkpointing,
            learning_rate=1e-2,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
        )
        collator = DataCollatorWithFlattening(return_flash_attn_kwargs=True)
        if not is_fused:  # its own attention reads the boundaries from positions
            collator = DataCollatorWithFlattening()
        trainer = Trainer(model, settings, collator, Rows())
        trainer.train()
        losses.append([each["loss"] for each in trainer.state.log_history if "loss" in each])
    assert losses[0][-1] < losses[0][0] - 0.1
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


@pytest.mark.parametrize("model_type", TYPES)
def test_a_mask_that_is_not_padding_on_the_right_is_read(model_type):
    model = with_adapters(tiny_model(model_type))
    inputs = padded()
    inputs["attention_mask"][0, :6] = 0
    own, gradients = step(model, **inputs)
    sft_kernels.fuse(model)
    output, found = step(model, **inputs)
    assert output.loss.item() == pytest.approx(own.loss.item(), rel=1e-6)
    assert_near(found, gradients)


def test_a_call_that_fails_leaves_the_next_ones_as_they_are():
    model = with_adapters(tiny_model("llama"))
    own, _ = step(model, **padded())
    sft_kernels.fuse(model)
    broken = model.get_output_embeddings().register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(**padded())
    broken.remove()
    assert model.eval()(**padded()).logits.shape[:2] == (2, 40)
    assert step(model.train(), **padded())[0].loss.item() == pytest.approx(own.loss.item())


def test_a_model_is_fused_once_and_only_a_fused_one_is_undone():
    model = tiny_model("llama")
    with pytest.raises(ValueError, match="is not fused"):
        sft_kernels.undo(model)
    sft_kernels.fuse(model)
    with pytest.raises(ValueError, match="is fused already"):
        sft_kernels.fuse(model)
    sft_kernels.undo(model)
    assert sft_kernels.fuse(base_model_of(model)).kernels.on


def test_a_model_without_fused_parts_keeps_its_code():
    model = with_adapters(tiny_model("bloom"))
    own, _ = step(model, **padded())
    fused = sft_kernels.fuse(model)
    assert "attention" in fused.kernels.off
    assert torch.equal(step(model, **padded())[0].loss, own.loss)


HIDDEN = """
import sys
sys.modules["sft_play"] = None
import torch
from transformers import LlamaConfig, LlamaForCausalLM
import sft_kernels
model = LlamaForCausalLM(LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=48,
    num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2))
assert {"attention", "mlp", "loss"} <= sft_kernels.fuse(model).kernels.on.keys()
ids = torch.arange(20)[None]
model.train()(input_ids=ids, labels=ids).loss.backward()
"""


def test_it_works_without_sft_play():
    done = subprocess.run(
        [sys.executable, "-c", HIDDEN], cwd=ROOT, timeout=120, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_the_package_alone_has_all_its_folders():
    project = tomllib.loads((ROOT / "sft_kernels/pyproject.toml").read_text())
    folders = [path.parent for path in (ROOT / "sft_kernels").rglob("__init__.py")]
    names = sorted(folder.relative_to(ROOT).as_posix().replace("/", ".") for folder in folders)
    assert project["tool"]["setuptools"]["packages"] == names


def test_trl_trains_with_the_kernels():
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "TRITON_INTERPRET": "1"}
    words = [sys.executable, "examples/trl_with_kernels.py", "--steps=2", "--rows=1"]
    told = [
        subprocess.run(
            [*words, *option], cwd=ROOT, env=environ, check=True, capture_output=True, text=True
        ).stdout.splitlines()
        for option in ([], ["--without"])
    ]
    losses = [[line for line in lines if line.startswith("step ")] for lines in told]
    assert len(losses[0]) == 2 and losses[0] == losses[1]
    assert told[0][0].startswith("fast path: attention x6, linears x24")
