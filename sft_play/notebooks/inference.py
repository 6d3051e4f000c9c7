"""Inference cells: inputs go to a device that has a number, and to the CPU where there is no GPU.

`.to("cuda")` and `.cuda()` become `.to(device)`. Pure.
"""

import ast
from collections.abc import Iterator

from sft_play.notebooks import code as codes
from sft_play.notebooks.code import Code, Edit
from sft_play.notebooks.load_call import lines_at
from sft_play.notebooks.notes import Note, changed, look
from sft_play.notebooks.recognise import Notebook, variable

DEVICE = "device"
OTHER_NAME = "inference_device"  # where the notebook has a `device` of its own
SETS_DEVICE = '{name} = "cuda:0" if torch.cuda.is_available() else "cpu"\n'


def device_edits(notebook: Notebook, code: Code) -> tuple[list[Edit], list[Note]]:
    """Return the edits of one cell that name the device of its inputs."""
    name = device_name(notebook)
    edits: list[Edit] = []
    notes: list[Note] = []
    calls = list(cuda_calls(code))
    for call in calls:
        if is_model(call.func.value):
            said = "moves a model with .to or .cuda, which a split model refuses; delete it"
            notes.append(look(code.number, said))
            continue
        edits.append(_device_edit(code, call, name))
    if not edits:
        return [], notes
    first = next(call for call in calls if not is_model(call.func.value))
    place = code.place_before(_outermost(code, first))
    imports = "" if "torch" in notebook.modules else "import torch\n\n"
    sets = imports + SETS_DEVICE.format(name=name)
    text = lines_at(sets, place.indent, code.newline)
    return (
        [Edit(place.offset, place.offset, text), *edits],
        [*notes, changed(code.number, f'inputs go to {name}, which is "cuda:0" or "cpu"')],
    )


def cuda_calls(code: Code) -> Iterator[ast.Call]:
    """Yield the calls that move something to the GPU without a number, in order."""
    for call in sorted(
        codes.calls_in(code.tree), key=lambda node: (node.end_lineno, node.end_col_offset)
    ):
        if isinstance(call.func, ast.Attribute) and (_moves_to_cuda(call) or _is_cuda(call)):
            yield call


def is_model(node: ast.expr) -> bool:
    """Return whether an expression is a model by its name."""
    name = variable(node)
    return name is not None and name.lower().endswith("model")


def device_name(notebook: Notebook) -> str:
    """Return a name for the device that the notebook does not use for something else."""
    sets = ast.dump(ast.parse(SETS_DEVICE.format(name=DEVICE)).body[0])
    for code in notebook.parsed:
        for node in ast.walk(code.tree):
            if isinstance(node, ast.arg) and node.arg == DEVICE:
                return OTHER_NAME
            is_set = isinstance(node, ast.Name) and node.id == DEVICE
            if is_set and isinstance(node.ctx, ast.Store) and not _is_statement(code, node, sets):
                return OTHER_NAME
    return DEVICE


def _is_statement(code: Code, node: ast.AST, dumped: str) -> bool:
    statements = (part for part in ast.walk(code.tree) if isinstance(part, ast.Assign))
    holder = next((part for part in statements if node in part.targets), None)
    return holder is not None and ast.dump(holder) == dumped


def _moves_to_cuda(call: ast.Call) -> bool:
    """Return whether a call is `.to("cuda")` or `.to(device="cuda")`."""
    if call.func.attr != "to":
        return False
    return any(_is_word_cuda(node) for node in _device_arguments(call))


def _is_cuda(call: ast.Call) -> bool:
    return call.func.attr == "cuda" and not call.args and not call.keywords


def _device_arguments(call: ast.Call) -> list[ast.expr]:
    keywords = [keyword.value for keyword in call.keywords if keyword.arg == "device"]
    return [*call.args[:1], *keywords]


def _is_word_cuda(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value == "cuda"


def _device_edit(code: Code, call: ast.Call, name: str) -> Edit:
    if call.func.attr == "cuda":
        _, begin = code.span(call.func.value)
        end = code.span(call)[1]
        dot = code.source.rindex("cuda", begin, end)
        return Edit(dot, end, f"to({name})")
    word = next(node for node in _device_arguments(call) if _is_word_cuda(node))
    return Edit(*code.span(word), name)


def _outermost(code: Code, node: ast.AST) -> ast.stmt:
    """Return the statement of the cell itself that holds a node; its names reach all the cell."""
    return next(codes.path_to(code.tree, node))
