"""A notebook as a script that trains data-parallel: one process a GPU, started by torchrun.

Cells keep their order and their code; magics, shell lines and text become comments. Pure.
"""

import ast
import warnings
from dataclasses import replace
from pathlib import Path

from notebook_converter.changes import Changes
from notebook_converter.code import LINE, Code, nodes_outside_strings, path_to
from notebook_converter.convert import add_argument, convert_cells
from notebook_converter.document import Cell, Document, NotebookError
from notebook_converter.recognize import Notebook
from notebook_converter.values import Values

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
# After training: peaks of all processes, and then the first continues alone
ALONE = """\

# %% all processes have trained: the first continues alone
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
SAVES = """
save_pretrained save_pretrained_merged save_pretrained_gguf
push_to_hub push_to_hub_merged push_to_hub_gguf save_model
""".split()
ONLY_IN_NOTEBOOKS = {"google": "only Colab has", "IPython": "comes with Jupyter"}
IN_NOTEBOOKS = ["get_ipython", "input"]


def export(document: Document, script: Path) -> tuple[str, list[str]]:
    """Return the text of a script that trains as the notebook does, and the report.

    Raises: NotebookError for a notebook that trains nothing.
    """
    notebook = Notebook(document)
    if not notebook.train_calls:
        raise NotebookError(
            f"NB={document.path}: no call of trainer.train() was found ({notebook.kind.value}), so "
            "there is nothing to train data-parallel; OUT=converted.ipynb converts the notebook"
        )
    changes = Changes()
    convert_cells(notebook, changes)
    notebook = _edited(notebook, changes)
    unread = {code.number for code in notebook.codes if _why_no_script(code) is not None}
    changes.notes = [note for note in changes.notes if note.cell not in unread]
    changes.edits.clear()
    _look_at_notebook(notebook, changes)
    _edit_for_script(notebook, changes)
    notebook = _edited(notebook, changes)
    texts = [HEADER.format(name=document.path.name, script=script.name)]
    if notebook.functions(["display"]):
        texts.append(DISPLAY)
    codes = {code.number: code for code in notebook.codes if _why_no_script(code) is None}
    for cell in notebook.document.cells:
        texts.append(_as_percent_cell(cell, codes.get(cell.number)))
    return "\n".join(texts), changes.report()


def _edited(notebook: Notebook, changes: Changes) -> Notebook:
    """Return the notebook with its cells edited."""
    sources = changes.sources()
    before = notebook.document
    cells = [replace(each, source=sources.get(each.number, each.source)) for each in before.cells]
    return Notebook(replace(before, cells=tuple(cells)))


def _edit_for_script(notebook: Notebook, changes: Changes) -> None:
    """Make what a script changes beyond the converted notebook."""
    inside: set[ast.AST] = set()  # of maps that hold without a launcher alone
    for load in notebook.loads:
        given = load.argument("device_map")
        if given is not None:
            inside.update(ast.walk(given))
            text = f"RANK_DEVICE_MAP or ({load.code.text(given)})"
            changes.replace(load.code, load.code.span(given), text)
    for code in notebook.parsed:  # each process has another GPU
        for node in nodes_outside_strings(code.tree):
            if getattr(node, "value", None) == "cuda:0" and node not in inside:
                changes.replace(code, code.span(node), 'f"cuda:{LOCAL_RANK}"')
    _ignore_unused_parameters(notebook, changes)
    for found in notebook.train_calls if notebook.trainers else []:
        text = ALL_PROCESSES.format(trainer=found.trainer)
        changes.insert_before(found.code, found.call, text)
    last_code, last = _last_together(notebook)
    end = last_code.end_of_line(last_code.span(last)[1])
    changes.replace(last_code, (end, end), f"\n{ALONE}".replace("\n", last_code.newline))
    changes.changed("all processes train; after it the first process continues alone", last_code)


def _ignore_unused_parameters(notebook: Notebook, changes: Changes) -> None:
    """Keep DDP from looking for unused parameters.

    With adapters and recomputed activations it would find a parameter ready twice.
    """
    if not notebook.arguments:
        changes.look(
            f"give the trainer's arguments {UNUSED}=False: no SFTConfig was found to add it to"
        )
    for found in notebook.arguments:
        if found.argument(UNUSED) is None:
            add_argument(found, f"{UNUSED} = False", changes)
            changes.changed(f"the trainer's arguments get {UNUSED} = False", found)


def _last_together(notebook: Notebook) -> tuple[Code, ast.stmt]:
    """Return the last statement that all processes must run: a training or an evaluation.

    If that is in a function, it is the last call of the function; in a class, the last
    statement of all.
    """
    uses = [use for use in notebook.functions(TOGETHER) if use.receiver in notebook.trainer_names]
    calls = notebook.train_calls + uses
    followed: set[str] = set()
    while calls:
        last = max(calls, key=lambda found: found.place)
        code, statement = last.code, path_to(last.code.tree, last.call)[0]
        if not isinstance(statement, ast.FunctionDef) or statement.name in followed:
            break
        followed.add(statement.name)
        calls = notebook.functions([statement.name])
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        code = [part for part in notebook.parsed if part.tree.body][-1]
        statement = code.tree.body[-1]
    return code, statement


def _look_at_notebook(notebook: Notebook, changes: Changes) -> None:
    """Say what a script cannot do as a notebook does."""
    last_code, _ = _last_together(notebook)
    for found in notebook.functions(IN_NOTEBOOKS + SAVES):
        call = f"{found.name}()"
        if found.name in IN_NOTEBOOKS:
            changes.look(f"{call} works in a notebook alone", found)
        elif found.number < last_code.number:
            changes.look(f"{call} stands before the end of training, so every process saves", found)
        else:
            changes.kept(f"{call}, by the first process alone", found)
    for module, where in ONLY_IN_NOTEBOOKS.items():
        if module in notebook.modules:
            changes.look(f"imports {module}, which {where}")
    _look_at_batch(notebook, changes)
    for code in notebook.codes:
        problem = _why_no_script(code)
        if problem is not None:
            changes.look(f"is a comment of the script: {problem}", code)
        elif code.masked:
            changes.look(
                f"{len(code.masked)} line(s) of magics or of the shell are comments of the script",
                code,
            )


def _look_at_batch(notebook: Notebook, changes: Changes) -> None:
    """Say what the notebook's batch and steps are with several processes."""
    values = Values(notebook)
    names = ("per_device_train_batch_size", "gradient_accumulation_steps", "max_steps")
    rows, counted = "the notebook's rows", ""
    for found in notebook.arguments[-1:]:
        batch, accumulation, steps = (values.argument(found, name) for name in names)
        if isinstance(batch, int) and isinstance(accumulation, int):
            rows = f"{batch} x {accumulation} = {batch * accumulation} rows"
        if isinstance(steps, int):
            counted = f"; max_steps = {steps} is kept, and counts updates"
    changes.look(
        f"an update has {rows} for each process; divide gradient_accumulation_steps by their "
        f"number to keep the notebook's{counted}"
    )


def _why_no_script(code: Code) -> str | None:
    """Return why a cell cannot be part of a script, None if it can."""
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
    kind = "" if cell.kind == "code" else f"[{cell.kind}] "
    title = f"# %% {kind}cell {cell.number}\n"
    if code is None:
        return f"{title}{_as_comments(cell.source)}"
    written = LINE.findall(code.source)
    lines = []
    for number, line in enumerate(code.lines, 1):
        if number in code.masked:
            comment = _as_comments(written[number - 1]).rstrip()
            line = comment if line in ("#", "pass") else f"{line}  {comment}"
        lines.append(line)
    return title + "\n".join(lines) + "\n"


def _as_comments(text: str) -> str:
    """Return lines as comments; that of a cell magic must not look like a new cell."""
    made = []
    for line in LINE.findall(text):
        magic = f"magic {line.strip()}" if line.lstrip().startswith("%%") else line
        made.append(f"# {magic}".rstrip() + "\n")
    return "".join(made)
