"""Finds the memory statistics of a cell: statements that measure a GPU and print what was found.

Pure: syntax trees in, statements by what their variables hold out.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from sft_play.notebooks import code as codes
from sft_play.notebooks.code import Code

MEASURES = frozenset(
    """
    max_memory_reserved max_memory_allocated memory_reserved memory_allocated get_device_properties
    """.split()
)
HARMLESS = frozenset({"round", "print", "torch", "str", "float", "int", "max", "min"})
LOGGERS = frozenset({"logger", "logging", "log"})
RUNTIME = "train_runtime"


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
        call.args and not isinstance(call.args[0], ast.Constant) for call in measures(code.tree)
    )


def measures_one_gpu(code: Code) -> bool:
    """Return whether a cell measures the memory of one GPU alone."""
    return bool(measures(code.tree)) and not covers_all_gpus(code)


def measures(tree: ast.AST) -> list[ast.Call]:
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
    return any(measures(statement) for statement in run)


def _assigned_name(statement: ast.stmt) -> str | None:
    if not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
        return None
    target = statement.targets[0]
    return target.id if isinstance(target, ast.Name) else None


def _is_arithmetic(value: ast.expr, known: set[str]) -> bool:
    """Return whether a value follows from memory: measured, or computed of what was."""
    if measures(value):
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
    calls = measures(value)
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
