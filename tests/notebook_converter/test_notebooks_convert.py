"""Notebooks for one GPU become notebooks for several, and nothing else of them changes."""

import ast
import json
import re
from pathlib import Path

import pytest
from notebook_files import FOLDER, GOLDEN, converted, converted_cell, sources, write_notebook

from notebook_converter import code as codes
from notebook_converter.recognize import Kind, Notebook
from sft_play.commands.notebook import read_notebook

LOAD = "model, tokenizer = FastLanguageModel.from_pretrained(\n    'x',\n)\n"


def report(path: Path) -> str:
    return "\n".join(converted(path).report)


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_converted_twice_is_converted_once(path, tmp_path):
    once = tmp_path / path.name
    once.write_text(converted(path).text, encoding="utf-8")
    again = converted(once)
    assert again.text == once.read_text(encoding="utf-8")
    assert not again.changed_cells


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_no_cell_no_output_and_no_metadata_changes(path):
    before = json.loads(path.read_text(encoding="utf-8"))
    made = converted(path)
    after = json.loads(made.text)
    for number, (old, new) in enumerate(zip(before["cells"], after["cells"], strict=True), 1):
        if number in made.changed_cells:
            assert type(old.pop("source")) is type(new.pop("source"))
        assert old == new
    del before["cells"], after["cells"]
    assert before == after


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_every_line_of_the_file_is_still_there(path):
    """Only a load's last argument, a device and the indent of memory statistics may differ."""
    for old, new in zip(
        sources(path.read_text("utf-8")), sources(converted(path).text), strict=True
    ):
        kept = [line.strip() for line in new.splitlines()]
        for line in map(str.strip, old.splitlines()):
            is_edited = "cuda" in line or "from_pretrained" in line
            assert is_edited or any(line.removesuffix(")") in other for other in kept)


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_a_converted_notebook_is_a_valid_notebook(path):
    nbformat = pytest.importorskip("nbformat", reason="make install installs it")
    for text in (path.read_text(encoding="utf-8"), converted(path).text):
        assert not list(nbformat.validator.iter_validate(json.loads(text)))


KINDS = {
    Kind.TEXT: "alpaca conversational inferred_markers pretraining guide",
    Kind.VISION: "vision",
    Kind.AUDIO: "speech",
    Kind.REWARDS: "grpo",
    Kind.PREFERENCES: "dpo",
    Kind.EMBEDDINGS: "embeddings",
    Kind.INFERENCE: "inference",
    Kind.NOTHING: "plain",
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_kind_of_each_notebook_is_told(kind):
    for name in KINDS[kind].split():
        path = FOLDER / f"{name}.ipynb"
        assert Notebook(read_notebook(path)).kind is kind
        assert kind is Kind.TEXT or "look     " in report(path)


@pytest.mark.parametrize(
    "call",
    [
        "FastModel.from_pretrained()",
        "FastModel.from_pretrained('x')",
        "FastModel.from_pretrained('x',)",
        "FastModel.from_pretrained(('x'))",
        "FastModel.from_pretrained(\n  'x', # a ) in a comment\n  a = f(1), # more, ( and\n)",
        "FastModel.from_pretrained(\n  'x',\n  a = 1 # no comma\n)",
        "FastModel.from_pretrained(\n\t'x',\n\t# token = 1,\n)",
        "FastModel.from_pretrained(\n  'é',\r\n  'ü' )",
        "unsloth.FastQwen2Model.from_pretrained('x')",
    ],
)
@pytest.mark.parametrize(
    "frame",
    [
        "m, t = {}",
        "if True:\n    m, t = {}\nelse:\n    pass",
        "if a: pass\nelif b: m, t = {}",
        "def load():\n\treturn {}\nm = load()",
        "x = '''\n'''; m, t = {}; y = 1",
        "x = 1; \\\nm, t = {}",
        "@cache\ndef load(x={}): pass",
    ],
)
def test_a_load_in_any_layout_gets_one_more_argument(call, frame, tmp_path):
    source = frame.format(call)
    (made,) = converted_cell(tmp_path, source)
    before, after = loads(source)[0], loads(made)[0]
    assert [ast.dump(word) for word in after.keywords[:-1]] == [
        ast.dump(word) for word in before.keywords
    ]
    assert after.keywords[-1].arg is None
    assert [ast.dump(value) for value in after.args] == [ast.dump(value) for value in before.args]


def loads(source: str) -> list[ast.Call]:
    tree = codes.parse(1, source).tree
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    return [
        call
        for call in calls
        if isinstance(call.func, ast.Attribute) and call.func.attr == "from_pretrained"
    ]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("device_map='auto'", "device_map='auto' of its own"),
        ("device_map=device_map", "has a device_map already"),
        ("**options", "add device_map to it by hand"),
        ("fast_inference=True", "vLLM"),
        ("fast_inference=fast", "vLLM"),
    ],
)
def test_a_load_with_a_map_of_its_own_stays(arguments, words, tmp_path):
    path = write_notebook(tmp_path / "in.ipynb", f"m, t = FastModel.from_pretrained({arguments})")
    assert not converted(path).changed_cells
    assert words in report(path)


@pytest.mark.parametrize(
    ("line", "made"),
    [
        ('x = t("a").to("cuda")', 'x = t("a").to(device)'),
        ("x = t('a').to('cuda', non_blocking = True)", None),
        ("x = t('a').to(device='cuda')", "x = t('a').to(device=device)"),
        ("x = t('a').input_ids . cuda ( )", "x = t('a').input_ids . to(device)"),
        ("%time x = t('a').to('cuda')", "%time x = t('a').to(device)"),
        ("x = a.cuda(); y = b.to('cuda').to('cuda')", None),
    ],
)
def test_inputs_go_to_a_named_device(line, made, tmp_path):
    after = converted_cell(tmp_path, LOAD, line)[1]
    assert "cuda()" not in after and "'cuda'" not in after and '"cuda")' not in after
    assert 'device = "cuda:0" if torch.cuda.is_available() else "cpu"\n' in after
    if made is not None:
        assert after.endswith(made)


