"""The five points of a notebook for several GPUs, each with what was found. Pure."""

import ast
import re
from collections.abc import Iterable
from dataclasses import dataclass

from notebook_converter.convert import is_model, moves_to_cuda
from notebook_converter.document import Document
from notebook_converter.memory import covers_all_gpus, measures
from notebook_converter.recognize import Notebook

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
    measuring = (code for code in notebook.parsed if measures(code.tree))
    of_one = (code.number for code in measuring if not covers_all_gpus(code))
    moved = (move.number for move in moves_to_cuda(notebook) if not is_model(move))
    found = {
        "counts the GPUs before the model is loaded": _counts_gpus(notebook),
        'device_map="balanced" on several GPUs': _has_device_map(notebook),
        "memory statistics cover all GPUs": _without(
            of_one, "{} of one GPU alone", "no cell measures one GPU alone"
        ),
        'inference names its device, "cuda:0"': _without(
            moved,
            '{}: inputs go to "cuda" without a number',
            'no cell moves inputs to "cuda" without a number',
        ),
        "tried on one GPU and on several": _was_tried([document, *others]),
    }
    return [Point(text, is_met, what) for text, (is_met, what) in found.items()]


def _counts_gpus(notebook: Notebook) -> tuple[bool, str]:
    """Return whether a point is met, and what was found; so do the functions that follow."""
    if not notebook.training_loads:
        return False, "no FastLanguageModel, FastModel or FastVisionModel is loaded"
    last = notebook.training_loads[-1]
    counted = [found for found in notebook.methods("device_count") if found.place < last.place]
    if counted:
        return True, f"cell {counted[-1].number} calls torch.cuda.device_count()"
    return False, f"nothing before the load in cell {last.number} does"


def _has_device_map(notebook: Notebook) -> tuple[bool, str]:
    loads = notebook.training_loads
    if not loads:
        return False, "no load"
    cells = [load.number for load in loads if not load.names_device_map]
    if cells:
        return False, f"the load in cell {cells[0]} has no device_map"
    cells = [load.number for load in loads]
    constants = {node.value for code, node in notebook.nodes(ast.Constant) if code.number in cells}
    if constants.isdisjoint(SPLITS):
        return False, f"cell {cells[0]} never sets it to balanced or auto"
    return True, f"the load in cell {cells[0]} has it"


def _without(cells: Iterable[int], problem: str, met: str) -> tuple[bool, str]:
    """Return a point that is met if no cell has its problem."""
    numbers = sorted(set(cells))
    named = f"cell{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"
    return not numbers, problem.format(named) if numbers else met


def _was_tried(documents: list[Document]) -> tuple[bool, str]:
    """Return whether outputs show a run on one GPU and one on several."""
    cells = (cell for document in documents for cell in document.cells)
    outputs = (output for cell in cells for output in cell.outputs if isinstance(output, dict))
    printed = "\n".join("".join(map(str, output.get("text", ""))) for output in outputs)
    counts = sorted(set(map(int, DETECTED.findall(printed))))
    numbers = " and ".join(map(str, counts))
    if 1 in counts and counts[-1] > 1:
        return True, f"outputs show runs on {numbers} GPUs"
    seen = f"outputs show a run on {numbers} alone" if counts else "no output shows a run"
    return False, f"{seen}; save it after a run on each, and give both: NB=one.ipynb,two.ipynb"
