"""sft_play.plan.run_plan: plan.json keeps a plan whole, and agrees with config.yaml."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from plan_examples import CPU, asked, plan_for

from sft_play.errors import EnvironmentFault
from sft_play.plan.batch import choose_layout
from sft_play.plan.launch import Launch
from sft_play.plan.memory import evaluation_rows, step_bytes
from sft_play.plan.probe_fit import ProbePoint, ProbeReport, request_of_started_run
from sft_play.plan.run_plan import PlannedRun, read_plan
from sft_play.runs.folder import RunFolder

LLAMA_8B = "model.name=meta-llama/Llama-3.1-8B-Instruct"
FULL = 1e9  # tokens of a usual step: its micro-batches stay as they are


def packed_run() -> PlannedRun:
    planned = plan_for("2xH200", LLAMA_8B)
    assert planned.plan.packing
    return planned.packed(5, FULL)


def probed_run() -> PlannedRun:
    """Return a run with the layout, memory and report of a probe, and its command."""
    planned = plan_for("1xH200", LLAMA_8B)
    layout = replace(planned.plan.layout, batch_size=2, grad_accum=16, checkpointed_layers=3)
    memory = step_bytes(planned.plan.step, layout)
    phases = {}
    for name, phase in memory.phases.items():
        phases[name] = replace(phase, measured_beyond=1 << 20)
    small = ProbePoint(1024, 0, accumulates=True, phases={"forward": 10, "backward": 12})
    report = ProbeReport(
        points=(small, replace(small, tokens=2048)),
        predicted_before=planned.plan.memory.totals(),
        predicted_after=memory.totals(),
        verified_bytes=1 << 30,
        seconds=1.5,
        cached=False,
        changed=True,
    )
    planned = planned.with_layout(layout, replace(memory, phases=phases))
    launch = Launch(("python", "train.py"), {"CUDA_VISIBLE_DEVICES": "0"})
    return replace(planned, plan=replace(planned.plan, probe=report, launch=launch))


RUNS = {
    "one_gpu": lambda: plan_for("1xH200", LLAMA_8B, "tuning.lora.target_modules=[q_proj, v_proj]"),
    "cpu": lambda: plan_for(CPU),
    "deepspeed": lambda: plan_for("2xH200", LLAMA_8B, use_deepspeed=True),
    "packed": packed_run,
    "probed": probed_run,
    "short_of_memory": lambda: plan_for("1x4090", LLAMA_8B, "tuning.mode=full"),
    "several_machines": lambda: plan_for(
        "2xH200", environ={"NNODES": "2", "MASTER_ADDR": "10.0.0.1"}
    ),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_run_is_read_as_it_was_written(name, tmp_path):
    planned = RUNS[name]()
    folder = RunFolder(tmp_path)
    planned.write(folder)
    assert read_plan(folder) == planned.plan
    assert PlannedRun.read(folder) == planned
    assert_agree(planned)
    # and what is written again is the same text
    before = (tmp_path / "plan.json").read_text()
    read_plan(folder)
    PlannedRun.read(folder).write(folder)
    assert (tmp_path / "plan.json").read_text() == before


def written_plan(tmp_path: Path) -> dict[str, Any]:
    plan_for(CPU).write(RunFolder(tmp_path))
    return json.loads((tmp_path / "plan.json").read_text())


@pytest.mark.parametrize(
    "place, value",
    [
        ("layout.batch_size", "four"),
        ("step.model.layers", None),
        ("ranks.strategy", "pipeline"),
        ("packing", "sometimes"),
        ("memory.phases", 7),
        ("layout", ...),
        ("budget_bytes", ...),
        ("the file", ""),
        ("the file", "{"),
        ("the file", "[]"),
        ("the file", "null"),
        ("ranks", '{"strategy": "single", "device": "cpu", "world_size": 1, "choice": {}}'),
    ],
)
def test_a_plan_of_another_version_is_refused_with_its_file_and_field(place, value, tmp_path):
    """A value is wrong, or lacks (...), or the text of the file is another."""
    path = tmp_path / "plan.json"
    facts = written_plan(tmp_path)
    *parents, name = place.split(".")
    section = facts
    for parent in parents:
        section = section[parent]
    if value is ...:
        del section[name]
    else:
        section[name] = value
    path.write_text(value if place in ("the file", "ranks") else json.dumps(facts))
    with pytest.raises(EnvironmentFault) as error:
        read_plan(RunFolder(tmp_path))
    assert f"{path}: " in str(error.value) and f"({place}: " in str(error.value)


def test_a_folder_without_a_plan_is_no_run(tmp_path):
    with pytest.raises(EnvironmentFault, match=r"plan\.json"):
        read_plan(RunFolder(tmp_path))


# config.yaml and plan.json


def assert_agree(planned: PlannedRun) -> None:
    """Check that the settings of a run are those of its plan."""
    train = planned.config.train
    plan = planned.plan
    layout = plan.layout
    assert train.batch_size == layout.batch_size
    assert train.grad_accum == layout.grad_accum
    assert train.effective_batch_size == layout.rows_per_step
    assert train.gradient_checkpointing is (layout.checkpointed_layers > 0)
    assert train.packing is plan.packing
    assert train.eval_batch_size == evaluation_rows(plan.step, layout)
    assert planned.config.model.max_seq_len == layout.max_seq_len
    assert layout.world_size == plan.ranks.world_size
    assert layout.checkpointed_layers <= plan.step.model.layers


@pytest.mark.parametrize(
    "settings",
    [
        ("train.batch_size=3", "train.grad_accum=5"),
        ("train.packing=false", "train.gradient_checkpointing=true"),
        ("train.packing=true", "train.gradient_checkpointing=false"),
        ("train.effective_batch_size=24", "train.eval_batch_size=7"),
        ("train.batch_size=2", "tuning.mode=full", "model.max_seq_len=4096"),
    ],
    ids=str,
)
def test_config_and_plan_agree_on_explicit_settings(settings):
    assert_agree(plan_for("2xH200", LLAMA_8B, *settings))


# What a plan says of itself


@pytest.mark.parametrize(
    "layers, name", [(0, "none"), (1, "selective"), (31, "selective"), (32, "full")]
)
def test_what_is_computed_again_has_a_name(layers, name):
    plan = plan_for("1xH200", LLAMA_8B).plan
    layout = replace(plan.layout, checkpointed_layers=layers)
    assert replace(plan, layout=layout).checkpointing == name


def test_a_packed_plan_takes_fewer_and_smaller_micro_batches_in_less_memory():
    planned = plan_for("1xH200", LLAMA_8B)
    plan, packed = planned.plan, planned.packed(9, FULL).plan
    assert (plan.layout.batch_size, plan.layout.micro_batches) == (4, 8)
    assert packed.layout == plan.layout.packed(9)
    assert (packed.layout.micro_batches, packed.layout.sequences) == (3, 3)
    assert packed.layout.rows_per_step == plan.layout.rows_per_step
    assert packed.request == asked(plan.request, fullest_step=9, step_tokens=FULL)
    assert packed.memory.predicted_peak < plan.memory.predicted_peak
    assert packed.deepspeed is None


def test_the_batch_of_a_packed_deepspeed_json_is_the_product_of_its_numbers():
    planned = plan_for("2xH200", LLAMA_8B, use_deepspeed=True)
    settings = planned.packed(5, FULL).plan.deepspeed.settings
    micro_batch = settings["train_micro_batch_size_per_gpu"]
    assert micro_batch == planned.plan.layout.batch_size
    assert settings["gradient_accumulation_steps"] == 1
    assert settings["train_batch_size"] == micro_batch * 2


@pytest.mark.parametrize("use_deepspeed", [False, True])
def test_a_run_of_ragged_rows_takes_larger_micro_batches(use_deepspeed):
    planned = plan_for("2xH200", LLAMA_8B, use_deepspeed=use_deepspeed)
    before = planned.packed(16, FULL).plan
    assert (before.layout.batch_size, before.layout.micro_batches) == (4, 2)
    packed = planned.packed(fullest_step=16, step_tokens=25_200)
    layout = packed.plan.layout
    assert (layout.batch_size, layout.micro_batches, layout.sequences) == (8, 1, 8)
    assert layout.rows_per_step == before.layout.rows_per_step == 32
    train = packed.config.train
    assert (train.batch_size, train.grad_accum, train.effective_batch_size) == (8, 2, 32)
    assert packed.plan.memory.predicted_peak > before.memory.predicted_peak
    if use_deepspeed:
        settings = packed.plan.deepspeed.settings
        assert settings["train_micro_batch_size_per_gpu"] == 8
        assert settings["train_batch_size"] == 8 * 2


def test_a_resumed_run_has_the_micro_batches_that_it_had_where_they_need_no_more():
    planned = plan_for("1xH200", LLAMA_8B)
    probed = probed_run()  # 2 x 16, 3 layers recomputed
    again = planned.as_before(probed.plan)
    assert again.plan.layout == probed.plan.layout != planned.plan.layout
    assert (again.config.train.batch_size, again.config.train.grad_accum) == (2, 16)
    assert again.plan.memory == step_bytes(planned.plan.step, probed.plan.layout)

    grown = replace(probed.plan, layout=replace(probed.plan.layout, checkpointed_layers=0))
    grown = replace(grown, layout=replace(grown.layout, batch_size=8, grad_accum=4))
    assert planned.as_before(grown) == planned, "a probe had measured more room"
    elsewhere = replace(probed.plan, gpu_names=("NVIDIA A100-SXM4-80GB",))
    assert planned.as_before(elsewhere) == planned
    asked = plan_for("1xH200", LLAMA_8B, "train.batch_size=4")
    assert asked.as_before(probed.plan) == asked


def test_what_was_asked_for_is_kept_packed():
    for setting in ("train.batch_size=2", "train.grad_accum=4"):
        planned = plan_for("1xH200", LLAMA_8B, setting)
        packed = planned.packed(fullest_step=9, step_tokens=12_600)
        assert packed.config == planned.config
        assert packed.plan.layout == planned.plan.layout.packed(9)


def test_a_probe_that_measures_what_was_planned_keeps_the_larger_micro_batches():
    plan = plan_for("1xH200", LLAMA_8B).packed(fullest_step=9, step_tokens=12_600).plan
    assert plan.layout.micro_batches == 1
    request = request_of_started_run(plan.request, plan.layout)

    def peak_bytes(layout):
        return step_bytes(plan.step, layout).predicted_peak

    assert choose_layout(request, peak_bytes, plan.budget_bytes) == plan.layout
    tight = peak_bytes(plan.layout) - 1
    assert choose_layout(request, peak_bytes, tight).micro_batches == 2, (
        "where it finds less memory"
    )


def test_micro_batches_whose_activations_wait_on_the_host_stay_as_small():
    settings = (LLAMA_8B, "train.activation_offloading=true", "train.gradient_checkpointing=true")
    planned = plan_for("1xH200", *settings)
    packed = planned.packed(fullest_step=9, step_tokens=12_600)
    assert packed.plan.layout == planned.plan.layout.packed(9)
    without = plan_for("1xH200", LLAMA_8B, settings[-1]).packed(9, 12_600)
    assert without.plan.layout.micro_batches < packed.plan.layout.micro_batches
