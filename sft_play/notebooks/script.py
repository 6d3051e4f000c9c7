"""A notebook as a script that trains data-parallel: one process a GPU, started by torchrun.

Cells keep their order and their code; magics, shell lines and text become comments. Pure.
"""

import ast
import warnings
from pathlib import Path
from typing import Any

from sft_play.errors import ConfigError
from sft_play.notebooks import code as codes
from sft_play.notebooks.code import Code, Edit
from sft_play.notebooks.convert import all_edits
from sft_play.notebooks.document import Cell, Document
from sft_play.notebooks.load_call import argument_edit, lines_at
from sft_play.notebooks.notes import Note, changed, kept, look
from sft_play.notebooks.recognise import ARGUMENTS, Found, Notebook, variable
from sft_play.notebooks.values import Values

HEADER = '''\
"""{name} as a script: one process a GPU, each with the whole model and rows of its own.

Start it with: torchrun --nproc_per_node=2 {script}
or with:       accelerate launch --multi_gpu --num_processes 2 {script}
Without a launcher it is the notebook, in one process.
"""

import os
import sys

import torch

RANK = int(os.environ.get("RANK", 0))
LOCAL_RANK = int(os.environ.get("LOCAL_RANK", 0))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", 1))
RANK_DEVICE_MAP = None
if WORLD_SIZE > 1 and torch.cuda.is_available():
    torch.cuda.set_device(LOCAL_RANK)
    RANK_DEVICE_MAP = {{"": LOCAL_RANK}}
if RANK > 0:  # each message once
    sys.stdout = open(os.devnull, "w")
'''
# Without a GPU the trainer sees no launcher unless its arguments have use_cpu=True
ALL_PROCESSES = """\
if {trainer}.args.world_size != WORLD_SIZE:
    sys.exit(f"the trainer sees {{{trainer}.args.world_size}} of {{WORLD_SIZE}} processes")
"""
DISPLAY = "display = print  # what IPython has\n"
# After training: peaks of all processes, and then the first goes on alone
ALONE = """\

# %% all processes have trained: the first goes on alone
import torch.distributed as dist

if WORLD_SIZE > 1 and dist.is_initialized():
    if torch.cuda.is_available():
        _total = round(torch.cuda.get_device_properties(LOCAL_RANK).total_memory / 1024**3, 3)
        _peak = round(torch.cuda.max_memory_reserved() / 1024**3, 3)
        _peaks = [None] * WORLD_SIZE
        dist.all_gather_object(_peaks, (_peak, _total))
        for _rank, (_peak, _total) in enumerate(_peaks):
            _percentage = round(_peak / _total * 100, 3)
            print(f"GPU {_rank}: Peak reserved = {_peak} GB ({_percentage}%)")
    dist.barrier()
    dist.destroy_process_group()
    if RANK > 0:
        sys.exit()
"""
UNUSED = "ddp_find_unused_parameters"
TOGETHER = ("evaluate", "predict")  # methods of a trainer that all processes must call
SAVES = frozenset(
    """
    save_pretrained save_pretrained_merged save_pretrained_gguf push_to_hub push_to_hub_merged
    push_to_hub_gguf save_model
    """.split()
)
ONLY_IN_NOTEBOOKS = {"google": "only Colab has", "IPython": "comes with Jupyter"}
IN_NOTEBOOKS = ("get_ipython", "input")


def export(document: Document, script: Path) -> tuple[str, list[Note]]:
    """Return the text of a script that trains as the notebook does, and what to say of it.

    Raises: ConfigError for a notebook that trains nothing.
    """
    notebook = Notebook(document)
    if not notebook.train_calls:
        raise ConfigError(
            f"NB={document.path}: no call of trainer.train() was found ({notebook.kind.value}), so "
            "there is nothing to train data-parallel; OUT=converted.ipynb converts the notebook"
        )
    edits, notes = all_edits(notebook)
    converted = _with_edits(document, notebook, edits)
    made = Notebook(converted)
    unread = {code.number for code in made.codes if _why_no_script(code) is not None}
    notes = [*(note for note in notes if note.cell not in unread), *_notes(made)]
    script_edits, said = _script_edits(made)
    made = Notebook(_with_edits(converted, made, script_edits))
    texts = [HEADER.format(name=document.path.name, script=script.name)]
    if any(made.functions(["display"])):
        texts.append(DISPLAY)
    by_number = {code.number: code for code in made.codes}
    for cell in made.document.cells:
        texts.append(_as_percent_cell(cell, by_number.get(cell.number)))
    return "\n".join(texts), [*notes, *said]


