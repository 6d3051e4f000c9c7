"""Learning rate, epochs and longest row by mode, model and rows; which config is the default."""

import shutil
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import NO_CONFIG
from record_files import write_rows

from sft_play.commands.train import run_stem
from sft_play.config.loader import BASE, DEFAULT, load_merged
from sft_play.data import row_facts
from sft_play.data.pipeline import build_run_data
from sft_play.data.row_facts import look_at_rows
from sft_play.errors import ConfigError
from sft_play.plan import recipe
from sft_play.plan.config_json import positions_of
from sft_play.plan.recipe import RecipeFacts, RowFacts
from sft_play.training.arguments import training_arguments

EMPTY = str(NO_CONFIG)
TINY = str(BASE.parents[1] / "data" / "tiny_llama")


def facts(rows: int = 1000, lengths: tuple[int, ...] = (100, 100)) -> RecipeFacts:
    return RecipeFacts(8_000_000_000, 4096, RowFacts(rows, lengths))


# Which config is the default


@pytest.mark.parametrize(
    ("environ", "overrides", "source"),
    [
        ({}, [], DEFAULT),
        ({"MODEL_NAME": "Qwen/Qwen2.5-1.5B-Instruct"}, [], BASE),
        ({}, ["model.name=/models/mine"], BASE),
        ({"MODEL_NAME": "other"}, [f"model.name={TINY}"], DEFAULT),
    ],
)
def test_without_config_the_config_of_the_shipped_model_is_for_it_alone(environ, overrides, source):
    loaded = load_merged(None, environ, overrides)
    assert loaded.source == source
    assert (loaded.config.train.learning_rate == 5e-3) == (source == DEFAULT)


def test_the_config_of_the_shipped_model_counts_for_another_where_it_is_named_with_a_warning(
    tmp_path,
):
    loaded = load_merged("tiny", {"MODEL_NAME": "Qwen/Qwen2.5-1.5B-Instruct"})
    assert loaded.config.train.learning_rate == 5e-3
    (warning,) = recipe.foreign_recipe(loaded)
    assert "train.learning_rate=0.005 (" in warning
    assert "model.name=Qwen/Qwen2.5-1.5B-Instruct (environment MODEL_NAME)" in warning
    own = {"MODEL_NAME": "other", "TRAIN_LEARNING_RATE": "1e-4", "TRAIN_EPOCHS": "1"}
    own["MODEL_MAX_SEQ_LEN"] = "512"
    assert recipe.foreign_recipe(load_merged("tiny", own)) == []
    assert recipe.foreign_recipe(load_merged("tiny")) == recipe.foreign_recipe(load_merged()) == []


def test_a_run_without_config_has_the_name_of_its_model():
    assert run_stem(load_merged(None, {"MODEL_NAME": "Qwen/Qwen2.5-1.5B"})) == "Qwen2.5-1.5B"
    assert run_stem(load_merged(None, {"MODEL_NAME": "/models/my model"})) == "my-model"
    assert run_stem(load_merged()) == "tiny"


# The choices


@pytest.mark.parametrize(
    ("mode", "parameters", "optim", "rate"),
    [
        ("lora", 1_500_000_000, "adamw_torch", 2e-4),
        ("qlora", 13_000_000_000, "adamw_torch", 2e-4),
        ("qlora", 70_000_000_000, "adamw_torch", 1e-4),
        ("full", 1_500_000_000, "adamw_torch", 2e-5),
        ("full", 70_000_000_000, "adamw_torch", 5e-6),
        ("full", None, "adamw_torch", 2e-5),
        ("full", 8_000_000_000, "lion_8bit", 2e-6),
        ("full", 8_000_000_000, "muon", 1e-5),
    ],
)
def test_the_learning_rate_follows_from_mode_size_and_optimizer(mode, parameters, optim, rate):
    found = recipe.choose_learning_rate(mode, parameters, optim)
    assert found.value == rate
    assert ("a fifth of AdamW's for Lion" in found.reason) == (optim == "lion_8bit")


@pytest.mark.parametrize(
    ("rows", "epochs"), [(1, 10), (500, 7), (8_333, 3), (8_334, 2), (10**6, 1)]
)
def test_few_rows_are_seen_more_often(rows, epochs):
    assert recipe.choose_epochs(RowFacts(rows, (10,))).value == epochs


