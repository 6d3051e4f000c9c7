"""Ranks of one run: each trains rows of its own, and all have the same weights, also after a resume."""

from pathlib import Path

import pytest
import torch
from faults.processes import spoil_one_weight
from marks import long
from rank_processes import run_two_workers, train_on_two
from run_files import run_json

from sft_play.data.batch import Batch
from sft_play.runs import seal
from sft_play.runs.folder import RunFolder

pytestmark = pytest.mark.slow

ZERO2 = "configs/deepspeed_zero2.json"


def check_ranks_were_equal(folder: RunFolder) -> None:
    """Assert that the run compared the weights of its ranks, and at which step."""
    step = run_json(folder)["global_step"]
    found = {check["name"]: check for check in run_json(folder)["checks"]}
    compared = found["the trained weights are equal on all ranks"]
    assert (compared["passed"], compared["found"]) == (True, f"at step {step}")


def test_a_weight_that_is_another_on_one_rank_ends_the_run(plan_run):
    settings = {"train.max_steps": 1, "train.predict_with_generate": False}
    folder = plan_run(settings, num_gpus=2)
    assert run_two_workers(folder, spoil_one_weight) == [13, 13]
    cause = run_json(folder)["cause"]
    assert cause.startswith("1 of 28 trained tensors of rank 1 are not those of rank 0 at step 1,")


def save_last_state(folder: Path) -> None:
    """Make a rank save its parameters, its part of the optimizer and the rows that it trained."""
    from sft_play.training import worker
    from sft_play.training.loop import TrainingLoop

    finish = worker.finish
    fetch = TrainingLoop.fetch
    steps: list[list[str]] = []

    def note_rows(trainer, *arguments):
        batches = fetch(trainer, *arguments)
        steps.append([row for batch in batches for row in rows_with_loss(batch)])
        return batches

    def save(context, recorder, trainer, stopped):
        parameters = {
            name: value.detach() for name, value in trainer.engine.model.named_parameters()
        }
        optimizer = list(trainer.engine.optimizer.state.values())
        state = {"parameters": parameters, "optimizer": optimizer, "steps": steps}
        torch.save(state, folder / f"state-{torch.distributed.get_rank()}.pt")
        finish(context, recorder, trainer, stopped)

    worker.finish = save
    TrainingLoop.fetch = note_rows


def rows_with_loss(batch: Batch) -> list[str]:
    """Return the labels of each document of a micro-batch, which name it; fillers have none."""
    places = torch.arange(batch.labels.shape[1]).expand_as(batch.labels)
    positions = batch.inputs.get("position_ids", places)
    numbers = (positions == 0).flatten().cumsum(0)
    labels = batch.labels.flatten()
    documents = [labels[numbers == number].tolist() for number in numbers.unique()]
    return [
        " ".join(str(label) for label in document if label != -100)
        for document in documents
        if any(label != -100 for label in document)
    ]


def check_rows_once_an_epoch(folders: list[Path], rows: int) -> None:
    """Assert that the ranks' rows of two steps, an epoch, are all rows once."""
    ranks = [torch.load(folder)["steps"] for folder in folders]
    for first in (0, 2):
        epoch = [row for steps in ranks for step in steps[first : first + 2] for row in step]
        assert len(epoch) == len(set(epoch)) == rows
    assert all(steps[0] for steps in ranks), "both ranks have rows"


@pytest.mark.parametrize(
    "engine, packing", [("ddp", True), long("ddp", False), long("zero2", True)]
)
def test_two_processes_resume_to_the_bit(plan_run, engine, packing):
    """Parameters and optimizer of both ranks and every loss; inside an epoch, with dropout."""
    settings = {
        "train.max_steps": 4,  # 10 rows, 8 a step: two an epoch
        "train.packing": packing,
        "train.predict_with_generate": False,
        "tuning.lora.dropout": 0.1,
    }

    def trained(changes):
        folder = plan_run(
            {**settings, **changes},
            num_gpus=2,
            deepspeed_config=ZERO2 if engine == "zero2" else None,
        )
        train_on_two(folder, save_last_state, folder.path)
        return folder

    whole = trained({"train.save_strategy": "steps", "train.save_steps": 3})
    again = trained({"train.resume_from": whole.checkpoints / "checkpoint-3"})
    assert len(run_json(whole)["loss"]) == 4
    assert run_json(again)["loss"] == run_json(whole)["loss"]
    assert seal.find_damage(whole.checkpoints / "checkpoint-3") is None
    names = sorted(path.name for path in whole.checkpoints.iterdir())
    assert names == ["checkpoint-3", "checkpoint-4"], "nothing is left of staging"
    for folder in (whole, again):
        check_ranks_were_equal(folder)
        assert seal.find_damage(folder.weights("lora")) is None
    names = ("state-0.pt", "state-1.pt")
    check_rows_once_an_epoch([whole.path / name for name in names], rows=10)
    for name in names:
        states = [torch.load(folder.path / name) for folder in (again, whole)]
        assert states[0]["optimizer"] and states[0]["parameters"]
        assert states[0].pop("steps") == states[1].pop("steps")[3:], "what was left of the run"
        torch.testing.assert_close(*states, rtol=0, atol=0)
