"""The five points of a notebook for several GPUs."""

from pathlib import Path

import pytest
from notebook_files import FOLDER, cell, converted, write_notebook

from notebook_converter import checklist
from notebook_converter.checklist import Point
from sft_play.commands.call import read_call
from sft_play.commands.notebook import check_notebook, read_notebook

SFT = ("alpaca", "conversational", "inferred_markers", "pretraining", "tiny")


def points(path: Path, *others: Path) -> list[Point]:
    return checklist.check(read_notebook(path), map(read_notebook, others))


def met(path: Path) -> list[bool]:
    return [point.is_met for point in points(path)]


@pytest.mark.parametrize("name", SFT)
def test_conversion_meets_what_code_can_meet(name, tmp_path):
    before = FOLDER / f"{name}.ipynb"
    assert met(before)[:2] == [False, False]
    after = tmp_path / before.name
    after.write_text(converted(before).text, encoding="utf-8")
    assert met(after) == [True, True, True, True, False]


def test_a_notebook_that_the_guide_converted_meets_them(tmp_path):
    assert met(FOLDER / "guide.ipynb") == [True, True, True, True, False]


def test_each_point_says_where_it_is_missed():
    lines = [point.line() for point in points(FOLDER / "alpaca.ipynb")]
    assert (
        lines[1]
        == '[ ] device_map="balanced" on several GPUs: the load in cell 3 has no device_map'
    )
    assert "cells 7, 9 of one GPU alone" in lines[2]
    assert "cell 11: inputs go" in lines[3]


def test_a_map_that_divides_nothing_is_not_balanced(tmp_path):
    path = write_notebook(
        tmp_path / "in.ipynb",
        "torch.cuda.device_count()\nm, t = FastModel.from_pretrained('x', device_map={'': 0})",
    )
    assert met(path)[:2] == [True, False]


def run_on(tmp_path: Path, gpus: int) -> Path:
    """Return a notebook with the output of a run on so many GPUs."""
    output = {"name": "stdout", "output_type": "stream", "text": [f"Detected {gpus} GPU(s)\n"]}
    load = cell("m, t = FastModel.from_pretrained('x')") | {"outputs": [output]}
    return write_notebook(tmp_path / f"{gpus}.ipynb", load)


def test_it_was_tried_where_outputs_show_one_gpu_and_several(tmp_path):
    one, two = run_on(tmp_path, 1), run_on(tmp_path, 2)
    assert not points(one)[-1].is_met
    assert "outputs show a run on 1 alone" in points(one)[-1].found
    assert points(two, one)[-1].is_met
    lines, _ = check_notebook(read_call(None, (), environ={"NB": f"{two}, {one}"}))
    assert lines[-1].startswith("3 of 5")
