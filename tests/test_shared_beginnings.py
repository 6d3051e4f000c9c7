"""Beginnings that samples share are computed once: losses, gradients and runs are those without."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from marks import long
from plan_examples import CPU as CPU_HOST
from plan_examples import plan_for
from rank_processes import run_two_workers
from record_files import write_rows
from run_files import run_json
from safetensors.torch import load_file
from test_data_template_table import OF_TRL, tokenizer_of
from test_data_trees import conversation, store_of
from tiny_models import tiny_model, with_adapters, write_base

from sft_kernels.process import Process
from sft_kernels.trees import TreeTokens, lay_out
from sft_play.config.schema import Config
from sft_play.config.sections.model import ModelSection
from sft_play.data import collate
from sft_play.data.collate import PackCollator, TrainRows
from sft_play.data.pipeline import build_ledger
from sft_play.data.splits import find_row_ends
from sft_play.data.store import Split
from sft_play.data.trees import Units, find_units
from sft_play.models.fast import install_fused_kernels
from sft_play.runs.folder import RunFolder
from sft_play.training.batches import StepLoss
from sft_play.training.isolation import measure_cross_document

CPU = torch.device("cpu")
CONFIG = Config.model_validate({"tuning": {"lora": {"dropout": 0.0}}})
# full attention, windows, windows and sinks, soft caps, latent attention, delta rule, learned positions
MODEL_TYPES = ("qwen3", "gemma3", "gpt_oss", "gemma2", "deepseek_v3", "qwen3_5", "lfm2", "gpt2")
SAME = 1e-5
# Where a tree branches, a scan begins another chunk. transformers' scan in chunks of 32 instead of
# 64 tokens changes gradients as much, by 1.9e-5.
ROUNDED = {"qwen3_5": 3e-5}


@pytest.fixture(scope="module")
def split(tmp_path_factory) -> Split:
    """Three conversations of tiny models' tokens, with weights on some answers."""
    draw = np.random.default_rng(5)
    rows = [conversation(draw, answers) for answers in (4, 1, 6)]
    return Split.whole([store_of(tmp_path_factory.mktemp("store"), rows)])


def units_of(split: Split, capacity: int | None) -> Units:
    return find_units(split.lengths, split.shared, find_row_ends(split), capacity)


def fused_model(model_type: str) -> Any:
    model = with_adapters(tiny_model(model_type))
    kernels = install_fused_kernels(model, CONFIG, Process.alone(CPU))
    assert "attention" in kernels.on, kernels.off
    return model


def step(model: Any, split: Split, units: Units, in_one_row: bool = True) -> dict[str, Any]:
    """Return the loss of all samples, its gradients, and the tokens computed for it."""
    rows = TrainRows(split, units)
    numbers = list(range(len(units.ends)))
    model.zero_grad()
    sequences = [rows[numbers]] if in_one_row else [rows[number] for number in numbers]
    batch = PackCollator(0, 2048, varlen=True)(sequences)
    loss = StepLoss(model).compute(model, batch, batch.loss.total_weight)
    loss.backward()
    gradients = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    return {"loss": loss.item(), "gradients": gradients, "tokens": int(units.lengths.sum())}


def difference(one: dict[str, Any], other: dict[str, Any]) -> float:
    """Return the largest difference of loss or gradients, of the largest gradient."""
    largest = max(grad.abs().max().item() for grad in one["gradients"].values())
    moved = max(
        (grad - other["gradients"][name]).abs().max().item()
        for name, grad in one["gradients"].items()
    )
    return max(abs(one["loss"] - other["loss"]) / one["loss"], moved / largest)


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_loss_and_gradients_are_those_of_separate_samples(model_type, split):
    model = fused_model(model_type)
    separate = step(model, split, units_of(split, None))
    for capacity, in_one_row in ((10_000, True), (10_000, False), (120, True)):
        shared = step(model, split, units_of(split, capacity), in_one_row)
        assert difference(separate, shared) <= ROUNDED.get(model_type, SAME)
        assert shared["tokens"] < 0.8 * separate["tokens"]


