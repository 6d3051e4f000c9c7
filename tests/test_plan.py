"""sft_play.plan: bytes of a step, the batch that fits, the ranks and the command that starts them; devices have a file of their own."""

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import yaml

from sft_play import commands
from sft_play.config import invocation
from sft_play.config.loader import PROJECT_ROOT, load
from sft_play.errors import ConfigError, DataError, EnvironmentFault, OutOfMemory, SftPlayError
from sft_play.plan import launch
from sft_play.plan.batch import Chosen, Wanted, choose
from sft_play.plan.devices import GIB, Gpu, Hardware, parse
from sft_play.plan.launch import (
    WORKER,
    Ranks,
    accelerate_config,
    launch_command,
    write_accelerate_config,
)
from sft_play.plan.memory import PHASES, PhaseBytes, StepShape, evaluation_rows, step_bytes
from sft_play.plan.model_shape import ModelShape, load_shape, shape_of
from sft_play.plan.resolve import Plan, precision, resolve

EMPTY = str(Path(__file__).parent / "fixtures" / "empty.yaml")
CPU = Hardware("cpu", (), 8, 64 * GIB)
EIGHT_B = ModelShape(
    vocab=128256,
    hidden=4096,
    intermediate=14336,
    layers=32,
    heads=32,
    kv_heads=8,
    head_dim=128,
    is_tied=False,
    model_type="llama",
)
TINY = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}


@pytest.fixture(autouse=True)
def _in_the_project(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(PROJECT_ROOT)  # the shipped model's path is relative to it


def planned(
    words: str | Hardware = "1xH200",
    *settings: str,
    config: str = EMPTY,
    environ: Mapping[str, str] | None = None,
    distributed: bool = True,
    deepspeed: bool = False,
) -> Plan:
    """The plan of a config on some hardware; `environ` holds the variables of make."""
    environ = environ or {}
    hardware = parse(words) if isinstance(words, str) else words
    return resolve(
        load(config, environ, settings),
        invocation.read(environ),
        hardware,
        environ,
        distributed,
        deepspeed,
    )


# Shapes


def test_llama_3_8b_has_8_03_billion_parameters() -> None:
    assert load_shape("meta-llama/Llama-3.1-8B-Instruct", None, {}) == EIGHT_B
    assert EIGHT_B.parameters == 8_030_261_248
    assert EIGHT_B.lora_parameters(16, "all-linear") == 41_943_040
    assert EIGHT_B.lora_parameters(8, ["q_proj", "v_proj"]) == 3_407_872


@cache
def tiny_llama(**changes: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**TINY, **changes))


SHAPES = [
    {},
    {"num_key_value_heads": 2},
    {"head_dim": 16},
    {"tie_word_embeddings": True},
    {"num_key_value_heads": 1, "head_dim": 12},
]


@pytest.mark.parametrize("changes", SHAPES, ids=str)
def test_a_shape_counts_the_parameters_of_the_real_model(changes: dict[str, Any]) -> None:
    model = tiny_llama(**changes)
    assert shape_of(model.config.to_dict(), "tiny").parameters == sum(
        parameter.numel() for parameter in model.parameters()
    )


@pytest.mark.parametrize(
    "targets",
    [
        "all-linear",
        ["q_proj", "v_proj"],
        ["self_attn.k_proj", "down_proj"],
        ["o_proj", "gate_proj", "up_proj"],
    ],
)
@pytest.mark.parametrize("changes", SHAPES[:2], ids=str)
def test_lora_parameters_are_those_that_peft_trains(
    changes: dict[str, Any], targets: str | list[str]
) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaForCausalLM

    base = tiny_llama(**changes)
    adapted = get_peft_model(
        LlamaForCausalLM(base.config),
        LoraConfig(r=4, target_modules=targets, task_type="CAUSAL_LM"),
    )
    trained = sum(
        parameter.numel() for parameter in adapted.parameters() if parameter.requires_grad
    )
    assert shape_of(base.config.to_dict(), "tiny").lora_parameters(4, targets) == trained


