"""Memory statistics: the lines for one GPU stay, and lines for each of several stand beside them.

Pure: the code of a notebook in, edits of its cells out.
"""

import ast
import re

from sft_play.notebooks import code as codes
from sft_play.notebooks.code import Edit
from sft_play.notebooks.load_call import lines_at
from sft_play.notebooks.memory_runs import (
    Names,
    Statistics,
    covers_all_gpus,
    find_statistics,
    measures,
)
from sft_play.notebooks.notes import Note, changed, kept, look
from sft_play.notebooks.recognise import Notebook

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


def statistics_edits(notebook: Notebook) -> tuple[dict[int, list[Edit]], list[Note]]:
    """Return the edits of all cells with memory statistics, by cell, and what to say of them."""
    edits: dict[int, list[Edit]] = {}
    notes: list[Note] = []
    converted: set[ast.stmt] = set()
    names: Names | None = None
    for code in notebook.parsed:
        if not measures(code.tree):
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
        others = codes.nodes_without(code.tree, converted)
        names_used = (node for node in others if isinstance(node, ast.Name))
        used = {node.id for node in names_used if isinstance(node.ctx, ast.Load)} & lists
        if used and not covers_all_gpus(code):
            said = "a list on several GPUs, a number for each; see whether this cell takes one"
            notes.append(look(code.number, f"uses {', '.join(sorted(used))}: {said}"))
    return notes
