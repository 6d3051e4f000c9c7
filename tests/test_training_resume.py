"""Checkpoints: their content, which runs may resume, and that resuming changes no result."""

import json
import os
import re
import resource
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from calls import outcome_of
from marks import long
from run_files import run_json

from sft_play.commands import call as calls
from sft_play.commands import train as training
from sft_play.errors import CheckpointError, ConfigError, ExitClass
from sft_play.runs import seal, stamp
from sft_play.runs.files import read_json
from sft_play.runs.folder import RunFolder
from sft_play.runs.resumed import AskedRun, check_resumable

ROOT = Path(__file__).resolve().parents[1]
NO_CONFIG = ROOT / "tests" / "fixtures" / "empty.yaml"
EPOCHS = {
    "train.max_steps": None,
    "train.epochs": 2,
}  # 10 rows, 4 a step: 3 steps an epoch, the last of 2 rows and 2 fillers


@pytest.fixture(scope="module")
def whole(train_run):
    """Six steps over two epochs in one go, with dropout, and a checkpoint at each."""
    folder = train_run(
        {
            **EPOCHS,
            "tuning.lora.dropout": 0.1,
            "train.save_strategy": "steps",
            "train.save_steps": 1,
            "train.save_total_limit": None,
        }
    )
    return folder


@pytest.fixture
def resumed(plan_run, whole):
    """A function that plans a run which continues from a checkpoint of `whole`."""

    def plan(checkpoint, **changes):
        return plan_run(
            {
                **EPOCHS,
                "tuning.lora.dropout": 0.1,
                "train.save_strategy": "steps",
                "train.save_steps": 6,
                "train.resume_from": checkpoint,
                **changes,
            }
        )

    return plan


def test_every_checkpoint_has_a_stamp_and_none_has_the_arguments_with_the_hub_token(whole):
    found = sorted(path.name for path in whole.checkpoints.iterdir())
    assert found == [f"checkpoint-{step}" for step in range(1, 7)]
    for name in found:
        facts = json.loads((whole.checkpoints / name / "stamp.json").read_text())
        assert (
            facts["global_step"] == int(name.removeprefix("checkpoint-"))
            and facts["mode"] == "lora"
        )
        assert (facts["run"], facts["precision"]) == (whole.path.name, "float32")
        assert facts.keys() >= {
            "backend",
            "base_model",
            "base_digest",
            "adapter",
            "tokenizer_digest",
            "template_digest",
            "data_digest",
            "world_size",
            "versions",
        }
    assert not list(whole.path.rglob("training_args.bin"))


def test_old_checkpoints_go_and_those_that_stay_are_complete(train_run):
    folder = train_run(
        {"train.save_strategy": "steps", "train.save_steps": 1, "train.save_total_limit": 2}
    )
    assert sorted(path.name for path in folder.checkpoints.iterdir()) == [
        "checkpoint-2",
        "checkpoint-3",
    ]
    assert all((path / "stamp.json").is_file() for path in folder.checkpoints.iterdir())


EXACT = ("adapter_model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth")


def check_same_run(folder, whole, losses_of):
    """Check that a run ended, to the bit, as one that was never interrupted."""
    assert losses_of(folder) == losses_of(whole) and len(losses_of(whole)) == 6
    scores = [run_json(run)["metrics"]["after"]["eval_loss"] for run in (folder, whole)]
    assert scores[0] == scores[1]
    paths = [run.weights("lora") / "adapter_model.safetensors" for run in (folder, whole)]
    assert paths[0].read_bytes() == paths[1].read_bytes()
    sealed = [
        read_json(run.checkpoints / "checkpoint-6" / seal.NAME)["files"] for run in (folder, whole)
    ]
    for name in EXACT:  # dropout too: the random state is in the checkpoint
        assert sealed[0][name] == sealed[1][name], name


def test_a_resumed_run_logs_and_saves_as_its_own_settings_say(whole, resumed, run_worker):
    folder = resumed(
        whole.checkpoints / "checkpoint-2",
        **{"train.logging_steps": 4, "train.save_strategy": "steps", "train.save_steps": 3},
    )
    assert run_worker(folder) == 0
    assert sorted(path.name for path in folder.checkpoints.iterdir()) == [
        "checkpoint-3",
        "checkpoint-6",
    ]
    assert [entry["step"] for entry in run_json(folder)["loss"]] == [1, 2, 4, 6]