def _with_edits(document: Document, notebook: Notebook, edits: dict[int, list[Edit]]) -> Document:
    """Return the document with edited cells."""
    sources = {
        code.number: codes.apply(code.source, edits[code.number])
        for code in notebook.parsed
        if edits.get(code.number)
    }
    cells = tuple(
        Cell(cell.number, cell.kind, sources.get(cell.number, cell.source))
        for cell in document.cells
    )
    return Document(document.path, document.text, cells, document.problems)


def _script_edits(notebook: Notebook) -> tuple[dict[int, list[Edit]], list[Note]]:
    """Return what a script changes beyond the converted notebook."""
    edits: dict[int, list[Edit]] = {code.number: [] for code in notebook.parsed}
    maps: set[ast.AST] = set()
    for load in notebook.loads:
        given = load.keyword("device_map")
        if given is not None:
            maps.add(given)
            start, end = load.code.span(given)
            text = f"RANK_DEVICE_MAP or ({load.code.source[start:end]})"
            edits[load.number].append(Edit(start, end, text))
    for code in notebook.parsed:
        edits[code.number] += [
            Edit(*code.span(node), 'f"cuda:{LOCAL_RANK}"') for node in _first_gpu(code, maps)
        ]
    edits_of_arguments, said = _unused_parameters(notebook)
    for number, edit in edits_of_arguments:
        edits[number].append(edit)
    for found in notebook.train_calls if notebook.trainers else []:
        place = found.code.place_before(found.call)
        text = lines_at(ALL_PROCESSES.format(trainer=found.name), place.indent, found.code.newline)
        edits[found.number].append(Edit(place.offset, place.offset, text))
    last_code, last = _last_together(notebook)
    end = last_code.end_of_line(last_code.span(last)[1])
    edits[last_code.number].append(Edit(end, end, f"\n{ALONE}".replace("\n", last_code.newline)))
    goes_on = "after it the first process goes on alone"
    return edits, [*said, changed(last_code.number, f"all processes train; {goes_on}")]


def _first_gpu(code: Code, maps: set[ast.AST]) -> list[ast.Constant]:
    """Return the words "cuda:0", but in device maps: each process of a script has another GPU."""
    strings = {node for node in ast.walk(code.tree) if isinstance(node, ast.JoinedStr)}
    return [
        node
        for node in codes.nodes_without(code.tree, maps | strings)
        if isinstance(node, ast.Constant) and node.value == "cuda:0"
    ]


def _unused_parameters(notebook: Notebook) -> tuple[list[tuple[int, Edit]], list[Note]]:
    """Return the edits that keep DDP from looking for unused parameters.

    With adapters and recomputed activations it would find a parameter ready twice.
    """
    found = [
        (code, node)
        for code, node in notebook.calls()
        if ARGUMENTS.fullmatch(notebook.name_of(node.func))
    ]
    if not found:
        said = f"give the trainer's arguments {UNUSED}=False: no SFTConfig was found to add it to"
        return [], [look(None, said)]
    edits, notes = [], []
    for code, node in found:
        if any(keyword.arg == UNUSED for keyword in node.keywords):
            continue
        edits.append((code.number, argument_edit(code, node, f"{UNUSED} = False")))
        notes.append(changed(code.number, f"the trainer's arguments get {UNUSED} = False"))
    return edits, notes


def _last_together(notebook: Notebook) -> tuple[Code, ast.stmt]:
    """Return the last statement that all processes must run: a training or an evaluation.

    Where that is in a function, it is the last call of the function; in a class, the last
    statement of all.
    """
    calls = [(found.code, found.call) for found in notebook.train_calls]
    calls += [
        (code, call)
        for code, call in notebook.calls()
        if isinstance(call.func, ast.Attribute)
        and call.func.attr in TOGETHER
        and variable(call.func.value) in notebook.trainer_names
    ]
    code, statement = _last_statement(calls)
    seen = set()
    while isinstance(statement, ast.FunctionDef) and statement.name not in seen:
        seen.add(statement.name)
        uses = [(part.code, part.call) for part in notebook.functions([statement.name])]
        if uses:
            code, statement = _last_statement(uses)
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        code = [part for part in notebook.parsed if part.tree.body][-1]
        statement = code.tree.body[-1]
    return code, statement


