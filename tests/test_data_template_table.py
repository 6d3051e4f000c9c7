"""Templates of published models: each trains ordinary rows and rows with reasoning, or says how.

`docs/templates.md` is what these tests find: SFT_PLAY_WRITE_TABLE=1 writes it anew.
"""

import os
import re
from dataclasses import dataclass
from pathlib import Path

import pytest
from conftest import ROOT
from families import LLAMA3_WORDS, tokenizer

from sft_play.config.sections.model import ModelSection
from sft_play.data.render import Renderer, RenderError, render_prompt
from sft_play.data.rows import Message, Row
from sft_play.data.template_variables import with_variables
from sft_play.data.templates import TURN_ENDS

trl = pytest.importorskip("trl", reason="it brings templates of published models")
FOLDER = Path(trl.__file__).parent / "chat_templates"
PAGE = ROOT / "docs" / "templates.md"
IMAGES = ("idefics3", "llava_next", "smolvlm")  # their messages are lists of parts
MARKS = re.compile(
    r"<\|[A-Za-z_]+\|>|<｜[^｜]+｜>|\[/?[A-Z_]+\]|<(?:start|end)_of_turn>|<\|?turn\|?>|</?think>"
)
EOS = ("<｜end▁of▁sentence｜>", "<|endoftext|>")
QUESTION = Message("user", "What is red?")
ANSWERS = {
    "ordinary": Message("assistant", "A rose."),
    "with reasoning": Message("assistant", "A rose.", reasoning="It is a rose."),
}
NAMES = sorted(
    path.stem
    for path in FOLDER.glob("*.jinja")
    if not path.stem.endswith("_training") and path.stem not in IMAGES
)
REMEDY = re.compile(r"DATA_REASONING=\w+|MODEL_TEMPLATE_KWARGS='[^']+'")


@dataclass(frozen=True)
class Outcome:
    """What a row trains under a template, and the setting that it needed."""

    trained: str
    remedy: str  # "" where none


def tokenizer_of(name: str, model: ModelSection):
    """Return a small tokenizer with a published template and its tokens."""
    text = (FOLDER / f"{name}.jinja").read_text(encoding="utf-8")
    marks = tuple(dict.fromkeys(MARKS.findall(text)))
    eos = next((mark for mark in EOS if mark in marks), "<|endoftext|>")
    others = tuple(mark for mark in marks if mark != eos)
    made = tokenizer(text, others, eos, "<bos>", LLAMA3_WORDS)
    made.chat_template = with_variables(text, model)
    return made


def trained(name: str, answer: Message, remedy: str) -> str:
    """Return what a row trains with a remedy; its prompt is checked to be that of use."""
    model = ModelSection()
    reasoning = "keep"
    if remedy.startswith("DATA_REASONING="):
        reasoning = remedy.partition("=")[2]
    elif remedy:
        value = "true" in remedy
        model = ModelSection(template_kwargs={"enable_thinking": value})
    tok = tokenizer_of(name, model)
    (result,) = Renderer(tok, "all", reasoning).render([Row((QUESTION, answer), "rows:1")])
    if isinstance(result, RenderError):
        raise result
    (sample,) = result
    prompt = render_prompt([QUESTION], tok)
    assert sample.ids[: len(prompt)] == prompt and set(sample.labels[: len(prompt)]) == {-100}
    return tok.decode([label for label in sample.labels if label >= 0])


def outcome(name: str, answer: Message) -> Outcome:
    """Return what a row trains, by the first setting that its error names where it needs one."""
    try:
        return Outcome(trained(name, answer, ""), "")
    except RenderError as error:
        found = REMEDY.search(str(error))
        assert found, f"no setting is named: {error}"
        return Outcome(trained(name, answer, found[0]), found[0])


@pytest.mark.parametrize("name", NAMES)
def test_a_published_template_trains_or_names_the_setting_that_makes_it(name):
    for kind, answer in ANSWERS.items():
        found = outcome(name, answer)
        assert found.trained.count("A rose.") == 1
        end = found.trained.partition("A rose.")[2]
        assert any(stop in end for stop in (*TURN_ENDS, *EOS)), found.trained
        thought = "It is a rose." in found.trained
        assert thought == (kind == "with reasoning" and "drop" not in found.remedy)


@pytest.mark.parametrize(("name", "count"), [("deepseek_r1_distill", 1), ("nemotron_3_nano", 2)])
def test_every_remedy_that_an_error_names_works(name, count):
    with pytest.raises(RenderError) as refused:
        trained(name, ANSWERS["ordinary"], "")
    remedies = REMEDY.findall(str(refused.value))
    assert len(remedies) == count
    assert trained(name, ANSWERS["ordinary"], remedies[0]).count("A rose.") == 1
    if count == 2:
        assert trained(name, ANSWERS["ordinary"], remedies[1]) == "A rose.<|im_end|>"


def table() -> str:
    """Return docs/templates.md."""
    lines = [
        "# Templates",
        "",
        "What two rows train under the chat templates that TRL ships of published models: one with an",
        "answer, one with reasoning and an answer. The setting is the one that the error names where",
        "a row does not train without. Written by `tests/test_data_template_table.py`.",
        "",
        "| Template | An answer trains | Setting | Reasoning and answer train | Setting |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name in NAMES:
        cells = [name]
        for answer in ANSWERS.values():
            found = outcome(name, answer)
            shown = found.trained.replace("\n", "\\n")
            cells += [f"`{shown}`", f"`{found.remedy}`" if found.remedy else ""]
        lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join(lines) + "\n"


def test_the_page_of_templates_is_what_the_tests_find():
    if os.environ.get("SFT_PLAY_WRITE_TABLE"):
        PAGE.write_text(table(), encoding="utf-8")
    assert PAGE.read_text(encoding="utf-8") == table()