def test_a_run_that_ended_in_the_middle_of_an_epoch_takes_no_step_more_when_resumed(train_run):
    steps = {"train.max_steps": 2, "train.lr_scheduler_type": "constant"}
    ended = train_run({**steps, "train.save_strategy": "steps", "train.save_steps": 2})
    again = train_run({**steps, "train.resume_from": ended.checkpoints / "checkpoint-2"})
    assert run_json(again)["global_step"] == 2
    name = "adapter_model.safetensors"
    trained = (again.weights("lora") / name).read_bytes()
    assert trained == (ended.weights("lora") / name).read_bytes()


def test_a_schedule_that_ends_before_the_checkpoint_is_refused(whole, resumed, run_worker):
    shorter = {"train.epochs": 1, "train.extend": True}
    folder = resumed(whole.path, **shorter)
    assert run_worker(folder) == ExitClass.CHECKPOINT
    cause = run_json(folder)["cause"]
    assert all(words in cause for words in ("6 steps", " 3", "TRAIN_EPOCHS", "TRAIN_MAX_STEPS"))


@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt"])
def test_a_checkpoint_without_its_optimizer_is_refused_rather_than_resumed_with_a_new_one(
    whole, resumed, run_worker, tmp_path, name
):
    copy = shutil.copytree(whole.checkpoints / "checkpoint-2", tmp_path / "checkpoint-2")
    (copy / name).unlink()
    folder = resumed(copy)
    assert run_worker(folder) == ExitClass.CHECKPOINT
    assert f"{name} is missing; it is checkpoint-2.corrupt now" in run_json(folder)["cause"]


@pytest.mark.parametrize(
    "was, now, advice",
    [
        (("deepspeed", 2), ("single", 1), "make train-deepspeed NUM_GPUS=2"),
        (("single", 1), ("deepspeed", 2), "make train or make train-distributed"),
        (("deepspeed", 4), ("deepspeed", 2), "make train-deepspeed NUM_GPUS=4"),
        (("ddp", 2), ("single", 1), "NUM_GPUS=2.* ELASTIC=1"),
    ],
)
def test_an_optimizer_that_was_split_otherwise_is_refused(whole, was, now, advice):
    checkpoint = whole.checkpoints / "checkpoint-2"
    saved = replace(stamp.read_stamp(checkpoint), strategy=was[0], world_size=was[1])
    with pytest.raises(CheckpointError, match=advice):
        check_resumable(checkpoint, saved, *now)
    if was[0] == "ddp":
        check_resumable(checkpoint, saved, *now, is_elastic=True)


@pytest.fixture
def other_rows(rows, tmp_path):
    """The same rows in another order."""
    other = tmp_path / "train.jsonl"
    other.write_text("".join(reversed(rows["train"].read_text().splitlines(keepends=True))))
    return other


def test_the_worker_refuses_rows_that_changed_since(whole, resumed, run_worker, other_rows):
    folder = resumed(whole.checkpoints / "checkpoint-5", **{"data.train_path": other_rows})
    assert run_worker(folder) == ExitClass.CHECKPOINT
    assert "its run had other rows (digest " in run_json(folder)["cause"]


# TRAIN_RESUME_FROM alone


def typed(resume_from: Path, *words: str, **variables: str) -> RunFolder:
    """Prepare a run as `make train` with these variables does, up to its launch."""
    environ = {"DEVICE": "cpu", "TRAIN_RESUME_FROM": str(resume_from), **variables}
    call = calls.Call(calls.invocations.read_invocation(environ), environ, words)
    return training.prepare_run(call, distributed=False, use_deepspeed=False)[0]


@pytest.mark.parametrize("step", [long(3), 5])  # the end of epoch 1, and inside epoch 2
def test_the_folder_alone_finishes_the_run_as_if_it_had_never_stopped(
    whole, run_worker, losses_of, step
):
    checkpoint = whole.checkpoints / f"checkpoint-{step}"
    folder = typed(checkpoint)
    changes = {"resume_from": str(checkpoint)}
    then = whole.read_config()
    assert folder.read_config() == then.model_copy(
        update={"train": then.train.model_copy(update=changes)}
    )
    assert run_worker(folder) == 0
    check_same_run(folder, whole, losses_of)


def test_what_was_auto_is_planned_anew_and_keeps_its_origin(whole):
    asked = AskedRun.read(typed(whole.path)).settings
    assert asked["train.bf16"].value == asked["train.eval_batch_size"].value == "auto"
    assert not asked["train.bf16"].is_chosen
    assert asked["train.learning_rate"].is_chosen
    assert f"{whole.path}/config.yaml:" in asked["train.learning_rate"].origin
    assert asked["train.resume_from"].origin == "environment TRAIN_RESUME_FROM"