@pytest.mark.parametrize(
    ("lengths", "positions", "tokens"),
    [
        ((100,) * 10, None, 512),  # never shorter
        ((700,) * 995 + (5000,) * 5, None, 5120),  # five rows hold 3.5 % of the tokens
        ((1100,) * 999 + (5000,), None, 1152),
        ((1100,) * 999 + (1300,), None, 1408),  # hardly longer: none is left out
        ((6000,) * 10, 4096, 4096),
        ((100,) * 10, 256, 256),
    ],
)
def test_the_longest_row_holds_almost_all_within_the_model(lengths, positions, tokens):
    assert recipe.choose_max_seq_len(RowFacts(1000, lengths), positions).value == tokens


def test_generated_answers_have_room():
    words = ["train.generation_max_new_tokens=1500"]
    assert (
        recipe.settle_autos(load_merged(EMPTY, {}, words), facts()).config.model.max_seq_len == 3072
    )
    with pytest.raises(ConfigError, match=r"model.max_seq_len=4096 \(auto: the model takes 4,096"):
        recipe.settle_autos(
            load_merged(EMPTY, {}, ["train.generation_max_new_tokens=9000"]), facts()
        )


def test_what_nobody_could_look_at_is_assumed_and_says_so():
    settled = recipe.settle_autos(load_merged(EMPTY), RecipeFacts(rows="no.jsonl is not here"))
    assert settled.described("model.max_seq_len") == (
        "model.max_seq_len=2048 (auto: assumed, as no.jsonl is not here)"
    )
    assert settled.described("train.epochs").startswith("train.epochs=1.0 (auto: assumed")
    short = recipe.settle_autos(load_merged(EMPTY), RecipeFacts(positions=1024))
    assert short.config.model.max_seq_len == 1024


def test_settled_numbers_have_their_reason_as_origin_and_given_ones_stay():
    loaded = load_merged(EMPTY, {"TRAIN_EPOCHS": "2", "TUNING_MODE": "full"})
    settled = recipe.settle_autos(loaded, facts())
    assert recipe.sentences(settled) == (
        "train.learning_rate=1e-05 (auto: full training of 8.00 billion weights)",
        "train.epochs=2.0 (environment TRAIN_EPOCHS)",
        "model.max_seq_len=512 (auto: all 2 rows looked at have at most 100 tokens)",
    )
    assert recipe.is_settled(settled.config) and not recipe.is_settled(loaded.config)
    assert not settled.is_set("train.learning_rate")
    assert recipe.settle_autos(settled, RecipeFacts()) is settled


def test_rows_that_the_model_does_not_take_choose_no_length():
    facts = RowFacts(61, (*[100] * 60, 12_000))
    lost = recipe.choose_max_seq_len(facts, 8192, may_lose=0.05)
    assert lost.value == 512 and "1 of 61 rows are longer, and dropped with 67%" in lost.reason
    assert "set DATA_TOO_LONG=split" in lost.reason
    kept = recipe.choose_max_seq_len(facts, 8192, may_lose=0.7)
    assert kept.value == 512 and "DATA_TOO_LONG" not in kept.reason
    assert recipe.choose_max_seq_len(facts, 8192).value == 8192, "split"
    texts = RecipeFacts(8_000_000_000, 8192, replace(facts, are_texts=True))
    assert recipe.settle_autos(load_merged(EMPTY), texts).config.model.max_seq_len == 8192


@pytest.mark.parametrize(
    ("config", "positions"),
    [
        ({"max_position_embeddings": 8192}, 8192),
        ({"text_config": {"max_position_embeddings": 131072}}, 131072),
        ({}, None),
        # Gemma 3: already stretched
        ({"max_position_embeddings": 131072, "rope_scaling": {"factor": 8.0}}, 131072),
        # Qwen 2.5 as its card says to stretch it
        (
            {
                "max_position_embeddings": 32768,
                "rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 32768},
            },
            131072,
        ),
    ],
)
def test_the_positions_of_a_model(config, positions):
    assert positions_of(config) == positions


# A look at the rows


def written(path: Path, records: list[dict[str, str]]) -> str:
    write_rows(path, *records)
    return str(path)


def answers(numbers: range) -> list[dict[str, str]]:
    return [{"instruction": f"Count to {n}.", "output": "one more " * n} for n in numbers]


def test_the_look_counts_the_tokens_that_the_run_counts(tmp_path, tokenizer):
    train = written(tmp_path / "train.jsonl", answers(range(1, 60)))
    val = written(tmp_path / "val.jsonl", answers(range(60, 70)))
    environ = {"DATA_TRAIN_PATH": train, "DATA_VAL_PATH": val, "MODEL_NAME": TINY}
    environ |= {"DATA_CACHE_DIR": str(tmp_path), "CONFIG": "base"}
    loaded = load_merged("base", environ, ["model.max_seq_len=2048"])
    found = look_at_rows(loaded.config, {}, may_fetch=False)
    data = build_run_data(loaded.config, tokenizer)
    assert found.rows == 59
    assert list(found.lengths) == sorted(data.train.lengths)


