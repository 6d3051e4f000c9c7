"""The pages of docs/: what the code writes is up to date, every block parses, the site builds."""

import ast
import json
import os
import re
import sys

import pytest
import yaml
from calls import outcome_of
from conftest import ROOT

from sft_play.config.schema import settings
from sft_play.config.unknown import suggest
from sft_play.errors import ExitClass
from tools.docs import errors, migration, promises
from tools.docs.__main__ import DOCS, PAGES, page

EVERY_PAGE = (
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "AGENTS.md",
    *sorted(DOCS.rglob("*.md")),
)
BLOCK = re.compile(r"^( *)```(\w+)\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
SPEED = re.compile(r"\b\d{1,3},\d{3}\b")  # tokens a second
PARSERS = {"python": ast.parse, "json": json.loads, "yaml": yaml.safe_load}


@pytest.mark.parametrize("name", PAGES)
def test_a_page_that_the_code_writes_is_up_to_date(name):
    assert (DOCS / name).read_text(encoding="utf-8") == page(name), "run python -m tools.docs"


def test_messages_are_read_with_their_class_and_place():
    found = errors.messages()
    texts = {message.text: message.source for message in found[ExitClass.CONFIG]}
    assert texts["CONFIG=<word>: no such file; <hint>"] == "sft_play/config/loader.py"
    assert all(len(found[kind]) > 3 for kind in (ExitClass.DATA, ExitClass.ENVIRONMENT))


@pytest.mark.parametrize("row", migration.SIDE_BY_SIDE, ids=lambda row: row[0])
def test_a_name_side_by_side_is_what_the_program_answers(row):
    here, *theirs = row
    setting = here.partition(":")[0]
    for name in filter(None, theirs):
        if setting.rpartition(".")[2] == name:
            continue
        answer = suggest(f"train.{name}", settings())
        assert answer is not None, f"{name} is not known"
        words = f"{answer.name} {answer.advice}"
        assert setting in words or here in words, f"{name}: {words}"


def test_the_settings_side_by_side_exist():
    named = {row[0].partition(":")[0] for row in migration.SIDE_BY_SIDE}
    assert named - migration.settings_named() == {"make train-deepspeed"}


def test_every_promise_has_an_entry_that_exists():
    assert promises.problems(promises.promises()) == []


CPU_TEST = "tests/test_docs_pages.py::test_the_site_builds_without_a_warning"
GPU_TEST = "tests/test_gpu.py::test_two_gpus_train_together"


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"shown_by": ["tests/test_docs_pages.py::test_none"]}, "there is no tests/test_docs"),
        ({"shown_by": [GPU_TEST, "docs/planner.md"]}, "no test shows it"),
        ({"state": "cpu"}, "no note says why"),
        ({"row": 2}, "the rows are not 1 to 137"),
    ],
)
def test_a_promise_that_nothing_shows_is_a_problem(changes, problem):
    _, *others = promises.promises()
    fields = {"row": 1, "promise": "A page is built.", "shown_by": [CPU_TEST], **changes}
    found = promises.problems([promises.Promise(**fields), *others])
    assert any(problem in line for line in found), found


@pytest.mark.parametrize(
    ("statuses", "state"), [((), "cpu"), (("done",), "shown"), (("done", "failed"), "cpu")]
)
def test_a_promise_that_waits_for_gpus_is_shown_once_all_their_results_show_it(statuses, state):
    fields = {"workload": "1", "gpus": 2, "figures": {}, "device": "H200"}
    results = [promises.GpuResult(status=status, **fields) for status in statuses]
    row = promises.Promise(row=1, promise="It trains.", state="gpu")
    assert promises.with_results(row, results).state == state


@pytest.mark.parametrize("path", EVERY_PAGE, ids=lambda path: path.name)
def test_every_block_of_code_parses(path):
    for _, language, text in BLOCK.findall(path.read_text(encoding="utf-8")):
        if language in PARSERS:
            assert PARSERS[language](text), "a block without content"


def test_the_site_builds_without_a_warning(tmp_path):
    done = outcome_of(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")],
        os.environ | {"NO_MKDOCS_2_WARNING": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "site" / "index.html").exists()


@pytest.mark.parametrize(
    "path",
    [ROOT / "README.md", DOCS / "several-gpus.md", DOCS / "adapters.md"],
    ids=lambda p: p.name,
)
def test_a_speed_in_a_table_is_one_of_the_tables_that_benchmarks_print(path):
    names = ("speed-h200", "scaling-h200", "scaling-h100")
    tables = [DOCS / "evidence" / f"{name}.md" for name in names]
    printed = {speed for table in tables for speed in SPEED.findall(table.read_text("utf-8"))}
    rows = [line for line in path.read_text("utf-8").splitlines() if line.startswith("|")]
    written = {speed for row in rows for speed in SPEED.findall(row)}
    assert len(written) > 5
    assert written - printed == set()
