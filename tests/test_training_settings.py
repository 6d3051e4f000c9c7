"""Every train setting is used: by transformers' arguments, the data loader, or as listed here."""

from dataclasses import fields, replace

import pytest
from transformers import TrainingArguments

from sft_play.config.schema import TrainSection
from sft_play.errors import EnvironmentFault
from sft_play.plan.run_plan import PlannedRun
from sft_play.training import arguments
from sft_play.training.arguments import training_arguments


@pytest.fixture(scope="module")
def arguments_of(plan_run):
    """Return a function that makes transformers' arguments of a run with `changes` of `train`."""
    folder = plan_run({})

    def arguments(device="cpu", **changes):
        planned = PlannedRun.read(folder)
        train = planned.config.train.model_copy(update=changes)
        layout = replace(planned.plan.layout, fullest_step=None)  # not packed
        layout = replace(layout, grad_accum=changes.get("grad_accum", 2))
        ranks = replace(planned.plan.ranks, device=device)
        changed = PlannedRun(
            planned.config.model_copy(update={"train": train}),
            replace(planned.plan, layout=layout, ranks=ranks),
        )
        return training_arguments(changed, folder)

    return arguments


# settings that transformers calls the same: a value that is not the default
SAME = {
    "learning_rate": 0.125,
    "lr_scheduler_type": "polynomial",
    "lr_scheduler_kwargs": {"power": 2},
    "warmup_steps": 0.25,
    "weight_decay": 0.5,
    "max_grad_norm": 0.75,
    "adam_beta1": 0.8,
    "adam_beta2": 0.95,
    "adam_epsilon": 1e-06,
    "max_steps": 11,
    "seed": 5,
    "data_seed": 6,
    "bf16": True,
    "fp16": True,
    "ddp_find_unused_parameters": True,
    "ddp_broadcast_buffers": True,
    "ddp_bucket_cap_mb": 3,
    "ddp_timeout": 77,
    "dataloader_num_workers": 2,
    "dataloader_pin_memory": True,
    "eval_strategy": "epoch",
    "eval_do_concat_batches": True,
    "eval_accumulation_steps": 4,
    "save_strategy": "steps",
    "save_total_limit": 9,
    "logging_steps": 13,
}
# what becomes of others in TrainingArguments
MAPPED = {name: (value, {name: value}) for name, value in SAME.items()} | {
    "batch_size": (3, {"per_device_train_batch_size": 3}),
    "grad_accum": (5, {"gradient_accumulation_steps": 5}),
    "eval_batch_size": (7, {"per_device_eval_batch_size": 7}),
    "optim": ("adamw_8bit", {"optim": "adamw_bnb_8bit"}),
    "epochs": (2.5, {"num_train_epochs": 2.5}),
}
# settings that transformers has no name for, or a narrower one, and who takes care of them
ELSEWHERE = {
    "strategy": "plan.strategy, training.build",
    "fsdp_offload": "plan.strategy, models.sharding",
    "run_name": "runs.folder",
    "output_dir": "runs.folder",
    "effective_batch_size": "plan.batch, data.collate.StepSampler",
    "eval_steps": "below: only under eval_strategy: steps",
    "save_steps": "below: only under save_strategy: steps",
    "predict_with_generate": "evaluation",
    "generation_num_beams": "evaluation",
    "generation_max_new_tokens": "evaluation",
    "generation_max_rows": "evaluation",
    "generation_batch_size": "evaluation.batches",
    "metrics": "evaluation.metrics",
    "metric_for_best_model": "training.best: only under load_best or early stopping",
    "load_best_model_at_end": "training.best",
    "early_stopping_patience": "training.best",
    "eval_token_share": "training.held_out",
    "packing": "build.build_loop",
    "probe": "worker.run_training, training.probe",
    "gradient_checkpointing": "plan.batch, models.checkpointing",
    "activation_offloading": "plan.candidates, models.checkpointing",
    "weight_offloading": "plan.candidates, models.weight_offloading",
    "context_parallel": "plan.candidates, data.collate, models.context",
    "router_aux_loss_coef": "training.experts",
    "fast_path": "models.load",
    "share_prefixes": "data.pipeline, training.sharing",
    "deliver_as": "models.delivered",
    "profile_steps": "training.observers",
    "resume_from": "resume.checkpoint_to_resume",
    "stop_after": "stop.StopOnSignal",
    "rendezvous_timeout": "commands.train.hand_over",
    "hang_timeout": "rank_watch.RankWatch",
    "reopen_saved": "training.saved_weights",
    "allow_backend_change": "resume.checkpoint_to_resume",
    "extend": "runs.resumed",
    "elastic": "resume.checkpoint_to_resume",
    "report_to": "trackers.open_trackers",
    "on_nonfinite": "training.guards",
    "max_skipped_steps": "training.guards",
    "on_untrained": "training.guards",
    "neftune_noise_alpha": "build.build_loop",
}


def test_every_train_setting_is_mapped_or_known_to_be_handled_elsewhere():
    assert MAPPED.keys() | ELSEWHERE.keys() == TrainSection.model_fields.keys()
    assert not MAPPED.keys() & ELSEWHERE.keys()


@pytest.mark.parametrize("name", MAPPED)
def test_a_train_setting_reaches_transformers(arguments_of, name):
    value, expected = MAPPED[name]
    assert value != TrainSection.model_fields[name].default, "a default value would prove nothing"
    device = (
        "cuda" if name == "dataloader_pin_memory" else "cpu"
    )  # for a CPU transformers unpins memory itself
    arguments = arguments_of(device, **{name: value})
    assert {attribute: getattr(arguments, attribute) for attribute in expected} == expected


def test_an_argument_that_the_installed_version_lacks_is_refused(arguments_of, monkeypatch):
    left = [field for field in fields(TrainingArguments) if field.name != "weight_decay"]
    monkeypatch.setattr(arguments, "fields", lambda _: left)
    with pytest.raises(EnvironmentFault, match="has no training argument weight_decay; type make"):
        arguments_of()


def test_eval_and_save_steps_count_under_their_strategies_alone(arguments_of):
    on = arguments_of(eval_strategy="steps", eval_steps=7, save_strategy="steps", save_steps=9)
    assert (on.eval_steps, on.save_steps) == (7, 9)
    off = arguments_of(eval_strategy="no", eval_steps=7, save_strategy="no", save_steps=9)
    assert off.eval_steps is None and off.save_steps > 10**6


def test_nothing_is_reported_to_others(arguments_of):
    arguments = arguments_of()
    assert (arguments.report_to, arguments.push_to_hub) == ([], False)
    shown = arguments.to_dict()  # what trackers show of a run
    assert (shown["run_name"], shown["train.lr_scheduler_type"]) == ("run", "constant")
    assert arguments.average_tokens_across_devices, "the loss counts the tokens of all ranks"


def test_worker_processes_and_pinned_memory_reach_the_data_loader(plan_run, build_loop):
    settings = {"train.dataloader_num_workers": 2, "train.dataloader_pin_memory": True}
    trainer, _ = build_loop(plan_run(settings))
    loader = trainer.create_loader()
    assert (loader.num_workers, loader.pin_memory, loader.persistent_workers) == (2, True, True)
    plain = build_loop(plan_run({}))[0].create_loader()
    assert (plain.num_workers, plain.pin_memory) == (0, False)
    assert [batch.labels.tolist() for batch in loader] == [batch.labels.tolist() for batch in plain]