def changed(**facts: Callable[[TreeTokens], np.ndarray]) -> Callable:
    def lay(branches: Any) -> TreeTokens:
        tokens = lay_out(branches)
        return tokens._replace(**{name: change(tokens) for name, change in facts.items()})

    return lay


MUTANTS = {
    "a visible sibling": changed(ends=lambda tokens: np.full_like(tokens.ends, len(tokens.ends))),
    "a position off by one": changed(
        positions=lambda tokens: tokens.positions + (tokens.parents != np.arange(-1, len(tokens.parents) - 1))
    ),
    "a parent that is the token before": changed(
        parents=lambda tokens: np.maximum(np.arange(-1, len(tokens.parents) - 1), 0)
    ),
}  # fmt: skip


@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_comparison_sees_a_mistake(mutant, split, monkeypatch):
    model = fused_model("qwen3")
    separate = step(model, split, units_of(split, None))
    monkeypatch.setattr(collate, "lay_out", MUTANTS[mutant])
    assert difference(separate, step(model, split, units_of(split, 10_000))) > 100 * SAME


def test_the_check_before_training_sees_a_branch_that_sees_another(monkeypatch):
    model, collator = fused_model("qwen3"), PackCollator(0, 512, varlen=True)
    assert measure_cross_document(model, collator, 97, CPU, shared=20).holds
    monkeypatch.setattr(collate, "lay_out", MUTANTS["a visible sibling"])
    assert not measure_cross_document(model, collator, 97, CPU, shared=20).holds


# Runs


@pytest.fixture(scope="module")
def chats(tmp_path_factory) -> dict[str, Path]:
    draw = random.Random(0)
    words = "flower river stone window table green small runs under yellow seven garden".split()

    def say(most: int) -> str:
        return " ".join(draw.choices(words, k=draw.randint(3, most)))

    def chat(answers: int) -> dict[str, Any]:
        turns = []
        for _ in range(answers):
            turns.append({"role": "user", "content": say(6)})
            answer = {"role": "assistant", "content": say(6), "reasoning_content": say(12)}
            turns.append(answer)
        return {"messages": turns}

    folder = tmp_path_factory.mktemp("chats")
    files = {"train": range(12), "val": range(3)}
    return {
        name: write_rows(folder / f"{name}.jsonl", *(chat(1 + number % 4) for number in numbers))
        for name, numbers in files.items()
    }


@pytest.fixture(scope="module")
def trained(plan_run, run_worker, chats, tmp_path_factory):
    """A function that returns a finished run of one process or two."""
    bases: dict[str, Path] = {}

    def base_of(model_type: str) -> Path:
        if model_type not in bases:
            tok = tokenizer_of(OF_TRL / "qwen3.jinja", ModelSection())
            folder = tmp_path_factory.mktemp(model_type)
            bases[model_type] = write_base(model_type, folder, tok)
        return bases[model_type]

    def run(shares: bool, strategy: str, model_type: str = "qwen3", **changes: Any) -> RunFolder:
        ranks = 1 if strategy == "single" else 2
        settings = {
            "model.name": base_of(model_type),
            "data.train_path": chats["train"],
            "data.val_path": chats["val"],
            "model.max_seq_len": 512,
            "train.learning_rate": 1e-3,
            "train.batch_size": 2,
            "train.grad_accum": 4 // ranks,
            "train.share_prefixes": shares,
            **({"train.strategy": strategy} if strategy in ("fsdp", "ep") else {}),
            **changes,
        }
        zero = f"configs/deepspeed_{strategy}.json" if strategy.startswith("zero") else None
        folder = plan_run(settings, num_gpus=ranks, deepspeed_config=zero, may_trace=False)
        exits = run_two_workers(folder) if ranks == 2 else [run_worker(folder)]
        assert set(exits) == {0}, (folder.path / "output.txt").read_text()[-3000:]
        return folder

    run.base_of = base_of
    return run


