"""sft_play.plan.fast: which runs record their layers, and the bytes of recordings."""

from dataclasses import replace

import pytest
from plan_examples import CPU, STEP, plan_for

from sft_play.plan.activations import graph_bytes
from sft_play.plan.step import Layout

ONE_B_PLAN = plan_for("1xH200", "model.name=meta-llama/Llama-3.2-1B-Instruct").plan
ONE_B = ONE_B_PLAN.step.model
LAUNCHED = replace(STEP, model=ONE_B, is_fast=True, optim="adamw_torch_fused")
RECORDED = replace(LAUNCHED, records_graphs=True)
FOUR_ROWS = Layout(batch_size=4, grad_accum=1, world_size=1, max_seq_len=2048)


def test_recordings_of_layers_that_are_recomputed_take_less():
    recomputed = replace(FOUR_ROWS, checkpointed_layers=RECORDED.model.layers)
    graphs = [graph_bytes(RECORDED, layout)["optimizer"] for layout in (recomputed, FOUR_ROWS)]
    assert 0 < graphs[0] < graphs[1] / 2


LLAMA = ("model.name=meta-llama/Llama-3.1-8B", "train.cuda_graphs=true")
NOT_RECORDED = {
    "train.neftune_noise_alpha=5": "1xH200",
    "tuning.lora.dropout=0.1": "1xH200",
    "tuning.mode=full": "1xH200",
    "train.fast_path=false": "1xH200",
    "tuning.lora.trainable_tokens=<|eot_id|>": "1xH200",
    "model.add_tokens=<tool>": "1xH200",
    "train.activation_offloading=true train.gradient_checkpointing=true": "1xH200",
    "train.strategy=fsdp": "2xH200",
    "train.strategy=zero2": "2xH200",
    "train.seed=1": CPU,
}


@pytest.mark.parametrize("gpus", ["1xH200", "2xH200"])
def test_a_plan_counts_what_is_recorded_and_names_it(gpus):
    plan = plan_for(gpus, *LLAMA).plan
    assert plan.step.records_graphs
    graphs = plan.memory.peak.components()["graphs"]
    assert graphs == graph_bytes(plan.step, plan.layout)[plan.memory.peak_phase] > 0
    assert not any("graphs" in warning for warning in plan.warnings)


@pytest.mark.parametrize("setting", NOT_RECORDED)
def test_a_plan_says_that_nothing_is_recorded_and_counts_no_graphs(setting):
    plan = plan_for(NOT_RECORDED[setting], *LLAMA, *setting.split()).plan
    assert any(words.startswith("train.cuda_graphs=true has no effect") for words in plan.warnings)
    assert "graphs" not in plan.memory.peak.components()


@pytest.mark.parametrize(
    "model, settings, is_said",
    [
        ("meta-llama/Llama-3.2-1B-Instruct", ["train.effective_batch_size=4"], True),
        ("Qwen/Qwen3-30B-A3B", ["train.effective_batch_size=4"], True),
        ("meta-llama/Llama-3.2-1B-Instruct", ["tuning.mode=full"], False),
        ("meta-llama/Llama-3.1-8B-Instruct", ["train.effective_batch_size=4"], False),
    ],
)
def test_a_plan_says_where_graphs_would_help(model, settings, is_said):
    plan = plan_for("1xH200", f"model.name={model}", "tuning.mode=lora", *settings).plan
    assert not plan.step.records_graphs
    assert any("TRAIN_CUDA_GRAPHS=true" in warning for warning in plan.warnings) == is_said
