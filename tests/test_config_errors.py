"""Every bad config is refused with its line, its value and what to write instead."""

from pathlib import Path

import pytest

from sft_play.config.loader import load_merged
from sft_play.config.schema import env_name, kinds, settings
from sft_play.errors import ConfigError

EMPTY = str(Path(__file__).parent / "fixtures" / "empty.yaml")

# Text of a.yaml; the place that its error begins with, and names and values that it has
BAD_FILES = [
    ("train:\n  batch_size: two", "a.yaml:2 train.batch_size=two auto"),
    ("train:\n  batch_size: 0", "a.yaml:2 train.batch_size=0 auto"),
    ("train:\n  batch_size: true", "a.yaml:2 train.batch_size=true auto"),
    ("train:\n  batch_size:", "a.yaml:2 train.batch_size auto"),
    ("train:\n  batch_size: {rows: 4}", "a.yaml:2 train.batch_size auto"),
    ("train:\n  batch_size: 2.5", "a.yaml:2 train.batch_size=2.5 auto"),
    ("train:\n  batch_size: null", "a.yaml:2 train.batch_size=null auto"),
    ("train:\n  batch_size: 1:30", "a.yaml:2 train.batch_size=1:30 auto"),
    ("train:\n  batch_size: [4]", "a.yaml:2 train.batch_size=[4] auto"),
    ("train:\n  learning_rate: -1", "a.yaml:2 train.learning_rate=-1 0"),
    ("train:\n  learning_rate: .nan", "a.yaml:2 train.learning_rate=.nan 0"),
    ("train:\n  learning_rate: 2e-4x", "a.yaml:2 train.learning_rate=2e-4x 0"),
    ("train:\n  optim: adam", "a.yaml:2 train.optim=adam adamw_torch,"),
    ("train:\n  learning_rate: .inf", "a.yaml:2 train.learning_rate=.inf 0"),
    ("train:\n  learning_rate: 1e999", "a.yaml:2 train.learning_rate=1e999 0"),
    ("train:\n  learning_rate: 'nan'", "a.yaml:2 train.learning_rate=nan 0"),
    ("train:\n  bf16: maybe", "a.yaml:2 train.bf16=maybe true false auto"),
    ("train:\n  eval_strategy: never", "a.yaml:2 train.eval_strategy=never no, steps epoch"),
    ("train: {optim: adamw_bnb_8bit}", "a.yaml:1 optim=adamw_bnb_8bit adamw_8bit"),
    ("train:\n  run_name: ../x", "a.yaml:2 train.run_name=../x 128 letters, digits"),
    ("train:\n  max_steps: 1.5", "a.yaml:2 train.max_steps=1.5 1, null"),
    ("tuning:\n  lora:\n    dropout: 1", "a.yaml:3 tuning.lora.dropout=1 0 1"),
    ("tuning:\n  lora: {target_modules: [1, 2]}", "a.yaml:2 target_modules=[1, all-linear"),
    ("tuning:\n  mode: qlora4", "a.yaml:2 tuning.mode=qlora4 lora, qlora full"),
    ("model:\n  revision: 1.10", 'a.yaml:2 model.revision=1.10 revision: "1.10"'),
    ("model:\n  name: 7", 'a.yaml:2 model.name=7 name: "7"'),
    ("model:\n  name: true", 'a.yaml:2 model.name=true name: "true"'),
    ("model:\n  name: ''", "a.yaml:2 model.name empty"),
    ("data:\n  train_path: [a, '']", "a.yaml:2 data.train_path"),
    ("train:\n  lerning_rate: 1", "a.yaml:2 train.lerning_rate train.learning_rate?"),
    ("train:\n  num_train_epochs: 1", "a.yaml:2 train.num_train_epochs train.epochs"),
    ("train:\n  gradient_accumulation_steps: 1", "a.yaml:2 train.grad_accum"),
    ("train:\n  warmup_ratio: 0.1", "a.yaml:2 train.warmup_ratio train.warmup_steps"),
    ("batch_size: 4", "a.yaml:1 batch_size train.batch_size"),
    ("train: [a]", "a.yaml:1 train=[a] section"),
    ("train:\n  max_seq_len: 1", "a.yaml:2 train.max_seq_len model.max_seq_len"),
    ("model:\n  lora: {r: 4}", "a.yaml:2 model.lora tuning.lora"),
    ("tuning:\n  lor: {r: 4}", "a.yaml:2 tuning.lor tuning.lora?"),
    ("\ntrian:\n  batch_size: 4", "a.yaml:2 trian train?"),
    ("qqqq: 4", "a.yaml:1 qqqq config"),
    ("train.batch_size: 4", "a.yaml:1 train.batch_size train:"),
    ("TRAIN_BATCH_SIZE: 4", "a.yaml:1 TRAIN_BATCH_SIZE train.batch_size"),
    ("train: 4", "a.yaml:1 train=4 section"),
    ("train:\n  include: b.yaml", "a.yaml:2 include section"),
    ("include: b.yaml", "a.yaml:1 include=b.yaml"),
    ("include: beside.yml", "a.yaml:1 include=beside.yml beside.yaml?"),
    ("include: .", "a.yaml:1 include=."),
    ("include: {a: b}", "a.yaml:1 include={...} list"),
    ("include: [1]", "a.yaml:1 include=[1] list"),
    ("train:\n  seed: 1\n  seed: 2", "a.yaml:3 seed 2"),
    ("tuning:\n  lora:\n    r: 1\n    'r': 2", "a.yaml:4 'r' 3"),
    ("train:\n  <<: {seed: 1, seed: 2}", "a.yaml:2 seed 2"),
    ("train:\n  <<: 4", "a.yaml:2 << mappings"),
    ("train:\n\tseed: 1", "a.yaml:2 '\\t' spaces, tabs"),
    ("train:\n  seed: 1\n epochs: 2", "a.yaml:3 indentation"),
    ("model:\n  name: a: b", "a.yaml:2 quotes"),
    ("train:\n  seed: 1\n  epochs\n", "a.yaml:3 colon"),
    ("model: {name: @x}", "a.yaml:1 quotes"),
    ("train: *t", "a.yaml:1 't' &"),
    ("train: {seed: 1}\n---\ntrain: {seed: 2}", "a.yaml:2 ---"),
    ("train: &t\n  x: *t", "a.yaml:1 alias itself"),
    ("tuning: {lora: {target_modules: &t [*t]}}", "a.yaml:1 alias itself"),
    ("model:\n  name: !!python/name:os.system", "a.yaml:2 !!python/name:os.system"),
    ("train:\n  seed: !!int two", "a.yaml:2 'two' !!int"),
    ("train:\n  ? [a]\n  : 1", "a.yaml:2 name word"),
    ("model:\n  name: a\x00b", "a.yaml:2 0x0000"),
    ("- train", "a.yaml:1 model: tuning: train: data: list"),
    ("batch_size:4", "a.yaml:1 mapping batch_size:4"),
    ("[" * 1500, "a.yaml nested"),
    ("train:\n  batch_size: " + "9" * 5000, "a.yaml:2 train.batch_size=999"),
]


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "beside.yaml").touch()
    return tmp_path


