"""The worker in one process: what a step computes, what a run writes down, and how it diverges."""

import json
import math
import shutil

import pytest
import torch
from marks import long
from run_files import run_json
from safetensors.torch import load_file, save_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from sft_play.data.render import IGNORE_INDEX
from sft_play.errors import ExitClass
from sft_play.training.trackers import HPARAMS

ANSWER_KEYS = {"origin", "prompt", "expected", "answer", "rougeL", "was_cut"}
EPOCHS = {
    "train.max_steps": None,
    "train.epochs": 2,
}  # 10 rows, 4 a step: 3 steps an epoch, the last of 2 rows and 2 fillers


def test_the_logged_loss_is_the_mean_over_the_labelled_tokens_of_the_step(
    plan_run, run_worker, build_loop, losses_of
):
    folder = plan_run({"train.max_steps": 1})
    trainer, data = build_loop(folder)
    rows = [
        index
        for batch in list(trainer.order)[: trainer.order.layout.micro_batches]
        for sequence in batch
        for index in sequence
    ]
    nats = tokens = 0
    trainer.engine.model.eval()
    for row in (data.train[index] for index in rows):
        with torch.no_grad():
            scores = (
                trainer.engine.model(input_ids=torch.tensor(row.ids[None]))
                .logits[0]
                .double()
                .log_softmax(-1)
            )
        nats -= sum(
            scores[t, label].item()
            for t, label in enumerate(row.labels[1:])
            if label != IGNORE_INDEX
        )
        tokens += row.trained_tokens
    run_worker(folder)
    assert losses_of(folder) == pytest.approx([nats / tokens], rel=1e-6)  # float32 logits


@pytest.mark.parametrize("mode", ["lora", "full", "qlora"])
def test_a_run_in_each_mode_learns_and_writes_down_what_it_did(finished, mode):
    folder = finished(mode)
    report = run_json(folder)
    assert (report["status"], report["exit_class"], report["cause"], report["global_step"]) == (
        "done",
        0,
        None,
        3,
    )
    assert (
        report["world_size"],
        report["strategy"],
        report["device"],
        report["backend"],
        report["mode"],
    ) == (1, "single", "cpu", "bnb", mode)
    before, after = report["metrics"]["before"], report["metrics"]["after"]
    assert after["eval_loss"] < before["eval_loss"] and 0 <= after["rougeL"] <= 1
    assert report["tokens_per_second"] > 0 and report["peak_bytes"]["measured"] > 2**20
    assert report["seconds"].keys() >= {
        "data",
        "load",
        "train",
        "training",
        "evaluate",
        "save",
        "total",
        "first_step",
    }
    assert [entry["step"] for entry in report["loss"]] == [1, 2, 3]
    answers = [
        json.loads(line) for line in (folder.evaluation / "after.jsonl").read_text().splitlines()
    ]
    assert len(answers) == 4 and set(answers[0]) == ANSWER_KEYS
    assert {"torch", "transformers", "peft"} <= report["versions"].keys()


def test_losses_and_scores_are_written_for_tensorboard(train_run, losses_of):
    scored = {"train.eval_steps": 2, "train.predict_with_generate": True}
    folder = train_run({"train.eval_strategy": "steps", **scored})
    events = EventAccumulator(str(folder.tensorboard))
    events.Reload()
    tags = set(events.Tags()["scalars"])
    assert {"train/loss", "train/learning_rate", "train/grad_norm"} <= tags
    assert {"train/tokens_per_second", "process/0/rss_gib"} <= tags
    assert {"eval/loss", "eval/rougeL"} <= tags
    for name in ("test/loss", "test/rougeL"):
        assert [event.step for event in events.Scalars(name)] == [0, 3], "before and after"
    assert [event.value for event in events.Scalars("train/loss")] == pytest.approx(
        losses_of(folder), rel=1e-6
    )  # float32 on disk
    parts = ("data", "forward", "backward", "optimizer")
    assert {f"step/{part}_seconds" for part in parts} <= tags
    assert not any(tag.startswith(("loss/rank_", "gpu/")) for tag in tags), "one process, no GPU"


def test_tensorboard_has_sample_answers_and_settings_with_scores(finished):
    events = EventAccumulator(str(finished("lora").tensorboard))
    events.Reload()
    texts = events.Tensors("samples/test/text_summary")
    assert [event.step for event in texts] == [0, 3]
    (text,) = texts[0].tensor_proto.string_val
    assert text.startswith(b"    prompt:   Count to 6.\n    expected: 1 2 3 4 5 6\n    answer:")
    plugin = events.PluginTagToContent("hparams")
    begun = HParamsPluginData.FromString(plugin["_hparams_/session_start_info"])
    shown = begun.session_start_info.hparams
    assert set(shown) == set(HPARAMS)
    assert shown["train.learning_rate"].number_value == 0.01
    experiment = HParamsPluginData.FromString(plugin["_hparams_/experiment"]).experiment
    scores = {info.name.tag for info in experiment.metric_infos}
    assert scores == {"test/loss", "test/rougeL"} <= set(events.Tags()["scalars"])


@pytest.mark.parametrize("strategy, steps", [("steps", [2, 4, 6]), long("epoch", [3, 6])])
def test_evaluations_during_training_happen_when_they_should_and_change_no_step(
    plan_run, run_worker, strategy, steps, losses_of
):
    watched = plan_run(
        {
            **EPOCHS,
            "train.eval_strategy": strategy,
            "train.eval_steps": 2,
            "tuning.lora.dropout": 0.1,
        }
    )
    plain = plan_run({**EPOCHS, "tuning.lora.dropout": 0.1})
    assert run_worker(watched) == run_worker(plain) == 0
    assert losses_of(watched) == losses_of(plain)
    log = (watched.logs / "rank-0.log").read_text()
    assert [step for step in range(1, 7) if f"step {step}/6 eval_loss=" in log] == steps


def test_divergence_between_two_logs_writes_no_checkpoint_and_no_weights_that_pass(
    plan_run, run_worker
):
    settings = {"tuning.mode": "full", "train.learning_rate": 1e30, "train.logging_steps": 10}
    folder = plan_run(settings | {"train.save_strategy": "steps", "train.save_steps": 1})
    assert run_worker(folder) == ExitClass.DIVERGED
    for stamped in folder.path.rglob("stamp.json"):
        files = list(stamped.parent.glob("*.safetensors"))
        tensors = [tensor for file in files for tensor in load_file(file).values()]
        assert tensors and all(torch.isfinite(tensor).all() for tensor in tensors), stamped


def test_a_base_model_with_nan_in_it_ends_the_run_before_the_first_step(
    plan_run, run_worker, tiny_base, tmp_path
):
    broken = shutil.copytree(tiny_base, tmp_path / "model")
    tensors = load_file(broken / "model.safetensors")
    tensors["model.norm.weight"][0] = math.nan
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    folder = plan_run({"model.name": broken})
    assert run_worker(folder) == ExitClass.DIVERGED
    assert "eval_loss=nan" in run_json(folder)["cause"] and run_json(folder)["global_step"] == 0
