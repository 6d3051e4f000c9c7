"""What a command writes to OUT does not replace what is there."""

import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sft_play import cli
from sft_play.commands.call import write_out
from sft_play.errors import ConfigError
from sft_play.inference.evaluate import _free_name
from sft_play.runs.files import write_json
from sft_play.runs.folder import RunFolder

NOTEBOOK = Path(__file__).parent / "notebooks" / "plain.ipynb"


@pytest.mark.parametrize(
    "words",
    [["compare", "name", "path"], ["slurm"], ["init"], ["preview", "--page"], ["convert-notebook"]],
    ids=lambda words: words[0],
)
def test_a_file_at_out_stays_without_overwrite(finished, tmp_path, words):
    folder = finished("lora")
    out = tmp_path / "taken.ipynb"
    out.write_text("mine")
    words = [{"name": folder.name, "path": str(folder.path)}.get(word, word) for word in words]
    environ = {"TRAIN_OUTPUT_DIR": str(folder.path.parent), "DEVICE": "cpu", "NB": str(NOTEBOOK)}
    if words[-1] == "--page":
        words.append(str(out))
    else:
        environ["OUT"] = str(out)
    done = CliRunner().invoke(cli.app, words, env=environ)
    assert isinstance(done.exception, ConfigError)
    free = tmp_path / "taken-2.ipynb"
    assert f"{out} exists; " in str(done.exception) and f"{free} is free" in str(done.exception)
    assert out.read_text() == "mine" and os.listdir(tmp_path) == ["taken.ipynb"]


def test_overwrite_replaces_a_file_and_no_folder(tmp_path):
    path = tmp_path / "page.html"
    write_out(path, "one", replaces=False)
    write_out(path, "two", replaces=True)
    assert path.read_text() == "two"
    with pytest.raises(ConfigError, match=r"OUT=.* exists; OUT=.*-2 is free$"):
        write_out(tmp_path, "three", replaces=True)


def test_scores_do_not_replace_rows_that_lie_in_eval(tmp_path):
    folder = RunFolder(tmp_path)
    folder.evaluation.mkdir()
    rows = folder.evaluation / "held.jsonl"
    rows.write_text("{}")
    assert _free_name(folder, "held", str(rows)) == "held-2"
    write_json(folder.evaluation / "held-2.json", {"test_path": str(rows)})
    (folder.evaluation / "held-2.jsonl").write_text("{}")
    assert _free_name(folder, "held", str(rows)) == "held-2"
    assert _free_name(folder, "held", "other/held.jsonl") == "held-3"
