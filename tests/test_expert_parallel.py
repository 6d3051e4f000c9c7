"""Two processes that share the experts of a model: equal to one process, saved in one form."""

from collections.abc import Callable

import pytest
import torch
from rank_processes import run_ranks
from run_files import run_json
from safetensors.torch import load_file

from sft_play.runs.folder import RunFolder

pytestmark = pytest.mark.slow

# 10 rows, 8 a step: two steps an epoch, and the second holds 2 rows and 6 fillers
SETTINGS = {
    "train.max_steps": 4,
    "train.learning_rate": 1e-3,
    "train.save_strategy": "steps",
    "train.save_steps": 3,
    "train.max_grad_norm": 0.05,
    "train.gradient_checkpointing": True,
}
Trained = Callable[..., RunFolder]


@pytest.fixture(scope="module")
def trained(plan_run, base_of) -> Trained:
    """A function that returns a finished run, the same one to every test."""
    runs: dict[tuple, RunFolder] = {}

    def run(ranks: int, strategy: str = "auto", **changes: object) -> RunFolder:
        model_type = changes.pop("model_type", "qwen3_moe")
        key = (ranks, strategy, model_type, *changes.items())
        if key not in runs:
            named = {name.replace("__", "."): value for name, value in changes.items()}
            mode = named.get("tuning.mode", "lora")
            base = {"model.name": base_of(model_type, mode), "train.strategy": strategy}
            base["train.batch_size"] = 2
            base["train.grad_accum"] = 4 // ranks
            folder = plan_run({**SETTINGS, **base, **named}, num_gpus=ranks)
            exits = run_ranks(folder, ranks)
            assert set(exits) == {0}, (folder.path / "output.txt").read_text()[-3000:]
            runs[key] = folder
        return runs[key]

    return run


def saved(folder: RunFolder) -> dict[str, torch.Tensor]:
    (path,) = folder.weights("lora").glob("*.safetensors")
    return load_file(path)


def losses(folder: RunFolder) -> list[float]:
    return [entry["loss"] for entry in run_json(folder)["loss"]]


def assert_equal_runs(one: RunFolder, other: RunFolder) -> None:
    assert losses(other) == pytest.approx(losses(one), abs=1e-5)
    norms = [[step["grad_norm"] for step in steps(folder)] for folder in (one, other)]
    assert norms[1] == pytest.approx(norms[0], rel=1e-4)
    torch.testing.assert_close(saved(other), saved(one), rtol=0, atol=1e-5)


def steps(folder: RunFolder) -> list[dict]:
    return [entry for entry in run_json(folder)["history"] if "grad_norm" in entry]


def test_ranks_that_share_experts_train_as_one_process(trained: Trained) -> None:
    assert_equal_runs(trained(1), trained(2, "ep"))
