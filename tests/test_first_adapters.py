"""A seed gives the same adapters, however the ranks share the model and whatever was drawn before."""

import os
from pathlib import Path

import pytest
import torch
from rank_processes import run_two_workers, start_rank, wait_for, work

from sft_play.plan.launch import free_port
from sft_play.runs.folder import RunFolder

pytestmark = pytest.mark.slow

ENGINES = ("single", "ddp", "fsdp", "zero2", "zero3")
DIVIDED = ("fsdp", "zero3")


def save_first_weights(folder: Path, drawn_before: int) -> None:
    """Make a rank draw numbers, load the model, save what is trained of it, and end."""
    from sft_play.training import worker

    load = worker.load_for_training

    def save(context, recorder, checkpoint):
        torch.rand(drawn_before)
        model = load(context, recorder, checkpoint)
        trained = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
        torch.save(trained, folder / f"first-{context.process.rank}.pt")
        os._exit(0)

    worker.load_for_training = save


def first_weights(plan_run, engine: str, settings: dict, drawn_before: int) -> list[dict]:
    """Return what each rank of a run trains, before its first step."""
    changes = dict(settings)
    if engine in ("ddp", "fsdp"):
        changes["train.strategy"] = engine
    json = f"configs/deepspeed_{engine}.json" if engine.startswith("zero") else None
    world_size = 1 if engine == "single" else 2
    folder: RunFolder = plan_run(changes, num_gpus=world_size, deepspeed_config=json)
    arguments = (folder.path, save_first_weights, folder.path, drawn_before)
    output = folder.path / "output.txt"
    if world_size == 1:
        exits = [wait_for(start_rank(work, arguments, 0, free_port(), output, world_size=1))]
    else:
        exits = run_two_workers(folder, save_first_weights, folder.path, drawn_before)
    assert set(exits) == {0}, output.read_text()[-3000:]
    return [torch.load(folder.path / f"first-{rank}.pt") for rank in range(world_size)]


FORMS = {
    "lora": {},
    "gaussian": {"tuning.lora.init_lora_weights": "gaussian", "tuning.lora.use_rslora": True},
    "orthogonal": {"tuning.lora.init_lora_weights": "orthogonal"},
    "layers": {"tuning.lora.layers_to_transform": [1]},
    "qlora": {"tuning.mode": "qlora"},
    "bfloat16": {"train.bf16": True},
    "float8": {"tuning.base_dtype": "float8"},
    "dora": {"tuning.lora.use_dora": True},
    "modules": {"tuning.lora.modules_to_save": "[norm, embed_tokens]"},
    "tokens": {"tuning.lora.trainable_tokens": "<|end|>"},
}
# what plan/strategy.py refuses, on a CPU
REFUSED = {
    "qlora": ("zero3",),
    "bfloat16": ("zero2", "zero3"),
    "float8": ("zero2", "zero3"),
    **dict.fromkeys(("dora", "modules", "tokens"), DIVIDED),
}


def check_equal_starts(plan_run, settings: dict, engines: tuple[str, ...]) -> None:
    """Assert that all ranks of these engines begin with the same weights, to the bit."""
    expected: dict[str, torch.Tensor] = {}
    for number, engine in enumerate(engines):
        for found in first_weights(plan_run, engine, settings, drawn_before=number):
            expected = expected or found
            assert found.keys() == expected.keys(), engine
            differ = [name for name in found if not torch.equal(found[name], expected[name])]
            assert differ == [], engine
    assert any(tensor.any() for tensor in expected.values())


def test_a_seed_begins_with_the_same_adapters_where_the_base_is_divided(plan_run):
    check_equal_starts(plan_run, {}, ("single", "fsdp"))


@pytest.mark.long
@pytest.mark.parametrize("form", FORMS)
def test_a_seed_begins_with_the_same_weights_of_every_form(plan_run, form):
    engines = tuple(engine for engine in ENGINES if engine not in REFUSED.get(form, ()))
    check_equal_starts(plan_run, FORMS[form], engines)


@pytest.mark.long
def test_a_seed_begins_with_the_same_adapters_of_experts(plan_run, base_of):
    check_equal_starts(plan_run, {"model.name": base_of("qwen3_moe")}, ENGINES)


@pytest.mark.long
def test_another_seed_begins_with_other_adapters(plan_run):
    (one,), (other,) = (
        first_weights(plan_run, "single", {"train.seed": seed}, 0) for seed in (1, 2)
    )
    names = [name for name in one if "lora_A" in name]
    assert names and not any(torch.equal(one[name], other[name]) for name in names)