def message(*arguments: object) -> str:
    with pytest.raises(ConfigError) as error:
        load_merged(*arguments)
    return str(error.value)


@pytest.mark.parametrize(("text", "facts"), BAD_FILES)
def test_a_bad_file_is_refused_with_line_and_hint(folder, text, facts):
    (folder / "a.yaml").write_text(text)
    got = message("a.yaml")
    place, *others = facts.split()
    assert got.startswith(f"{place}: ") and all(fact in got for fact in others), got
    assert "\n" not in got and len(got) < 400


BAD_VARIABLES = [
    ("TRAIN_BATCH_SIZE", "true", "train.batch_size=true auto"),
    ("TRAIN_BATCH_SIZE", "4 5", "train.batch_size=4 5 auto"),
    ("TRAIN_LEARNING_RATE", "nan", "train.learning_rate=nan 0"),
    ("TRAIN_PER_DEVICE_TRAIN_BATCH_SIZE", "4", "TRAIN_BATCH_SIZE"),
    ("TUNING_LORA_RANK", "4", "TUNING_LORA_R"),
    ("TRAIN_EPOCHS", "null", "train.epochs=null 0"),
    ("TUNING_LORA_TARGET_MODULES", "[q", "tuning.lora.target_modules=[q q_proj,v_proj"),
    ("TRAIN_BATCHSIZE", "4", "TRAIN_BATCH_SIZE?"),
    ("TRAIN_MAX_SEQ_LEN", "4", "MODEL_MAX_SEQ_LEN"),
    ("DATA_DIR", "/x", "unset DATA_DIR"),
    ("MODEL_NAME", "", "model.name is empty text, or leave it out"),
    ("DATA_VAL_PATH", " ", "data.val_path is empty or null, leave"),
    ("MODEL_ADAPTER", "", "model.adapter is empty or null, leave"),
    ("MODEL_NAME", "bad\udcff", "model.name=bad\udcff is not UTF-8; rename"),
    ("DATA_TRAIN_PATH", "[a, bad\udcff]", "data.train_path=[a, bad\udcff] rename"),
]


