"""Notebook files: broken ones are refused or mended by name, and nothing is lost or rewritten."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
from notebook_files import GOLDEN, as_notebook, cell, converted, sources, write_notebook

from notebook_converter import code as codes
from sft_play.commands.call import read_call
from sft_play.commands.notebook import convert_notebook, read_notebook
from sft_play.errors import ConfigError

LOAD = "m, t = FastModel.from_pretrained(\n\t'x',\n)\nx = t('a').to('cuda')\n"


def refusal(path: Path) -> str:
    with pytest.raises(ConfigError) as error:
        read_notebook(path)
    return str(error.value)


def run(**environ: str) -> list[str]:
    return convert_notebook(read_call(None, (), environ=environ))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("\ufeff", "empty"),
        ("<html>Sign in</html>", ":1:1: not JSON"),
        ('{"cells": [\n{"a": 1 2}\n]}', ":2:9: not JSON"),
        ('{"cells": [', "end of the file"),
        ("[1, 2]", "[1, 2]"),
        ('{"nbformat": 3, "worksheets": []}', "nbformat 3"),
        ('{"nbformat": 5, "cells": []}', "nbformat 5"),
        ('{"nbformat": 4}', "no cells"),
        ('{"nbformat": 4, "cells": {}}', "cells is {}"),
        ('{"nbformat": 4, "cells": [7]}', "cell 1 is 7"),
        ('{"cells": [{"source": ""}]}', "cell 1: cell_type is null"),
        ('{"cells": [{"cell_type": "code", "source": 5}]}', "cell 1: source is 5"),
        ('{"cells": [{"cell_type": "code", "source": ["a", 1]}]}', 'cell 1: source is ["a", 1]'),
        (
            '{"cells": [{"cell_type": "code", "source": "", "outputs": {}}]}',
            "cell 1: outputs is {}",
        ),
        ("[" * 100_000, "nested"),
    ],
)
def test_what_is_no_notebook_is_refused_with_place_and_value(text, words, tmp_path):
    path = tmp_path / "in.ipynb"
    path.write_text(text, encoding="utf-8")
    said = refusal(path)
    assert said.startswith(f"NB={path}")
    assert words in said


def test_files_that_cannot_be_read_are_refused(tmp_path):
    assert refusal(tmp_path / "none.ipynb").endswith("No such file or directory; name a notebook")
    assert refusal(tmp_path).endswith("is a folder; name a notebook in it")
    path = tmp_path / "in.ipynb"
    path.write_bytes(b'{"cells": "\xff"}')
    assert "byte 11 is not UTF-8" in refusal(path)


def mended(tmp_path: Path, text: str) -> tuple[Any, str]:
    """Return a converted notebook and the report."""
    path = tmp_path / "in.ipynb"
    path.write_text(text, encoding="utf-8")
    made = converted(path)
    return json.loads(made.text), "\n".join(made.report)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"cells": []}', 'added "metadata": {}, "nbformat": 4, "nbformat_minor": 4'),
        ('{ "cells":[ {"cell_type":"markdown"} ],"nbformat":4}', 'cell 1: added "metadata": {}'),
        ('{"nbformat": 4, "cells": [{"cell_type": "code", "source": ""}]}', '"outputs": []'),
    ],
)
def test_members_that_the_format_asks_for_are_added_and_named(text, words, tmp_path):
    nbformat = pytest.importorskip("nbformat", reason="make install installs it")
    made, report = mended(tmp_path, text)
    nbformat.validate(made)
    assert words in report


def test_a_cell_of_an_unknown_type_is_kept_and_named(tmp_path):
    odd = {"cell_type": "sql", "metadata": {}, "source": "select 1", "rows": [1]}
    made, report = mended(tmp_path, json.dumps(as_notebook([LOAD, odd])))
    assert made["cells"][1] == odd
    assert "cell 2: cell_type 'sql' is none of code, markdown, raw; it is kept as it is" in report


@pytest.mark.parametrize(
    "layout",
    [
        {"indent": 1},
        {"indent": 4, "ensure_ascii": False},
        {"separators": (",", ":")},
        {"indent": "\t", "separators": (",", " : ")},
        {},
    ],
)
@pytest.mark.parametrize("as_lines", [True, False])
def test_the_layout_of_the_file_stays(layout, as_lines, tmp_path):
    """What is not a changed source is the same text, with strange values, texts and line ends."""
    source = LOAD.splitlines(keepends=True) if as_lines else LOAD
    odd = cell("print('é \\u2028 \U0001f9a5')")
    odd["outputs"] = [{"output_type": "stream", "name": "stdout", "text": "\ud83d 1e5"}]
    odd["metadata"] = {"big": 12345678901234567890, "nan": float("nan"), "x": 1.1}
    text = json.dumps(as_notebook([odd, cell(source), odd]), **layout)
    text = text.encode("utf-8", "surrogatepass").decode("utf-8", "replace")
    path = tmp_path / "in.ipynb"
    path.write_text(f"\ufeff{text}\r\n", encoding="utf-8", newline="")
    made = converted(path).text
    before, after = f"\ufeff{text}\r\n".split("FastModel")[0], made.split("FastModel")[0]
    assert after.startswith(before[: before.index("m, t")])
    assert made.endswith(text[text.rindex("'cuda'") + 10 :] + "\r\n")
    assert "device" in sources(made.removeprefix("\ufeff"))[1]


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_line_ends_of_a_cell_stay(newline, tmp_path):
    path = write_notebook(tmp_path / "in.ipynb", LOAD.replace("\n", newline))
    (made,) = sources(converted(path).text)
    assert "device_map" in made
    assert made.count("\r\n") == (made.count("\n") if newline == "\r\n" else 0)


def test_nothing_is_written_over(tmp_path):
    path = write_notebook(tmp_path / "in.ipynb", LOAD)
    before = path.read_text(encoding="utf-8")
    for out in (path, tmp_path):
        with pytest.raises(ConfigError, match="OUT="):
            run(NB=str(path), OUT=str(out))
    assert path.read_text(encoding="utf-8") == before
    run(NB=str(path), OUT=str(path), OVERWRITE="1")
    assert "device_map" in path.read_text(encoding="utf-8")


def test_without_out_nothing_is_written(tmp_path):
    path = write_notebook(tmp_path / "in.ipynb", LOAD)
    assert run(NB=str(path))[-1].startswith("nothing was written: OUT=converted.ipynb")
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({}, "name a notebook: NB=notebook.ipynb"),
        ({"OUT": "train.py"}, "no call of trainer.train"),
        ({"OUT": "x.yaml"}, "OUT=x.yaml: OUT=converted.ipynb is a notebook"),
    ],
)
def test_what_cannot_be_made_is_refused(environ, words, tmp_path):
    path = write_notebook(tmp_path / "in.ipynb", LOAD)
    with pytest.raises(ConfigError, match=words):
        run(**({"NB": str(path)} | environ if environ else {}))
    assert list(tmp_path.iterdir()) == [path]


def spoiled(source: str, chance: random.Random) -> str:
    """Return a source with one thing broken or unusual."""
    lines = source.splitlines(keepends=True) or [""]
    at = chance.randrange(len(lines))
    ways = (
        lambda: lines.pop(at),
        lambda: lines.insert(at, "!pip install 'x\n"),
        lambda: lines.insert(at, "%matplotlib inline\n"),
        lambda: lines.insert(0, "%%time\n"),
        lambda: lines.insert(at, "files = !ls *.txt\n"),
        lambda: lines.insert(at, '"""\n'),
        lambda: lines.insert(at, "model?\n"),
        lambda: lines.insert(at, "pip install x \\\n  y\n"),
        lambda: lines.__setitem__(slice(None), [f"  {line}" for line in lines]),
        lambda: lines.__setitem__(slice(None), [line.replace("    ", "\t") for line in lines]),
        lambda: lines.__setitem__(slice(None), [line.replace("\n", "\r\n") for line in lines]),
        lambda: lines.__setitem__(at, lines[at].replace(" = ", "=").replace("\n", "; é = 1\n")),
    )
    chance.choice(ways)()
    return "".join(lines)


