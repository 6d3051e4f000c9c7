"""A probe does not change a run, to the bit; ranks with different free memory choose the same."""

import pytest
import torch
from fake_gpu import FakeGpu, use_fake_memory
from marks import long
from rank_processes import run_two_workers, train_on_two
from run_files import plan_json, run_json
from safetensors.torch import load_file
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from sft_play.errors import EnvironmentFault, ExitClass
from sft_play.models.architecture import decoder_layers
from sft_play.models.checkpointing import checkpoint_layers
from sft_play.plan.run_plan import read_plan
from sft_play.plan.step import Layout
from sft_play.runs.folder import RunFolder
from sft_play.training import worker
from sft_play.training.dry_run import DryRun, digest, step_without_change

STEPS = {
    "train.max_steps": None,
    "train.epochs": 2,
    "train.learning_rate": 1e-3,
}  # of 8 of 10 rows: 4, the second and the last with 2 rows and 6 fillers
SAME = {
    **STEPS,
    "train.probe": True,
    "tuning.lora.dropout": 0.1,
    "train.weight_decay": 0.1,
    "train.batch_size": 2,
}
FREE = {
    **STEPS,
    "train.probe": True,
    "train.batch_size": "auto",
    "train.grad_accum": "auto",
    "train.effective_batch_size": 8,
    "train.packing": False,
}


def trained(folder: RunFolder) -> dict[str, torch.Tensor]:
    """The tensors that a run has saved."""
    return load_file(next(folder.weights(run_json(folder)["mode"]).glob("*.safetensors")))


def check_same(one: RunFolder, other: RunFolder) -> None:
    """Assert that two runs logged the same losses and scores and saved the same weights, to the bit."""
    reports = run_json(one), run_json(other)
    assert len(reports[0]["loss"]) == 4 and reports[0]["loss"] == reports[1]["loss"]
    assert [report["metrics"]["after"]["eval_loss"] for report in reports] == [
        reports[0]["metrics"]["after"]["eval_loss"]
    ] * 2
    before, after = trained(one), trained(other)
    assert before.keys() == after.keys() and all(
        torch.equal(before[name], after[name]) for name in before
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"tuning.mode": "lora", "tuning.lora.trainable_tokens": "<|user|>"},
        long({"tuning.mode": "qlora"}),
        long({"tuning.mode": "full"}),
    ],
    ids=["lora", "qlora", "full"],
)
def test_a_probed_run_is_the_run_that_was_not(plan_run, run_worker, changes):
    probed, plain = (
        plan_run({**SAME, **changes, "train.grad_accum": 4, "train.probe": is_probed})
        for is_probed in (True, False)
    )
    assert run_worker(probed) == run_worker(plain) == 0
    check_same(probed, plain)
    facts = run_json(probed)["probe"]
    assert (
        facts["points"][0]["phases"].keys() == {"forward", "backward", "optimizer"}
        and not facts["changed"]
    )
    assert plan_json(probed)["probe"] == facts and "probe" not in run_json(plain)


def test_a_resumed_run_is_probed_without_its_optimizer(train_run):
    settings = {
        **SAME,
        "train.grad_accum": 4,
        "train.save_strategy": "steps",
        "train.save_steps": 2,
    }
    whole = train_run(settings)
    resumed = train_run({**settings, "train.resume_from": whole.checkpoints / "checkpoint-2"})
    check_same(whole, resumed)
    assert run_json(resumed)["probe"]["points"][0]["phases"].keys() == {"forward", "backward"}


# What a dry_run leaves


@pytest.fixture
def trainer(plan_run, build_loop):
    trainer, _ = build_loop(plan_run({"tuning.mode": "full", "train.weight_decay": 0.1}))
    trainer.engine.prepare(steps=1)
    return trainer


def settings_of_groups(optimizer: torch.optim.Optimizer) -> list[dict]:
    return [
        {name: value for name, value in group.items() if name != "params"}
        for group in optimizer.param_groups
    ]


