"""Memory statistics: the lines for one GPU stay, and lines for each of several are added.

Statements that measure a GPU and print what was found are told by what their variables hold.
Pure: the code of a notebook in, edits of its cells out.
"""

import ast
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, replace

from notebook_converter.changes import Changes
from notebook_converter.code import Code
from notebook_converter.recognize import Notebook, variable

MEASURES = frozenset(
    """
    max_memory_reserved max_memory_allocated memory_reserved memory_allocated get_device_properties
    """.split()
)
HARMLESS = frozenset("round print torch str float int max min".split())
LOGGERS = frozenset({"logger", "logging", "log"})
RUNTIME = "train_runtime"
MARKER = "<the lines for one GPU>"
# A process of torchrun measures its own GPU, as a notebook on one GPU does
BEFORE = """\
import os

num_gpus = torch.cuda.device_count()
if num_gpus == 1 or "LOCAL_RANK" in os.environ:
{one}
else:
    {start}, {most} = [], []
    for i in range(num_gpus):
        {stats} = torch.cuda.get_device_properties(i)
        {start}.append(round(torch.cuda.{measure}(i) / 1024 / 1024 / 1024, 3))
        {most}.append(round({stats}.total_memory / 1024 / 1024 / 1024, 3))
        print(
            f"GPU {{i}} = {{{stats}.name}}. Max memory = {{{most}[i]}} GB. "
            f"Reserved = {{{start}[i]}} GB."
        )
    if num_gpus > 1:
        total_max, total_reserved = round(sum({most}), 3), round(sum({start}), 3)
        print(
            f"\\nTotal across {{num_gpus}} GPUs: {{total_max}} GB max, "
            f"{{total_reserved}} GB reserved"
        )
"""
AFTER = """\
import os

num_gpus = torch.cuda.device_count()
if num_gpus == 1 or "LOCAL_RANK" in os.environ:
{one}
else:
    {used}, {training} = [], []
    for i in range(num_gpus):
        {used}.append(round(torch.cuda.{measure}(i) / 1024 / 1024 / 1024, 3))
        {training}.append(round({used}[i] - {start}[i], 3))
        {percentage} = round({used}[i] / {most}[i] * 100, 3)
        print(
            f"GPU {{i}}: Peak reserved = {{{used}[i]}} GB ({{{percentage}}}%), "
            f"Training = {{{training}[i]}} GB "
            f"({{round({training}[i] / {most}[i] * 100, 3)}}%)"
        )
    if num_gpus > 1:
        total_used, total_max = round(sum({used}), 3), sum({most})
        total_training = round(sum({training}), 3)
        print(
            f"\\nTotal across {{num_gpus}} GPUs: Peak = {{total_used}} GB "
            f"({{round(total_used / total_max * 100, 3)}}%), Training = {{total_training}} GB "
            f"({{round(total_training / total_max * 100, 3)}}%)"
        )
"""
TIME = """\
    _seconds = {stats}.metrics['train_runtime']
    print(f"\\n{{_seconds}} seconds ({{round(_seconds / 60, 2)}} minutes) used for training.")
"""


@dataclass(frozen=True)
class Names:
    """The variables of a notebook's memory statistics, by what they hold."""

    stats: str  # properties of a GPU
    start: str  # reserved before training
    most: str  # total memory
    measure: str  # torch.cuda's function
    used: str = "used_memory"
    training: str = "used_memory_for_lora"
    percentage: str = "used_percentage"


def convert_statistics(notebook: Notebook, changes: Changes) -> None:
    """Let every cell with memory statistics measure each GPU."""
    converted: list[ast.stmt] = []
    names: Names | None = None
    for code in notebook.parsed:
        if not measures(code.tree):
            continue
        if covers_all_gpus(code):
            changes.kept("measures the memory of each GPU already", code)
            continue
        known = {names.stats, names.start, names.most} if names else set()
        for run in _runs(code.tree, known):
            held = _variables(run, names)
            is_before = held.keys() == {"stats", "most", "used", "measure"}
            is_after = names is not None and "used" in held and not held.keys() & {"most", "other"}
            if is_before:
                names = Names(held["stats"], held["used"], held["most"], held["measure"])
            if not (is_before or is_after) or not _can_be_indented(code, run):
                changes.look(
                    "measures the memory of one GPU in a way of its own, which is kept", code
                )
                continue
            if is_after:
                names = replace(names, **held)
            converted += run
            template = BEFORE if is_before else _after(run)
            _replace(changes, code, run, template.format(one=MARKER, **vars(names)))
            when = "before" if is_before else "after"
            changes.changed(f"memory {when} training: of each GPU", code)
    if names is not None:
        _look_at_other_uses(notebook, changes, names, converted)


def covers_all_gpus(code: Code) -> bool:
    """Return whether a cell asks for the memory of a GPU by a number that is not fixed."""
    calls = measures(code.tree)
    return any(call.args and not isinstance(call.args[0], ast.Constant) for call in calls)


def measures(tree: ast.AST) -> list[ast.Call]:
    """Return the calls of torch.cuda's memory functions."""
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    return [call for call in calls if getattr(call.func, "attr", None) in MEASURES]


