"""model.add_tokens: rows of embedding and head that a base does not have."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from rank_processes import run_ranks
from run_files import run_json
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from sft_play.config.schema import Config
from sft_play.data.tokenizer import load_tokenizer
from sft_play.errors import ConfigError
from sft_play.inference.load import load_run
from sft_play.inference.merge import merge_run
from sft_play.models.load import load_base, load_model
from sft_play.models.parameters import count_parameters
from sft_play.plan.run_plan import read_plan
from sft_play.process import Process

CPU = Process.alone(torch.device("cpu"))
TOKENS = ["<tool>", "</tool>"]
SETTING = json.dumps(TOKENS)


def config_of(base: Path, **model) -> Config:
    return Config.model_validate({"model": {"name": str(base), "add_tokens": TOKENS, **model}})


@pytest.fixture(scope="module")
def tool_rows(tmp_path_factory) -> dict[str, Path]:
    """Rows whose answers hold the added tokens."""
    folder = tmp_path_factory.mktemp("tools")
    files = {name: folder / f"{name}.jsonl" for name in ("train", "val")}
    for start, path in enumerate(files.values()):
        rows = [
            {"question": f"Count to {n}.", "answer": f"<tool>count {n}</tool> " + "1 " * n}
            for n in range(1 + 10 * start, 9 + 6 * start)
        ]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return files


def resized_by_hand(base: Path, folder: Path) -> Path:
    """Write a base with the tokens and their rows, as a user without this setting would."""
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.add_tokens(TOKENS)
    model = AutoModelForCausalLM.from_pretrained(base, dtype="auto")
    means = [matrix.weight.data.double().mean(0) for matrix in matrices(model)]
    rows = len(means and matrices(model)[0].weight)
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    for matrix, mean in zip(matrices(model), means, strict=True):
        matrix.weight.data[rows:] = mean.to(matrix.weight.dtype)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def matrices(model) -> list[torch.nn.Module]:
    return [model.get_input_embeddings(), model.get_output_embeddings()]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("mode", ["full", "lora", "qlora"])
def test_losses_are_those_of_a_base_that_was_resized_by_hand(
    plan_run, run_worker, losses_of, tiny_base, tool_rows, tmp_path, mode, ranks
):
    same = {
        "tuning.mode": mode,
        "data.train_path": tool_rows["train"],
        "data.val_path": tool_rows["val"],
    }
    by_hand = {"model.name": resized_by_hand(tiny_base, tmp_path / "base")}
    if mode != "full":
        by_hand["tuning.lora.trainable_tokens"] = SETTING
    folders = [
        plan_run({**same, **changes}, num_gpus=ranks)
        for changes in ({"model.add_tokens": SETTING}, by_hand)
    ]
    for folder in folders:
        exits = {run_worker(folder)} if ranks == 1 else set(run_ranks(folder, ranks))
        assert exits == {0}, run_json(folder)["cause"]
    added, resized = map(losses_of, folders)
    assert len(added) == 3 and added == resized