def test_other_settings_that_matter_are_refused_in_a_table(whole, tmp_path):
    config = tmp_path / "mine.yaml"
    config.write_text("model: {max_seq_len: 128}\n")
    with pytest.raises(CheckpointError) as caught:
        typed(whole.path, "train.seed=7", CONFIG=str(config), TUNING_LORA_R="8")
    lines = [line.split() for line in str(caught.value).splitlines()[1:-1]]
    assert lines[1:] == [
        ["model.max_seq_len", "256", "128", f"{config}:1"],
        ["tuning.lora.r", "16", "8", "environment", "TUNING_LORA_R"],
        ["train.seed", "42", "7", "--set", "train.seed"],
    ]
    assert f"TRAIN_RESUME_FROM={whole.path} uses the settings of the run" in str(caught.value)


def test_settings_that_train_the_same_may_change_and_are_named(whole, capsys):
    folder = typed(
        whole.path,
        TRAIN_BATCH_SIZE="4",
        TRAIN_GRAD_ACCUM="1",
        TRAIN_LOGGING_STEPS="5",
        TRAIN_EPOCHS="3",  # the learning rate is constant: no step depends on the last one
    )
    train = folder.read_config().train
    assert (train.batch_size, train.grad_accum, train.logging_steps) == (4, 1, 5)
    named = ("resume train.batch_size", "resume train.logging_steps was 1 and is 5")
    shown = capsys.readouterr().out
    assert all(words in shown for words in named)
    typed(whole.path, TRAIN_BATCH_SIZE="auto", TRAIN_GRAD_ACCUM="auto")
    assert named[0] not in capsys.readouterr().out, "the plan is to find it"


def test_a_longer_run_is_one_of_its_own_on_a_schedule_of_its_length(plan_run, run_worker):
    """The rates from step 3 on are those of a run that was asked for four steps."""
    cosine = {"train.lr_scheduler_type": "cosine", "train.predict_with_generate": False}
    first = plan_run({**cosine, "train.max_steps": 2, "train.save_strategy": "epoch"})
    four = plan_run({**cosine, "train.max_steps": 4})
    longer = {**cosine, "train.max_steps": 4, "train.resume_from": first.path}
    refused, extended = plan_run(longer), plan_run({**longer, "train.extend": True})
    assert run_worker(first) == run_worker(four) == 0
    assert run_worker(refused) == ExitClass.CHECKPOINT
    cause = run_json(refused)["cause"]
    assert "train.max_steps  2     4" in cause and "TRAIN_EXTEND=true, under a new RUN" in cause
    assert run_worker(extended) == 0
    rates = [
        [step.learning_rate for step in run.read_report().history if step.learning_rate]
        for run in (extended, four)
    ]
    assert rates[0][2:] == rates[1][2:] and len(rates[1]) == 4
    parent = first.checkpoints / "checkpoint-2"
    assert run_json(extended)["resumed_from"] == str(parent)


def test_another_effective_batch_is_refused(whole):
    with pytest.raises(ConfigError, match=r"train.effective_batch_size=4; set one of the three"):
        typed(whole.path, TRAIN_GRAD_ACCUM="4")
    with pytest.raises(CheckpointError, match=r"train.effective_batch_size +4 +8"):
        typed(whole.path, TRAIN_GRAD_ACCUM="4", TRAIN_EFFECTIVE_BATCH_SIZE="8")


@pytest.mark.parametrize("is_finished", [True, False])
def test_rows_that_changed_since_are_refused_before_the_launch_and_the_remedy_works(
    whole, other_rows, train_run, tmp_path, is_finished
):
    run = whole.path
    if not is_finished:
        run = shutil.copytree(run, tmp_path / "killed")
        shutil.rmtree(run / "adapter")
    named = r"its run had other rows[^\n]*\n  data.train_path: \S+ has other bytes"
    with pytest.raises(CheckpointError, match=named) as caught:
        typed(run, DATA_TRAIN_PATH=str(other_rows))
    remedy = Path(re.search(r"set MODEL_ADAPTER=(\S+) instead", str(caught.value))[1])
    assert remedy == (run if is_finished else run / "checkpoints" / "checkpoint-6")
    changes = {"model.adapter": remedy, "data.train_path": other_rows}
    further = train_run({**changes, "train.max_steps": 1, "train.predict_with_generate": False})
    then, now = (run_json(each)["metrics"] for each in (whole, further))
    assert now["before"]["eval_loss"] == pytest.approx(then["after"]["eval_loss"], rel=1e-6)


