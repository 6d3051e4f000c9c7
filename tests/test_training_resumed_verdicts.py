"""What ends a run ends it at the same step if it was stopped and resumed before."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from sft_kernels.process import Process
from sft_play.errors import DivergedError
from sft_play.training.best import LossWatch
from sft_play.training.guards import WATCHED_STEPS, GradientWatch, WeightChangeCheck

ALONE = Process.alone(torch.device("cpu"))
VOCABULARY = 2000  # a uniform guess has a loss of 7.6
LOG = [
    {"step": 0, "test_loss": 3.8},
    {"step": 1, "loss": 3.6},
    *({"step": step, "loss": 9.0} for step in range(2, 20)),
]


def step_of_end(watch: LossWatch, log: list[dict[str, float]]) -> int:
    """Return the step at which a run with this log ends as diverged."""
    for entry in log:
        try:
            watch.replay([entry])
        except DivergedError:
            return entry["step"]
    return -1


@pytest.mark.parametrize("stopped_at", [1, 2, 8])
def test_a_loss_diverges_at_the_same_step_after_resuming(stopped_at: int) -> None:
    whole = step_of_end(LossWatch(VOCABULARY, 1e-3), LOG)
    assert whole > stopped_at
    resumed = LossWatch(VOCABULARY, 1e-3)
    resumed.replay([entry for entry in LOG if entry["step"] <= stopped_at])
    resumed.start(9.0)  # the score at the checkpoint
    assert resumed.before == 3.8
    assert step_of_end(resumed, [entry for entry in LOG if entry["step"] > stopped_at]) == whole


class Adapters(nn.Module):
    """Two adapters, of which only `used` gets a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.ParameterDict({"lora_B": nn.Parameter(torch.zeros(2))})
        self.unused = nn.ParameterDict({"lora_B": nn.Parameter(torch.zeros(2))})

    def take_step(self) -> None:
        self.used["lora_B"].grad = torch.ones(2)
        self.used["lora_B"].data -= 0.1


def test_an_adapter_without_a_gradient_ends_the_run_at_the_same_step() -> None:
    model = Adapters()
    ended = []
    for watches in ([GradientWatch(ALONE)], [GradientWatch(ALONE), GradientWatch(ALONE)]):
        for step in range(WATCHED_STEPS):
            model.take_step()
            engine = SimpleNamespace(model=model, is_deepspeed=False)
            watch = watches[step * len(watches) // WATCHED_STEPS]  # the second after resuming
            try:
                watch.record(engine, step + 1, 100)
            except DivergedError as error:
                assert "unused" in str(error) and "used," not in str(error)
                ended.append(step + 1)
    assert ended == [WATCHED_STEPS, WATCHED_STEPS]


def test_weights_that_moved_before_a_run_was_resumed_have_moved() -> None:
    model = nn.Linear(2, 2)
    first = WeightChangeCheck(model, ALONE)
    assert not first.has_moved()
    model.weight.data += 1
    assert first.has_moved()
    WeightChangeCheck(model, ALONE, has_moved=True).raise_if_unmoved(1, 1e-3)
    with pytest.raises(DivergedError, match="no weight has changed"):
        WeightChangeCheck(model, ALONE).raise_if_unmoved(1, 1e-3)
