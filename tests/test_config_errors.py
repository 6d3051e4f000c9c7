"""Every bad config is refused with its line, its value and what to write instead."""

from pathlib import Path

import pytest

from sft_play.config.loader import CONFIGS, load
from sft_play.config.schema import env_name, kinds, settings
from sft_play.errors import ConfigError

EMPTY = str(Path(__file__).parent / "fixtures" / "empty.yaml")
BATCH = "write a whole number of at least 1, or auto"

# text of a.yaml, where the message says that it is wrong, and what the message says
BAD_FILES = [
    ("train:\n  batch_size: two", "a.yaml:2", f"train.batch_size=two is not valid; {BATCH}"),
    ("train:\n  batch_size: 0", "a.yaml:2", f"train.batch_size=0 is not valid; {BATCH}"),
    ("train:\n  batch_size: 2.5", "a.yaml:2", f"train.batch_size=2.5 is not valid; {BATCH}"),
    ("train:\n  batch_size: true", "a.yaml:2", f"train.batch_size=true is a switch; {BATCH}"),
    (
        "train:\n  batch_size:",
        "a.yaml:2",
        f"train.batch_size has no value; {BATCH}, or delete the line",
    ),
    ("train:\n  batch_size: null", "a.yaml:2", f"train.batch_size=null is not valid; {BATCH}"),
    ("train:\n  batch_size: 1:30", "a.yaml:2", f"train.batch_size=1:30 is not valid; {BATCH}"),
    ("train:\n  batch_size: [4]", "a.yaml:2", f"train.batch_size=[4] is not valid; {BATCH}"),
    (
        "train:\n  batch_size: {rows: 4}",
        "a.yaml:2",
        f"train.batch_size takes one value, not settings below it; {BATCH}",
    ),
    (
        "train:\n  learning_rate: -1",
        "a.yaml:2",
        "train.learning_rate=-1 is not valid; write a number above 0",
    ),
    (
        "train:\n  learning_rate: .inf",
        "a.yaml:2",
        "train.learning_rate=.inf is not finite; write a number above 0",
    ),
    (
        "train:\n  learning_rate: .nan",
        "a.yaml:2",
        "train.learning_rate=.nan is not finite; write a number above 0",
    ),
    (
        "train:\n  learning_rate: 1e999",
        "a.yaml:2",
        "train.learning_rate=1e999 is not finite; write a number above 0",
    ),
    (
        "train:\n  learning_rate: 'nan'",
        "a.yaml:2",
        "train.learning_rate=nan is not valid; write a number above 0",
    ),
    (
        "train:\n  learning_rate: 2e-4x",
        "a.yaml:2",
        "train.learning_rate=2e-4x is not valid; write a number above 0",
    ),
    (
        "train:\n  bf16: maybe",
        "a.yaml:2",
        "train.bf16=maybe is not valid; write true or false, or auto",
    ),
    (
        "train:\n  eval_strategy: never",
        "a.yaml:2",
        "train.eval_strategy=never is not valid; write no, steps or epoch",
    ),
    (
        "train: {optim: adamw_bnb_8bit}",
        "a.yaml:1",
        "optim=adamw_bnb_8bit is not valid; write adamw_8bit",
    ),
    ("train:\n  optim: adam", "a.yaml:2", "train.optim=adam is not valid; write adamw_torch, "),
    (
        "train:\n  run_name: ../x",
        "a.yaml:2",
        "train.run_name=../x is not valid; write 1 to 128 letters, digits, dots, dashes or "
        "underscores",
    ),
    (
        "train:\n  max_steps: 1.5",
        "a.yaml:2",
        "train.max_steps=1.5 is not valid; write a whole number of at least 1, or null",
    ),
    (
        "tuning:\n  lora:\n    dropout: 1",
        "a.yaml:3",
        "tuning.lora.dropout=1 is not valid; write a number of at least 0 and below 1",
    ),
    (
        "tuning:\n  lora: {target_modules: [1, 2]}",
        "a.yaml:2",
        "tuning.lora.target_modules=[1, 2] is not valid; write all-linear, or a list of names",
    ),
    (
        "tuning:\n  mode: qlora4",
        "a.yaml:2",
        "tuning.mode=qlora4 is not valid; write lora, qlora or full",
    ),
    (
        "model:\n  revision: 1.10",
        "a.yaml:2",
        'model.revision=1.10 is a number, not a text; put it in quotes: revision: "1.10"',
    ),
    (
        "model:\n  name: 7",
        "a.yaml:2",
        'model.name=7 is a number, not a text; put it in quotes: name: "7"',
    ),
    (
        "model:\n  name: true",
        "a.yaml:2",
        'model.name=true is a switch, not a text; put it in quotes: name: "true"',
    ),
    ("model:\n  name: ''", "a.yaml:2", "model.name is empty; write a text"),
    (
        "train:\n  lerning_rate: 1",
        "a.yaml:2",
        "unknown setting 'train.lerning_rate'; did you mean train.learning_rate?",
    ),
    (
        "train:\n  num_train_epochs: 1",
        "a.yaml:2",
        "unknown setting 'train.num_train_epochs'; here it is train.epochs",
    ),
    ("train:\n  gradient_accumulation_steps: 1", "a.yaml:2", "here it is train.grad_accum"),
    (
        "train:\n  warmup_ratio: 0.1",
        "a.yaml:2",
        "unknown setting 'train.warmup_ratio'; here it is train.warmup_steps",
    ),
    (
        "train:\n  max_seq_len: 1",
        "a.yaml:2",
        "unknown setting 'train.max_seq_len'; here it is model.max_seq_len",
    ),
    (
        "model:\n  lora: {r: 4}",
        "a.yaml:2",
        "unknown setting 'model.lora'; here it is tuning.lora",
    ),
    (
        "tuning:\n  lor: {r: 4}",
        "a.yaml:2",
        "unknown setting 'tuning.lor'; did you mean tuning.lora?",
    ),
    ("batch_size: 4", "a.yaml:1", "unknown setting 'batch_size'; here it is train.batch_size"),
    ("\ntrian:\n  batch_size: 4", "a.yaml:2", "unknown setting 'trian'; did you mean train?"),
    ("qqqq: 4", "a.yaml:1", "unknown setting 'qqqq'; `make config` lists every setting"),
    (
        "train.batch_size: 4",
        "a.yaml:1",
        "'train.batch_size' is one key with dots; write batch_size: 4 below train:",
    ),
    (
        "TRAIN_BATCH_SIZE: 4",
        "a.yaml:1",
        "'TRAIN_BATCH_SIZE' is a variable of the shell; in a file write train.batch_size",
    ),
    (
        "train: 4",
        "a.yaml:1",
        "train=4 is not valid: train is a section; write its settings below it",
    ),
    (
        "train: [a]",
        "a.yaml:1",
        "train=[a] is not valid: train is a section; write its settings below it",
    ),
    (
        "train:\n  include: b.yaml",
        "a.yaml:2",
        "include stands inside a section; write it at the top level of the file",
    ),
    (
        "include: b.yaml",
        "a.yaml:1",
        "include=b.yaml: no such file b.yaml; write it relative to the including file",
    ),
    (
        "include: beside.yml",
        "a.yaml:1",
        "include=beside.yml: no such file beside.yml; did you mean beside.yaml?",
    ),
    ("include: .", "a.yaml:1", "include=.: no such file .;"),
    (
        "include: {a: b}",
        "a.yaml:1",
        "include={...} is not valid; write a file name, or a list of them",
    ),
    ("include: [1]", "a.yaml:1", "include=[1] is not valid; write a file name, or a list of them"),
    (
        "train:\n  seed: 1\n  seed: 2",
        "a.yaml:3",
        "key 'seed' is given twice, first on line 2; keep one of them",
    ),
    (
        "tuning:\n  lora:\n    r: 1\n    'r': 2",
        "a.yaml:4",
        "key 'r' is given twice, first on line 3; keep one of them",
    ),
    (
        "train:\n  <<: {seed: 1, seed: 2}",
        "a.yaml:2",
        "key 'seed' is given twice, first on line 2; keep one of them",
    ),
    (
        "train:\n  <<: 4",
        "a.yaml:2",
        "<< merges mappings; write <<: *name of one, or a list of them",
    ),
    (
        "train:\n\tseed: 1",
        "a.yaml:2",
        "found character '\\t' that cannot start any token; indent with spaces, not tabs",
    ),
    ("train:\n  seed: 1\n epochs: 2", "a.yaml:3", "check the indentation"),
    (
        "model:\n  name: a: b",
        "a.yaml:2",
        "put a value that contains ': ' in quotes, or check the indentation",
    ),
    (
        "train:\n  seed: 1\n  epochs\n",
        "a.yaml:3",
        "write name: value, with a space after the colon",
    ),
    ("model: {name: @x}", "a.yaml:1", "put the value in quotes"),
    ("train: *t", "a.yaml:1", "found undefined alias 't'; define it with & first"),
    (
        "train: {seed: 1}\n---\ntrain: {seed: 2}",
        "a.yaml:2",
        "a config is one document; delete the --- before this line",
    ),
    ("train: &t\n  x: *t", "a.yaml:1", "an alias that contains itself; write the values out"),
    (
        "tuning: {lora: {target_modules: &t [*t]}}",
        "a.yaml:1",
        "an alias that contains itself; write the values out",
    ),
    (
        "model:\n  name: !!python/name:os.system",
        "a.yaml:2",
        "the tag !!python/name:os.system has no meaning in a config; delete it",
    ),
    ("train:\n  seed: !!int two", "a.yaml:2", "'two' does not fit its tag !!int; delete the tag"),
    ("train:\n  ? [a]\n  : 1", "a.yaml:2", "a setting's name is a word, not a list or a mapping"),
    ("model:\n  name: a\x00b", "a.yaml:2", "character 0x0000 is not allowed; delete it"),
    (
        "- train",
        "a.yaml:1",
        "a config is a mapping of sections (model:, tuning:, train:, data:), not a list",
    ),
    (
        "batch_size:4",
        "a.yaml:1",
        "a config is a mapping of sections (model:, tuning:, train:, data:), not batch_size:4",
    ),
    ("[" * 1500, "a.yaml", "nested too deeply to read; a config has three levels"),
    ("train:\n  batch_size: " + "9" * 5000, "a.yaml:2", "train.batch_size=999"),
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "beside.yaml").touch()
    return tmp_path


