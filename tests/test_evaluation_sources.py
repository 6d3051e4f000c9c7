"""The loss of each evaluation source by name, in every record of a run, packed and on two ranks."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_processes import run_ranks
from record_files import write_rows
from run_files import run_json
from transformers import AutoModelForCausalLM

from sft_kernels.process import Process
from sft_play.config.metrics import find_metric_problems
from sft_play.config.schema import Config
from sft_play.data.cache import TokenizedSource, name_sources
from sft_play.data.pipeline import build_run_data
from sft_play.evaluation.evaluator import Evaluator
from sft_play.plan.sources import resolved
from sft_play.reporting.charts import history_charts
from sft_play.reporting.run_facts import RunFacts
from sft_play.runs.folder import RunFolder
from sft_play.runs.report import logged_losses, score_names

HERE = Process.alone(torch.device("cpu"))


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, Path]:
    """Three files of unequal numbers of rows, and of lengths."""
    folder = tmp_path_factory.mktemp("sources")
    made = {}
    for name, numbers in {"sums": range(20, 25), "words": range(3), "more": range(30, 32)}.items():
        made[name] = folder / f"{name}.jsonl"
        rows = [
            {"question": f"{name} {n}?", "answer": " ".join([name] * (n % 9 + 1))} for n in numbers
        ]
        write_rows(made[name], *rows)
    return made


@pytest.fixture
def scored(rows, files, tiny_base, tokenizer, tmp_path):
    """A function that returns the scores of the tiny base on what `data` names."""
    model = AutoModelForCausalLM.from_pretrained(tiny_base).eval()

    def score(batch_size: int = 3, **data: Any):
        settings = {"train_path": str(rows["train"]), "cache_dir": str(tmp_path), **data}
        config = Config.model_validate(
            {
                "model": {"max_seq_len": 256},
                "data": settings,
                "train": {"eval_batch_size": batch_size, "predict_with_generate": False},
            }
        )
        split = build_run_data(config, tokenizer).validation
        return Evaluator(split, tokenizer, config.train, HERE).score(model)

    return score


@pytest.mark.parametrize("batch_size", [1, 3, 16])
def test_the_loss_of_a_source_is_that_of_its_rows_alone(scored, files, batch_size):
    paths = {name: str(path) for name, path in files.items()}
    alone = {name: scored(val_path=path) for name, path in paths.items()}
    both = scored(batch_size, val_path={"a": [paths["sums"], paths["more"]], "b": paths["words"]})
    rows = [*alone["sums"].row_losses, *alone["more"].row_losses]
    expected = sum(row.nats for row in rows) / sum(row.tokens for row in rows)
    assert both.source_losses == {
        "a": pytest.approx(expected, rel=1e-5),
        "b": pytest.approx(alone["words"].eval_loss, rel=1e-5),
    }
    assert list(both.as_metrics())[:3] == ["eval_loss", "eval_a_loss", "eval_b_loss"]
    assert list(both.as_test_metrics()) == ["test_loss", "test_a_loss", "test_b_loss"]


@pytest.mark.parametrize("as_names", [False, True])
def test_one_source_has_no_loss_beside_the_whole(scored, files, as_names):
    path = str(files["sums"])
    given = {"sums": [path, str(files["more"])]} if as_names else path
    scores = scored(val_path=given)
    assert scores.source_losses == {}
    assert set(scores.as_metrics()) == {"eval_loss", "eval_loss_seconds"}


def test_held_out_rows_of_several_training_sources_have_their_losses(scored, files):
    sources = [str(files["sums"]), str(files["words"])]
    scores = scored(train_path=sources, val_size=0.4)
    assert set(scores.source_losses) == {"sums", "words"}


def named(*sources: str) -> list[str]:
    """Names of sources given as `path`, or as `title=path`."""
    made = []
    for text in sources:
        title, _, path = text.rpartition("=")
        made.append(TokenizedSource(path, (path,), None, "", "", title=title or None))
    return name_sources(made)


@pytest.mark.parametrize(
    ("sources", "names"),
    [
        (["/d/maths.jsonl", "/d/code.jsonl.gz"], ["maths", "code"]),
        (["/d/a/val.jsonl", "/d/b/val.parquet"], ["a_val", "b_val"]),
        (["/d/a/val.jsonl", "/d/b/code.jsonl"], ["val", "code"]),
        (["owner/gsm8k (main)", "owner/gsm8k (socratic)"], ["gsm8k_main", "gsm8k_socratic"]),
        (["one/set", "two/set"], ["one_set", "two_set"]),
        (["maths=/d/a.jsonl", "maths=/d/b.jsonl", "/d/c.jsonl"], ["maths", "maths", "c"]),
        (["my maths/1=/d/a.jsonl", "x=/d/b.jsonl"], ["my_maths_1", "x"]),
        (["/d/a.jsonl", "/d/a.jsonl"], ["a", "a"]),
        (["a b.jsonl", "a_b.jsonl"], ["a_b", "a_b"]),
        ([], []),
    ],
)
def test_a_source_is_named_as_the_user_named_it_or_by_the_end_of_its_path(sources, names):
    assert named(*sources) == names


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"a": "x.jsonl", "b": ["y.jsonl", "z.jsonl"]}, [("a", "x"), ("b", "y"), ("b", "z")]),
        ({"x.jsonl": 3, "y.jsonl": 1}, [(None, "x"), (None, "y")]),
        ({"a": {"path": "x.jsonl", "rows": 5}}, [("a", "x")]),
        ({"a": [{"path": "x.jsonl", "split": "[:5]"}]}, [("a", "x")]),
        ({"x.jsonl": {"rows": 5}}, [(None, "x")]),
        ({"path": "x.jsonl", "rows": 5}, [(None, "x")]),
        ([{"path": "x.jsonl", "name": "a"}], [("a", "x")]),
    ],
)
def test_a_mapping_has_names_or_paths_as_keys(value, expected):
    for setting in ("val_path", "test_path"):
        data = Config.model_validate({"data": {setting: value}}).data
        sections = getattr(data, setting)
        assert [(one.name, one.path.removesuffix(".jsonl")) for one in sections] == expected
        again = Config.model_validate({"data": resolved(data).model_dump()}).data
        assert again == resolved(data)


def test_names_are_no_splits_of_training_rows():
    with pytest.raises(ValueError):
        Config.model_validate({"data": {"train_path": {"train": "a.jsonl", "test": "b.jsonl"}}})


def test_losses_of_sources_are_no_scores_of_answers():
    logged = {"eval_loss": 1.0, "eval_a_b_loss": 2.0, "eval_loss_seconds": 3.0, "eval_rougeL": 0.5}
    assert logged_losses(logged) == {"a_b": 2.0}
    assert score_names(logged) == ["eval_rougeL"]
    (problem,) = find_metric_problems(["metrics.py:token_loss"])
    assert problem.endswith("rename the function")


SETTINGS = {
    "train.predict_with_generate": False,
    "train.eval_strategy": "steps",
    "train.eval_steps": 2,
    "train.report_to": "tensorboard",
}


@pytest.fixture(scope="module")
def runs(plan_run, run_worker, files):
    """A function that returns the folder of a finished run, packed or not, of one rank or two."""

    @cache
    def run(ranks: int, packing: bool) -> RunFolder:
        val_path = f"{{sums: {files['sums']}, words: {files['words']}}}"
        settings = {
            **SETTINGS,
            "data.val_path": val_path,
            "train.packing": str(packing).lower(),
            "train.grad_accum": 2 // ranks,
        }
        folder = plan_run(settings, num_gpus=ranks)
        codes = [run_worker(folder)] if ranks == 1 else run_ranks(folder, ranks)
        assert set(codes) == {0}, run_json(folder)["cause"]
        return folder

    return run


def test_every_record_of_a_run_has_the_losses_by_name(runs):
    folder = runs(1, False)
    metrics = run_json(folder)["metrics"]
    for when in ("before", "after"):
        assert {"eval_loss", "eval_sums_loss", "eval_words_loss"} <= set(metrics[when])
    lines = [json.loads(line) for line in folder.metrics.read_text().splitlines()]
    logged = [line["values"] for line in lines if "eval_words_loss" in line.get("values", {})]
    assert len(logged) >= 1
    facts = RunFacts.read(folder)
    assert [score.name for score in facts.scores] == ["loss", "loss, sums", "loss, words"]
    whole, sums, words = facts.scores
    assert sums.after.mean == pytest.approx(metrics["after"]["eval_sums_loss"], abs=1e-5)
    assert (whole.after.rows, sums.after.rows, words.after.rows) == (8, 5, 3)
    evaluated = [step.eval_losses for step in facts.report.history if step.eval_loss is not None]
    assert evaluated and all(losses.keys() == {"sums", "words"} for losses in evaluated)
    titles = [chart.title for chart in history_charts([("run", facts.report.history)])]
    assert {"Validation loss of sums", "Validation loss of words"} <= set(titles)
    assert scalars(folder) >= {
        *("eval/loss", "eval/sums_loss", "eval/words_loss"),
        *("test/loss", "test/sums_loss", "test/words_loss"),
    }


def scalars(folder: RunFolder) -> set[str]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder.tensorboard))
    events.Reload()
    return set(events.Tags()["scalars"])


@pytest.mark.slow
def test_the_losses_are_equal_packed_and_on_two_ranks(runs):
    found = [run_json(runs(*how))["metrics"] for how in ((1, False), (2, True))]
    names = ("eval_loss", "eval_sums_loss", "eval_words_loss")
    for when in ("before", "after"):
        for name in names:
            values = [metrics[when][name] for metrics in found]
            assert values == pytest.approx([values[0]] * 2, rel=1e-4)