def test_what_a_config_leaves_out_is_what_transformers_takes() -> None:
    least = {"vocab_size": 10, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    assert shape_of(least, "m") == ModelShape(10, 8, 32, 1, 2, 2, 4, is_tied=False)
    assert shape_of({**least, "model_type": "gemma2"}, "m").is_tied
    assert not shape_of(
        {**least, "model_type": "gemma2", "tie_word_embeddings": False}, "m"
    ).is_tied
    assert shape_of({"text_config": least, "tie_word_embeddings": True}, "m") == ModelShape(
        10, 8, 32, 1, 2, 2, 4, is_tied=True
    )


def test_a_config_that_relies_on_its_class_is_completed_by_it() -> None:
    # as the hub has it: the vocabulary is the class's
    text = {
        "model_type": "gemma3_text",
        "hidden_size": 5376,
        "intermediate_size": 21504,
        "num_attention_heads": 32,
        "num_hidden_layers": 62,
    }
    on_the_hub = {
        "model_type": "gemma3",
        "text_config": {**text, "num_key_value_heads": 16, "head_dim": 128},
    }
    assert shape_of(on_the_hub, "m") == load_shape("google/gemma-3-27b-it", None, {})
    gpt2 = shape_of({"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4}, "m")
    assert (gpt2.hidden, gpt2.layers, gpt2.heads, gpt2.vocab, gpt2.intermediate, gpt2.is_tied) == (
        64,
        2,
        4,
        50257,
        256,
        True,
    )


@pytest.mark.parametrize(
    "config", [{}, {"model_type": "no-such-type"}, {"hidden_size": 8, "vocab_size": None}]
)
def test_a_config_that_describes_no_decoder_is_refused(config: dict[str, Any]) -> None:
    with pytest.raises(
        EnvironmentFault,
        match=r"model.name=m: its config.json names no vocab_size, .*Set MODEL_NAME",
    ):
        shape_of(config, "m")


def test_a_model_is_found_in_a_folder_and_in_the_hubs_cache(tmp_path: Path) -> None:
    config = {"vocab_size": 10, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    for commit, layers in (("abc", 1), ("def", 2)):
        snapshot = tmp_path / "hub" / "models--org--m" / "snapshots" / commit
        snapshot.mkdir(parents=True)
        (snapshot / "config.json").write_text(json.dumps({**config, "num_hidden_layers": layers}))
    refs = tmp_path / "hub" / "models--org--m" / "refs"
    refs.mkdir()
    (refs / "main").write_text("abc\n")
    for environ in ({"HF_HOME": str(tmp_path)}, {"HF_HUB_CACHE": str(tmp_path / "hub")}):
        assert [
            load_shape("org/m", revision, environ).layers for revision in (None, "main", "def")
        ] == [1, 1, 2]
    assert (
        load_shape(str(tmp_path / "hub" / "models--org--m" / "snapshots" / "def"), None, {}).layers
        == 2
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "the folder has no config.json"),
        ("{", "not valid JSON"),
        ("[]", "holds list rather than an object"),
    ],
)
def test_a_folder_that_is_no_model_is_refused(text: str | None, words: str, tmp_path: Path) -> None:
    if text:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(EnvironmentFault, match=words):
        load_shape(str(tmp_path), None, {})


def test_a_model_that_can_be_had_nowhere_says_what_to_do() -> None:
    with pytest.raises(
        EnvironmentFault,
        match=r"model.name=a/b/c: no folder of that name here, and the hub gave none \(Repo id must .*set MODEL_NAME to the folder",
    ):
        load_shape("a/b/c", None, {})  # no name that the hub could have, so that nothing is asked


# Memory

STEP = StepShape(
    mode="lora", batch_size=2, seq_len=512, compute_bytes=2, weight_bytes=2, lora_rank=16, lora_targets="all-linear", optim="adamw_torch",
    double_quant=True, checkpointed_layers=0, is_fast=False, world_size=1, zero_stage=0, offload=False, is_gpu=True,
)  # fmt: skip


def peak(shape: ModelShape = EIGHT_B, **changes: Any) -> int:
    return step_bytes(shape, dataclasses.replace(STEP, **changes)).predicted_peak


def held(shape: ModelShape = EIGHT_B, phase: str = "backward", **changes: Any) -> PhaseBytes:
    return step_bytes(shape, dataclasses.replace(STEP, **changes)).phases[phase]


def test_the_bytes_of_a_lora_step_by_hand() -> None:
    shape = ModelShape(
        vocab=100,
        hidden=8,
        intermediate=16,
        layers=2,
        heads=2,
        kv_heads=1,
        head_dim=4,
        is_tied=True,
    )
    weights = 2 * (8 * 8 * 2 + 8 * 4 * 2 + 3 * 8 * 16) + 100 * 8 + 5 * 8
    adapters = 4 * 2 * ((8 + 8) * 2 + (8 + 4) * 2 + (8 + 16) * 3)
    assert (shape.parameters, shape.lora_parameters(4, "all-linear")) == (weights, adapters)
    step = dataclasses.replace(STEP, lora_rank=4, batch_size=1, seq_len=10)
    state = PhaseBytes(
        weights=2 * weights,
        adapters=4 * adapters,
        gradients=4 * adapters,
        optimizer=8 * adapters,
        context=int(0.75 * GIB),
    )
    activations, logits = 10 * 2 * (22 * 8 + 11 * 16), 10 * 100 * 12
    at_work = dataclasses.replace(state, activations=activations, logits=logits)
    assert step_bytes(shape, step).phases == {
        "load": dataclasses.replace(state, gradients=0, optimizer=0),
        "forward": at_work,
        "backward": at_work,
        "optimizer": dataclasses.replace(
            state, activations=4 * adapters
        ),  # which its foreach form copies the gradients to
        "evaluation": dataclasses.replace(state, gradients=0, logits=logits),
        "save": dataclasses.replace(state, gradients=0),
    }
    assert tuple(step_bytes(shape, step).phases) == PHASES
    assert (
        step_bytes(shape, dataclasses.replace(step, accumulates=False)).phases["forward"].gradients
        == 0
    )


def test_quantised_weights_and_checkpointed_activations_by_hand() -> None:
    quantised = [held(mode="qlora", double_quant=double).weights for double in (True, False)]
    other = 2 * (2 * 128256 * 4096 + 65 * 4096)  # embedding, head and norms stay in 16 bits
    assert quantised == [int(bytes_ * 6_979_321_856) + other for bytes_ in (0.516, 0.5625)]
    layer, tokens = (
        22 * 4096 + 11 * 14336,
        STEP.batch_size * STEP.seq_len,
    )  # 7.6 MiB a token over 32 layers
    assert held().activations == tokens * 32 * layer
    assert held(checkpointed_layers=30).activations == tokens * (30 * 2 * 4096 + 2 * layer)


def test_the_layer_that_is_computed_again_comes_on_top_only_where_all_are_and_more_than_the_loss_is_needed() -> (
    None
):
    def activations(shape: ModelShape, layers: int) -> int:
        return held(shape, checkpointed_layers=layers).activations

    tokens, few_words = STEP.batch_size * STEP.seq_len, dataclasses.replace(EIGHT_B, vocab=1000)
    layer, kept = 22 * 4096 + 11 * 14336, 32 * 2 * 4096
    assert activations(EIGHT_B, 32) == tokens * kept  # 1.5 MB a token are the logits'
    assert activations(few_words, 32) == tokens * (kept + layer - 12 * 1000)
    assert activations(few_words, 31) == tokens * (31 * 2 * 4096 + layer)


def test_the_bytes_of_a_fused_step_by_hand() -> None:
    tokens = STEP.batch_size * STEP.seq_len

    def bytes_of(mode: str, weight_bytes: int = 2, shape: ModelShape = EIGHT_B) -> tuple[int, int]:
        parts = held(shape, is_fast=True, mode=mode, weight_bytes=weight_bytes)
        return parts.activations, parts.logits

    # norms' inputs and outputs, queries, keys, values and the attention's output, gate and up; and the gradients of one layer
    layer, gradients = 2 * (4 * 4096 + 2 * 4096 + 2 * 1024 + 2 * 14336), 2 * (2 * 4096 + 3 * 14336)
    loss, head = (
        tokens * 2 * 2 * 4096,
        2 * 128256 * 4096,
    )  # the last hidden states' gradient, and the head's where it is trained
    assert bytes_of("lora") == bytes_of("qlora") == (tokens * (32 * layer + gradients), loss)
    assert 32 * layer / 2**20 == 3.375  # MiB a token
    assert bytes_of("full") == (tokens * (32 * (layer + 2 * 14336) + gradients), loss + head)
    assert (
        bytes_of("full", weight_bytes=4)[0] - bytes_of("full")[0] == tokens * 32 * 2 * 2 * 4096
    )  # the residual stream
    assert (
        bytes_of("lora", shape=dataclasses.replace(EIGHT_B, model_type="gemma2"))[0]
        - bytes_of("lora")[0]
        == tokens * 32 * 2 * 2 * 4096
    )
    chunks = [
        held(shape, "forward", is_fast=True).logits - loss
        for shape in (EIGHT_B, dataclasses.replace(EIGHT_B, vocab=1000))
    ]
    assert chunks == [
        GIB // 4,
        tokens * 12 * 1000,
    ]  # of logits, and fewer where there are not so many


def test_what_several_processes_hold_beside_the_model_by_hand() -> None:
    def beside(**changes: Any) -> tuple[int, float]:
        parts = held(**changes)
        return parts.buckets, parts.context / GIB

    adapters = EIGHT_B.lora_parameters(16, "all-linear")
    assert beside() == (0, pytest.approx(0.75))
    assert beside(world_size=2) == (
        4 * adapters,
        pytest.approx(1.25),
    )  # DDP's copy of the gradients, NCCL
    assert beside(world_size=2, mode="full") == (2 * EIGHT_B.parameters, pytest.approx(1.25))
    assert beside(world_size=2, zero_stage=2) == (GIB, pytest.approx(1.25))
    assert beside(world_size=2, is_gpu=False) == (4 * adapters, pytest.approx(0.8))


def test_the_peak_is_the_sum_of_its_parts() -> None:
    parts = step_bytes(EIGHT_B, STEP).as_json()
    assert parts.pop("predicted_peak") == sum(parts.values())


@pytest.mark.parametrize("mode", ["lora", "qlora", "full"])
@pytest.mark.parametrize("checkpointed", [0, 12, 32])
@pytest.mark.parametrize("is_fast", [True, False])
def test_more_tokens_never_need_fewer_bytes(mode: str, checkpointed: int, is_fast: bool) -> None:
    fixed = {"mode": mode, "checkpointed_layers": checkpointed, "is_fast": is_fast}
    batches, lengths = (1, 2, 3, 8), (1, 512, 513, 4096)
    by_rows = [
        [peak(batch_size=batch, seq_len=seq, **fixed) for batch in batches] for seq in lengths
    ]
    by_length = list(zip(*by_rows, strict=True))
    assert by_rows == list(map(sorted, by_rows)) and list(map(list, by_length)) == list(
        map(sorted, by_length)
    )


@pytest.mark.parametrize("mode", ["lora", "qlora", "full"])
@pytest.mark.parametrize("field", ["hidden", "intermediate", "layers", "vocab", "kv_heads"])
def test_a_larger_model_needs_more(mode: str, field: str) -> None:
    larger = dataclasses.replace(EIGHT_B, **{field: 2 * getattr(EIGHT_B, field)})
    assert peak(larger, mode=mode) > peak(EIGHT_B, mode=mode)


def test_a_higher_rank_and_more_targets_need_more() -> None:
    ranks = [peak(lora_rank=rank) for rank in (1, 8, 16, 256)]
    assert ranks == sorted(set(ranks))
    assert (
        peak(lora_targets=["q_proj"])
        < peak(lora_targets=["q_proj", "v_proj"])
        < peak(lora_targets="all-linear")
    )


def test_checkpointing_needs_less_and_quantising_too() -> None:
    for mode, fast in product(("lora", "qlora", "full"), (True, False)):
        at_work = [
            held(mode=mode, is_fast=fast, checkpointed_layers=layers).total for layers in range(33)
        ]
        assert at_work == sorted(at_work, reverse=True) and at_work[-1] < at_work[0] / (
            1 if mode == "full" else 1.1
        )
        assert held(mode=mode, is_fast=True).total < held(mode=mode).total
    assert (
        peak(mode="qlora")
        < peak(mode="qlora", double_quant=False)
        < peak(mode="lora")
        < peak(mode="full")
    )
    assert (
        step_bytes(EIGHT_B, dataclasses.replace(STEP, mode="full")).peak_phase == "optimizer"
    )  # whose copies outweigh 1,024 tokens


@pytest.mark.parametrize("mode", ["lora", "full"])
def test_zero_divides_optimizer_gradients_and_weights_in_turn(mode: str) -> None:
    def at(stage: int, world: int = 4) -> PhaseBytes:
        return held(mode=mode, zero_stage=stage, world_size=world)

    assert at(1, 1).optimizer // 4 == at(1).optimizer == at(2).optimizer == at(3).optimizer
    assert at(1, 1).gradients == at(1).gradients == 4 * at(2).gradients == 4 * at(3).gradients
    assert at(1, 1).weights == at(2).weights == 4 * at(3).weights
    peaks = [peak(mode=mode, zero_stage=3, world_size=world) for world in (2, 4, 8, 64)]
    assert peaks == sorted(peaks, reverse=True)


@pytest.mark.parametrize(("stage", "copies"), [(0, 0), (1, 2), (2, 2), (3, 1)])
def test_the_optimizers_step_copies_gradients_under_zero(stage: int, copies: int) -> None:
    stepping = held(
        phase="optimizer", mode="full", optim="adamw_torch_fused", zero_stage=stage, world_size=4
    )
    assert stepping.activations == copies * stepping.gradients
    masters = [
        held(
            mode="full", zero_stage=stage, world_size=4, compute_bytes=width, weight_bytes=4
        ).optimizer
        for width in (2, 4)
    ]
    assert (
        masters == [(12 * EIGHT_B.parameters // 4) if stage else 8 * EIGHT_B.parameters] * 2
    )  # with a float32 copy of the weights


def test_offloading_frees_a_gpu_and_not_a_host() -> None:
    zero = {"zero_stage": 2, "world_size": 2}
    on_gpu = [held(**zero, offload=offload).optimizer for offload in (True, False)]
    on_host = [held(**zero, offload=offload, is_gpu=False).optimizer for offload in (True, False)]
    assert on_gpu[0] == 0 < on_gpu[1] == on_host[0] == on_host[1]


def test_weights_that_are_offloaded_leave_the_gpu() -> None:
    zero3 = {"mode": "full", "zero_stage": 3, "world_size": 2, "offload_weights": True}
    assert held(**zero3).weights == 0 < held(**zero3, is_gpu=False).weights


def test_adams_moments_have_the_type_of_the_weights() -> None:
    def states(optim: str, **changes: Any) -> float:
        return held(mode="full", optim=optim, **changes).optimizer / EIGHT_B.parameters

    assert (
        states("adamw_torch", weight_bytes=4),
        states("adamw_torch", weight_bytes=2),
        states("adamw_8bit"),
        states("sgd"),
    ) == (8, 4, 2, 0)
    assert (
        states("adamw_torch", weight_bytes=4, zero_stage=1) == 12
    )  # and a float32 copy of the weights


def test_only_autocast_keeps_a_second_copy_of_full_weights() -> None:
    full = {"mode": "full", "weight_bytes": 4}
    copies = 2 * EIGHT_B.block_weights
    assert [held(**full, phase=phase).weights for phase in PHASES] == [
        4 * EIGHT_B.parameters + copies * (phase in ("forward", "backward")) for phase in PHASES
    ]
    assert held(**full, compute_bytes=4).weights == 4 * EIGHT_B.parameters
    # ZeRO turns them to 16 bits once they are loaded
    assert [held(**full, zero_stage=2, phase=phase).weights for phase in ("load", "forward")] == [
        4 * EIGHT_B.parameters,
        2 * EIGHT_B.parameters,
    ]


def test_an_evaluation_takes_rows_whose_logits_fit_where_a_step_has_its_activations() -> None:
    one_b = load_shape("meta-llama/Llama-3.2-1B-Instruct", None, {})
    step = dataclasses.replace(STEP, batch_size=4, seq_len=2048)
    # 12 bytes a token and word, 2.9 GiB a row; without checkpointing a step has them in training, too
    assert [
        evaluation_rows(one_b, dataclasses.replace(step, checkpointed_layers=layers))
        for layers in (0, 16)
    ] == [4, 4]
    assert evaluation_rows(one_b, dataclasses.replace(step, batch_size=1)) == 1
    for fused in (
        dataclasses.replace(step, is_fast=True),
        dataclasses.replace(step, is_fast=True, checkpointed_layers=16),
    ):
        assert (
            evaluation_rows(one_b, fused) == 4
        )  # a chunk of logits is the same for any number of rows


@pytest.mark.parametrize(
    ("changes", "measured_gib"),
    [
        # one H200, sequence 2048, 8192 tokens a micro-batch
        ({"checkpointed_layers": 32}, 29),
        ({}, 87),
        ({"mode": "qlora"}, 69),
    ],
)
def test_an_8b_step_is_not_put_below_what_was_measured_nor_a_tenth_above(
    changes: dict[str, Any], measured_gib: float
) -> None:
    assert measured_gib < peak(batch_size=4, seq_len=2048, **changes) / GIB < 1.1 * measured_gib


@pytest.mark.parametrize(
    ("model", "changes", "measured_gib"),
    [
        # peak reserved by make train-bnb on one H200, 8,192 tokens a micro-batch (docs/speed-h200.md), less the context
        ("meta-llama/Llama-3.2-1B-Instruct", {"mode": "full", "accumulates": False}, 17.07),
        ("meta-llama/Llama-3.2-1B-Instruct", {"accumulates": False}, 10.23),
        ("meta-llama/Llama-3.2-1B-Instruct", {}, 10.30),
        ("meta-llama/Llama-3.1-8B-Instruct", {"mode": "full", "accumulates": False}, 80.68),
        ("meta-llama/Llama-3.1-8B-Instruct", {"accumulates": False}, 43.40),
        ("meta-llama/Llama-3.1-8B-Instruct", {}, 43.56),
        # without optimizer and context, by a bare step
        ("meta-llama/Llama-3.1-8B-Instruct", {"checkpointed_layers": 16}, 30.8),
        ("meta-llama/Llama-3.1-8B-Instruct", {"checkpointed_layers": 31}, 19.0),
    ],
)
def test_a_fused_step_is_estimated_to_a_fiftieth_of_what_was_measured(
    model: str, changes: dict[str, Any], measured_gib: float
) -> None:
    fused = {
        "is_fast": True,
        "optim": "adamw_torch_fused",
        "batch_size": 4,
        "seq_len": 2048,
        **changes,
    }
    found = step_bytes(load_shape(model, None, {}), dataclasses.replace(STEP, **fused))
    assert (found.predicted_peak - found.peak.context) / GIB == pytest.approx(
        measured_gib, rel=0.02
    )


# Batch


LAYERS = 10


def wanted(**changes: Any) -> Wanted:
    automatic = Wanted(
        "auto",
        "auto",
        effective_batch=32,
        is_effective_set=False,
        gradient_checkpointing="auto",
        seq_len=2048,
        world_size=1,
        layers=LAYERS,
    )
    return dataclasses.replace(automatic, **changes)


def fits(rows: int, checkpointed_rows: int = 0) -> Any:
    """A model of memory of which there are 1000 bytes: `rows` fit in without checkpointing, `checkpointed_rows` with all layers checkpointed."""
    plain, least = 1000 / rows, 1000 / (checkpointed_rows or rows)
    return lambda size, layers: size * (plain + (least - plain) * layers / LAYERS)


def chosen(rows: int = 1000, checkpointed_rows: int = 0, **changes: Any) -> Chosen:
    return choose(wanted(**changes), fits(rows, checkpointed_rows), 1000, "a GPU")


def a_choice(
    batch_size: int, grad_accum: int, checkpointed_layers: int, effective_batch: int
) -> Chosen:
    return Chosen(batch_size, grad_accum, checkpointed_layers, LAYERS, effective_batch)


@pytest.mark.parametrize("world", range(1, 9))
def test_the_effective_batch_is_kept_exactly(world: int) -> None:
    for effective, rows in product((world, 8 * world, 31 * world), (1, 3, 1000)):
        got = chosen(rows, world_size=world, effective_batch=effective, is_effective_set=True)
        assert got.batch_size * got.grad_accum * world == got.effective_batch == effective
        assert got.batch_size <= rows


@pytest.mark.parametrize("world", range(1, 9))
def test_a_default_effective_batch_is_rounded_up_to_what_the_ranks_can_make(world: int) -> None:
    got = chosen(world_size=world)
    assert got.batch_size * got.grad_accum * world == got.effective_batch == -(-32 // world) * world


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"batch_size": 5, "grad_accum": 3, "world_size": 2}, a_choice(5, 3, 0, 30)),
        ({"batch_size": 8, "world_size": 2}, a_choice(8, 2, 0, 32)),
        ({"batch_size": 5}, a_choice(5, 7, 0, 35)),
        ({"grad_accum": 4, "world_size": 2}, a_choice(4, 4, 0, 32)),
        ({"grad_accum": 64}, a_choice(1, 64, 0, 64)),
        ({"batch_size": 4, "gradient_checkpointing": True}, a_choice(4, 8, LAYERS, 32)),
        ({"batch_size": 4, "grad_accum": 8, "is_effective_set": True}, a_choice(4, 8, 0, 32)),
    ],
)
def test_explicit_values_survive_and_the_others_follow(
    changes: dict[str, Any], expected: Chosen
) -> None:
    assert chosen(**changes) == expected


@pytest.mark.parametrize(
    ("rows", "checkpointed", "changes", "expected"),
    [
        (1000, 0, {}, (4, 0)),  # 8192 tokens saturate the device
        (1000, 0, {"seq_len": 512}, (16, 0)),
        (1000, 0, {"seq_len": 128, "effective_batch": 32}, (32, 0)),
        (1000, 0, {"seq_len": 100_000}, (1, 0)),
        (2, 100, {}, (2, 0)),  # half of what saturates, and nothing computed twice
        (1, 100, {}, (1, 0)),
        (3, 100, {}, (2, 0)),
        (
            15,
            100,
            {"seq_len": 256},
            (16, 1),
        ),  # one row short of it: a layer computed twice costs less than half of the tokens at once
        (12, 100, {"seq_len": 512}, (8, 0)),
        (3, 100, {"seq_len": 512}, (2, 0)),
        (
            1,
            100,
            {"seq_len": 512},
            (16, 10),
        ),  # a sixteenth of it is slower than computing all twice
        (1, 3, {"seq_len": 512}, (1, 0)),
        (1, 100, {"gradient_checkpointing": False, "seq_len": 512}, (1, 0)),
        (1, 100, {"is_by_layer": False, "seq_len": 512}, (16, 10)),
        (3, 100, {"is_by_layer": False}, (2, 0)),
        (1000, 0, {"gradient_checkpointing": True}, (4, 10)),
        (
            4,
            100,
            {"effective_batch": 31, "is_effective_set": True},
            (1, 0),
        ),  # 31 is prime: 1 or all
        (
            1000,
            0,
            {"fullest_step": 8},
            (4, 0),
        ),  # the fullest packed step is two micro-batches that saturate
        (
            1000,
            0,
            {"fullest_step": 9},
            (8, 0),
        ),  # where 4 rows would make three of 6,144 tokens, over 3 % slower than one of all
        (1000, 0, {"fullest_step": 7}, (4, 0)),  # two of 7,168 tokens are not
        (4, 100, {"fullest_step": 9}, (4, 0)),
        (
            1000,
            0,
            {"fullest_step": 9, "world_size": 4},
            (4, 0),
        ),  # one micro-batch on each rank, whatever it may hold: the smallest that does
        (1000, 0, {"fullest_step": 1}, (1, 0)),
    ],
)
def test_the_fastest_step_that_fits_is_chosen(
    rows: int, checkpointed: int, changes: dict[str, Any], expected: tuple[int, int]
) -> None:
    got = chosen(rows, checkpointed, **changes)
    assert (got.batch_size, got.checkpointed_layers) == expected


def test_a_batch_that_an_accumulation_calls_for_is_checkpointed_before_it_is_made_smaller() -> None:
    assert chosen(7, 100, grad_accum=4) == a_choice(8, 4, 2, 32)
    assert chosen(2, 5, grad_accum=4) == a_choice(5, 4, LAYERS, 20)
    assert chosen(2, 5, grad_accum=4, gradient_checkpointing=False) == a_choice(2, 4, 0, 8)


def test_an_explicit_batch_that_does_not_fit_stands_with_checkpointing() -> None:
    assert chosen(1, 2, batch_size=8) == a_choice(8, 4, LAYERS, 32)
    assert chosen(1, 2, batch_size=8, gradient_checkpointing=False) == a_choice(8, 4, 0, 32)


def test_what_is_computed_again_has_a_name() -> None:
    assert [a_choice(1, 1, layers, 1).checkpointing for layers in (0, 1, 9, 10)] == [
        "none",
        "selective",
        "selective",
        "full",
    ]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"batch_size": 4, "grad_accum": 4, "world_size": 3, "is_effective_set": True},
            "train.batch_size=4 x 3 ranks x train.grad_accum=4 = 48, but train.effective_batch_size=32; set one of the three to auto",
        ),
        (
            {"batch_size": 5, "is_effective_set": True},
            "train.effective_batch_size=32 is no multiple of train.batch_size=5; set TRAIN_EFFECTIVE_BATCH_SIZE=30 or TRAIN_EFFECTIVE_BATCH_SIZE=35",
        ),
        (
            {"grad_accum": 3, "is_effective_set": True},
            "train.effective_batch_size=32 is no multiple of train.grad_accum=3; set TRAIN_EFFECTIVE_BATCH_SIZE=30 or TRAIN_EFFECTIVE_BATCH_SIZE=33",
        ),
        (
            {"world_size": 64, "is_effective_set": True},
            "train.effective_batch_size=32 is no multiple of 64 ranks; set TRAIN_EFFECTIVE_BATCH_SIZE=64",
        ),
    ],
)
def test_numbers_that_contradict_each_other_are_refused_with_the_arithmetic(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as error:
        chosen(**changes)
    assert str(error.value) == message


def test_what_fits_nowhere_is_out_of_memory_and_says_what_it_needs() -> None:
    with pytest.raises(OutOfMemory) as error:
        choose(wanted(), lambda size, layers: 3 * size * GIB, 2 * GIB, "a GPU")
    assert (
        str(error.value)
        == "train.batch_size=auto: even 1 row of 2048 tokens with checkpointing needs 3.0 GiB, a GPU has 2.0 GiB to give"
    )
    with pytest.raises(OutOfMemory):  # 7 rows would fit, and the effective batch is the user's
        chosen(7, 7, grad_accum=4, is_effective_set=True)
    with pytest.raises(
        OutOfMemory,
        match=r"even 8 rows, which train.grad_accum=4 calls for, of 2048 tokens with checkpointing needs 24.0 GiB",
    ):
        choose(
            wanted(grad_accum=4, is_effective_set=True),
            lambda size, layers: 3 * size * GIB,
            2 * GIB,
            "a GPU",
        )


# The plan


def test_gemma_27b_on_two_h200_trains_4_x_2_x_4() -> None:
    plan = planned("2xH200", config="configs/multi_gpu_config.yaml")
    assert (plan.chosen, plan.ranks.strategy) == (Chosen(4, 4, 62, 62, 32), "ddp")
    assert "batch=4 x 2 x accum=4 = 32" in plan.line()
    assert not plan.warnings


CONFIGS = sorted(path.name for path in (PROJECT_ROOT / "configs").glob("*.yaml"))


@pytest.mark.parametrize("words", ["1x24GiB", "2xH200", "2x4090", "8xA100-80", "1xV100-16"])
@pytest.mark.parametrize("config", CONFIGS)
def test_every_shipped_config_plans_or_says_why_not(config: str, words: str) -> None:
    if config == "run_unsloth.yaml":
        with pytest.raises(
            EnvironmentFault, match=r"^tuning.backend=unsloth: unsloth is not installed"
        ):
            planned(words, config=f"configs/{config}")
        return
    plan = planned(words, config=f"configs/{config}")
    chosen, train = plan.chosen, plan.config.train
    assert (
        chosen.batch_size * chosen.grad_accum * plan.ranks.world_size
        == chosen.effective_batch
        == train.effective_batch_size
    )
    assert (train.batch_size, train.grad_accum, train.gradient_checkpointing) == (
        chosen.batch_size,
        chosen.grad_accum,
        chosen.checkpointed_layers > 0,
    )
    assert plan.fits == (plan.memory.predicted_peak <= plan.budget_bytes) == (plan.shortage is None)
    if plan.fits:
        assert plan.changes == ()
    elif plan.is_batch_explicit:
        assert plan.shortage.startswith(
            f"train.batch_size={chosen.batch_size} is estimated to need "
        )
    else:
        assert plan.shortage.startswith("train.batch_size=auto: even 1 row of ")


@pytest.mark.parametrize("config", ["tiny", "run_bnb", "base"])
def test_the_configs_on_the_shipped_model_plan_on_a_cpu(config: str) -> None:
    plan = planned(CPU, config=config)
    assert (
        plan.ranks.world_size,
        plan.ranks.strategy,
        plan.ranks.device,
        precision(plan.config),
    ) == (1, "single", "cpu", "float32")


def test_a_budget_is_what_is_free_less_a_reserve() -> None:
    assert planned("2xH200").budget_bytes == int(parse("1xH200").gpus[0].free_bytes * 0.92)
    gpus = (Gpu(0, "a", 80 * GIB, 70 * GIB, (8, 0)), Gpu(1, "b", 80 * GIB, 20 * GIB, (8, 0)))
    host = Hardware("cuda", gpus, 8, 64 * GIB)
    assert [planned(host, distributed=both).budget_bytes for both in (True, False)] == [
        int(20 * GIB * 0.92),
        int(70 * GIB * 0.92),
    ]
    assert planned(CPU, environ={"NUM_GPUS": "4"}).budget_bytes == int(16 * GIB * 0.92)


@pytest.mark.parametrize(
    ("words", "settings", "weight_bytes"),
    [
        ("1xH200", (), 2),
        ("1xV100-32", (), 2),
        (CPU, (), 4),
        ("1xH200", ("train.bf16=false",), 4),
        ("1xH200", ("model.dtype=float32",), 4),
        (CPU, ("model.dtype=bfloat16",), 2),
        ("1xH200", ("tuning.mode=full",), 4),
        ("1xH200", ("tuning.mode=full", "model.dtype=bfloat16"), 2),
        (CPU, ("tuning.mode=full",), 4),
    ],
)
def test_weights_are_counted_in_the_type_that_they_are_loaded_in(
    words: Any, settings: tuple[str, ...], weight_bytes: int
) -> None:
    assert (
        planned(words, *settings).memory.phases["load"].weights
        == weight_bytes * load_shape("data/tiny_llama", None, {}).parameters
    )


def test_what_does_not_fit_names_the_device() -> None:
    for words, device in (
        ("1x24GiB", "a GPU has 22.1 GiB to give"),
        (Hardware("cpu", (), 8, 24 * GIB), "this host for each process has 22.1 GiB to give"),
    ):
        plan = planned(words, "model.name=meta-llama/Llama-3.1-70B-Instruct")
        assert not plan.fits and plan.shortage.endswith(device)


def test_unsloth_is_refused_where_it_is_not_installed_and_under_deepspeed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        EnvironmentFault,
        match="unsloth is not installed; run make install-unsloth, or set TUNING_BACKEND=bnb",
    ):
        planned("1xH200", "tuning.backend=unsloth")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    assert planned("1xH200", "tuning.backend=unsloth").config.tuning.backend == "unsloth"
    with pytest.raises(
        ConfigError,
        match="unsloth does not run under DeepSpeed; use make train-distributed, or set TUNING_BACKEND=bnb",
    ):
        planned("2xH200", "tuning.backend=unsloth", deepspeed=True)


