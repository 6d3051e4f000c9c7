"""The loading cell: GPUs are counted before the model is loaded, and the load gets a device map.

Pure: a found call in, edits of its cell out.
"""

import ast
import io
import textwrap
import tokenize

from sft_play.notebooks import code as codes
from sft_play.notebooks.code import Code, Edit
from sft_play.notebooks.notes import Note, changed, kept, look
from sft_play.notebooks.recognise import Found

# In a notebook a model is divided among the GPUs; started by torchrun, each process has a whole one
DETECTION = """\
import os

import torch

num_gpus = torch.cuda.device_count()
print(f"Detected {num_gpus} GPU(s)")
if "LOCAL_RANK" in os.environ:  # started by torchrun: each process holds the whole model
    device_map = {"": int(os.environ["LOCAL_RANK"])} if num_gpus else None
elif num_gpus > 1:
    device_map = "balanced"
    print(f"Using device_map='balanced' to split the model across {num_gpus} GPUs")
    print("A split model computes one batch at a time; torchrun trains data-parallel")
else:
    device_map = None
    print("Single GPU mode - no device_map needed")

"""
VARIABLE = "device_map"
# On one GPU the load has no device_map, as before: None would leave 16-bit weights on the CPU
ARGUMENT = '**({"device_map": device_map} if device_map else {})'


def device_map_edits(load: Found) -> tuple[list[Edit], list[Note]]:
    """Return the edits that give a load its device map, and what to say of it."""
    given = load.keyword(VARIABLE)
    if given is not None:
        return [], [_of_given_map(load, given)]
    if any(VARIABLE in load.code.text(keyword) for keyword in load.call.keywords):
        return [], [kept(load.number, "the load has a device_map already")]
    if load.unpacks:
        mapping = "`**` takes keywords from a mapping: add device_map to it by hand"
        return [], [look(load.number, f"{load.name}.from_pretrained: {mapping}")]
    if may_be_true(load.keyword("fast_inference")):
        said = "fast_inference=True starts vLLM, which takes no device_map: the load is unchanged"
        return [], [look(load.number, said)]
    place = load.code.place_before(load.call)
    edits = [
        Edit(place.offset, place.offset, lines_at(DETECTION, place.indent, load.code.newline)),
        argument_edit(load.code, load.call, ARGUMENT),
    ]
    said = f"counts the GPUs, and {load.name}.from_pretrained gets device_map"
    return edits, [changed(load.number, said)]


def _of_given_map(load: Found, given: ast.expr) -> Note:
    if isinstance(given, ast.Name) and given.id == VARIABLE:
        return kept(load.number, "the load has a device_map already")
    written = load.code.text(given)
    return look(
        load.number,
        f"the load has device_map={written} of its own, which is kept; 'balanced' would split the "
        "model evenly",
    )


def argument_edit(code: Code, call: ast.Call, text: str) -> Edit:
    """Return the edit that adds a last argument to a call, in the call's own layout."""
    start, end = code.span(call)
    lines = codes.LINE.findall(code.source[start:end])
    tokens = _tokens("\n".join(line.rstrip("\r\n") for line in lines))
    closing, last = tokens[-1], tokens[-2]
    after_last = start + sum(map(len, lines[: last.end[0] - 1])) + last.end[1]
    if last.string == "(":
        return Edit(after_last, after_last, text)
    has_comma = last.string == ","
    if last.end[0] == closing.start[0]:
        return Edit(after_last, after_last, f" {text}" if has_comma else f", {text}")
    line_end = code.end_of_line(after_last)
    comment = code.source[after_last:line_end]
    comma = "" if has_comma else ","
    new_line = f"{code.newline}{_argument_indent(code, call)}{text},"
    return Edit(after_last, line_end, f"{comma}{comment}{new_line}")


def _tokens(call_text: str) -> list[tokenize.TokenInfo]:
    """Return the tokens of a call that are not white space or comments."""
    quiet = (
        tokenize.COMMENT,
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
        tokenize.ENDMARKER,
    )
    tokens = tokenize.generate_tokens(io.StringIO(call_text).readline)
    return [token for token in tokens if token.type not in quiet]


def _argument_indent(code: Code, call: ast.Call) -> str:
    """Return the white space that the line of the call's last argument begins with."""
    arguments = [*call.args, *call.keywords]
    last = max(arguments, key=lambda argument: (argument.lineno, argument.col_offset))
    start, _ = code.span(last)
    begin = max(code.source.rfind("\n", 0, start), code.source.rfind("\r", 0, start)) + 1
    line = code.source[begin:start]
    return line[: len(line) - len(line.lstrip())]


def lines_at(text: str, indent: str, newline: str) -> str:
    """Return lines of ours with the indent and newline of a cell."""
    return textwrap.indent(text, indent).replace("\n", newline)


def may_be_true(node: ast.expr | None) -> bool:
    """Return whether an argument is given and not written as False."""
    return node is not None and not (isinstance(node, ast.Constant) and not node.value)