def test_what_stands_in_an_f_string_stays(tmp_path):
    line = "print(f'é {t(1).to(\"cuda\")} {x.cuda()}')"
    assert converted_cell(tmp_path, LOAD, line)[1] == line


def test_a_device_of_the_notebooks_own_is_left_to_it(tmp_path):
    after = converted_cell(tmp_path, LOAD, "device = 'cpu'", "t('a').to('cuda')")
    assert after[1] == "device = 'cpu'"
    assert after[2].endswith("t('a').to(inference_device)")


def test_other_places_with_the_word_cuda_stay(tmp_path):
    kept = "print('to(\"cuda\")')\ntorch.zeros(1, device='cuda')\nx.to('cuda:1')\nmodel.to('cuda')"
    path = write_notebook(tmp_path / "in.ipynb", LOAD, kept)
    assert sources(converted(path).text)[1] == kept
    assert "a split model refuses" in report(path)


def test_memory_variables_that_other_cells_use_are_named(tmp_path):
    statistics = (
        "s = torch.cuda.get_device_properties(0)\n"
        "start = torch.cuda.max_memory_allocated() / 2**30\n"
        "most = s.total_memory / 2**30\n"
        "print(start, most)"
    )
    path = write_notebook(tmp_path / "in.ipynb", LOAD, statistics, "print(start + 1)")
    after = sources(converted(path).text)
    assert "start.append(round(torch.cuda.max_memory_allocated(i)" in after[1]
    assert "cell 3: uses start: a list on several GPUs" in report(path)


@pytest.mark.parametrize(
    "statistics",
    [
        "peak = torch.cuda.max_memory_reserved() / 2**30\nprint(peak)",
        "s = torch.cuda.get_device_properties(0); print(s.name)",
        "s = torch.cuda.get_device_properties(0)\nx = torch.cuda.max_memory_reserved()\n"
        "m = s.total_memory\nprint('''a\nb''', m)",
    ],
)
def test_memory_that_is_measured_in_another_way_is_left_and_named(statistics, tmp_path):
    path = write_notebook(tmp_path / "in.ipynb", LOAD, statistics)
    assert sources(converted(path).text)[1] == statistics
    assert "cell 2: measures the memory of one GPU in a way of its own" in report(path)


def test_the_banner_comes_before_each_training_and_stays_indented(tmp_path):
    trainer = "trainer = SFTTrainer(model)\n"
    after = converted_cell(tmp_path, LOAD, trainer, "if go:\n\tstats = trainer.train()")
    lines = after[2].splitlines()
    assert lines[0] == "if go:" and lines[-1] == "\tstats = trainer.train()"
    assert lines[1] == "\t_args = trainer.args"


def test_a_cell_that_is_no_python_stays_and_is_named(tmp_path):
    broken = "model, t = FastModel.from_pretrained('x'\nprint('never closed'"
    path = write_notebook(tmp_path / "in.ipynb", LOAD, broken, "%%writefile a.py\n" + LOAD)
    after = sources(converted(path).text)
    assert after[1] == broken
    assert "cell 2: left as it is, because it is not read as Python (line" in report(path)
    assert "cell 3: left as it is, because it is not read as Python (a %%writefile" in report(path)


def test_statistics_before_and_after_training_in_one_cell(tmp_path):
    cell = (
        "if torch.cuda.is_available():\n"
        "    s = torch.cuda.get_device_properties(0)\n"
        "    start = torch.cuda.max_memory_reserved() / 2**30\n"
        "    most = s.total_memory / 2**30\n"
        "    logger.info(f'{s.name} {most}')\n"
        "trainer_stats = trainer.train()\n"
        "used = torch.cuda.max_memory_reserved() / 2**30\n"
        "print(used / most, used - start)\n"
        "print('done')"
    )
    after = converted_cell(tmp_path, LOAD, "trainer = SFTTrainer(m)", cell)[2]
    assert after.count("for i in range(num_gpus)") == 2
    assert after.count("Effective batch size") == 1
    assert after.endswith("\nprint('done')")


@pytest.mark.parametrize("name", ["self.trainer", "my_trainer", "t"])
def test_trainers_are_known_by_their_variable(name, tmp_path):
    after = converted_cell(tmp_path, LOAD, f"{name} = SFTTrainer(m)\n{name}.train()\nmodel.train()")
    assert after[1].count(f"_args = {name}.args") == 1


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("os.environ['CUDA_VISIBLE_DEVICES'] = '0'", "CUDA_VISIBLE_DEVICES"),
        ("%env CUDA_VISIBLE_DEVICES=0", "CUDA_VISIBLE_DEVICES"),
        ("os.environ.setdefault('LOCAL_RANK', '0')", "LOCAL_RANK"),
        ("model = torch.nn.DataParallel(model)", "DataParallel"),
        ("notebook_launcher(train, num_processes=2)", "notebook_launcher"),
        ("torch.cuda.set_device(0)", "set_device"),
    ],
)
def test_what_decides_about_gpus_itself_is_named(source, words, tmp_path):
    path = write_notebook(tmp_path / "in.ipynb", LOAD, source)
    assert re.search(f"cell 2: .*{words}", report(path))
    assert sources(converted(path).text)[1] == source