def test_a_resolved_config_holds_numbers_and_absolute_paths() -> None:
    plan = planned("2xH200", "train.resume_from=outputs/x")
    left = {
        name: value
        for section in ("train", "data")
        for name, value in plan.config.model_dump()[section].items()
        if value == "auto"
    }
    assert left == {"fast_path": "auto"}  # the model itself is asked, part by part
    data = plan.config.data
    assert all(
        Path(path).is_absolute() and Path(path).is_file()
        for path in (data.train_path, data.val_path, data.test_path)
    )
    assert plan.config.model.name == str(PROJECT_ROOT / "data" / "tiny_llama")
    assert plan.config.train.resume_from == str(PROJECT_ROOT / "outputs" / "x")
    assert plan.config.train.eval_batch_size == plan.chosen.batch_size
    assert plan.config.train.dataloader_pin_memory is True
    assert planned(CPU).config.train.dataloader_pin_memory is False


def test_plan_json_is_plain_data_with_the_names_that_scripts_rely_on() -> None:
    facts = json.loads(json.dumps(planned("2xH200").as_json()))
    assert {
        "world_size",
        "per_device_batch_size",
        "grad_accum",
        "effective_batch",
        "checkpointing",
        "checkpointed_layers",
        "memory",
    } <= facts.keys()
    assert "predicted_peak" in facts["memory"]
    assert (facts["backend_of_collectives"], planned(CPU).as_json()["backend_of_collectives"]) == (
        "nccl",
        "gloo",
    )