def test_a_rehearsal_leaves_nothing_behind(trainer):
    with torch.no_grad():
        first = next(trainer.engine.model.parameters())
        first.view(-1)[::3] = -0.0  # a negative zero survives as itself
    before, random = digest(trainer.engine.model), torch.get_rng_state()
    optimizer, modes = (
        trainer.engine.optimizer.optimizer,
        [module.training for module in trainer.engine.model.modules()],
    )
    groups = settings_of_groups(optimizer)
    trainer.memory = FakeGpu(9)
    with DryRun(trainer, steps_optimizer=True) as dry_run:
        point = dry_run.measure(Layout(2, 2, 1, 64))
        assert point.tokens == 2 * 64
    assert digest(trainer.engine.model) == before and torch.equal(torch.get_rng_state(), random)
    assert not optimizer.state and all(
        parameter.grad is None for parameter in trainer.engine.model.parameters()
    )
    assert groups == settings_of_groups(optimizer)
    assert (
        modes == [module.training for module in trainer.engine.model.modules()]
        and trainer.engine.accelerator.sync_gradients
    )


def test_a_rehearsal_of_a_model_just_loaded_recomputes_its_layers(plan_run, build_loop):
    loop, _ = build_loop(plan_run({"tuning.mode": "lora"}))
    loop.engine.prepare(steps=1)
    checkpoint_layers(loop.engine.model, len(decoder_layers(loop.engine.model)))
    passes = []
    layer = decoder_layers(loop.engine.model)[0]
    layer.register_forward_pre_hook(lambda *_: passes.append(torch.is_grad_enabled()))
    with DryRun(loop, steps_optimizer=True) as dry_run:
        dry_run.is_warm = True
        dry_run.measure(Layout(1, 1, 1, 64))
    assert len(passes) == 2, "once forward, and once more in the backward pass"


def test_a_weight_that_changed_is_an_error(trainer):
    changing = DryRun(trainer, steps_optimizer=True)
    with (
        pytest.raises(
            EnvironmentFault,
            match=r"1 tensors are not as they were before the probe, .*embed_tokens",
        ),
        changing,
        torch.no_grad(),
    ):
        trainer.engine.model.get_input_embeddings().weight[0, 0] += 1e-7


def test_out_of_memory_within_a_rehearsal_leaves_nothing_behind_either(trainer):
    gpu, before = FakeGpu(0.6), digest(trainer.engine.model)
    trainer.memory = gpu
    handle = gpu.count_forward_passes()
    try:
        with DryRun(trainer, steps_optimizer=True) as dry_run:
            assert dry_run.measure(Layout(1, 2, 1, 32)) is not None
            assert dry_run.measure(Layout(1, 2, 1, 256)) is None
    finally:
        handle.remove()
    assert (
        gpu.failures == 1
        and digest(trainer.engine.model) == before
        and not trainer.engine.optimizer.optimizer.state
    )


def test_rotary_embeddings_that_grow_with_what_they_see_shrink_again(trainer, monkeypatch):
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    shape = LlamaConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        max_position_embeddings=16,
        rope_parameters=rope,
    )
    model = LlamaForCausalLM(shape)
    was = model.model.rotary_emb.inv_freq.clone()
    ids = torch.arange(64)[None]
    monkeypatch.setattr(trainer.engine, "wrapped", model)
    with DryRun(trainer, steps_optimizer=False):
        model(ids)
        assert (
            not torch.equal(model.model.rotary_emb.inv_freq, was)
            and model.model.rotary_emb.max_seq_len_cached == 64
        )
    assert (
        torch.equal(model.model.rotary_emb.inv_freq, was)
        and model.model.rotary_emb.max_seq_len_cached == 16
    )


@pytest.mark.parametrize(
    "make",
    [
        torch.optim.AdamW,
        lambda groups: torch.optim.AdamW(groups, fused=True),
        lambda groups: torch.optim.SGD(groups, lr=0.1),
    ],
)
def test_an_optimizer_that_steps_without_change_changes_no_bit(make):
    weight = nn.Parameter(torch.tensor([0.0, -0.0, 1.0, -1e-40, 3e38, torch.finfo().tiny]))
    weight.grad = torch.full_like(weight, float("nan"))
    before = weight.detach().view(torch.int32).clone()
    optimizer = make([{"params": [weight], "weight_decay": 0.3}])
    step_without_change(optimizer)
    assert (
        torch.equal(weight.detach().view(torch.int32), before)
        and optimizer.param_groups[0]["weight_decay"] == 0.3
    )


