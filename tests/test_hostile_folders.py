"""Model folders that anyone may have made: each is read, or refused in one sentence."""

import json
import os
import resource
from collections.abc import Callable
from pathlib import Path

import hostile_folders as hostile
import pytest
from hostile_tokenizers import TEMPLATES, TOKENIZERS, WRITES, template
from marks import long
from plan_examples import load_shape
from record_files import run_data, write_rows
from tiny_models import tiny_model

from sft_play.config.schema import Config
from sft_play.data import chunk_tokenizer
from sft_play.data.limits import refuse_endless
from sft_play.data.tokenizer import load_tokenizer
from sft_play.errors import ConfigError, DataError, EnvironmentFault, disk_errors_in_words
from sft_play.models.expert_adapters import load_frozen_adapter
from sft_play.plan.base_model import require_base
from sft_play.plan.config_json import load_positions
from sft_play.runs.model_folder import find_model, read_adapter_config

FOLDERS = hostile.configs() | hostile.files() | hostile.headers() | hostile.indexes()
ROW = {"question": "a" * 40 + "!", "answer": "b c"}
SECONDS, GIB = 10, 1.0  # of computing, whatever else the machine does
FAILING = ("split-catastrophic", long("explode-30"), long("wordpiece"))
STOPPED = [
    long(kind, number) if number else (kind, number)
    for kind, texts in TEMPLATES.items()
    for number in range(len(texts))
]


def of_seconds(monkeypatch: pytest.MonkeyPatch, seconds: int) -> None:
    """Give templates, patterns and rows little time."""
    monkeypatch.setattr(chunk_tokenizer, "CPU_SECONDS", seconds)
    monkeypatch.setattr(refuse_endless, "__defaults__", (seconds, refuse_endless.__defaults__[1]))


def config_of(folder: Path) -> Config:
    return Config.model_validate({"model": {"name": str(folder)}})


def said_in_child(call: Callable[[], None], path: Path) -> str:
    """Return what a call says in a process of its own, "" if nothing; it stays in its limits."""
    child = os.fork()
    if child == 0:
        text = ""
        try:
            with disk_errors_in_words():
                call()
        except (ConfigError, DataError, EnvironmentFault) as error:
            text = str(error)
        except BaseException as error:  # noqa: BLE001 - panics of tokenizers, too
            text = f"Traceback {type(error)} {error}"
        path.write_text(text, errors="backslashreplace")
        os._exit(0)
    _, status, usage = os.wait4(child, 0)
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert status == 0
    assert usage.ru_utime + usage.ru_stime < SECONDS
    assert usage.ru_maxrss - own < GIB * 2**20
    text = path.read_text()
    assert "Traceback" not in text, text
    return text


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_is_read_or_refused_in_words(name, tmp_path):
    folder = hostile.copied(tmp_path / "model")
    FOLDERS[name](folder)
    config = config_of(folder)
    try:
        with disk_errors_in_words():
            require_base(config, {})
            assert load_shape(str(folder), None, {}).parameters > 0
            load_positions(config.model, {}, may_fetch=False)
    except (ConfigError, EnvironmentFault) as error:
        assert str(folder) in str(error)


def tokenize(folder: Path) -> None:
    require_base(config_of(folder), {})
    rows = write_rows(folder.parent / "rows.jsonl", ROW)
    run_data(rows, load_tokenizer(config_of(folder)), val_path=str(rows))


@pytest.mark.parametrize("kind, number", STOPPED)
def test_a_template_is_stopped_in_words(kind, number, tmp_path, monkeypatch):
    of_seconds(monkeypatch, 0)
    folder = hostile.copied(tmp_path / "model")
    template(TEMPLATES[kind][number] + WRITES)(folder)
    said = said_in_child(lambda: tokenize(folder), tmp_path / "said")
    if (kind, number) not in (("center", 1), ("power", 3)):
        assert "the chat template" in said or said == ""


@pytest.mark.parametrize("name", FAILING)
def test_a_tokenizer_that_does_not_end_is_left_in_words(name, tmp_path, monkeypatch):
    of_seconds(monkeypatch, 0)
    folder = hostile.copied(tmp_path / "model")
    TOKENIZERS[name](folder)
    said = said_in_child(lambda: tokenize(folder), tmp_path / "said")
    assert "get the model again" in said


@pytest.mark.parametrize(
    ("key", "value"), [("r", 10**9), ("r", "8"), ("target_modules", [1]), ("modules_to_save", ".*")]
)
def test_an_adapter_whose_config_has_other_values_is_refused(key, value, tmp_path):
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", key: value}))
    with pytest.raises(EnvironmentFault, match=rf"adapter_config.json: {key}=.*get the adapter"):
        read_adapter_config(tmp_path)


def test_an_adapter_that_is_a_pickle_is_refused(tmp_path):
    config = {"peft_type": "LORA", "base_model_name_or_path": "owner/name"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    (tmp_path / "adapter_model.bin").write_bytes(b"any")
    with pytest.raises(EnvironmentFault, match=r"save a pickle \(\.bin\), which can run any code"):
        find_model(str(tmp_path), tmp_path)


def test_a_pattern_of_layers_that_never_ends_is_refused(tmp_path, monkeypatch):
    of_seconds(monkeypatch, 1)
    config = {"peft_type": "LORA", "r": 4, "target_modules": "((?:[a-z_0-9.]+)+)+!"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(DataError, match=r"has not ended after 1 s; write the names of the layers"):
        load_frozen_adapter(tiny_model("llama"), tmp_path)