def test_an_effective_batch_that_gives_way_is_a_warning_with_both_values() -> None:
    (warning,) = planned("3xH200").warnings
    assert "train.effective_batch_size=32 (configs/base.yaml:" in warning
    assert (
        "becomes 33: train.batch_size=11 x world=3 x train.grad_accum=1; TRAIN_EFFECTIVE_BATCH_SIZE=33 says so"
        in warning
    )
    assert planned("3xH200", "train.effective_batch_size=33").warnings == ()
    assert planned("3xH200", "train.batch_size=2", "train.grad_accum=1").warnings == ()


def test_a_batch_of_the_users_that_is_estimated_not_to_fit_is_a_warning_and_one_of_ours_an_error(
    capsys: pytest.CaptureFixture[str],
) -> None:
    settings = ("model.name=meta-llama/Llama-3.1-8B-Instruct", "tuning.mode=qlora")
    commands.require_room(planned("1x24GiB", *settings))
    commands.require_room(planned("1x24GiB", *settings, "train.batch_size=32"))
    told = capsys.readouterr().out
    assert (
        told.startswith("warning: train.batch_size=32 is estimated to need ")
        and "try TRAIN_BATCH_SIZE=" in told
    )
    with pytest.raises(OutOfMemory, match=r"^train.batch_size=auto: even 1 row of 2048 tokens"):
        commands.require_room(planned("1x4GiB", *settings))