@pytest.mark.parametrize(("name", "text", "facts"), BAD_VARIABLES)
def test_a_bad_variable_is_refused_by_its_name(name, text, facts):
    got = message(EMPTY, {name: text})
    assert got.startswith(f"environment {name}: ") and "\n" not in got
    assert all(fact in got for fact in facts.split()), got


def test_the_value_of_a_foreign_variable_is_never_shown():
    assert "s3cret" not in message(EMPTY, {"MODEL_API_KEY": "s3cret"})


def test_variables_with_other_prefixes_are_left_alone():
    assert load_merged(
        EMPTY, {"TRAINER": "x", "MODELS_X": "x", "PATH": "x", "DATA": "x"}
    ) == load_merged(EMPTY)


BAD_OVERRIDES = [
    ("train.batch_size", "--set train.batch_size=4"),
    ("train.batch_size=", "--set train.batch_size=value"),
    ("train.max_steps=", "--set train.max_steps=null"),
    ("batch_size=3", "train.batch_size"),
    ("TRAIN_BATCH_SIZE=3", "--set train.batch_size=value"),
    ("train=3", "--set train.run_name=value"),
    ("train.batch_size=x", "train.batch_size=x"),
]


@pytest.mark.parametrize(("entry", "hint"), BAD_OVERRIDES)
def test_a_bad_override_is_refused(entry, hint):
    got = message(EMPTY, None, [entry])
    assert got.startswith("--set ")
    assert hint in got


BAD_PATHS = [
    ("nowhere.yaml", "CONFIG=nowhere.yaml: no such file; configs/ has "),
    ("smal", "CONFIG=smal: no such file; did you mean CONFIG="),
    ("configs/run-bnb.yaml", "run_bnb.yaml?"),
    ("x" * 5000, "no such file"),
    (f"{'x' * 5000}/small.yaml", "no such file"),
    ("confgs/smal.yaml", "configs/small.yaml?"),
    ("a\0b", "no such file"),
    ("link.yaml", "CONFIG=link.yaml: a link to gone.yaml"),
    (".", "CONFIG=. is a folder"),
    ("latin.yaml", "latin.yaml:2: not UTF-8: byte 0xe9"),
    ("utf16.yaml", "utf16.yaml:1: not UTF-8: byte 0xff"),
]


@pytest.mark.parametrize(("path", "hint"), BAD_PATHS)
def test_a_file_that_cannot_be_read_is_named(folder, path, hint):
    (folder / "latin.yaml").write_bytes(b"model:\n  name: caf\xe9\n")
    (folder / "utf16.yaml").write_bytes("train:\n".encode("utf-16"))
    (folder / "link.yaml").symlink_to("gone.yaml")
    assert hint in message(path)


def test_includes_that_go_in_a_circle_are_refused_with_the_circle(folder):
    (folder / "a.yaml").write_text("include: b.yaml\n")
    (folder / "b.yaml").write_text("train: {seed: 1}\ninclude: c.yaml\n")
    (folder / "c.yaml").write_text("\n\ninclude: b.yaml\n")
    got = message("a.yaml")
    assert got.startswith("c.yaml:3: ") and "b.yaml -> c.yaml -> b.yaml" in got


def test_all_problems_come_at_once_one_a_line(folder):
    text = "train:\n  sed: 1\n  batch_size: true\nmodel:\n  max_seq_len: 0\n"
    (folder / "a.yaml").write_text(text)
    environ = {"TRAIN_SEED": "-1", "TRAIN_X": "1"}
    lines = message("a.yaml", environ, ["tuning.mode=x"]).splitlines()
    assert [line.split(": ")[0] for line in lines] == [
        "environment TRAIN_X",
        "a.yaml:2",
        "a.yaml:5",
        "--set tuning.mode",
        "a.yaml:3",
        "environment TRAIN_SEED",
    ]


def test_problems_are_listed_at_once_and_of_a_great_many_the_rest_is_counted():
    lines = message(EMPTY, {f"TRAIN_X{n}": "1" for n in range(112)}).splitlines()
    assert len(lines) == 101
    assert lines[-1] == "... and 12 more"


NUMBERS = [path for path in settings() if int in kinds(settings()[path].annotation)]


@pytest.mark.parametrize("digits", [13, 40])
def test_numbers_that_no_library_takes_are_refused_with_the_largest(digits):
    """A plan would go through all of them, or a run end late in a library."""
    assert "train.seed" in NUMBERS and "train.batch_size" in NUMBERS
    environ = {env_name(path): "9" * digits for path in NUMBERS}
    lines = message(EMPTY, environ).splitlines()
    assert len(lines) > 5
    assert all(" is too large; write at most " in line for line in lines[:-1]), lines
