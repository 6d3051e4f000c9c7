"""What a notebook itself says of GPUs and processes, which a person must look at. Pure."""

import ast

from sft_play.notebooks import code as codes
from sft_play.notebooks.code import Code
from sft_play.notebooks.notes import Note, look
from sft_play.notebooks.recognise import Notebook

# Variables that a notebook sets for itself, and what follows
VARIABLES = {
    "CUDA_VISIBLE_DEVICES": "the GPUs that it leaves out are not used: delete the line",
    "LOCAL_RANK": "it is torchrun's, and makes the load take that one GPU: delete the line",
    "RANK": "it is torchrun's: delete the line",
    "WORLD_SIZE": "it is torchrun's: delete the line",
}
# Calls that spread a model or start processes in another way
CALLS = {
    "DataParallel": "copies the model to each GPU, which a split or 4-bit one refuses: delete it",
    "DistributedDataParallel": "the trainer wraps the model itself: delete it",
    "notebook_launcher": "starts processes of its own, of which each would split the model: train "
    "with the script that OUT=train.py writes",
    "set_device": "chooses a GPU; device_map and torchrun do so here",
}


def notes_of_devices(notebook: Notebook) -> list[Note]:
    """Return a note for each line that decides about GPUs and processes."""
    notes = []
    for code in notebook.codes:
        for name in _variables_set(code):
            notes.append(look(code.number, f"sets {name}: {VARIABLES[name]}"))
    for code, call in notebook.calls():
        name = notebook.name_of(call.func)
        if name in CALLS:
            notes.append(look(code.number, f"calls {name}: {CALLS[name]}"))
    return notes


def _variables_set(code: Code) -> list[str]:
    """Return the variables of VARIABLES that a cell sets, in Python or by %env."""
    lines = codes.LINE.findall(code.source)
    magics = "".join(lines[number - 1] for number in code.masked)
    words = [word for line in magics.splitlines() for word in line.replace("=", " ").split()]
    names = set(words) if "%env" in magics or "%set_env" in magics else set()
    for node in ast.walk(code.tree) if code.tree is not None else ():
        names.update(_keys_set(node))
    return [name for name in VARIABLES if name in names]


def _keys_set(node: ast.AST) -> list[str]:
    """Return the key that `os.environ["key"] = ...` or `os.environ.setdefault("key", ...)` sets."""
    if isinstance(node, ast.Assign):
        keys = [target.slice for target in node.targets if isinstance(target, ast.Subscript)]
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        keys = node.args[:1] if node.func.attr in ("setdefault", "putenv") else []
    else:
        keys = []
    values = [key.value for key in keys if isinstance(key, ast.Constant)]
    return [value for value in values if isinstance(value, str)]
