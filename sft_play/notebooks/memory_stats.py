"""Memory statistics: the lines for one GPU stay, and lines for each of several stand beside them.

Pure: the code of a cell in, edits of it out.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from sft_play.notebooks import code as codes
from sft_play.notebooks.code import Code, Edit
from sft_play.notebooks.load_call import lines_at
from sft_play.notebooks.notes import Note, changed, kept, look
from sft_play.notebooks.recognise import Notebook

MEASURES = frozenset(
    """
    max_memory_reserved max_memory_allocated memory_reserved memory_allocated get_device_properties
    """.split()
)
HARMLESS = frozenset({"round", "print", "torch", "str", "float", "int", "max", "min"})
LOGGERS = frozenset({"logger", "logging", "log"})
RUNTIME = "train_runtime"
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


@dataclass(frozen=True)
class Statistics:
    """Statements that measure one GPU's memory and print it; they stand one after the other."""

    code: Code
    when: Literal["before", "after"]
    statements: tuple[ast.stmt, ...]
    names: Names
    trained: str | None  # the variable whose metrics have the time of training

    @property
    def number(self) -> int:
        """The cell's number."""
        return self.code.number


def statistics_edits(notebook: Notebook) -> tuple[dict[int, list[Edit]], list[Note]]:
    """Return the edits of all cells with memory statistics, by cell, and what to say of them."""
    edits: dict[int, list[Edit]] = {}
    notes: list[Note] = []
    converted: set[ast.stmt] = set()
    names: Names | None = None
    for code in notebook.parsed:
        if not _measures(code.tree):
            continue
        if covers_all_gpus(code):
            notes.append(kept(code.number, "measures the memory of each GPU already"))
            continue
        found, has_others = find_statistics(code, names)
        if has_others:
            said = "measures the memory of one GPU in a way of its own, which is kept"
            notes.append(look(code.number, said))
        for part in sorted(found, key=lambda part: part.statements[0].lineno):
            names = part.names
            converted.update(part.statements)
            edits.setdefault(code.number, []).append(_edit(part))
            notes.append(changed(code.number, f"memory {part.when} training: of each GPU"))
    if names is not None:
        notes += _other_uses(notebook, names, converted)
    return edits, notes


def find_statistics(code: Code, before: Names | None) -> tuple[list[Statistics], bool]:
    """Return the statistics of a cell, and whether it measures in another way as well.

    `before` are the names of those before training in an earlier cell.
    """
    found: list[Statistics] = []
    has_others = False
    for block in codes.blocks(code.tree):
        named = [_names_before(run) for run in _runs(block, set())]
        before = next(filter(None, named), before)
    known = set() if before is None else {before.stats, before.start, before.most}
    for block in codes.blocks(code.tree):
        for run in _runs(block, known):
            part = _statistics(code, run, before) if _can_be_indented(code, block, run) else None
            if part is None:
                has_others = True
                continue
            found.append(part)
    return found, has_others


def _statistics(code: Code, run: list[ast.stmt], before: Names | None) -> Statistics | None:
    """Return a run of statements as statistics, None where it is another one."""
    names = _names_before(run)
    if names is not None:
        return Statistics(code, "before", tuple(run), names, None)
    names = None if before is None else _names_after(run, before)
    if names is not None:
        return Statistics(code, "after", tuple(run), names, _trained(run))
    return None


def covers_all_gpus(code: Code) -> bool:
    """Return whether a cell asks for the memory of a GPU by a number that is not fixed."""
    return any(
        call.args and not isinstance(call.args[0], ast.Constant) for call in _measures(code.tree)
    )


def measures_one_gpu(code: Code) -> bool:
    """Return whether a cell measures the memory of one GPU alone."""
    return bool(_measures(code.tree)) and not covers_all_gpus(code)


def _measures(tree: ast.AST) -> list[ast.Call]:
    """Return the calls of torch.cuda's memory functions."""
    return [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in MEASURES
    ]


def _runs(block: list[ast.stmt], known: set[str]) -> Iterator[list[ast.stmt]]:
    """Yield what stands together: the statements that measure, and print what was measured.

    `known` are the variables with measures, to which those of the block are added.
    """
    run: list[ast.stmt] = []
    for statement in block:
        target = _assigned_name(statement)
        if target is not None and _is_arithmetic(statement.value, known):
            known.add(target)
        elif not (run and _is_print(statement, known)):
            if _measures_here(run):
                yield _without_last_words(run, known)
            run = []
            continue
        run.append(statement)
    if _measures_here(run):
        yield _without_last_words(run, known)


def _without_last_words(run: list[ast.stmt], known: set[str]) -> list[ast.stmt]:
    """Return a run without prints at its end that print no measure, such as `print("done")`."""
    while not (_names(run[-1]) & known or RUNTIME in _constants(run[-1])):
        run = run[:-1]
    return run


def _names(node: ast.AST) -> set[str]:
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}


def _can_be_indented(code: Code, block: list[ast.stmt], run: list[ast.stmt]) -> bool:
    """Return whether a run has its lines for itself, and no string that goes over several."""
    others = [statement for statement in block if statement not in run]
    lines = range(run[0].lineno, run[-1].end_lineno + 1)
    shares = any(part.lineno in lines or part.end_lineno in lines for part in others)
    strings = [
        node
        for statement in run
        for node in ast.walk(statement)
        if isinstance(node, ast.JoinedStr | ast.Constant) and node.lineno != node.end_lineno
    ]
    begin, _ = code.span(run[0])
    return not shares and not strings and code.place_before(run[0]).offset <= begin


