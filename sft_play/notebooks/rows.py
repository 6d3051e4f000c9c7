"""Where a notebook's rows come from, and what becomes of the way in which it formats them. Pure."""

import ast
from typing import Any

from sft_play.notebooks.carried import Carried
from sft_play.notebooks.notes import Note, look
from sft_play.notebooks.recognise import Found, Notebook
from sft_play.notebooks.values import Values

FILE_BUILDERS = ("json", "csv", "parquet", "text")
TEMPLATE = "here the model's own chat template renders the rows; model.chat_template names another"


# Functions that change rows beyond their format
RESHAPES = ("to_sharegpt", "apply_chat_template", "concatenate_datasets", "interleave_datasets")


def take_rows(carried: Carried, notebook: Notebook, values: Values, data: str | None) -> None:
    """Take data.train_path: what the user names, else what the notebook loads."""
    _take_held_out(carried, notebook, values)
    if data is not None:
        carried.values["data.train_path"] = data
        carried.origins["data.train_path"] = "DATA of make convert-notebook"
        return
    loads = notebook.functions(["load_dataset"])
    if not loads:
        said = "loads no data set by name: give the file with DATA=rows.jsonl"
        carried.notes.append(look(None, said))
        return
    source = _source(carried, values, loads[0])
    if source is not None:
        carried.put("data.train_path", source, loads[0].number, "load_dataset")
    if len(loads) > 1:
        said = "loads several data sets; the first is carried: see data.train_path"
        carried.notes.append(look(loads[0].number, said))


def _take_held_out(carried: Carried, notebook: Notebook, values: Values) -> None:
    """Take the share of the rows that `train_test_split` holds out."""
    for split in notebook.methods("train_test_split")[:1]:
        share = values.keyword(split, "test_size")
        if isinstance(share, float) and 0 < share < 0.5:
            carried.put("data.val_size", share, split.number, f"test_size = {share}")
        else:
            said = "train_test_split is not carried: data.val_size is a share under 0.5"
            carried.notes.append(look(split.number, said))


def _source(carried: Carried, values: Values, load: Found) -> Any:
    """Return the source of a load_dataset call, None where it cannot be told."""
    read = [values.of(load.code, node) for node in load.call.args]
    path = read[0] if read else values.keyword(load, "path")
    if path in FILE_BUILDERS:
        files = values.keyword(load, "data_files")
        if isinstance(files, dict):
            files = files.get("train")
        path = files
    if not isinstance(path, str):
        said = "the data set's name is told only by running: give it with DATA="
        carried.notes.append(look(load.number, said))
        return None
    split = values.keyword(load, "split")
    subset = read[1] if len(read) > 1 else values.keyword(load, "name")
    section = {"path": path}
    if isinstance(split, str):
        name, _, part = split.partition("[")
        if part:
            said = f"split = {split!r}: the part in brackets is not carried, all rows are used"
            carried.notes.append(look(load.number, said))
        if name != "train":
            section["split"] = name
    if isinstance(subset, str):
        section["subset"] = subset
    return path if len(section) == 1 else [section]


def notes_of_rows(notebook: Notebook) -> list[Note]:
    """Return what of the notebook's formatting has no counterpart, or another one."""
    notes = [
        look(found.number, f"get_chat_template with {_template(found)}: {TEMPLATE}")
        for found in notebook.functions(["get_chat_template"])[:1]
    ]
    maps = [found for found in notebook.methods("map") if _is_of_rows(found)]
    if maps:
        said = "rows are read as they are in the file, and the function of .map is not carried"
        notes.append(look(maps[0].number, f"{said}: rows of a shape of its own need DATA="))
    notes += [
        look(found.number, f"{found.name} is not carried: {TEMPLATE}")
        for found in notebook.functions(RESHAPES)
        if isinstance(found.call.func, ast.Name)
    ]
    prompt = _prompt_with_end(notebook)
    if prompt is not None:
        said = "a prompt of its own with EOS_TOKEN is not carried"
        notes.append(look(prompt, f"{said}: {TEMPLATE}"))
    masked = notebook.functions(["train_on_responses_only", "DataCollatorForCompletionOnlyLM"])
    if not masked:
        said = "the notebook trains on prompts too; here answers alone carry loss, but for rows of "
        said += "plain text"
        notes.append(look(None, said))
    return notes


def _template(found: Found) -> str:
    node = found.keyword("chat_template")
    return "a template" if node is None else found.code.text(node)


def _is_of_rows(found: Found) -> bool:
    return bool(found.call.args) and isinstance(found.call.args[0], ast.Name | ast.Lambda)


def _prompt_with_end(notebook: Notebook) -> int | None:
    """Return the cell that ends a text of its own with the stop token."""
    for code in notebook.parsed:
        for node in ast.walk(code.tree):
            if isinstance(node, ast.Attribute) and node.attr == "eos_token":
                return code.number
    return None
