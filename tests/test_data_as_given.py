"""data.order=as_given, and the loss of a named source as the score of the best checkpoint."""

import pytest

from sft_play.config import loader
from sft_play.config.metrics import is_higher_better
from sft_play.data.order import StepSampler, steps
from sft_play.errors import ConfigError
from sft_play.plan.step import Layout

ROWS = 23
SOURCES = "data.val_path=[{path: a.jsonl, name: math}, {path: b.jsonl}]"
BEST = "train.metric_for_best_model=eval_math_loss"


def test_a_curriculum_keeps_the_order_of_the_files_in_every_epoch() -> None:
    for epoch in (0, 1):
        found = list(steps(ROWS, 8, None, epoch))
        assert found == [list(range(8)), list(range(8, 16)), list(range(16, ROWS))]
    assert loader.load("base", {}, ["data.order=as_given"]).config.epoch_seed is None
    assert loader.load("base", {}, ["train.seed=3"]).config.epoch_seed == 3


@pytest.mark.parametrize(("batch", "world"), [(1, 1), (2, 2), (1, 4)])
def test_any_number_of_ranks_trains_the_same_steps_in_order(batch: int, world: int) -> None:
    layout = Layout(batch, 8 // (batch * world), world, 64)
    sampler = StepSampler([5] * ROWS, layout, None)
    per_step = layout.micro_batches * world
    batches = list(sampler)
    trained = [
        sorted(index for batch in batches[at : at + per_step] for (index,) in batch if index >= 0)
        for at in range(0, len(batches), per_step)
    ]
    assert trained == list(steps(ROWS, 8, None, 0))
    assert sampler.find_samples(2, 0, 0)[0] in trained[1]


def test_the_loss_of_a_named_source_may_choose_the_best_checkpoint() -> None:
    config = loader.load("base", {}, [SOURCES, BEST]).config
    assert config.train.metric_for_best_model == "eval_math_loss"
    assert not is_higher_better("eval_math_loss") and is_higher_better("eval_rougeL")
    for words in ([BEST], [SOURCES, BEST.replace("math", "code")]):
        with pytest.raises(ConfigError, match=r"train\.metric_for_best_model"):
            loader.load("base", {}, words)