@pytest.mark.parametrize("seed", range(60))
def test_spoiled_notebooks_convert_to_what_still_parses_twice_as_once(seed, tmp_path):
    chance = random.Random(seed)
    path = chance.choice(GOLDEN)
    notebook = json.loads(path.read_text(encoding="utf-8"))
    for part in chance.sample(notebook["cells"], k=len(notebook["cells"]) // 2 + 1):
        part["source"] = spoiled("".join(part["source"]), chance)
    spoiled_path = tmp_path / "in.ipynb"
    spoiled_path.write_text(json.dumps(notebook), encoding="utf-8")
    made = converted(spoiled_path)
    after = tmp_path / "out.ipynb"
    after.write_text(made.text, encoding="utf-8")
    assert converted(after).text == made.text
    pairs = zip(notebook["cells"], json.loads(made.text)["cells"], strict=True)
    for number, (old, new) in enumerate(pairs, 1):
        if number in made.changed_cells:
            assert codes.parse(number, "".join(new["source"])).problem is None
        else:
            assert old == new


def test_a_very_long_sum_of_strings_is_no_trouble(tmp_path):
    long = "template = " + " + ".join(["'a'"] * 900) + "\n"
    path = write_notebook(
        tmp_path / "in.ipynb", long + LOAD, "trainer = SFTTrainer(m)\ntrainer.train()"
    )
    assert "device_map" in sources(converted(path).text)[0]
    run(NB=str(path), OUT=str(tmp_path / "train.py"))
