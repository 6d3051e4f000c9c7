"""`train.report_to`: what is sent to experiment trackers, and what is refused before a run.

What needs W&B or MLflow runs where they are installed: W&B offline, MLflow with a file of SQLite.
"""

import logging
import sys
from types import SimpleNamespace

import pytest
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from sft_play.commands.train import check_trackers
from sft_play.config import loader
from sft_play.config.schema import Config
from sft_play.errors import ConfigError, EnvironmentFault
from sft_play.monitor.packages import installed_version
from sft_play.runs.files import read_json, write_json
from sft_play.runs.folder import RunFolder
from sft_play.training.events import LogDetails
from sft_play.training.trackers import IDS, Continued, Trackers, open_trackers


class Recorder(TrainerCallback):
    """A tracker that keeps what it is told."""

    def __init__(self):
        self.logs = []
        self.has_ended = False

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.logs.append(logs)

    def on_train_end(self, args, state, control, **kwargs):
        self.has_ended = True


def test_a_tracker_gets_more_of_a_loss_and_stays_open_for_the_scores_after_training():
    tracker = Recorder()
    trackers = Trackers([tracker])
    details = LogDetails({"gpu/0/watts": 400.0}, ())
    trackers.on_log(None, None, None, logs={"loss": 1.5}, details=details)
    trackers.on_train_end(None, None, None)
    trackers.on_log(None, None, None, logs={"test_loss": 0.5}, details=LogDetails())
    assert not tracker.has_ended
    trackers.close()
    assert tracker.has_ended
    first, last = tracker.logs
    assert first == {"loss": 1.5, "gpu/0/watts": 400.0}
    assert last == {"test_loss": 0.5}


def report_to(value):
    return Config.model_validate({"train": {"report_to": value}}).train.report_to


def test_report_to_takes_a_name_a_list_or_none():
    assert report_to("wandb") == ["wandb"]
    assert report_to("none") == report_to(False) == report_to(None) == []
    loaded = loader.load_merged(None, {"TRAIN_REPORT_TO": "wandb,tensorboard"})
    assert loaded.config.train.report_to == ["wandb", "tensorboard"]
    with pytest.raises(ConfigError, match="tensorboard, wandb, mlflow, trackio"):
        loader.load_merged(None, {"TRAIN_REPORT_TO": "comet"})


@pytest.mark.skipif(installed_version("trackio") is not None, reason="trackio is installed here")
def test_a_tracker_that_is_not_installed_is_refused_with_the_command_that_installs_it():
    config = Config.model_validate({"train": {"report_to": "trackio"}})
    with pytest.raises(EnvironmentFault, match=r"report_to=trackio: .* -m pip install trackio"):
        check_trackers(config, with_tensorboard=False)


def test_tensorboard_beside_a_run_that_does_not_write_for_it_is_refused():
    config = Config.model_validate({"train": {"report_to": "none"}})
    with pytest.raises(ConfigError, match=r"report_to=none writes nothing .* leave out -tb"):
        check_trackers(config, with_tensorboard=True)
    check_trackers(config, with_tensorboard=False)


class Launch:
    """A launch of a run that reports to one tracker, in a folder with a checkpoint of step 4."""

    def __init__(self, path, tracker, **train):
        self.folder = RunFolder(path)
        self.tracker = tracker
        self.folder.checkpoints.mkdir(parents=True, exist_ok=True)
        for name in ("config.yaml", "plan.json"):
            (path / name).touch()
        self.checkpoint = self.folder.checkpoints / "checkpoint-4"
        self.train_section = {"report_to": tracker, **train}

    def train(self, steps, checkpoint=None, max_steps=10):
        """Log a loss in each of some steps; return the id of the tracker's run."""
        train = {**self.train_section, "resume_from": checkpoint and str(checkpoint)}
        context = SimpleNamespace(
            process=SimpleNamespace(is_main=True),
            folder=self.folder,
            config=Config.model_validate({"train": train}),
        )
        trackers = Trackers(open_trackers(context))
        arguments = TrainingArguments(str(self.folder.path), run_name="a", max_steps=max_steps)
        state, control = TrainerState(), TrainerControl()
        trackers.on_train_begin(arguments, state, control, model=None)
        for state.global_step in steps:
            logs = {"loss": 1 / state.global_step}
            trackers.on_log(arguments, state, control, logs=logs, details=LogDetails())
        trackers.on_train_end(arguments, state, control)
        trackers.close()
        if "wandb" in sys.modules:
            sys.modules[
                "wandb"
            ].teardown()  # a launch is a process, which reads the variables again
        return read_json(self.folder.path / IDS)[self.tracker]