# Choosing


@pytest.fixture
def on_fake(monkeypatch):
    """A function that lets the runs of this process find such a GPU; returns it."""
    handles = []

    def install(*args, **kwargs):
        gpu = FakeGpu(*args, **kwargs)
        handles.append(gpu.count_forward_passes())
        monkeypatch.setattr(worker, "MemoryMeter", gpu.of_process)
        return gpu

    yield install
    for handle in handles:
        handle.remove()


def step_of(folder: RunFolder) -> tuple[int, int, int]:
    """Return micro-batch, accumulation and checkpointed layers of plan.json and config.yaml.

    The two files must agree, and nothing may be auto.
    """
    plan, train = read_plan(folder), folder.read_config().train
    step = step_of_plan(folder)
    assert (train.batch_size, train.grad_accum) == step[:2]
    assert train.gradient_checkpointing == (step[2] > 0)
    assert plan.checkpointing == run_json(folder)["checkpointing"]
    assert isinstance(train.eval_batch_size, int)
    return step


def test_a_step_that_does_not_fit_is_cut_anew_and_trains_the_same(plan_run, run_worker, on_fake):
    plain = plan_run({**FREE, "train.probe": False})
    assert step_of_plan(plain) == (8, 1, 0) and run_worker(plain) == 0
    folder, gpu = plan_run(FREE), on_fake(1.7)
    assert run_worker(folder) == 0
    # 0.5 GiB, and 0.25 per row and layer: 2 rows take 1.5, 4 with one layer checkpointed 1.6,
    # 8 with both 0.9
    assert step_of(folder) == (2, 4, 0) and gpu.failures == 0
    report, other = run_json(folder), run_json(plain)
    assert [entry["loss"] for entry in report["loss"]] == pytest.approx(
        [entry["loss"] for entry in other["loss"]], abs=1e-5
    )
    facts = report["probe"]
    assert facts["changed"] and len(facts["points"]) == 3
    assert facts["verified_bytes"] == facts["predicted_after"]["forward"]
    assert (
        report["peak_bytes"]["predicted"]
        == read_plan(folder).memory.predicted_peak
        == max(facts["predicted_after"].values())
    )


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["fsdp", "zero3"])
def test_a_step_that_is_tried_as_planned_corrects_the_plan(plan_run, strategy):
    """The ranks divide the weights: rank 1 takes 2 GiB more next to its step, which both count."""
    settings = {**FREE, "train.strategy": strategy, "train.batch_size": 2, "tuning.mode": "lora"}
    folder = plan_run(settings, num_gpus=2)
    layout = read_plan(folder).layout
    memory = {"allocatable": [100.0, 100.0], "fixed": [0.5, 2.5]}
    train_on_two(folder, use_fake_memory, memory)
    report = run_json(folder)
    after = report["probe"]["predicted_after"]
    assert not report["probe"]["changed"] and read_plan(folder).layout == layout
    assert max(after.values()) == report["probe"]["verified_bytes"]
    assert max(after.values()) > 2.5 * 2**30 > max(report["probe"]["predicted_before"].values())
    assert report["peak_bytes"]["predicted"] == max(after.values())
    assert read_plan(folder).memory.predicted_peak == max(after.values())


def step_of_plan(folder: RunFolder) -> tuple[int, int, int]:
    layout = read_plan(folder).layout
    return layout.batch_size, layout.grad_accum, layout.checkpointed_layers


@pytest.mark.long
def test_the_second_run_measures_nothing_and_chooses_the_same(
    plan_run, run_worker, on_fake, tmp_path
):
    folders = [plan_run({**FREE, "data.cache_dir": tmp_path}) for _ in range(2)]
    on_fake(1.7)
    for folder in folders:
        assert run_worker(folder) == 0
    assert step_of(folders[0]) == step_of(folders[1]) == (2, 4, 0)
    facts = [run_json(folder)["probe"] for folder in folders]
    assert [fact["cached"] for fact in facts] == [False, True] and facts[0]["points"] == facts[1][
        "points"
    ]
    assert run_json(folders[0])["loss"] == run_json(folders[1])["loss"]
    on_fake(1.2)  # less memory than then: what is remembered holds, the choice does not
    folder = plan_run({**FREE, "data.cache_dir": tmp_path})
    assert run_worker(folder) == 0 and step_of(folder) == (1, 8, 0)


