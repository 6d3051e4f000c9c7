"""Bytes of any layout from a few traced steps: by hand, next to whole traces, and in a plan."""

import itertools
import json
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from marks import long
from plan_examples import EMPTY, EXAMPLE, plan_for
from tiny_models import tiny_config, tiny_model
from traced_steps import real_point, traced_point

from sft_play.config import invocation
from sft_play.config.loader import load_merged
from sft_play.config.schema import Config
from sft_play.models import structure, trace
from sft_play.models.step_meter import StepSetup
from sft_play.plan import counting, report
from sft_play.plan.cards import parse_hardware
from sft_play.plan.config_json import KNOWN, known_model
from sft_play.plan.resolve import fastest, resolve_plan
from sft_play.plan.run_plan import PlannedRun
from sft_play.plan.structure import structure_from_json
from sft_play.plan.traced import SIZES, ActivationGrowth, LayersGrowth, TracedSize, TracedStep
from sft_play.plan.workload import describe_speed
from tools.known_models import known_trace

LAYERS = EXAMPLE.step.model.layers
ON = ("attention", "mlp", "norms", "loss")


def by_token(size: int) -> ActivationGrowth:
    return ActivationGrowth(0.0, size, 0.0)


def traced_step(kept: int = 1000) -> TracedStep:
    """A traced step that keeps `kept` bytes of a token, and works with 10 and 20 more."""
    plain, checkpointed = (
        LayersGrowth(by_token(size), by_token(size + 10), by_token(size + 20))
        for size in (kept, kept // 10)
    )
    return TracedStep(plain, checkpointed, by_token(4), by_token(1), by_token(0), in_one_row=True)


# By hand


def test_growth_is_by_rows_tokens_and_pairs():
    growth = ActivationGrowth(fixed=5.0e6, by_token=300.0, by_pair=2.0)
    found = ActivationGrowth.through(
        {size: round(growth.at(*size)) for size in SIZES}, has_pairs=True
    )
    assert found.fixed == pytest.approx(5.0e6)
    assert found.by_token == pytest.approx(300.0)
    assert found.by_pair == pytest.approx(2.0)
    assert growth.at(3, 10) == 5.0e6 + 3 * (300 * 10 + 2 * 100)
    # a peak of weights, and then of tokens
    sizes = dict(zip(SIZES, (900, 1000, 5096), strict=True))
    assert ActivationGrowth.through(sizes, has_pairs=False) == ActivationGrowth(
        900 - 2048.0, 1.0, 0.0
    )


def test_a_traced_step_by_hand():
    example = EXAMPLE.changed(traced=traced_step(), batch_size=2, max_seq_len=100)

    def working(phase, checkpointed_layers):
        bytes_of = example.changed(checkpointed_layers=checkpointed_layers).memory.phases[phase]
        return bytes_of.activations // 200, bytes_of.logits // 200

    for count, kept in ((0, 1000), (LAYERS // 2, 550), (LAYERS, 100)):
        # a layer works with 10 where the head would take 4
        assert working("forward", count) == (kept + 6, 4)
        assert working("backward", count) == (kept + 19, 1)


def test_outputs_of_attention_that_are_kept_are_added_to_a_trace():
    example = EXAMPLE.changed(traced=traced_step(), checkpointed_layers=LAYERS)
    phases = [example.changed(keeps_attention=kept).memory.phases for kept in (False, True)]
    outputs = example.layout.tokens * LAYERS * 32 * (2 * 128 + 4)
    for name in ("forward", "backward"):
        assert phases[1][name].activations - phases[0][name].activations == outputs


def test_gradients_that_come_in_the_backward_pass_may_need_more_than_its_begin():
    example = EXAMPLE.changed(
        traced=traced_step(), batch_size=1, max_seq_len=100, mode="full", grad_accum=1
    )
    backward = example.memory.phases["backward"]
    assert backward.gradients == 2 * example.step.model.parameters
    assert backward.activations == 20 * 100  # of the last layer


@pytest.mark.parametrize(
    "layers, depths",
    [
        ("aaaaaaaa", (3, 2)),
        ("dababababab", (5, 3)),
        ("aaabaaabaaabaaab", (8, 4)),
        ("abcd", (4,)),
        ("aa", (2,)),
    ],
)
def test_a_deep_model_is_cut_to_whole_periods(layers, depths):
    assert trace.cut_depths(layers) == depths


# Next to whole traces and real steps


def setup_of(folder: Path) -> StepSetup:
    config = Config.model_validate(
        {
            "model": {"name": str(folder), "max_seq_len": 24},
            "tuning": {"mode": "lora", "lora": {"r": 4}},
            "train": {"batch_size": 3, "packing": False, "bf16": False, "fp16": False},
        }
    )
    return StepSetup(config, "cpu", zero_stage=0)


def folder_of(model_type: str, folder: Path, **changes: Any) -> Path:
    (folder / "config.json").write_text(json.dumps(tiny_config(model_type, **changes).to_dict()))
    return folder


@pytest.mark.long
@pytest.mark.parametrize("model_type", ["smollm3", "qwen3_moe", "gpt_oss", "olmo2"])
def test_a_traced_step_has_the_bytes_of_a_real_one(model_type, tmp_path):
    tiny_model(model_type).save_pretrained(tmp_path)
    setup = setup_of(tmp_path)
    assert traced_point(setup) == real_point(setup)


@pytest.mark.long
@pytest.mark.parametrize(
    "model_type, changes", [("olmo2", {}), ("qwen3_moe", {"mlp_only_layers": []})]
)
def test_a_cut_model_has_the_bytes_of_the_whole_one(model_type, changes, tmp_path):
    folder = folder_of(model_type, tmp_path, num_hidden_layers=7, **changes)
    traced = trace.trace_step(setup_of(folder))
    # several rows share their positions, which are counted for each
    for layers, (size, above) in itertools.product(
        (0, 7), ((TracedSize(1, 6144), 1.02), (TracedSize(3, 3072), 1.05))
    ):
        whole = traced_point(setup_of(folder), layers, size)
        assert 0.98 <= traced.at(*size, layers / 7).kept / whole.kept <= above
        assert 0.98 <= traced.at(*size, layers / 7).backward / whole.backward <= above


# In a plan


def plan_of(folder: Path, *settings: str) -> PlannedRun:
    cache = f"data.cache_dir={folder / 'cache'}"
    return plan_of_known(str(folder), cache, *settings)


@pytest.fixture
def answers(monkeypatch):
    """The requests of tracers; counts are made in this process, traces are the one by hand."""
    requests: list[dict[str, Any]] = []

    def ask(module, request, environ):
        if module == "sft_play.models.structure":
            return structure.answer(request)
        requests.append(request)
        step = replace(traced_step(10**6), on=ON, off={"linears": "a reason"})
        return {"answer": asdict(step)}

    monkeypatch.setattr(counting, "_ask", ask)
    return requests


def test_a_model_unlike_llama_is_traced_once_for_its_settings(answers, tmp_path):
    folder = folder_of("olmo2", tmp_path)
    runs = [plan_of(folder), plan_of(folder, "train.batch_size=2"), plan_of(folder)]
    assert len(answers) == 1
    assert {run.plan.step.memory_source for run in runs} == {"traced"}
    assert runs[0].plan.step.kernels.describe() == "fused kernels but for linears (a reason)"
    assert runs[0].plan.step.is_fast
    assert runs[1].plan.memory.phases["backward"].activations > 2 * 64 * 10**6
    plan_of(folder, "tuning.mode=qlora")
    assert [request["settings"]["tuning"]["mode"] for request in answers] == ["lora", "qlora"]


def test_engines_that_gain_nothing_over_ddp_are_not_traced(answers):
    hardware, call = parse_hardware("8xH200"), invocation.read_invocation({})
    loaded = load_merged(EMPTY, {}, ["model.name=openai/gpt-oss-20b"])
    planned = fastest(loaded, call, hardware, {})
    assert (planned.plan.ranks.strategy, planned.plan.layout.checkpointed_layers) == ("ddp", 0)
    assert answers == [], "the trace of one GPU ships; those under ZeRO do not"


def test_a_speed_that_nobody_measured_is_said_to_be_a_count(answers, tmp_path):
    folder = folder_of("qwen3_moe", tmp_path)
    for mode in ("lora", "qlora"):  # which were measured
        assert "roughly" not in describe_speed(plan_of(folder, f"tuning.mode={mode}").plan)
    words = describe_speed(plan_of(folder, "tuning.mode=full").plan)
    assert words.startswith("roughly, as no such run of a model with experts")
    rate = re.search(r"about ([\d,]+) tokens/s", words)[1].replace(",", "")
    assert len(rate.rstrip("0")) <= 2, "a number that nobody measured has two digits"


def test_a_model_that_cannot_be_traced_is_a_guess(answers, tmp_path, monkeypatch):
    counted = counting._ask

    def ask(module, request, environ):
        if module == "sft_play.models.structure":
            return counted(module, request, environ)
        return {"refused": "ValueError: its code reads values"}

    monkeypatch.setattr(counting, "_ask", ask)
    plan = plan_of(folder_of("olmo2", tmp_path)).plan
    assert plan.step.memory_source == "guess"
    assert any("could not be traced (ValueError: its code reads" in word for word in plan.warnings)


def test_a_model_like_llama_has_the_closed_form(answers, tmp_path):
    plan = plan_of(folder_of("llama", tmp_path)).plan
    assert plan.step.memory_source == "closed form"
    assert not answers
    assert not plan.warnings
    assert "by the closed form" in report._memory(plan)


# Well-known models


def plan_of_known(name: str, *settings: str) -> PlannedRun:
    loaded = load_merged(EMPTY, {}, (f"model.name={name}", "model.max_seq_len=64", *settings))
    return resolve_plan(
        loaded, invocation.read_invocation({}), parse_hardware("1xH200"), {}, True, False
    )


@pytest.mark.parametrize(
    "name, word",
    [
        *(("Qwen/Qwen3-30B-A3B", word) for word in ("lora", "lora-shared", "qlora-none")),
        *(("allenai/olmo-2-0425-1b-instruct", word) for word in [*counting.KNOWN_SETTINGS][:-3]),
    ],
)
def test_a_well_known_model_is_planned_from_the_trace_that_ships(name, word, answers):
    config = counting.known_setting(name, word)
    settings = (f"tuning.mode={config.tuning.mode}", f"model.dtype={config.model.dtype}")
    in_float8 = f"tuning.base_dtype={config.tuning.base_dtype}"
    experts = f"tuning.lora.experts={config.tuning.lora.experts}"
    plan = plan_of_known(name, *settings, in_float8, experts, "tuning.lora.alpha=7").plan
    assert plan.step.memory_source == "traced"
    assert not answers


def test_a_folder_with_the_sizes_of_a_well_known_model_needs_no_trace(answers, tmp_path):
    """As downloaded, with what config.json has next to sizes; nested parts count, too."""
    config = known_model("openai/gpt-oss-20b").config
    packing = {**config["quantization_config"], "modules_to_not_convert": ["lm_head"]}
    published = {**config, "quantization_config": packing, "torch_dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(published))
    words = ("tuning.mode=qlora", "model.max_seq_len=512")
    folder = plan_of(tmp_path, *words).plan
    assert not answers and folder.step.memory_source == "traced"
    assert folder.memory == plan_of_known("openai/gpt-oss-20b", *words).plan.memory
    other = json.dumps({**published, "num_hidden_layers": 23})
    (tmp_path / "config.json").write_text(other)
    plan_of(tmp_path, *words)
    assert len(answers) == 1


def test_fsdp_keeps_no_copies_of_trained_weights_in_16_bits(answers):
    def traced(strategy):
        words = ("model.name=allenai/OLMo-2-1124-7B", "tuning.mode=full")
        return plan_for("2xB200", *words, f"train.strategy={strategy}").plan.step

    casts = 2 * traced("ddp").model.block_weights
    assert traced("ddp").traced.plain.kept.fixed == pytest.approx(casts, rel=0.01)
    assert traced("fsdp").traced.plain.kept.fixed < casts / 1000
    assert not answers


@pytest.mark.parametrize("setting", ["tuning.lora.r=4", "model.dtype=float32"])
def test_another_setting_of_a_well_known_model_is_traced(setting, answers, tmp_path):
    plan_of_known("allenai/OLMo-2-0425-1B", setting, f"data.cache_dir={tmp_path}")
    assert len(answers) == 1


SHORT = [("allenai/OLMo-2-0425-1B", "lora"), ("allenai/OLMo-2-0425-1B", "float8")]


@pytest.mark.parametrize(
    "name, word",
    [
        *SHORT,
        *(
            long(name, word)
            for name, traces in json.loads(counting.KNOWN_TRACES.read_text()).items()
            for word in traces
            if (name, word) not in SHORT
        ),
    ],
)
def test_the_trace_that_ships_is_the_one_of_this_code(name, word):
    """Where it differs: python -m tools.known_models traces."""
    shipped = json.loads(counting.KNOWN_TRACES.read_text())[name][word]
    assert known_trace(name, word) == shipped


def test_no_trace_ships_of_a_model_whose_kernels_depend_on_the_machine():
    shapes = {name: facts.get("structure") for name, facts in json.loads(KNOWN.read_text()).items()}
    recurrent = {
        name
        for name, found in shapes.items()
        if found and structure_from_json(found).recurrent_layers
    }
    assert "Qwen/Qwen3-Next-80B-A3B-Instruct" in recurrent
    assert not recurrent & json.loads(counting.KNOWN_TRACES.read_text()).keys()


@pytest.mark.parametrize(
    "lora",
    [{"layers_to_transform": [6]}, {"target_modules": ["layers.5.mlp.up_proj", "q_proj"]}],
    ids=str,
)
def test_layers_with_other_adapters_are_no_period(lora):
    config = Config.model_validate({"tuning": {"lora": lora}})
    signatures = trace.layer_signatures(tiny_model("olmo2", num_hidden_layers=8), config)
    assert trace.cut_depths(signatures) == (8,)


@pytest.mark.parametrize("features, depths", [(0, (4, 2)), (8, (8,))])
def test_layers_whose_inputs_share_a_projection_are_not_cut(features, depths):
    wide = {str(number): {"head_dim": 16} for number in (1, 3, 5, 7)}
    sizes = {"num_hidden_layers": 8, "num_kv_shared_layers": 0, "per_layer_config": wide}
    types = ["sliding_attention", "full_attention"] * 4
    model = tiny_model("gemma4", layer_types=types, hidden_size_per_layer_input=features, **sizes)
    assert trace.cut_depths(trace.layer_signatures(model, Config())) == depths
