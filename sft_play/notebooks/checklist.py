"""The five points of a notebook for several GPUs, each with what was found. Pure."""

import ast
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from sft_play.notebooks.code import Code
from sft_play.notebooks.document import Document
from sft_play.notebooks.inference import cuda_calls, is_model
from sft_play.notebooks.memory_runs import measures_one_gpu
from sft_play.notebooks.recognise import Found, Notebook

DETECTED = re.compile(r"Detected (\d+) GPU")
SPLITS = ("balanced", "balanced_low_0", "auto", "sequential")


@dataclass(frozen=True)
class Point:
    """One point of the checklist."""

    text: str
    is_met: bool
    found: str

    def line(self) -> str:
        return f"[{'x' if self.is_met else ' '}] {self.text}: {self.found}"


def check(document: Document, others: Iterable[Document] = ()) -> list[Point]:
    """Return the five points; `others` are copies of the notebook that ran elsewhere."""
    notebook = Notebook(document)
    return [
        _counts_gpus(notebook),
        _has_device_map(notebook),
        _measures_all(notebook),
        _names_device(notebook),
        _was_tried([document, *others]),
    ]


def _counts_gpus(notebook: Notebook) -> Point:
    text = "counts the GPUs before the model is loaded"
    loads = notebook.training_loads
    if not loads:
        return Point(text, False, "no FastLanguageModel, FastModel or FastVisionModel is loaded")
    last = loads[-1]
    counted = [
        (code.number, call.lineno)
        for code, call in notebook.calls()
        if isinstance(call.func, ast.Attribute) and call.func.attr == "device_count"
    ]
    earlier = [place for place in counted if place < (last.number, last.call.lineno)]
    if earlier:
        return Point(text, True, f"cell {earlier[-1][0]} calls torch.cuda.device_count()")
    return Point(text, False, f"nothing before the load in cell {last.number} does")


def _has_device_map(notebook: Notebook) -> Point:
    text = 'device_map="balanced" on several GPUs'
    loads = notebook.training_loads
    without = [load for load in loads if not _device_maps(load)]
    if not loads or without:
        where = f"the load in cell {without[0].number} has no device_map" if without else "no load"
        return Point(text, False, where)
    if not any(_names_split(load) for load in loads):
        return Point(text, False, f"cell {loads[0].number} never sets it to balanced or auto")
    return Point(text, True, f"the load in cell {loads[0].number} has it")


def _device_maps(load: Found) -> list[ast.keyword]:
    """Return the keywords of a load that give it a device map."""
    words = load.call.keywords
    return [word for word in words if "device_map" in (word.arg or load.code.text(word))]


def _names_split(load: Found) -> bool:
    """Return whether the load's cell names a way to divide a model."""
    words = (node.value for node in ast.walk(load.code.tree) if isinstance(node, ast.Constant))
    return any(word in SPLITS for word in words if isinstance(word, str))


def _measures_all(notebook: Notebook) -> Point:
    text = "memory statistics cover all GPUs"
    of_one = [code.number for code in notebook.parsed if measures_one_gpu(code)]
    if of_one:
        return Point(text, False, f"{_cells(of_one)} of one GPU alone")
    return Point(text, True, "no cell measures one GPU alone")


def _names_device(notebook: Notebook) -> Point:
    text = 'inference names its device, "cuda:0"'
    without = [code.number for code in notebook.parsed if _moves_inputs(code)]
    if without:
        return Point(text, False, f'{_cells(without)}: inputs go to "cuda" without a number')
    return Point(text, True, 'no cell moves inputs to "cuda" without a number')


def _moves_inputs(code: Code) -> bool:
    return any(not is_model(call.func.value) for call in cuda_calls(code))


def _was_tried(documents: list[Document]) -> Point:
    """Return whether outputs show a run on one GPU and one on several."""
    text = "tried on one GPU and on several"
    counts = {count for document in documents for count in _counts_in_outputs(document)}
    if any(count > 1 for count in counts) and 1 in counts:
        return Point(text, True, f"outputs show runs on {_numbers(counts)} GPUs")
    seen = f"outputs show a run on {_numbers(counts)} alone" if counts else "no output shows a run"
    advice = "save it after a run on each, and give both: NB=one.ipynb,two.ipynb"
    return Point(text, False, f"{seen}; {advice}")


def _counts_in_outputs(document: Document) -> set[int]:
    texts = (_text(output) for cell in document.cells for output in cell.outputs)
    return {int(count) for text in texts for count in DETECTED.findall(text)}


def _text(output: Any) -> str:
    """Return what an output printed."""
    text = output.get("text", "") if isinstance(output, dict) else ""
    return "".join(map(str, text)) if isinstance(text, list) else str(text)


def _numbers(counts: set[int]) -> str:
    return " and ".join(map(str, sorted(counts)))


def _cells(numbers: list[int]) -> str:
    return f"cell{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"
