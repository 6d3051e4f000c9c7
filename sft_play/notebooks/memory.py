"""Memory statistics: the lines for one GPU stay, and lines for each of several are added.

Statements that measure a GPU and print what was found are told by what their variables hold.
Pure: the code of a notebook in, edits of its cells out.
"""

import ast
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, replace

from sft_play.notebooks import code as codes
from sft_play.notebooks.changes import Changes
from sft_play.notebooks.code import Code
from sft_play.notebooks.recognise import Notebook

MEASURES = frozenset(
    """
    max_memory_reserved max_memory_allocated memory_reserved memory_allocated get_device_properties
    """.split()
)
HARMLESS = frozenset({"round", "print", "torch", "str", "float", "int", "max", "min"})
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
    converted: set[ast.stmt] = set()
    names: Names | None = None
    for code in notebook.parsed:
        if not measures(code.tree):
            continue
        if covers_all_gpus(code):
            changes.kept(code.number, "measures the memory of each GPU already")
            continue
        blocks = list(_blocks(code.tree))
        for run in (run for block in blocks for run in _runs(block, set())):
            names = _names_before(run) or names
        before = names
        known = {before.stats, before.start, before.most} if before else set()
        runs = [(run, block) for block in blocks for run in _runs(block, known)]
        for run, block in sorted(runs, key=lambda pair: pair[0][0].lineno):
            found, template, when = _names_before(run), BEFORE, "before"
            if found is None and before is not None:
                found, template, when = _names_after(run, before), _after(run), "after"
            if found is None or not _can_be_indented(block, run):
                said = "measures the memory of one GPU in a way of its own, which is kept"
                changes.look(code.number, said)
                continue
            names = found
            converted.update(run)
            _replace(changes, code, run, template.format(one=MARKER, **vars(found)))
            changes.changed(code.number, f"memory {when} training: of each GPU")
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


def _blocks(tree: ast.AST) -> Iterator[list[ast.stmt]]:
    """Yield every list of statements that stand one after the other."""
    for node in ast.walk(tree):
        for name in ("body", "orelse", "finalbody"):
            block = getattr(node, name, None)
            if isinstance(block, list):
                yield block


def _runs(block: list[ast.stmt], known: set[str]) -> Iterator[list[ast.stmt]]:
    """Yield what stands together: the statements that measure, and print what was measured.

    `known` are the variables with measures, to which those of the block are added.
    """
    run: list[ast.stmt] = []
    for statement in (*block, None):
        target = _assigned_name(statement)
        if target is not None and _is_of_memory(statement.value, known):
            known.add(target)
            run.append(statement)
        elif run and _is_print(statement, known):
            run.append(statement)
        else:
            if any(map(measures, run)):
                # what it prints last may be no measure, such as print("done")
                while not (_names(run[-1]) & known or RUNTIME in _texts(run[-1])):
                    run.pop()
                yield run
            run = []


def _can_be_indented(block: list[ast.stmt], run: list[ast.stmt]) -> bool:
    """Return whether a run has its lines for itself, and no string that goes over several."""
    lines = range(run[0].lineno, run[-1].end_lineno + 1)
    others = [part for part in block if part not in run]
    shares = any(part.lineno in lines or part.end_lineno in lines for part in others)
    nodes = (node for statement in run for node in ast.walk(statement))
    strings = (node for node in nodes if isinstance(node, ast.JoinedStr | ast.Constant))
    return not shares and all(node.lineno == node.end_lineno for node in strings)


def _assigned_name(statement: ast.stmt | None) -> str | None:
    """Return the variable that a statement sets, None where it does something else."""
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
    return is_computed and is_plain and bool((_names(value) - HARMLESS) & known)


def _is_print(statement: ast.stmt | None, known: set[str]) -> bool:
    """Return whether a statement prints, or logs, measures or the time of training alone."""
    call = statement.value if isinstance(statement, ast.Expr) else None
    if not isinstance(call, ast.Call):
        return False
    words = ast.unparse(call.func).split(".")
    if words != ["print"] and not (words[0] in LOGGERS and words[1:] == ["info"]):
        return False
    return RUNTIME in _texts(statement) or _names(statement) <= known | HARMLESS | LOGGERS


def _names(node: ast.AST) -> set[str]:
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}


def _texts(node: ast.AST) -> set[object]:
    return {part.value for part in ast.walk(node) if isinstance(part, ast.Constant)}


def _assignments(run: list[ast.stmt]) -> Iterator[tuple[str, ast.expr, str | None]]:
    """Yield the variables that a run sets, with their values and the function that measures."""
    for part in run:
        name = _assigned_name(part)
        if name is not None:
            calls = measures(part.value)
            yield name, part.value, calls[0].func.attr if calls else None


def _names_before(run: list[ast.stmt]) -> Names | None:
    """Return the variables of statistics before training; None where the run has others."""
    found = {}
    for name, value, measure in _assignments(run):
        if any(getattr(node, "attr", None) == "total_memory" for node in ast.walk(value)):
            found["most"] = name
        elif measure == "get_device_properties":
            found["stats"] = name
        elif measure is not None:
            found |= {"start": name, "measure": measure}
        else:
            return None
    return Names(**found) if found.keys() == {"most", "stats", "start", "measure"} else None


def _names_after(run: list[ast.stmt], before: Names) -> Names | None:
    """Return the variables of statistics after training; None where the run has others."""
    found = {}
    for name, value, measure in _assignments(run):
        if measure is not None:
            found |= {"used": name, "measure": measure}
        elif before.start in _names(value):
            found["training"] = name
        elif before.most in _names(value):
            found.setdefault("percentage", name)
        else:
            return None
    if found.get("measure") in (None, "get_device_properties"):
        return None
    return replace(before, **found)


def _after(run: list[ast.stmt]) -> str:
    """Return the lines after training, with its time where the run prints `stats.metrics[...]`."""
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
    changes.replace(code, place.offset, end, lines.replace(place.indent + MARKER, one))


def _look_at_other_uses(
    notebook: Notebook, changes: Changes, names: Names, converted: set[ast.stmt]
) -> None:
    """Name each cell that uses a variable which is now a list on several GPUs."""
    lists = {names.start, names.most, names.used, names.training}
    for code in notebook.parsed:
        nodes = codes.nodes_without(code.tree, converted)
        loaded = (node for node in nodes if isinstance(getattr(node, "ctx", None), ast.Load))
        used = {getattr(node, "id", None) for node in loaded} & lists
        if used and not covers_all_gpus(code):
            said = "a list on several GPUs, a number for each; see whether this cell takes one"
            changes.look(code.number, f"uses {', '.join(sorted(used))}: {said}")