def test_a_data_file_that_is_not_there_is_refused_before_a_run_is_made(tmp_path: Path) -> None:
    missing = tmp_path / "a.jsonl"
    for name in ("train", "val", "test"):
        with pytest.raises(DataError) as error:
            planned(CPU, f"data.{name}_path={missing}")
        assert str(error.value) == (
            f"data.{name}_path={missing} (--set data.{name}_path): no such file; set DATA_{name.upper()}_PATH to a data file, "
            "a folder of them, or a hub data set id"
        )


# Ranks


@pytest.mark.parametrize(
    ("words", "environ", "distributed", "expected"),
    [
        ("4xH200", {}, True, (4, "ddp")),
        ("4xH200", {}, False, (1, "single")),
        ("4xH200", {"NUM_GPUS": "2"}, True, (2, "ddp")),
        ("4xH200", {"NUM_GPUS": "2"}, False, (2, "ddp")),
        ("1xH200", {}, True, (1, "single")),
        (CPU, {}, True, (1, "single")),
        (CPU, {"NUM_GPUS": "2"}, True, (2, "ddp")),
        ("2xH200", {"NNODES": "3", "MASTER_ADDR": "10.0.0.1"}, True, (6, "ddp")),
        (CPU, {"NNODES": "2", "MASTER_ADDR": "127.0.0.1"}, True, (2, "ddp")),
    ],
)
def test_num_gpus_defaults_to_every_gpu_of_a_distributed_run(
    words: Any, environ: dict[str, str], distributed: bool, expected: tuple[int, str]
) -> None:
    ranks = planned(words, environ=environ, distributed=distributed).ranks
    assert (ranks.world_size, ranks.strategy) == expected


