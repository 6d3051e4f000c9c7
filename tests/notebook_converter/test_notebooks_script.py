"""What a script for torchrun makes of a notebook's cells."""

from pathlib import Path

import pytest
from notebook_files import GOLDEN, write_notebook

from notebook_converter.document import NotebookError
from notebook_converter.script import export
from sft_play.commands.notebook import read_notebook

LOAD = "m, t = FastModel.from_pretrained('x')"
TRAIN = "trainer = SFTTrainer(m, args=SFTConfig(max_steps=1))\nstats = trainer.train()"
ALONE = "# %% all processes have trained: the first continues alone"


def script(path: Path) -> tuple[str, str]:
    """Return the script of a notebook, which compiles, and the report."""
    text, report = export(read_notebook(path), Path("train.py"))
    compile(text, "train.py", "exec")
    return text, "\n".join(report)


def script_of(tmp_path: Path, *cells: str) -> tuple[str, str]:
    return script(write_notebook(tmp_path / "in.ipynb", *cells))


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_every_notebook_that_trains_becomes_a_script_that_compiles(path):
    if path.stem in ("inference", "plain"):
        with pytest.raises(NotebookError, match="nothing to train data-parallel"):
            script(path)
        return
    text, _ = script(path)
    assert text.count(ALONE) == 1
    for cell in read_notebook(path).cells:
        assert f"cell {cell.number}\n" in text


def test_magics_and_what_is_no_python_are_comments(tmp_path):
    shell = "%%capture\n!pip install a \\\n  b\nif x:\n    !ls\nfiles = !ls"
    text, report = script_of(tmp_path, shell, "%%bash\nls", "broken(", "await f()", LOAD, TRAIN)
    assert "# magic %%capture\n# !pip install a \\\n#   b\nif x:\n    pass  #     !ls" in text
    assert "# magic %%bash\n# ls\n" in text
    assert "# broken(\n" in text and "# await f()\n" in text
    assert "cell 1: 5 line(s) of magics or of the shell are comments" in report
    for number in (2, 3, 4):
        assert f"cell {number}: is a comment of the script" in report


@pytest.mark.parametrize(
    ("cell", "last"),
    [
        (TRAIN, "stats = trainer.train()"),
        (f"{TRAIN}\nprint(trainer.evaluate())\nx = 1", "print(trainer.evaluate())"),
        (f"{TRAIN}; x = 1", "stats = trainer.train(); x = 1"),
        ("def main():\n  trainer = SFTTrainer(m)\n  trainer.train()\nmain()\nx = 1", "main()"),
        ("def f():\n  trainer.train()\ndef main():\n  f()\nif True:\n  main()\nx = 1", "  main()"),
        (f"{TRAIN}\nm.save_pretrained('x')", "stats = trainer.train()"),
    ],
)
def test_processes_part_after_the_last_training(cell, last, tmp_path):
    text, _ = script_of(tmp_path, LOAD, cell, "print('inference')")
    before, after = text.split(ALONE)
    assert before.rstrip().splitlines()[-1] == last
    assert "print('inference')" in after


def test_processes_stay_together_where_a_class_trains(tmp_path):
    cell = "class A:\n  def go(self):\n    self.trainer.train()\nA().go()"
    text, _ = script_of(tmp_path, LOAD, cell, "print('inference')")
    assert "print('inference')" in text.split(ALONE)[0]


def test_the_trainers_arguments_get_what_ddp_needs_once(tmp_path):
    text, _ = script_of(tmp_path, LOAD, TRAIN)
    assert "SFTConfig(max_steps=1, ddp_find_unused_parameters = False)" in text
    given = TRAIN.replace("max_steps=1", "ddp_find_unused_parameters=True")
    assert "= False)" not in script_of(tmp_path, LOAD, given)[0]


@pytest.mark.parametrize("written", ["'auto'", "{'': 'cuda:0'}"])
def test_a_map_of_the_notebook_holds_without_a_launcher_alone(written, tmp_path):
    load = f"m, t = FastModel.from_pretrained('x', device_map={written})"
    made = f"device_map=RANK_DEVICE_MAP or ({written}))"
    assert made in script_of(tmp_path, load, TRAIN)[0]


def test_each_process_has_a_gpu_of_its_own(tmp_path):
    cells = (LOAD, TRAIN, "a = t('x').to('cuda:0')\nb = t('x').to('cuda')")
    text, _ = script_of(tmp_path, *cells)
    assert "a = t('x').to(f\"cuda:{LOCAL_RANK}\")" in text
    assert "b = t('x').to(device)" in text


def test_what_a_script_cannot_do_is_named(tmp_path):
    cells = (LOAD, "from google.colab import drive\ninput()", "m.save_pretrained('a')", TRAIN)
    _, report = script_of(tmp_path, *cells)
    assert "imports google, which only Colab has" in report
    assert "cell 2: input() works in a notebook alone" in report
    assert "cell 3: save_pretrained() stands before the end of training" in report


@pytest.mark.parametrize(
    ("size", "cells", "counted"),
    [
        ("size // 2", ("size = 4", "size = size * 2"), "4 x 3 = 12 rows"),
        ("c['size']", ("c = {'size': 3, 'x': f()}",), "3 x 3 = 9 rows"),
        ("c['size']", ("c = {'size': 3}", "c['size'] = 4"), "the notebook's rows"),
        ("c['size']", ("c = {'size': 3}", "c.update(size=4)"), "the notebook's rows"),
        ("c['size']", ("c = load()",), "the notebook's rows"),
        ("c.size", ("class c:\n    size = 3",), "3 x 3 = 9 rows"),
        ("c.size", ("class C:\n    size: int = 3\nc = C(size=4)",), "the notebook's rows"),
        ("c.size", ("class C:\n    size = 3\nc = C()",), "3 x 3 = 9 rows"),
        ("c.size", ("class c:\n    size = 3\nc.size = 4",), "the notebook's rows"),
    ],
)
def test_rows_of_an_update_are_counted_where_they_are_written(size, cells, counted, tmp_path):
    arguments = f"per_device_train_batch_size={size}, gradient_accumulation_steps=3"
    _, report = script_of(tmp_path, LOAD, *cells, TRAIN.replace("max_steps=1", arguments))
    assert f"an update has {counted} for each process" in report


def test_a_converted_notebook_makes_the_same_script(tmp_path):
    from notebook_files import converted

    path = next(path for path in GOLDEN if path.stem == "alpaca")
    once = tmp_path / path.name
    once.write_text(converted(path).text, encoding="utf-8")
    assert script(once)[0] == script(path)[0]