def losses(folder: RunFolder) -> list[float]:
    return [each["loss"] for each in run_json(folder)["loss"]]


def weights(folder: RunFolder) -> dict[str, torch.Tensor]:
    (path,) = folder.weights("lora").glob("*.safetensors")
    return load_file(path)


@pytest.mark.parametrize(
    "strategy, model_type, changes",
    [
        ("single", "qwen3", {"train.max_steps": 3}),
        long("single", "qwen3", {"train.max_steps": 25}),
        long("single", "qwen3", {"train.max_steps": 25, "train.packing": False}),
        long("single", "qwen3_5", {"train.max_steps": 8}),
        long("single", "gpt_oss", {"train.max_steps": 25}),
        long("single", "deepseek_v3", {"train.max_steps": 25}),
        long("ddp", "qwen3", {"train.max_steps": 25}),
        long("ddp", "qwen3", {"train.max_steps": 25, "model.max_seq_len": 300}),  # trees are cut
        long("fsdp", "qwen3", {"train.max_steps": 25}),
        long("zero1", "qwen3", {"train.max_steps": 25}),
        long("zero2", "qwen3", {"train.max_steps": 25}),
        long("ep", "qwen3_moe", {"train.max_steps": 25}),
    ],
)
def test_a_run_is_that_of_separate_samples(trained, strategy, model_type, changes):
    separate, shared = (
        trained(shares, strategy, model_type, **changes) for shares in (False, True)
    )
    assert losses(shared) == pytest.approx(losses(separate), abs=SAME)
    torch.testing.assert_close(weights(shared), weights(separate), rtol=0, atol=SAME)
    facts = run_json(shared)
    assert facts["distinct_tokens_per_second"] < 0.9 * facts["tokens_per_second"]
    assert run_json(separate).get("distinct_tokens_per_second") is None


@pytest.mark.parametrize(
    "model_type, changes, reason",
    [
        ("mamba2", {}, "the state of Mamba2Mixer cannot branch"),
        long(
            "qwen3_moe",
            {"train.router_aux_loss_coef": 0.01},
            "the load-balancing loss counts the tokens of each sample",
        ),
    ],
)
def test_a_model_that_cannot_share_trains_separate_samples(trained, model_type, changes, reason):
    separate, shared = (
        trained(shares, "single", model_type, **{"train.max_steps": 2}, **changes)
        for shares in (False, True)
    )
    assert losses(shared) == losses(separate)
    assert run_json(shared)["padding"] == run_json(separate)["padding"]
    reason = f"beginnings that samples share are computed for each: {reason}"
    assert reason in (shared.path / "logs" / "rank-0.log").read_text()


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"train.fast_path": False}, "train.fast_path=false turns off the attention for them"),
        ({"train.neftune_noise_alpha": 5}, "a sample's noise depends on its length"),
        ({"train.share_prefixes": False}, None),
    ],
)
def test_what_cannot_share_says_so_in_one_line(plan_run, trained, chats, capsys, changes, reason):
    settings = {"data.train_path": chats["train"], "data.val_path": chats["val"]}
    base = trained.base_of("qwen3")
    plan_run({"model.name": base, "model.max_seq_len": 512, **settings, **changes})
    lines = [line for line in capsys.readouterr().out.splitlines() if "beginnings" in line]
    expected = f"beginnings that samples share are computed for each: {reason}"
    assert lines == ([] if reason is None else [expected])


def test_a_ledger_is_all_that_data_check_prints(trained, chats, capsys):
    """Its JSON would not be JSON."""
    settings = {
        "model.name": trained.base_of("qwen3"),
        "model.max_seq_len": 512,
        "data.train_path": chats["train"],
        "data.val_path": chats["val"],
        "train.fast_path": "false",
    }
    planned = plan_for(CPU_HOST, *(f"{name}={value}" for name, value in settings.items()))
    build_ledger(planned)
    assert "beginnings" not in capsys.readouterr().out