def test_deepspeed_is_deepspeed_on_one_gpu_too() -> None:
    assert planned("1xH200", deepspeed=True).ranks.strategy == "deepspeed"


def test_more_processes_than_gpus_are_refused() -> None:
    with pytest.raises(
        EnvironmentFault,
        match="NUM_GPUS=3: this host has 2 usable GPUs; set NUM_GPUS=2, or see make gpu-info",
    ):
        planned("2xH200", environ={"NUM_GPUS": "3"})


@pytest.mark.parametrize("address", [{}, {"MASTER_ADDR": ""}, {"MASTER_ADDR": " "}])
def test_several_machines_need_an_address_to_meet_at(address: dict[str, str]) -> None:
    with pytest.raises(
        ConfigError,
        match=r"NNODES=2 without MASTER_ADDR: .*127.0.0.1; set MASTER_ADDR to the address of machine 0",
    ):
        planned("2xH200", environ={"NNODES": "2", **address})


def test_a_cluster_that_counts_on_several_machines_is_not_given_single_ones() -> None:
    with pytest.raises(
        EnvironmentFault,
        match=r"WORLD_SIZE=8 is set, by a cluster or a launcher, .*; set NNODES, NODE_RANK and MASTER_ADDR .* or unset WORLD_SIZE",
    ):
        planned(CPU, environ={"WORLD_SIZE": "8"})
    assert planned(CPU, environ={"WORLD_SIZE": "1"}).ranks.world_size == 1
    assert planned(CPU, environ={"WORLD_SIZE": "8", "NUM_GPUS": "2"}).ranks.world_size == 2


# Precision

V100, T4, A100 = "1xV100-32", "1xT4", "1xA100-40"
WORDS = {"bf16": "bfloat16", "fp16": "float16", "float32": "float32"}


@pytest.mark.parametrize(
    ("words", "settings", "expected", "warns"),
    [
        (A100, (), "bf16", False),
        (T4, (), "fp16", False),
        (V100, (), "fp16", False),
        (CPU, (), "float32", False),
        (A100, ("train.bf16=false",), "float32", False),
        (V100, ("train.bf16=false",), "fp16", False),
        (A100, ("train.bf16=false", "train.fp16=false"), "float32", False),
        (V100, ("train.fp16=false",), "float32", False),
        (A100, ("train.fp16=true",), "fp16", False),
        (A100, ("train.fp16=true", "train.bf16=true"), "bf16", True),
        (V100, ("train.bf16=true",), "fp16", True),
        (T4, ("train.bf16=true", "train.fp16=true"), "fp16", True),
        (V100, ("train.bf16=true", "train.fp16=false"), "float32", True),
        (CPU, ("train.bf16=true",), "bf16", False),
    ],
)
def test_one_precision_is_chosen_by_what_the_device_has(
    words: Any, settings: tuple[str, ...], expected: str, warns: bool
) -> None:
    plan = planned(words, *settings)
    assert precision(plan.config) == expected
    assert not (plan.config.train.bf16 and plan.config.train.fp16)
    assert isinstance(plan.config.train.bf16, bool) and isinstance(plan.config.train.fp16, bool)
    assert bool(plan.warnings) == warns
    for warning in plan.warnings:
        assert f"computing in {WORDS[expected]};" in warning


def test_mixed_gpus_compute_in_what_all_of_them_have() -> None:
    gpus = (Gpu(0, "A100", 40 * GIB, 40 * GIB, (8, 0)), Gpu(1, "V100", 32 * GIB, 32 * GIB, (7, 0)))
    assert precision(planned(Hardware("cuda", gpus, 8, GIB)).config) == "fp16"


def test_float16_without_a_gpu_is_refused() -> None:
    with pytest.raises(
        ConfigError,
        match=r"train.fp16=true \(--set train.fp16\): float16 needs a GPU; set TRAIN_FP16=auto",
    ):
        planned(CPU, "train.fp16=true")