@pytest.fixture(params=["wandb", "mlflow"])
def tracker(request, tmp_path, monkeypatch):
    """The name of a tracker that is installed, and writes below this test's folder."""
    pytest.importorskip(request.param)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    return request.param


def logged_steps(run_id):
    """Return the steps with a loss of a run in MLflow."""
    import mlflow

    return [metric.step for metric in mlflow.MlflowClient().get_metric_history(run_id, "loss")]


def test_a_run_that_resumes_in_its_folder_continues_its_tracker_run(tmp_path, tracker, caplog):
    caplog.set_level(logging.INFO)
    run = Launch(tmp_path / "run", tracker)
    first = run.train(range(1, 7))
    assert f"continues run {first}" not in caplog.text
    again = run.train(range(5, 9), run.checkpoint, max_steps=8)
    assert again == first
    assert f"{tracker} continues run {first}" in caplog.text
    if tracker == "mlflow":
        assert logged_steps(first) == [1, 2, 3, 4, 5, 6, 7, 8]
        assert "logs before step 6, which it has, are not sent again" in caplog.text
        assert "Failed to log run data" not in caplog.text  # other settings


def test_a_new_folder_continues_the_tracker_run_unless_its_schedule_is_longer(tmp_path, tracker):
    run = Launch(tmp_path / "run", tracker)
    first = run.train(range(1, 5))
    assert Launch(tmp_path / "next", tracker).train(range(5, 7), run.checkpoint) == first
    longer = Launch(tmp_path / "longer", tracker, extend=True)
    of_longer = longer.train(range(5, 7), run.checkpoint)
    assert of_longer != first
    assert longer.train(range(5, 9), longer.checkpoint) == of_longer


def test_a_tracker_run_that_is_gone_is_a_warning_and_a_new_run(tmp_path, tracker, caplog):
    run = Launch(tmp_path / "run", tracker)
    first = run.train(range(1, 5))
    if tracker == "mlflow":
        import mlflow

        mlflow.delete_run(first)
    else:
        first = "no/id"  # W&B refuses it as it does one that was deleted
        write_json(run.folder.path / IDS, {"wandb": first})
    again = run.train(range(5, 7), run.checkpoint)
    assert again != first
    assert f"run {first} cannot be continued, so a new one begins: " in caplog.text


def test_the_tracker_run_that_the_user_names_wins(tmp_path, tracker, monkeypatch):
    others = Launch(tmp_path / "others", tracker).train(range(1, 3))
    run = Launch(tmp_path / "run", tracker)
    run.train(range(1, 5))
    monkeypatch.setenv(f"{tracker.upper()}_RUN_ID", others)
    assert run.train(range(5, 7), run.checkpoint) == others


def test_steps_that_a_tracker_has_are_not_sent_again():
    class Continuing(Continued, Recorder):
        last_step = 6

    continuing = Continuing()
    state = TrainerState()
    for state.global_step in (5, 6, 7):
        for logs in ({"loss": state.global_step}, {"eval_loss": state.global_step}):
            continuing.on_log(None, state, None, logs=logs)
    assert continuing.logs == [{"eval_loss": 6}, {"loss": 7}, {"eval_loss": 7}]
