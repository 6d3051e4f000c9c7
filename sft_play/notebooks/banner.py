"""The banner before training: how many rows an update really has. Pure."""

import ast

from sft_play.notebooks.code import Code, Edit
from sft_play.notebooks.load_call import lines_at
from sft_play.notebooks.notes import Note, changed, kept, look
from sft_play.notebooks.recognise import Found, Notebook

MARK = "Effective batch size"
# From the trainer's own arguments: a split model is one worker, whatever the number of GPUs
BANNER = """\
_args = {trainer}.args
_workers = max(1, _args.n_gpu) * _args.world_size
_rows = _args.per_device_train_batch_size * _workers * _args.gradient_accumulation_steps
print(
    f"Effective batch size: {{_args.per_device_train_batch_size}} rows x {{_workers}} data-parallel"
    f" x {{_args.gradient_accumulation_steps}} accumulated = {{_rows}} rows an update"
)
"""


def banner_edits(notebook: Notebook) -> tuple[dict[int, list[Edit]], list[Note]]:
    """Return the edits that print the effective batch before training, by cell."""
    if not notebook.trainers:
        return {}, []
    for code in notebook.parsed:
        if has_banner(code):
            return {}, [_of_banner(code)]
    calls = [found for found in notebook.train_calls if found.name in notebook.trainer_names]
    calls = calls or notebook.train_calls
    if not calls:
        said = "no call of trainer.train() was found, so nothing prints the effective batch size"
        return {}, [look(None, said)]
    edits: dict[int, list[Edit]] = {}
    notes = []
    for found in _one_a_cell(calls):
        place = found.code.place_before(found.call)
        text = lines_at(BANNER.format(trainer=found.name), place.indent, found.code.newline)
        edits[found.number] = [Edit(place.offset, place.offset, text)]
        notes.append(changed(found.number, "prints the effective batch size before training"))
    return edits, notes


def has_banner(code: Code) -> bool:
    """Return whether a cell prints an effective batch size."""
    return any(
        isinstance(node, ast.Constant) and isinstance(node.value, str) and MARK in node.value
        for node in ast.walk(code.tree)
    )


def _of_banner(code: Code) -> Note:
    """Say whether a banner that is there counts split GPUs as data-parallel ones."""
    reads_arguments = any(
        isinstance(node, ast.Attribute) and node.attr in ("n_gpu", "world_size")
        for node in ast.walk(code.tree)
    )
    if reads_arguments:
        return kept(code.number, "prints the effective batch size already")
    return look(
        code.number,
        "prints an effective batch size that it computes itself; a model split by device_map is "
        "one worker, so the number of GPUs does not multiply its batch",
    )


def _one_a_cell(calls: list[Found]) -> list[Found]:
    """Return the first call of each cell."""
    return list({found.number: found for found in reversed(calls)}.values())[::-1]