@pytest.mark.parametrize("kwargs", [{}, {"tone": "calm"}])
def test_a_template_that_was_edited_is_named_and_the_remedy_works(
    train_run, plan_run, run_worker, tmp_path, tiny_base, kwargs
):
    file = tmp_path / "mine.jinja"
    own = (tiny_base / "chat_template.jinja").read_text()
    file.write_text(f"{{# {{{{ tone }}}} #}}{own}")
    settings = {"train.predict_with_generate": False, "model.chat_template": file}
    settings["model.template_kwargs"] = json.dumps(kwargs)
    first = plan_run({**settings, "train.max_steps": 2, "train.stop_after": 1})
    assert run_worker(first) == ExitClass.STOPPED
    before = run_json(first)["metrics"]["before"]
    file.write_text(own)
    again = {**settings, "train.max_steps": 2, "train.resume_from": first.path}
    refused = plan_run(again)
    assert run_worker(refused) == ExitClass.CHECKPOINT
    cause = run_json(refused)["cause"]
    assert f"({file}) has changed since" in cause and "ALLOW_BACKEND" not in cause
    remedy = re.search(r"MODEL_CHAT_TEMPLATE=(\S+) resumes", cause)[1]
    resumed = train_run({**again, "model.chat_template": remedy})
    assert run_json(resumed)["metrics"]["before"] == before, "the base's, not step 1's"
    (first.path / "run.json").unlink()
    alone = train_run({**again, "model.chat_template": remedy})
    assert {*run_json(alone)["metrics"]} == {"resumed", "after"}


def test_a_checkpoint_without_its_run_needs_the_config_that_it_was_trained_with(whole, tmp_path):
    copy = shutil.copytree(whole.checkpoints / "checkpoint-2", tmp_path / "a" / "checkpoint-2")
    with pytest.raises(CheckpointError, match="of its run is missing; set CONFIG"):
        typed(copy)


@pytest.fixture
def of_unsloth(whole, tmp_path):
    """A checkpoint whose stamp says that Unsloth wrote it."""
    copy = shutil.copytree(whole.checkpoints / "checkpoint-2", tmp_path / "checkpoint-2")
    facts = json.loads((copy / "stamp.json").read_text())
    then = facts["config"]
    then["tuning"]["backend"] = "unsloth"
    (copy / "stamp.json").write_text(json.dumps({**facts, "backend": "unsloth", "config": then}))
    seal.seal(copy)
    return copy


def test_the_worker_refuses_a_checkpoint_of_another_backend(resumed, run_worker, of_unsloth):
    folder = resumed(of_unsloth)
    assert run_worker(folder) == ExitClass.CHECKPOINT
    report = run_json(folder)
    assert (report["status"], report["exit_class"]) == ("failed", 12)
    assert "backend: the checkpoint has unsloth, this run bnb" in report["cause"]


def planned_call(settings_of, tmp_path: Path, checkpoint: Path) -> calls.Call:
    settings = settings_of(
        {
            "train.output_dir": tmp_path / "out",
            "train.resume_from": checkpoint,
            "tuning.lora.dropout": 0.1,
            **EPOCHS,
        }
    )
    words = tuple(
        f"{name}={'null' if value is None else value}" for name, value in settings.items()
    )
    return calls.Call(
        calls.invocations.read_invocation({"DEVICE": "cpu", "CONFIG": str(NO_CONFIG)}), {}, words
    )


def test_the_refusal_on_the_command_line_takes_no_torch_and_leaves_no_run(
    settings_of, tmp_path, of_unsloth
):
    words = [
        word
        for setting in planned_call(settings_of, tmp_path, of_unsloth).overrides
        for word in ("--set", setting)
    ]
    command = [sys.executable, "-X", "importtime", "-m", "sft_play", "train", *words]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = outcome_of(command, {**os.environ, "DEVICE": "cpu", "CONFIG": str(NO_CONFIG)})
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == ExitClass.CHECKPOINT
    assert "exit class 12 (checkpoint)" in done.stderr
    assert not any(
        line.split("|")[-1].strip() == "torch"
        for line in done.stderr.splitlines()
        if line.startswith("import time")
    )
    assert (
        after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1.5
    )  # seconds of computing: waiting for others does not count
    assert not (tmp_path / "out").exists()
