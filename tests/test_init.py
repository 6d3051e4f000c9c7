"""`make init`: the config that it writes loads, plans, and says why."""

import json
import shutil
from pathlib import Path

import pytest

from sft_play.commands import call as calls
from sft_play.commands.init import init
from sft_play.commands.plan import plan_for_display
from sft_play.config import invocation
from sft_play.config.loader import PROJECT_ROOT, load_merged
from sft_play.config.present import SettingLine, commented_yaml
from sft_play.errors import ConfigError, DataError, ExitClass, OutOfMemory

TINY = PROJECT_ROOT / "data" / "tiny_llama"
ALPACA = {"instruction": "Count.", "input": "to 3", "output": "1 2 3"}
GSM8K = {"question": "How many clips?", "answer": "48/2 = <<48/2=24>>24\n#### 24"}


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A function that returns a call in an empty folder, with variables."""
    monkeypatch.chdir(tmp_path)

    def with_variables(**variables: str) -> calls.Call:
        environ = {"DEVICE": "cpu", "HF_HUB_CACHE": str(tmp_path / "hub"), **variables}
        return calls.Call(invocation.read_invocation(environ), environ, ())

    return with_variables


def written(record: dict[str, str], rows: int = 20) -> str:
    """Write a data file to the current folder and return its name."""
    lines = [json.dumps({**record, "id": number}) + "\n" for number in range(rows)]
    Path("rows.jsonl").write_text("".join(lines))
    return "rows.jsonl"


@pytest.mark.parametrize("record", [ALPACA, GSM8K], ids=["alpaca", "gsm8k"])
def test_a_written_config_loads_and_plans_as_it_was_printed(call, record: dict[str, str]) -> None:
    path = written(record)
    told = init(call(MODEL_NAME=str(TINY), DATA_TRAIN_PATH=path))
    assert told[0] == "wrote config.yaml"
    assert told[-2:] == [
        "next make preview CONFIG=config.yaml",
        "next make train CONFIG=config.yaml",
    ]
    text = Path("config.yaml").read_text()
    assert text.startswith("# make train CONFIG=config.yaml\n")
    columns = " and ".join(name for name in record if name != "input")
    assert f"# 19 rows to train on, from the columns {columns}\n  train_path: rows.jsonl" in text
    loaded = load_merged("config.yaml")
    assert (loaded.config.tuning.mode, loaded.config.model.name) == ("lora", str(TINY))
    assert loaded.config.train.learning_rate == 2e-4
    assert loaded.config.train.epochs == 10
    assert loaded.config.model.max_seq_len == 512
    planned = plan_for_display(call(CONFIG="config.yaml"), False, False)
    assert planned.plan.fits
    assert planned.plan.recipe[1].startswith("train.epochs=10.0 (config.yaml:")


def test_a_model_of_another_architecture(call) -> None:
    folder = Path("model")
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(TINY / name, folder)
    sizes = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
    config = {"model_type": "qwen3", "vocab_size": 2304, "max_position_embeddings": 256, **sizes}
    (folder / "config.json").write_text(json.dumps(config))
    init(call(MODEL_NAME="model", DATA_TRAIN_PATH=written(GSM8K), OUT="sub/own.yaml"))
    loaded = load_merged("sub/own.yaml")
    assert loaded.config.model.max_seq_len == 256
    assert "the model takes 256" in Path("sub/own.yaml").read_text()
    assert plan_for_display(call(CONFIG="sub/own.yaml"), False, False).plan.fits


def test_what_the_user_gives_is_written_with_its_origin(call) -> None:
    rows = written({"problem": "1 + 1?", "solution": "2", "input": "unused"})
    variables = {"MODEL_NAME": str(TINY), "DATA_TRAIN_PATH": rows, "TUNING_LORA_R": "8"}
    columns = "{question: problem, answer: solution}"
    init(call(**variables, DATA_COLUMNS=columns, TUNING_MODE="full", TRAIN_EPOCHS="2"))
    text = Path("config.yaml").read_text()
    assert "    # environment TUNING_LORA_R\n    r: 8\n" in text
    config = load_merged("config.yaml").config
    assert config.data.columns == {"question": "problem", "answer": "solution"}
    assert (config.tuning.mode, config.train.learning_rate) == ("full", 2e-5)
    assert config.train.epochs == 2


def test_the_mode_follows_from_memory(call) -> None:
    rows = written(GSM8K)
    big = {"MODEL_NAME": "Qwen/Qwen2.5-14B-Instruct", "DATA_TRAIN_PATH": rows}
    init(call(**big, GPUS="1x24GiB", OUT="small.yaml"))
    init(call(**big, GPUS="1xH200", OUT="large.yaml"))
    assert load_merged("small.yaml").config.tuning.mode == "qlora"
    assert "adapters over 4-bit weights fit" in Path("small.yaml").read_text()
    assert load_merged("large.yaml").config.tuning.mode == "lora"
    with pytest.raises(OutOfMemory):
        init(call(**big, GPUS="1x4GiB", OUT="none.yaml"))
    assert not Path("none.yaml").exists()


def test_init_refuses_to_overwrite_and_to_guess(call) -> None:
    rows = written(GSM8K)
    given = {"MODEL_NAME": str(TINY), "DATA_TRAIN_PATH": rows}
    Path("config.yaml").write_text("mine")
    with pytest.raises(ConfigError, match=r"OUT=config\.yaml exists; OUT=config-2\.yaml is free"):
        init(call(**given))
    assert Path("config.yaml").read_text() == "mine"
    with pytest.raises(ConfigError, match=r"add MODEL_NAME=\.\.\."):
        init(call(DATA_TRAIN_PATH=rows, OUT="new.yaml"))
    Path(rows).write_text('{"question": "q"}\n')
    with pytest.raises(DataError) as caught:
        init(call(**given, OUT="new.yaml"))
    assert caught.value.exit_class == ExitClass.DATA
    assert not Path("new.yaml").exists()


def test_a_commented_file_reads_back_as_it_was(tmp_path: Path) -> None:
    lines = [
        SettingLine("tuning.lora.r", 8, "a rank"),
        SettingLine("tuning.lora.alpha", 16.0, "a scale " * 30),
        SettingLine("data.train_path", [{"path": "a: b.jsonl", "weight": 2.0}, "c.jsonl"], "two"),
        SettingLine("data.system_prompt", "no", "a text that YAML 1.1 takes for a switch"),
    ]
    path = tmp_path / "a.yaml"
    path.write_text(commented_yaml(["header"], lines))
    config = load_merged(str(path)).config
    assert (config.tuning.lora.r, config.tuning.lora.alpha) == (8, 16.0)
    assert config.data.train_path[0].path == "a: b.jsonl"
    assert config.data.system_prompt == "no"
    assert max(map(len, path.read_text().splitlines())) <= 100