def test_a_step_that_the_fit_took_for_too_small_gives_way_to_a_smaller_one(
    plan_run, run_worker, on_fake
):
    gpu, folder = on_fake(1.7, cliffs={512: 2}), plan_run(FREE)
    assert run_worker(folder) == 0
    assert (
        step_of(folder) == (2, 4, 1) and gpu.failures == 1
    )  # 2 rows were expected to take 1.5 and take 2.5 GiB, 1.6 with a layer checkpointed


@pytest.mark.parametrize(
    "at_1024, chosen, failures",
    # the second takes 2.15, more than the fragmentation leaves; the third runs out of memory
    [(0.5, (4, 2, 0), 0), (0.825, (2, 4, 0), 0), (2, (2, 4, 0), 1)],
)
def test_a_step_that_the_fit_took_for_too_large_is_tried_once_there_seems_room(
    plan_run, run_worker, on_fake, tmp_path, at_1024, chosen, failures
):
    """2 rows were expected to take 1.5 and take 1, so 4 are tried, of 2.5 by the line."""
    gpu, facts = on_fake(2.2, cliffs={512: 0.5, 1024: at_1024}), []
    for _ in range(2):
        folder = plan_run({**FREE, "data.cache_dir": tmp_path})
        assert run_worker(folder) == 0 and step_of(folder) == chosen
        facts.append(run_json(folder)["probe"])
        measured = f" forward={facts[-1]['verified_bytes'] / 2**30:.2f}GiB "
        assert measured in (folder.logs / "rank-0.log").read_text(), "of the chosen step"
    assert gpu.failures == failures * 2, "what ran out of memory is not kept"
    assert facts[0]["points"] == facts[1]["points"] and facts[1]["cached"]
    assert facts[0]["verified_bytes"] == max(facts[0]["predicted_after"].values())


@pytest.mark.parametrize(
    "at_2048, chosen, failures", [(0.25, (8, 1, 0), 0), (2, (2, 4, 0), 1)], ids=["fits", "does-not"]
)
def test_what_the_plan_of_a_moe_model_takes_is_tried_though_the_line_refuses_it(
    plan_run, run_worker, on_fake, base_of, at_2048, chosen, failures
):
    """By the line 8 rows take 4.5; they take 1.5, or run out of memory."""
    folder = plan_run({**FREE, "model.name": base_of("qwen2_moe")})
    assert step_of_plan(folder) == (8, 1, 0)
    gpu = on_fake(1.7, cliffs={2048: at_2048})
    assert run_worker(folder) == 0 and step_of(folder) == chosen
    assert gpu.failures == failures


@pytest.mark.long
def test_a_packed_run_is_cut_anew_with_its_packs(plan_run, run_worker, on_fake, losses_of):
    plain, folder = (
        plan_run({**FREE, "model.max_seq_len": 64, "train.packing": True, "train.probe": is_probed})
        for is_probed in (False, True)
    )
    assert run_worker(plain) == 0
    on_fake(0.7)
    assert run_worker(folder) == 0
    layout = read_plan(folder).layout
    assert (
        step_of(folder) != step_of_plan(plain)
        and layout.micro_batches > read_plan(plain).layout.micro_batches
    )
    assert folder.read_data()["padding"] == run_json(folder)["padding"]
    losses = [losses_of(run) for run in (folder, plain)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)


def test_a_packed_run_needs_room_for_what_its_fullest_step_takes_and_no_more(
    plan_run, run_worker, on_fake
):
    folder = plan_run({**FREE, "train.packing": True})
    before = read_plan(folder).layout
    assert (before.sequences, before.micro_batches) == (1, 1), (
        "all 8 short rows of a step share one sequence"
    )
    on_fake(1.7)  # where 8 sequences would not fit, nor 4
    assert run_worker(folder) == 0 and step_of(folder) == (8, 1, 0)
    assert max(point["tokens"] for point in run_json(folder)["probe"]["points"]) == 256
    assert read_plan(folder).layout.sequences == 1


