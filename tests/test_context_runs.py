"""Whole runs whose ranks share rows: of every strategy, resumed, with groups of ranks, refused."""

import json
from types import SimpleNamespace
from unittest.mock import patch

import pytest
from architecture_steps import adapted, fused, settings
from marks import long
from published_models import published_model
from rank_processes import run_ranks, run_two_workers
from run_files import FOUR_STEPS, check_same_end, run_json
from tiny_models import tiny_model

from sft_play.errors import ConfigError
from sft_play.plan import ranks as plan_ranks
from sft_play.runs.folder import RunFolder
from sft_play.training.build import sharing_ranks

pytestmark = pytest.mark.slow

LONG = pytest.mark.long
SETTINGS = {**FOUR_STEPS, "model.max_seq_len": 250}


@pytest.fixture(scope="module")
def finished(plan_run, tmp_path_factory):
    """A function that returns a finished run, the same one to every test."""
    runs: dict[str, RunFolder] = {}
    rows = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    lines = []
    for number in range(24):
        asked = {"role": "user", "content": f"What is {number} and {number}? " * (1 + number % 5)}
        answer = {"role": "assistant", "content": f"It is {2 * number}. " * (1 + number % 3)}
        lines.append(json.dumps({"messages": [asked, answer]}))
    rows.write_text("\n".join(lines) + "\n")

    def run(strategy="ddp", shared=1, ranks=2, prepare=None, **changes):
        key = repr((strategy, shared, ranks, prepare, sorted(changes.items())))
        if key not in runs:
            settings = {
                **SETTINGS,
                "data.train_path": rows,
                "train.context_parallel": shared,
                **changes,
            }
            zero = "configs/deepspeed_zero2.json" if strategy == "zero2" else None
            if zero is None:
                settings["train.strategy"] = strategy
            with patch.object(plan_ranks, "_refuse_crowd"):  # more ranks than cores
                folder = plan_run(settings, num_gpus=ranks, deepspeed_config=zero)
            exits = run_two_workers(folder, prepare) if ranks == 2 else run_ranks(folder, ranks)
            assert set(exits) == {0}, (folder.path / "output.txt").read_text()[-3000:]
            runs[key] = folder
        return runs[key]

    return run


def in_small_tiles() -> None:
    from sft_kernels.linears import tiles

    tiles.TILE_TOKENS = 16


@pytest.mark.parametrize(
    "strategy, ranks, mode",
    [
        ("ddp", 2, "lora"),
        long("ddp", 4, "full"),
        long("fsdp", 2, "lora"),
        long("fsdp", 2, "full"),
        long("zero2", 2, "lora"),
        long("ddp", 2, "qlora"),
    ],
)
def test_ranks_that_share_rows_train_as_those_that_do_not(
    finished, strategy, ranks, mode, losses_of
):
    apart = finished(**{"tuning.mode": mode})
    together = finished(strategy, 2, ranks, **{"tuning.mode": mode})
    assert losses_of(apart)[-1] < 0.95 * losses_of(apart)[0]
    assert losses_of(together) == pytest.approx(losses_of(apart), abs=2e-5)
    reports = [run_json(run) for run in (apart, together)]
    scores = [report["metrics"]["after"]["eval_loss"] for report in reports]
    assert scores[1] == pytest.approx(scores[0], abs=2e-4)
    assert any("share rows" in check["name"] for check in reports[1]["checks"])


@pytest.mark.long
@pytest.mark.parametrize(
    "changes",
    [{"train.packing": False}, {"train.gradient_checkpointing": True}],
    ids=["unpacked", "recomputed"],
)
def test_unpacked_and_recomputed_rows_train_alike(finished, changes, losses_of):
    whole = finished("ddp", 2)
    assert losses_of(finished("ddp", 2, **changes)) == pytest.approx(losses_of(whole), abs=2e-5)


@pytest.mark.long
def test_a_resumed_run_is_the_one_that_never_stopped(finished):
    whole = finished("ddp", 2)
    again = finished("ddp", 2, **{"train.resume_from": whole.checkpoints / "checkpoint-2"})
    check_same_end(whole, again)


@pytest.mark.parametrize(
    "strategy, mode", [("fsdp", "full"), ("fsdp", "lora"), ("zero2", "lora"), ("ddp", "qlora")]
)
@pytest.mark.long
def test_mlps_in_tiles_train_as_whole_ones(finished, strategy, mode, losses_of):
    settings = {"tuning.mode": mode, "train.gradient_checkpointing": True}
    in_tiles = finished(strategy, 2, prepare=in_small_tiles, **settings)
    assert losses_of(in_tiles) == pytest.approx(
        losses_of(finished(**{"tuning.mode": mode})), abs=2e-5
    )


@pytest.mark.parametrize(
    "model_type, has_images, words",
    [
        ("llama4", False, "their place in the row"),
        ("qwen3_5", False, "need the tokens before theirs"),
        ("llama", True, "no rows with images"),
    ],
)
def test_a_model_and_rows_that_cannot_be_shared_are_refused(model_type, has_images, words):
    chosen = settings("lora")
    make = published_model if model_type == "llama4" else tiny_model
    model = fused(adapted(make(model_type), chosen), chosen)
    data = SimpleNamespace(train=SimpleNamespace(has_images=has_images))
    for shared in (1, 2):
        layout = SimpleNamespace(context_parallel=shared)
        context = SimpleNamespace(plan=SimpleNamespace(layout=layout), process=None)
        if shared == 1:
            assert sharing_ranks(context, data, model) is None
            continue
        with pytest.raises(ConfigError, match=words + ".*; set TRAIN_CONTEXT_PARALLEL=1"):
            sharing_ranks(context, data, model)