def _measures_here(run: list[ast.stmt]) -> bool:
    return any(_measures(statement) for statement in run)


def _assigned_name(statement: ast.stmt) -> str | None:
    if not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
        return None
    target = statement.targets[0]
    return target.id if isinstance(target, ast.Name) else None


def _is_arithmetic(value: ast.expr, known: set[str]) -> bool:
    """Return whether a value follows from memory: measured, or computed of what was."""
    if _measures(value):
        return True
    names = _names(value)
    is_computed = any(isinstance(node, ast.BinOp | ast.Attribute) for node in ast.walk(value))
    calls = [node for node in ast.walk(value) if isinstance(node, ast.Call)]
    is_plain = all(isinstance(call.func, ast.Name) and call.func.id == "round" for call in calls)
    return is_computed and is_plain and bool((names - HARMLESS) & known)


def _is_print(statement: ast.stmt, known: set[str]) -> bool:
    if not isinstance(statement, ast.Expr) or not isinstance(statement.value, ast.Call):
        return False
    if not _prints(statement.value.func):
        return False
    if RUNTIME in _constants(statement):
        return True
    return _names(statement) <= known | HARMLESS | LOGGERS


def _prints(function: ast.expr) -> bool:
    """Return whether a function is print, or a logger's info."""
    if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name):
        return function.attr == "info" and function.value.id in LOGGERS
    return isinstance(function, ast.Name) and function.id == "print"


def _constants(node: ast.AST) -> set[str]:
    return {
        part.value
        for part in ast.walk(node)
        if isinstance(part, ast.Constant) and isinstance(part.value, str)
    }


def _values(run: list[ast.stmt]) -> dict[str, ast.expr]:
    """Return the variables that a run sets, with their values."""
    return {name: part.value for part in run if (name := _assigned_name(part)) is not None}


def _measure_of(value: ast.expr) -> str | None:
    calls = _measures(value)
    return calls[0].func.attr if calls else None


def _names_before(run: list[ast.stmt]) -> Names | None:
    """Return the variables of statistics before training; None where the run has others."""
    stats = start = most = measure = None
    for name, value in _values(run).items():
        measured = _measure_of(value)
        attributes = {node.attr for node in ast.walk(value) if isinstance(node, ast.Attribute)}
        if "total_memory" in attributes:
            most = name
        elif measured == "get_device_properties":
            stats = name
        elif measured is not None:
            start, measure = name, measured
        else:
            return None
    if None in (stats, start, most):
        return None
    return Names(stats, start, most, measure)


def _names_after(run: list[ast.stmt], before: Names) -> Names | None:
    """Return the variables of statistics after training; None where the run has others."""
    used = training = percentage = measure = None
    for name, value in _values(run).items():
        names = _names(value)
        if _measure_of(value) is not None:
            used, measure = name, _measure_of(value)
        elif before.start in names:
            training = name
        elif before.most in names:
            percentage = percentage or name
        else:
            return None
    if used is None or measure == "get_device_properties":
        return None
    return Names(
        before.stats,
        before.start,
        before.most,
        measure,
        used,
        training or Names.training,
        percentage or Names.percentage,
    )


def _trained(run: list[ast.stmt]) -> str | None:
    """Return the variable of `trainer_stats.metrics["train_runtime"]`."""
    for statement in run:
        for node in ast.walk(statement):
            is_metrics = isinstance(node, ast.Attribute) and node.attr == "metrics"
            if is_metrics and isinstance(node.value, ast.Name):
                return node.value.id
    return None


def _edit(found: Statistics) -> Edit:
    """Return the edit that puts the statistics of several GPUs beside those of one."""
    code, names = found.code, found.names
    place = code.place_before(found.statements[0])
    _, end = code.span(found.statements[-1])
    end = code.end_of_line(end)
    one = code.source[place.offset : end]
    template = BEFORE if found.when == "before" else AFTER
    if found.trained is not None:
        template += TIME.replace("{stats}", found.trained)
    marker = "<the lines for one GPU>"
    text = template.format(one=marker, **vars(names)).rstrip("\n")
    text = lines_at(text, place.indent, code.newline)
    indented = re.sub(r"(?m)^(?=[^\r\n])", _step(place.indent), one)
    text = text.replace(place.indent + marker, indented)
    return Edit(place.offset, end, text)


def _step(indent: str) -> str:
    """Return one more level of indent, in tabs where the cell has tabs."""
    return "\t" if "\t" in indent else "    "


def _other_uses(notebook: Notebook, names: Names, converted: set[ast.stmt]) -> list[Note]:
    """Return a note for each cell that uses a variable which is now a list on several GPUs."""
    lists = {names.start, names.most, names.used, names.training}
    notes = []
    for code in notebook.parsed:
        used = set(_loaded_names(code.tree, converted)) & lists
        if used and not covers_all_gpus(code):
            said = "a list on several GPUs, a number for each; see whether this cell takes one"
            notes.append(look(code.number, f"uses {', '.join(sorted(used))}: {said}"))
    return notes


def _loaded_names(node: ast.AST, without: set[ast.stmt]) -> Iterator[str]:
    """Yield the names that are read below a node, but for those in some statements."""
    if node in without:
        return
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
        yield node.id
    for child in ast.iter_child_nodes(node):
        yield from _loaded_names(child, without)