def test_a_batch_that_the_user_set_survives_or_ends_the_run(plan_run, run_worker, on_fake):
    settings = {**FREE, "train.batch_size": 4, "train.gradient_checkpointing": False}
    folder = plan_run(settings)
    on_fake(2.52)  # it takes 2.5: more than the fragmentation leaves, and it runs
    assert run_worker(folder) == 0 and step_of(folder) == (4, 2, 0)
    assert "TRAIN_BATCH_SIZE=auto chooses one that does" in (folder.logs / "rank-0.log").read_text()
    folder = plan_run(settings)
    on_fake(2.4)
    assert run_worker(folder) == ExitClass.OUT_OF_MEMORY
    report = run_json(folder)
    assert (report["global_step"], report["exit_class"]) == (0, 15)
    cause = (
        "train.batch_size=4 does not fit: a step takes about 3.3 GiB by what was measured before "
        "training, "
    )
    assert report["cause"].startswith(cause) and "TRAIN_BATCH_SIZE=" in report["cause"]


def test_where_one_row_does_not_fit_the_run_ends_before_training(plan_run, run_worker, on_fake):
    folder = plan_run({**FREE, "model.max_seq_len": 1024})
    on_fake(0.62)
    assert run_worker(folder) == ExitClass.OUT_OF_MEMORY
    assert run_json(folder)["cause"].startswith(
        "model.max_seq_len=1024: out of memory when one row was tried before training"
    )


# Two ranks


def run_on(folder: RunFolder, **memory: list[float]) -> int:
    """Run two ranks, each with its own fake memory if given; return the exit class in run.json."""
    codes = run_two_workers(folder, use_fake_memory, memory)
    report = run_json(folder)
    assert report["exit_class"] is not None, (codes, (folder.path / "output.txt").read_text())
    return report["exit_class"]


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("engine, mode", [("ddp", "lora"), (2, "lora"), (3, "full")])
def test_probed_ranks_are_the_ranks_that_were_not(plan_run, engine, mode):
    changes, path = (
        {**SAME, "tuning.mode": mode, "train.grad_accum": 2},
        None if engine == "ddp" else f"configs/deepspeed_zero{engine}.json",
    )
    folders = [
        plan_run({**changes, "train.probe": is_probed}, num_gpus=2, deepspeed_config=path)
        for is_probed in (True, False)
    ]
    assert [run_on(folder) for folder in folders] == [0, 0]
    check_same(*folders)
    assert run_json(folders[0])["probe"]["points"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "memory, step",
    [
        ({"allocatable": [2.6, 1.7]}, (2, 2, 0)),  # 4 rows would fit on the first rank
        (
            {"allocatable": [1.7, 1.7], "cliffs": [{}, {512: 2}]},
            (2, 2, 1),
        ),  # the second runs out of memory on what both were to run
    ],
    ids=["unequal", "one-runs-out"],
)
@pytest.mark.long
def test_ranks_of_unlike_memory_choose_alike(plan_run, memory, step):
    folder = plan_run(FREE, num_gpus=2)
    assert step_of_plan(folder) == (4, 1, 0)
    assert run_on(folder, **memory) == 0
    assert step_of(folder) == step
    for rank in (0, 1):
        log = (folder.logs / f"rank-{rank}.log").read_text()
        assert f" batch {step[0]} x 2 x {step[1]} = 8 (was 4 x 2 x 1) checkpointing=" in log
        assert f":{step[2]}/2 in " in log


@pytest.mark.slow
def test_where_nothing_fits_both_ranks_end_as_out_of_memory(plan_run):
    folder = plan_run(FREE, num_gpus=2)
    assert run_on(folder, allocatable=[2.6, 0.51]) == ExitClass.OUT_OF_MEMORY
    for rank in (0, 1):
        assert (
            f"exit class 15 (out_of_memory), rank {rank}"
            in (folder.logs / f"rank-{rank}.log").read_text()
        )