# DeepSpeed


def json_file(path: Path, value: Any) -> dict[str, str]:
    path.write_text(json.dumps(value))
    return {"DEEPSPEED_CONFIG": str(path)}


def test_a_deepspeed_plan_has_numbers_for_every_auto() -> None:
    plan = planned("2xH200", deepspeed=True)
    assert (plan.zero_stage, plan.deepspeed_source) == (
        2,
        str(PROJECT_ROOT / "configs" / "deepspeed_zero2.json"),
    )
    assert plan.deepspeed["train_micro_batch_size_per_gpu"] == plan.chosen.batch_size
    assert plan.deepspeed["train_batch_size"] == plan.chosen.effective_batch == 32
    assert (plan.deepspeed["bf16"]["enabled"], plan.deepspeed["fp16"]["enabled"]) == (True, False)


def test_the_precision_of_the_json_decides_where_the_config_leaves_it_open(tmp_path: Path) -> None:
    environ = json_file(
        tmp_path / "a.json", {"fp16": {"enabled": True}, "zero_optimization": {"stage": 1}}
    )
    assert precision(planned("2xH200", environ=environ, deepspeed=True).config) == "fp16"
    with pytest.raises(ConfigError, match=r"fp16.enabled=true, but train.fp16=false"):
        planned("2xH200", "train.bf16=true", environ=environ, deepspeed=True)


OFFLOAD = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}


@pytest.mark.parametrize("optim", ["adamw_8bit", "paged_adamw_8bit", "paged_adamw_32bit", "sgd"])
def test_offload_with_an_optimizer_that_would_be_swapped_is_refused(
    optim: str, tmp_path: Path
) -> None:
    environ = json_file(tmp_path / "a.json", OFFLOAD)
    with pytest.raises(ConfigError) as error:
        planned("2xH200", f"train.optim={optim}", environ=environ, deepspeed=True)
    assert str(error.value) == (
        f"train.optim={optim} (--set train.optim): with offload_optimizer DeepSpeed computes AdamW on the CPU; set TRAIN_OPTIM=adamw_torch, "
        "or delete offload_optimizer from the DeepSpeed JSON"
    )
    assert planned("2xH200", f"train.optim={optim}", deepspeed=True).config.train.optim == optim


@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_torch_fused"])
def test_offload_with_adamw_is_planned_and_needs_less(optim: str, tmp_path: Path) -> None:
    environ = json_file(tmp_path / "a.json", OFFLOAD)
    assert (
        planned("2xH200", f"train.optim={optim}", environ=environ, deepspeed=True)
        .memory.phases["optimizer"]
        .optimizer
        == 0
    )
    old = json_file(tmp_path / "b.json", {"zero_optimization": {"stage": 2, "cpu_offload": True}})
    assert planned("2xH200", environ=old, deepspeed=True).memory.phases["optimizer"].optimizer == 0


@pytest.mark.parametrize(
    ("words", "settings", "message"),
    [
        (
            CPU,
            ("tuning.mode=qlora",),
            r"ZeRO-3 with tuning.mode=qlora aborts on a CPU; set TUNING_MODE=lora, or DEEPSPEED_CONFIG=",
        ),
        (
            CPU,
            ("tuning.backend=unsloth",),
            "Unsloth needs an NVIDIA GPU and none is usable here; set TUNING_BACKEND=bnb",
        ),
    ],
)
def test_what_does_not_run_under_zero_3_is_refused(
    words: Any, settings: tuple[str, ...], message: str
) -> None:
    with pytest.raises(SftPlayError, match=message):
        planned(
            words,
            *settings,
            environ={"DEEPSPEED_CONFIG": "configs/deepspeed_zero3.json"},
            deepspeed=True,
        )


# Launch

RUN = Path("outputs/a run")


def ranks(strategy: str, device: str, per_node: int, **changes: Any) -> Ranks:
    visible = tuple(map(str, range(per_node))) if device == "cuda" else ()
    here = Ranks(
        strategy,
        device,
        per_node,
        nodes=1,
        node_rank=0,
        master_addr="127.0.0.1",
        master_port=None,
        visible=visible,
        cpu_count=8,
    )
    return dataclasses.replace(here, **changes)


def command(of: Ranks, **environ: str) -> launch.Launch:
    return launch_command(of, RUN, environ)


@pytest.fixture(scope="module")
def deepspeed_parser() -> Any:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    from deepspeed.launcher.runner import parse_args

    return parse_args


def test_a_single_process_is_python_on_the_worker() -> None:
    started = command(ranks("single", "cpu", 1))
    assert started.argv == (sys.executable, str(WORKER), str(RUN))
    assert started.env["CUDA_VISIBLE_DEVICES"] == ""
    assert started.env["OMP_NUM_THREADS"] == "8"


def test_two_cpu_processes_are_two_by_accelerates_own_reading(tmp_path: Path) -> None:
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser

    of = ranks("ddp", "cpu", 2)
    write_accelerate_config(tmp_path / "accelerate.yaml", accelerate_config(of, "no"), "a test")
    started = launch_command(of, tmp_path, {})
    assert started.argv[:3] == (sys.executable, "-m", "accelerate.commands.launch")
    arguments, _, _ = _validate_launch_command(
        launch_command_parser().parse_args(list(started.argv[3:]))
    )
    assert (
        arguments.num_processes,
        arguments.num_machines,
        arguments.multi_gpu,
        arguments.use_cpu,
        arguments.use_deepspeed,
    ) == (2, 1, True, True, False)
    assert (arguments.training_script, arguments.training_script_args) == (
        str(WORKER),
        [str(tmp_path)],
    )
    assert (arguments.gpu_ids, arguments.mixed_precision) == ("all", "no")
    assert started.env["ACCELERATE_USE_CPU"] == "true"


def test_the_accelerate_file_names_everything_that_accelerate_would_guess(tmp_path: Path) -> None:
    of = ranks("ddp", "cuda", 4, nodes=2, node_rank=1, master_addr="10.0.0.1", master_port=29600)
    write_accelerate_config(
        tmp_path / "a.yaml", accelerate_config(of, "bf16"), "Written by a test."
    )
    text = (tmp_path / "a.yaml").read_text()
    assert text.startswith("# Written by a test.\n")
    expected = {
        "distributed_type": "MULTI_GPU", "num_machines": 2, "num_processes": 8, "machine_rank": 1, "main_process_ip": "10.0.0.1",
        "main_process_port": 29600, "mixed_precision": "bf16", "use_cpu": False, "rdzv_backend": "static", "compute_environment": "LOCAL_MACHINE",
    }  # fmt: skip
    assert expected.items() <= yaml.safe_load(text).items()


def test_deepspeed_on_a_cpu_counts_its_processes(deepspeed_parser: Any) -> None:
    started = command(ranks("deepspeed", "cpu", 2))
    arguments = deepspeed_parser(list(started.argv[3:]))
    assert (arguments.num_gpus, arguments.include, arguments.user_script, arguments.user_args) == (
        2,
        "",
        str(WORKER),
        [str(RUN)],
    )
    assert (
        started.env["DS_ACCELERATOR"],
        started.env["ACCELERATE_USE_CPU"],
        started.env["CUDA_VISIBLE_DEVICES"],
    ) == ("cpu", "false", "")


def two_gpus(visible: str) -> Ranks:
    return planned("2xH200", environ={"CUDA_VISIBLE_DEVICES": visible}, deepspeed=True).ranks