def message(*arguments: object) -> str:
    with pytest.raises(ConfigError) as error:
        load(*arguments)
    return str(error.value)


@pytest.mark.parametrize(("text", "origin", "hint"), BAD_FILES)
def test_a_bad_file_is_refused_with_line_and_hint(
    folder: Path, text: str, origin: str, hint: str
) -> None:
    (folder / "a.yaml").write_text(text)
    got = message("a.yaml")
    assert got.startswith(f"{origin}: ")
    assert hint in got
    assert "\n" not in got
    assert len(got) < 400


BAD_VARIABLES = [
    (
        "TRAIN_BATCH_SIZE",
        "true",
        f"environment TRAIN_BATCH_SIZE: train.batch_size=true is a switch; {BATCH}",
    ),
    (
        "TRAIN_BATCH_SIZE",
        "4 5",
        f"environment TRAIN_BATCH_SIZE: train.batch_size=4 5 is not valid; {BATCH}",
    ),
    (
        "TRAIN_LEARNING_RATE",
        "nan",
        "environment TRAIN_LEARNING_RATE: train.learning_rate=nan is not valid; write a number "
        "above 0",
    ),
    (
        "TRAIN_EPOCHS",
        "null",
        "environment TRAIN_EPOCHS: train.epochs=null is not valid; write a number above 0",
    ),
    (
        "TUNING_LORA_TARGET_MODULES",
        "[q",
        "tuning.lora.target_modules=[q cannot be read; write names with commas between them: "
        "q_proj,v_proj",
    ),
    (
        "TRAIN_BATCHSIZE",
        "4",
        "environment TRAIN_BATCHSIZE: no such setting; did you mean TRAIN_BATCH_SIZE?",
    ),
    (
        "TRAIN_MAX_SEQ_LEN",
        "4",
        "environment TRAIN_MAX_SEQ_LEN: no such setting; here it is MODEL_MAX_SEQ_LEN",
    ),
    ("TRAIN_PER_DEVICE_TRAIN_BATCH_SIZE", "4", "here it is TRAIN_BATCH_SIZE"),
    ("TUNING_LORA_RANK", "4", "here it is TUNING_LORA_R"),
    (
        "DATA_DIR",
        "/x",
        "environment DATA_DIR: no such setting; unset DATA_DIR if it is another program's",
    ),
]


