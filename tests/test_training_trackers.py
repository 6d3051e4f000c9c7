"""`train.report_to`: what is sent to experiment trackers, and what is refused before a run."""

import pytest
from transformers import TrainerCallback

from sft_play.commands.train import check_trackers
from sft_play.config import loader
from sft_play.config.schema import Config
from sft_play.errors import ConfigError, EnvironmentFault
from sft_play.monitor.packages import installed_version
from sft_play.training.trackers import Trackers


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
    trackers = Trackers([tracker], lambda: {"gpu/0/watts": 400.0})
    trackers.on_log(None, None, None, logs={"loss": 1.5})
    trackers.on_train_end(None, None, None)
    trackers.on_log(None, None, None, logs={"test_loss": 0.5})
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
    loaded = loader.load(None, {"TRAIN_REPORT_TO": "wandb,tensorboard"})
    assert loaded.config.train.report_to == ["wandb", "tensorboard"]
    with pytest.raises(ConfigError, match="tensorboard, wandb, mlflow, trackio"):
        loader.load(None, {"TRAIN_REPORT_TO": "comet"})


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