def test_an_edited_template_or_model_file_is_looked_at_again(tmp_path):
    train = written(tmp_path / "train.jsonl", answers(range(1, 9)))
    model, own = shutil.copytree(TINY, tmp_path / "m"), tmp_path / "t.jinja"
    environ = {"DATA_TRAIN_PATH": train, "MODEL_NAME": str(model), "DATA_CACHE_DIR": str(tmp_path)}
    template = model / "chat_template.jinja"
    text = template.read_text()
    for path, chosen in ((own, {"MODEL_CHAT_TEMPLATE": str(own)}), (template, {})):
        config, lengths = load_merged("base", environ | chosen).config, []
        for first in ("a", "a " * 50):
            path.write_text(f"{{{{ '{first}' }}}}{text}")
            lengths.append(look_at_rows(config, {}, may_fetch=False).lengths[0])
        assert lengths[1] > lengths[0] + 40


def test_a_data_set_of_the_hub_is_named_by_its_commit(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    config = load_merged("base", {"DATA_TRAIN_PATH": "owner/rows"}).config
    paths = set()
    for commit in ("a" * 40, "b" * 40):  # where the datasets library writes its rows
        (tmp_path / "datasets" / "owner___rows" / "default" / "0.0.0" / commit).mkdir(parents=True)
        paths |= {row_facts._record_path(config), row_facts._record_path(config)}
    assert len(paths) == 2


def test_of_many_rows_some_are_looked_at_and_the_same_ones_each_time(tmp_path):
    train = written(tmp_path / "train.jsonl", answers(range(1, 6)) * 2000)
    config = load_merged("base", {"DATA_TRAIN_PATH": train}).config
    found = look_at_rows(config, {}, may_fetch=False)
    assert (found.rows, len(found.lengths)) == (9_500, 2000)
    assert found == look_at_rows(config, {}, may_fetch=False)


def test_rows_of_parquet_are_drawn_as_those_of_lines(tmp_path, monkeypatch):
    monkeypatch.setattr(row_facts, "SAMPLED_ROWS", 3)
    records = answers(range(1, 30))
    pq.write_table(pa.Table.from_pylist(records), tmp_path / "train.parquet")
    paths = (str(tmp_path / "train.parquet"), written(tmp_path / "train.jsonl", records))
    looks = [
        look_at_rows(load_merged("base", {"DATA_TRAIN_PATH": path}).config, {}, False)
        for path in paths
    ]
    assert looks[0] == looks[1] and len(looks[0].lengths) == 3


def test_a_model_without_a_tokenizer_here_is_looked_at_by_characters_once(tmp_path, monkeypatch):
    train = written(tmp_path / "train.jsonl", [{"question": "a" * 300, "answer": "b" * 100}])
    config = load_merged(EMPTY, {"DATA_TRAIN_PATH": train, "MODEL_NAME": "some/model"}).config
    found = look_at_rows(config, {"HF_HOME": str(tmp_path)}, may_fetch=False)
    assert found.lengths == (100,)
    assert "the tokenizer of some/model is not on this machine" in found.uncounted_because
    monkeypatch.setattr(row_facts, "read_chunks", None)
    assert row_facts.count_rows_or_reason(config.changed({"model.max_seq_len": 50})).tokens == 50


def test_rows_that_cannot_be_read_are_a_reason(tmp_path):
    def look(path: str) -> RowFacts | str:
        config = load_merged(EMPTY, {"DATA_TRAIN_PATH": path}).config
        return look_at_rows(config, {}, may_fetch=False)

    assert look("some/dataset") == (
        "some/dataset is not on this machine yet; make data-check fetches it"
    )
    assert "no rows" in look(written(tmp_path / "empty.jsonl", []))


# From end to end


def test_a_run_of_auto_has_plain_numbers_in_its_folder(plan_run, tmp_path):
    train = written(tmp_path / "train.jsonl", answers(range(1, 40)))
    autos = dict.fromkeys(("train.learning_rate", "train.epochs", "model.max_seq_len"), "auto")
    folder = plan_run({**autos, "data.train_path": train})
    config = folder.read_config()
    assert (config.train.learning_rate, config.train.epochs) == (2e-4, 10)
    assert config.model.max_seq_len == 512  # that is all that the model takes
    from sft_play.plan.run_plan import PlannedRun

    planned = PlannedRun.read(folder)
    assert planned.plan.recipe[1] == "train.epochs=10.0 (auto: 39 training rows)"
    assert training_arguments(planned, folder).learning_rate == 2e-4