@pytest.mark.parametrize(("name", "text", "hint"), BAD_VARIABLES)
def test_a_bad_variable_is_refused_by_its_name(name: str, text: str, hint: str) -> None:
    got = message(EMPTY, {name: text})
    assert hint in got
    assert "\n" not in got


def test_the_value_of_a_foreign_variable_is_never_shown() -> None:
    assert "s3cret" not in message(EMPTY, {"MODEL_API_KEY": "s3cret"})


def test_variables_with_other_prefixes_are_left_alone() -> None:
    assert load(EMPTY, {"TRAINER": "x", "MODELS_X": "x", "PATH": "x", "DATA": "x"}) == load(EMPTY)


BAD_OVERRIDES = [
    ("train.batch_size", "has no value; write --set name=value, such as --set train.batch_size=4"),
    ("train.batch_size=", "has no value; write --set train.batch_size=value"),
    (
        "train.max_steps=",
        "has no value; write --set train.max_steps=value, or --set train.max_steps=null",
    ),
    ("batch_size=3", "unknown setting 'batch_size'; here it is train.batch_size"),
    ("TRAIN_BATCH_SIZE=3", "is a variable of the shell; write --set train.batch_size=value"),
    (
        "train=3",
        "train is a section; write one of its settings, such as --set train.run_name=value",
    ),
    ("train.batch_size=x", f"train.batch_size=x is not valid; {BATCH}"),
]