def _last_statement(calls: list[tuple[Code, ast.Call]]) -> tuple[Code, ast.stmt]:
    """Return the statement of a cell itself that holds the last of these calls."""
    code, call = max(calls, key=lambda pair: (pair[0].number, pair[1].lineno))
    return code, next(codes.path_to(code.tree, call))


def _notes(notebook: Notebook) -> list[Note]:
    """Return what a script cannot do as a notebook does."""
    notes = []
    last_code, _ = _last_together(notebook)
    for code, call in notebook.calls():
        name = notebook.name_of(call.func)
        if name in IN_NOTEBOOKS:
            notes.append(look(code.number, f"{name}() works in a notebook alone"))
        if name in SAVES and code.number < last_code.number:
            said = f"{name}() stands before the end of training, so every process saves"
            notes.append(look(code.number, said))
        elif name in SAVES:
            notes.append(kept(code.number, f"{name}(), by the first process alone"))
    for module, where in ONLY_IN_NOTEBOOKS.items():
        if module in notebook.modules:
            notes.append(look(None, f"imports {module}, which {where}"))
    notes.append(_of_batch(notebook))
    for code in notebook.codes:
        problem = _why_no_script(code)
        if problem is not None:
            notes.append(look(code.number, f"is a comment of the script: {problem}"))
        elif code.masked:
            count = len(code.masked)
            said = f"{count} line(s) of magics or of the shell are comments of the script"
            notes.append(look(code.number, said))
    return notes


def _of_batch(notebook: Notebook) -> Note:
    """Say what the notebook's batch and steps are with several processes."""
    batch, accumulation, steps = _sizes(notebook)
    rows = "an update has the notebook's rows for each process"
    if isinstance(batch, int) and isinstance(accumulation, int):
        product = f"{batch} x {accumulation} = {batch * accumulation}"
        rows = f"an update has {product} rows for each process"
    said = "divide gradient_accumulation_steps by their number to keep the notebook's"
    counted = f"; max_steps = {steps} is kept, and counts updates" if isinstance(steps, int) else ""
    return look(None, f"{rows}; {said}{counted}")


def _sizes(notebook: Notebook) -> list[Any]:
    """Return batch, accumulation and steps of the trainer's arguments, as far as they are known."""
    values = Values(notebook)
    names = ("per_device_train_batch_size", "gradient_accumulation_steps", "max_steps")
    sizes: list[Any] = [None] * len(names)
    for code, call in notebook.calls():
        if ARGUMENTS.fullmatch(notebook.name_of(call.func)):
            found = Found(code, call, notebook.name_of(call.func))
            sizes = [values.keyword(found, name) for name in names]
    return sizes


def _why_no_script(code: Code) -> str | None:
    """Return why a cell cannot be part of a script, None where it can."""
    if code.tree is None:
        return code.problem
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compile(code.tree, "cell", "exec")
    except SyntaxError as error:  # `await` and `return` outside of a function
        return f"line {error.lineno}: {error.msg}"
    except RecursionError as error:
        return str(error)
    return None


def _as_percent_cell(cell: Cell, code: Code | None) -> str:
    """Return a cell in the percent format, which editors and jupytext know."""
    if code is None:
        return f"# %% [{cell.kind}] cell {cell.number}\n{_as_comments(cell.source)}"
    title = f"# %% cell {cell.number}\n"
    if _why_no_script(code) is not None:
        return f"{title}{_as_comments(cell.source)}"
    written = codes.LINE.findall(code.source)
    lines = []
    for number, line in enumerate(code.lines, 1):
        if number in code.masked:
            comment = _as_comments(written[number - 1]).rstrip()
            line = comment if line in ("#", "pass") else f"{line}  {comment}"
        lines.append(line)
    return title + "\n".join(lines) + "\n"


def _as_comments(text: str) -> str:
    """Return lines as comments; that of a cell magic must not look like a new cell."""
    lines = (line.rstrip("\r\n") for line in codes.LINE.findall(text))
    written = (
        f"magic {line.strip()}" if line.lstrip().startswith("%%") else line for line in lines
    )
    return "".join(f"# {line}".rstrip() + "\n" for line in written)