def test_deepspeed_includes_the_gpus_that_are_visible(deepspeed_parser: Any) -> None:
    started = command(two_gpus("2, 3"), CUDA_VISIBLE_DEVICES="2, 3")
    arguments = deepspeed_parser(list(started.argv[3:]))
    assert (arguments.include, arguments.num_gpus, arguments.no_local_rank, arguments.hostfile) == (
        "localhost:2,3",
        -1,
        True,
        os.devnull,
    )
    assert started.env["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert "DS_ACCELERATOR" not in started.env


def test_gpus_by_uuid_are_started_by_torchrun() -> None:
    from torch.distributed.run import parse_args

    started = command(two_gpus("GPU-aaaa,GPU-bbbb"), CUDA_VISIBLE_DEVICES="GPU-aaaa,GPU-bbbb")
    assert started.argv[1:3] == ("-m", "torch.distributed.run")
    arguments = parse_args(started.argv[3:])
    assert (arguments.nnodes, arguments.nproc_per_node, arguments.training_script) == (
        "1",
        "2",
        str(WORKER),
    )
    assert started.env["CUDA_VISIBLE_DEVICES"] == "GPU-aaaa,GPU-bbbb"


def test_several_machines_meet_at_one_address() -> None:
    from torch.distributed.run import parse_args

    of = ranks("deepspeed", "cuda", 2, nodes=2, node_rank=1, master_addr="10.0.0.1")
    arguments = parse_args(command(of).argv[3:])
    expected = ("2", 1, "2", "10.0.0.1", 29500)
    assert (
        arguments.nnodes,
        arguments.node_rank,
        arguments.nproc_per_node,
        arguments.master_addr,
        arguments.master_port,
    ) == expected
    ddp = command(dataclasses.replace(of, strategy="ddp"))
    assert ddp.argv[ddp.argv.index("--main_process_port") + 1] == "29500"
    assert accelerate_config(of, "no")["main_process_ip"] == "10.0.0.1"
    named = command(dataclasses.replace(of, master_port=4000)).argv
    assert named[named.index("--master_port") + 1] == "4000"


@pytest.mark.parametrize(
    ("visible", "count", "entries"),
    [
        (None, 2, ("0", "1")),
        ("", 2, ("0", "1")),
        ("3", 1, ("3",)),
        (" 3 , 1,0", 2, ("3", "1")),
        ("GPU-a,GPU-b", 1, ("GPU-a",)),
        ("3", 2, ("0", "1")),  # a plan for another machine
    ],
)
def test_the_first_of_the_visible_gpus_are_used(
    visible: str | None, count: int, entries: tuple[str, ...]
) -> None:
    assert launch.visible_entries(visible, count) == entries


def test_num_gpus_takes_the_first_of_the_visible_ones() -> None:
    environ = {"CUDA_VISIBLE_DEVICES": "5,7", "NUM_GPUS": "1"}
    of = planned("2xH200", environ=environ).ranks
    assert launch_command(of, RUN, environ).env["CUDA_VISIBLE_DEVICES"] == "5"


def test_what_the_user_set_himself_stands() -> None:
    of = ranks("ddp", "cuda", 2)
    assert command(of).env["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        assert "PYTORCH_CUDA_ALLOC_CONF" not in command(of, **{name: "max_split_size_mb:64"}).env
    assert command(of).env["OMP_NUM_THREADS"] == "4"
    assert command(ranks("ddp", "cpu", 16)).env["OMP_NUM_THREADS"] == "1"
    assert "OMP_NUM_THREADS" not in command(of, OMP_NUM_THREADS="1").env
    assert "OMP_WAIT_POLICY" not in command(ranks("ddp", "cpu", 2), OMP_WAIT_POLICY="ACTIVE").env


def test_what_unsloth_compiles_lies_in_the_run_unless_the_user_says_where() -> None:
    of = ranks("single", "cuda", 1)
    assert command(of).env["UNSLOTH_COMPILE_LOCATION"] == str(RUN.absolute() / "unsloth")
    assert "UNSLOTH_COMPILE_LOCATION" not in command(of, UNSLOTH_COMPILE_LOCATION="/tmp/x").env
    assert "UNSLOTH_COMPILE_LOCATION" not in command(ranks("single", "cpu", 1)).env


def test_what_the_user_left_set_does_not_mislead_a_cpu_run() -> None:
    left = {"CUDA_VISIBLE_DEVICES": "0", "ACCELERATE_USE_CPU": "false", "DS_ACCELERATOR": "cuda"}
    env = command(ranks("ddp", "cpu", 2), **left).env
    assert (env["CUDA_VISIBLE_DEVICES"], env["ACCELERATE_USE_CPU"], env["DS_ACCELERATOR"]) == (
        "",
        "true",
        "cpu",
    )


def test_the_old_name_of_nccls_error_handling_reaches_torch() -> None:
    assert (
        command(ranks("ddp", "cuda", 2), NCCL_ASYNC_ERROR_HANDLING="1").env[
            "TORCH_NCCL_ASYNC_ERROR_HANDLING"
        ]
        == "1"
    )


def test_programs_of_this_python_are_found() -> None:
    folder = str(Path(sys.executable).parent)
    assert (
        command(ranks("single", "cpu", 1), PATH="/usr/bin").env["PATH"]
        == f"{folder}{os.pathsep}/usr/bin"
    )
    assert (
        "PATH" not in command(ranks("single", "cpu", 1), PATH=f"/usr/bin{os.pathsep}{folder}").env
    )


@pytest.mark.parametrize(
    ("environ", "settings", "seconds"),
    [
        ({}, (), 1800),
        ({"NCCL_TIMEOUT": "1"}, (), 1),
        ({"NCCL_TIMEOUT": "60"}, (), 60),
        ({"NCCL_TIMEOUT": "60"}, ("train.ddp_timeout=90",), 90),
        ({"NCCL_TIMEOUT": ""}, (), 1800),
    ],
)
def test_nccl_timeout_is_read_where_the_config_says_nothing(
    environ: dict[str, str], settings: tuple[str, ...], seconds: int
) -> None:
    assert planned("2xH200", *settings, environ=environ).config.train.ddp_timeout == seconds


@pytest.mark.parametrize("text", ["soon", "0", "-1", "1.5", "²"])
def test_an_nccl_timeout_that_is_no_number_is_refused(text: str) -> None:
    with pytest.raises(
        ConfigError, match=f"NCCL_TIMEOUT={text}: write whole seconds, such as NCCL_TIMEOUT=1800"
    ):
        planned("2xH200", environ={"NCCL_TIMEOUT": text})


def test_a_free_port_is_free() -> None:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", launch.free_port()))


def test_the_place_that_another_launcher_left_is_not_passed_on() -> None:
    program = "import os; print(sorted(name for name in os.environ if 'RANK' in name or 'WORLD' in name), os.environ['A'], os.environ['B'])"
    environ = {
        "RANK": "3",
        "LOCAL_RANK": "3",
        "WORLD_SIZE": "8",
        "LOCAL_WORLD_SIZE": "8",
        "A": "theirs",
        "B": "theirs",
    }
    code = f"from sft_play.plan.launch import Launch, execute; execute(Launch(({sys.executable!r}, '-c', {program!r}), {{'B': 'ours'}}), {environ!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "[] theirs ours\n", done.stderr


def test_a_launcher_that_is_not_there_is_an_environment_fault() -> None:
    with pytest.raises(
        EnvironmentFault,
        match="/no/such/python cannot be started: No such file or directory; try make install",
    ):
        launch.execute(launch.Launch(("/no/such/python",), {}), {})
