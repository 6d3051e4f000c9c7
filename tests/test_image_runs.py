"""Whole runs on rows with images: alone, on two ranks of every strategy, resumed, in every mode."""

import contextlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import opening_here
from image_models import draw_image, write_image_model
from marks import long
from rank_processes import train_on_two
from run_files import FOUR_STEPS, check_same_end, run_json
from safetensors.torch import load_file
from tiny_models import WHOLE_BLOCKS

from sft_play.errors import ConfigError
from sft_play.runs.folder import RunFolder

pytestmark = pytest.mark.slow

ZERO2 = "configs/deepspeed_zero2.json"
LONG = pytest.mark.long
SETTINGS = {**FOUR_STEPS, "model.max_seq_len": 128}


@pytest.fixture(scope="module")
def place(tokenizer, tmp_path_factory) -> Path:
    """A folder with a tiny model, and rows of which a third have an image."""
    folder = tmp_path_factory.mktemp("images")
    write_image_model("qwen3_vl", folder / "base", tokenizer)
    lines = []
    for number in range(12):
        content: object = f"What is {number} and {number}?"
        if number % 3 == 0:
            draw_image(folder / f"{number}.png", (32 + 8 * number, 40), number)
            content = [
                {"type": "image", "image": f"{number}.png"},
                {"type": "text", "text": f"What is picture {number}?"},
            ]
        answer = {"role": "assistant", "content": f"It is {2 * number}."}
        lines.append(json.dumps({"messages": [{"role": "user", "content": content}, answer]}))
    (folder / "rows.jsonl").write_text("\n".join(lines) + "\n")
    held = [line for number, line in enumerate(lines) if number % 3 == 0]
    (folder / "held.jsonl").write_text("\n".join(held[:2]).replace("picture", "image") + "\n")
    return folder


@pytest.fixture(scope="module")
def finished(train_run, place, plan_run) -> Callable[..., RunFolder]:
    """A function that returns a finished run, the same one to every test."""
    runs: dict[str, RunFolder] = {}

    def run(strategy: str = "single", **changes: object) -> RunFolder:
        key = repr((strategy, sorted(changes.items())))
        if key in runs:
            return runs[key]
        settings = {
            **SETTINGS,
            "model.name": place / "base",
            "data.train_path": place / "rows.jsonl",
            "data.val_path": place / "held.jsonl",
            "data.on_overlap": "allow",
            **changes,
        }
        if strategy == "single":
            folder = train_run(settings, may_trace=False)
        else:
            zero = ZERO2 if strategy == "zero2" else None
            if zero is None:
                settings["train.strategy"] = strategy
            folder = plan_run(settings, num_gpus=2, deepspeed_config=zero, may_trace=False)
            train_on_two(folder)
        runs[key] = folder
        return folder

    return run


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "zero2"])
def test_two_ranks_train_as_one(finished, strategy, losses_of):
    alone, two = finished(), finished(strategy)
    assert run_json(two)["world_size"] == 2
    assert losses_of(alone)[-1] < 0.9 * losses_of(alone)[0]
    assert losses_of(two) == pytest.approx(losses_of(alone), abs=2e-5)
    scores = [run_json(run)["metrics"]["after"]["eval_loss"] for run in (alone, two)]
    assert scores[1] == pytest.approx(scores[0], abs=2e-4)


def test_a_resumed_run_is_the_one_that_never_stopped(finished):
    whole = finished()
    again = finished(**{"train.resume_from": whole.checkpoints / "checkpoint-2"})
    check_same_end(whole, again)


def test_rows_are_packed_and_unpacked_alike(finished, losses_of):
    packed, unpacked = finished(), finished(**{"train.packing": False})
    assert losses_of(unpacked) == pytest.approx(losses_of(packed), abs=2e-5)


def test_prepared_by_processes_of_their_own(finished, losses_of):
    """As auto has it for rows with images where there is a core to spare."""
    assert losses_of(finished()) == losses_of(finished(**{"train.dataloader_num_workers": 0}))


@pytest.mark.parametrize(
    ("mode", "strategy"),
    [
        ("lora", "single"),
        long("full", "single"),
        long("lora", "ddp"),
        long("lora", "fsdp"),
        long("full", "ddp"),
    ],
)
def test_encoders_are_trained(finished, place, mode, strategy, losses_of):
    changes = {
        "tuning.mode": mode,
        "tuning.encoders": mode,
        "tuning.encoders_learning_rate": 0.02,
        "train.learning_rate": 0.01 if mode == "lora" else 0.001,
    }
    folder = finished(strategy, **changes)
    if strategy != "single":
        assert losses_of(folder) == pytest.approx(losses_of(finished(**changes)), abs=5e-5)
        return
    frozen = finished(
        **{**changes, "tuning.encoders": "frozen", "tuning.encoders_learning_rate": None}
    )
    assert losses_of(folder)[0] == pytest.approx(losses_of(frozen)[0], abs=2e-5)
    assert losses_of(folder)[-1] != pytest.approx(losses_of(frozen)[-1], abs=1e-3)
    (path,) = folder.weights(mode).glob("*.safetensors")
    saved = load_file(path)
    if mode == "lora":
        assert any("visual" in name for name in saved)
        return
    (base,) = (place / "base").glob("*.safetensors")
    before = load_file(base)
    assert saved.keys() == before.keys()
    changed = [name for name in saved if "visual" in name and (saved[name] != before[name]).any()]
    assert changed


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tuning.encoders": "drop"}, "TUNING_ENCODERS=frozen"),
        ({"tuning.encoders": "full"}, "TUNING_ENCODERS=lora"),
        ({"tuning.encoders_learning_rate": 0.1}, "no encoder is trained"),
        ({"train.strategy": "zero3"}, "TRAIN_STRATEGY=fsdp"),
        ({"train.strategy": "zero2", "tuning.encoders": "lora"}, "TRAIN_STRATEGY=ddp"),
    ],
)
def test_what_cannot_train_them_is_refused(place, plan_run, changes, words):
    settings = {
        **SETTINGS,
        "model.name": place / "base",
        "data.train_path": place / "rows.jsonl",
        **changes,
    }
    ranks = 2 if "train.strategy" in changes else 1
    with pytest.raises(ConfigError, match=words):
        plan_run(settings, num_gpus=ranks, may_trace=False)


@pytest.mark.parametrize(
    "opening", [opening_here, long(contextlib.nullcontext)], ids=["here", "in a process of its own"]
)
def test_encoders_of_a_base_in_4_bits_are_whole_for_whoever_opens_it(
    place, tokenizer, plan_run, run_worker, tmp_path, opening
):
    base = write_image_model("qwen3_vl", tmp_path / "base", tokenizer, WHOLE_BLOCKS)
    changes = {
        **SETTINGS,
        "model.name": base,
        "tuning.mode": "qlora",
        "data.train_path": place / "rows.jsonl",
        "data.val_path": place / "held.jsonl",
        "data.on_overlap": "allow",
        "train.reopen_saved": True,
    }
    folder = plan_run(changes, may_trace=False)
    with opening():
        assert run_worker(folder) == 0, run_json(folder)["cause"]
    assert "KL=" in (folder.path / "logs/rank-0.log").read_text()  # beyond its bound the run fails