def _runs(node: ast.AST, known: set[str]) -> Iterator[list[ast.stmt]]:
    """Yield adjacent statements that measure memory and print what was measured.

    `known` are the variables that hold measurements; variables that are found are added.
    """
    for _, block in ast.iter_fields(node):
        run: list[ast.stmt] = []
        for part in (*block, None) if isinstance(block, list) else ():
            target = _assigned_name(part)
            if target is not None and _is_of_memory(part.value, known):
                known.add(target)
                run.append(part)
                continue
            if run and _is_print(part, known):
                run.append(part)
                continue
            if any(map(measures, run)):
                # what it prints last may be no measure, such as print("done")
                while not (_names(run[-1]) & known or RUNTIME in _texts(run[-1])):
                    run.pop()
                yield run
            run = []
            if isinstance(part, ast.AST):
                yield from _runs(part, known)


def _can_be_indented(code: Code, run: list[ast.stmt]) -> bool:
    """Return whether a run has its lines for itself, and no string that goes over several."""
    end = code.span(run[-1])[1]
    behind = code.source[end : code.end_of_line(end)].partition("#")[0]
    nodes = (node for statement in run for node in ast.walk(statement))
    strings = (node for node in nodes if isinstance(node, ast.JoinedStr | ast.Constant))
    is_alone = code.begins_its_line(run[0]) and not behind.strip(" \t;")
    return is_alone and all(node.lineno == node.end_lineno for node in strings)


def _assigned_name(statement: ast.stmt | None) -> str | None:
    """Return the variable that a statement sets, None if it does something else."""
    is_plain = isinstance(statement, ast.Assign) and len(statement.targets) == 1
    return getattr(statement.targets[0], "id", None) if is_plain else None


def _is_of_memory(value: ast.expr, known: set[str]) -> bool:
    """Return whether a value follows from memory: measured, or computed of what was."""
    if measures(value):
        return True
    nodes = list(ast.walk(value))
    is_computed = any(isinstance(node, ast.BinOp | ast.Attribute) for node in nodes)
    calls = [node.func for node in nodes if isinstance(node, ast.Call)]
    is_plain = all(getattr(function, "id", None) == "round" for function in calls)
    return is_computed and is_plain and bool(_names(value) & known)


def _is_print(statement: ast.stmt | None, known: set[str]) -> bool:
    """Return whether a statement prints, or logs, measures or the time of training alone."""
    call = statement.value if isinstance(statement, ast.Expr) else None
    if not isinstance(call, ast.Call):
        return False
    is_print = getattr(call.func, "id", None) == "print"
    is_log = getattr(call.func, "attr", None) == "info" and variable(call.func.value) in LOGGERS
    if not is_print and not is_log:
        return False
    return RUNTIME in _texts(statement) or _names(statement) <= known | HARMLESS | LOGGERS


def _names(node: ast.AST) -> set[str]:
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}


def _texts(node: ast.AST) -> set[object]:
    return {part.value for part in ast.walk(node) if isinstance(part, ast.Constant)}


def _variables(run: list[ast.stmt], before: Names | None) -> dict[str, str]:
    """Return the variables that a run sets, by what they hold: a field of Names or `other`."""
    found = {}
    for statement in run:
        name = _assigned_name(statement)
        if name is None:
            continue
        calls, names = measures(statement.value), _names(statement.value)
        measure = calls[0].func.attr if calls else None
        if any(getattr(node, "attr", None) == "total_memory" for node in ast.walk(statement)):
            found["most"] = name
        elif measure == "get_device_properties":
            found["stats"] = name
        elif measure is not None:
            found |= {"used": name, "measure": measure}
        elif before is not None and before.start in names:
            found["training"] = name
        elif before is not None and before.most in names:
            found.setdefault("percentage", name)
        else:
            found["other"] = name
    return found


def _after(run: list[ast.stmt]) -> str:
    """Return the lines after training, with its time if the run prints `stats.metrics[...]`."""
    for node in (node for statement in run for node in ast.walk(statement)):
        name = getattr(getattr(node, "value", None), "id", None)
        if getattr(node, "attr", None) == "metrics" and name is not None:
            return AFTER + TIME.replace("{stats}", name)
    return AFTER


def _replace(changes: Changes, code: Code, run: list[ast.stmt], text: str) -> None:
    """Put the lines of several GPUs around those of one, which are indented."""
    place = code.place_before(run[0])
    end = code.end_of_line(code.span(run[-1])[1])
    step = "\t" if "\t" in place.indent else "    "
    one = re.sub(r"(?m)^(?=[^\r\n])", step, code.source[place.offset : end])
    lines = textwrap.indent(text.rstrip("\n"), place.indent).replace("\n", code.newline)
    changes.replace(code, (place.offset, end), lines.replace(place.indent + MARKER, one))


def _look_at_other_uses(
    notebook: Notebook, changes: Changes, names: Names, converted: list[ast.stmt]
) -> None:
    """Name each cell that uses a variable which is now a list on several GPUs."""
    lists = {names.start, names.most, names.used, names.training}
    inside = {part for statement in converted for part in ast.walk(statement)}
    for code in notebook.parsed:
        nodes = [node for node in ast.walk(code.tree) if isinstance(node, ast.Name)]
        loaded = [node for node in nodes if isinstance(node.ctx, ast.Load) and node not in inside]
        used = {node.id for node in loaded} & lists
        if used and not covers_all_gpus(code):
            said = "a list on several GPUs, a number for each; see whether this cell takes one"
            changes.look(f"uses {', '.join(sorted(used))}: {said}", code)
