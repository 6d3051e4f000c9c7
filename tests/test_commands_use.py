"""`make eval TASKS=`: the command of lm-eval for what RUN names."""

import shlex
from pathlib import Path

import pytest

from sft_play.commands.use import lm_eval_lines
from sft_play.runs.folder import RunFolder
from sft_play.runs.model_folder import ModelFolder


@pytest.mark.parametrize(
    ("folders", "model", "merges"),
    [
        (["adapter"], "merged", True),
        (["adapter", "merged"], "merged", False),
        (["model"], "model", False),
    ],
)
def test_the_command_scores_the_merged_model(
    tmp_path: Path, folders: list[str], model: str, merges: bool
) -> None:
    for name in folders:
        (tmp_path / name).mkdir()
    lines = lm_eval_lines(RunFolder(tmp_path), "hellaswag arc_easy")
    assert any(line == f"make merge RUN={tmp_path.name}" for line in lines) is merges
    words = shlex.split(lines[-1])
    assert words[0] == "lm_eval" and "hellaswag,arc_easy" in words
    assert f"pretrained={tmp_path / model}" in words


def test_the_command_of_an_adapter_has_its_base(tmp_path: Path) -> None:
    adapter = ModelFolder(tmp_path / "a", tmp_path / "outputs", "owner/base")
    assert f"pretrained=owner/base,peft={tmp_path / 'a'}" in lm_eval_lines(adapter, "x")[-1]