@pytest.mark.parametrize(("entry", "hint"), BAD_OVERRIDES)
def test_a_bad_override_is_refused(entry: str, hint: str) -> None:
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
    ("link.yaml", "CONFIG=link.yaml: a link to gone.yaml, which leads to no file; configs/ has "),
    (".", "CONFIG=. is a folder; name a file in it, such as CONFIG="),
    ("latin.yaml", "latin.yaml:2: not UTF-8: byte 0xe9; save the file as UTF-8"),
    ("utf16.yaml", "utf16.yaml:1: not UTF-8: byte 0xff; save the file as UTF-8"),
]


@pytest.mark.parametrize(("path", "hint"), BAD_PATHS)
def test_a_file_that_cannot_be_read_is_named(folder: Path, path: str, hint: str) -> None:
    (folder / "latin.yaml").write_bytes(b"model:\n  name: caf\xe9\n")
    (folder / "utf16.yaml").write_bytes("train:\n".encode("utf-16"))
    (folder / "link.yaml").symlink_to("gone.yaml")
    assert hint in message(path)


def test_a_folder_of_the_same_name_does_not_hide_a_preset(folder: Path) -> None:
    (folder / "small").mkdir()
    assert load("small").source == CONFIGS / "small.yaml"


def test_includes_that_go_in_a_circle_are_refused_with_the_circle(folder: Path) -> None:
    (folder / "a.yaml").write_text("include: b.yaml\n")
    (folder / "b.yaml").write_text("train: {seed: 1}\ninclude: c.yaml\n")
    (folder / "c.yaml").write_text("\n\ninclude: b.yaml\n")
    assert message("a.yaml") == (
        "c.yaml:3: include=b.yaml goes in a circle: b.yaml -> c.yaml -> b.yaml; delete one of them"
    )
    (folder / "d.yaml").write_text("include: d.yaml\n")
    assert (
        message("d.yaml")
        == "d.yaml:1: include=d.yaml goes in a circle: d.yaml -> d.yaml; delete one of them"
    )


def test_all_problems_come_at_once_one_a_line(folder: Path) -> None:
    (folder / "a.yaml").write_text(
        "train:\n  sed: 1\n  batch_size: true\nmodel:\n  max_seq_len: 0\n"
    )
    assert message(
        "a.yaml", {"TRAIN_SEED": "-1", "TRAIN_X": "1"}, ["tuning.mode=x"]
    ).splitlines() == [
        "environment TRAIN_X: no such setting; unset TRAIN_X if it is another program's",
        "a.yaml:2: unknown setting 'train.sed'; did you mean train.seed? (a guess from the spelling)",
        "a.yaml:5: model.max_seq_len=0 is not valid; write a whole number of at least 1, or auto",
        "--set tuning.mode: tuning.mode=x is not valid; write lora, qlora or full",
        f"a.yaml:3: train.batch_size=true is a switch; {BATCH}",
        "environment TRAIN_SEED: train.seed=-1 is not valid; write a whole number of at least 0",
    ]


def test_problems_are_listed_at_once_and_of_a_great_many_the_rest_is_counted() -> None:
    lines = message(EMPTY, {f"TRAIN_X{n}": "1" for n in range(112)}).splitlines()
    assert len(lines) == 101
    assert lines[-1] == "... and 12 more"


NUMBERS = [path for path in settings() if int in kinds(settings()[path].annotation)]


@pytest.mark.parametrize("digits", [13, 40])
def test_numbers_that_no_library_takes_are_refused_with_the_largest(digits: int) -> None:
    """A plan would go through all of them, or a run end late in a library."""
    assert "train.seed" in NUMBERS and "train.batch_size" in NUMBERS
    environ = {env_name(path): "9" * digits for path in NUMBERS}
    with pytest.raises(ConfigError) as raised:
        load(EMPTY, environ=environ)
    lines = str(raised.value).splitlines()
    assert len(lines) > 5
    assert all(" is too large; write at most " in line for line in lines[:-1]), lines
