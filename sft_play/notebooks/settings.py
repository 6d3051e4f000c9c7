"""A notebook's settings as a config of SFT-Play: what has a counterpart is carried, and the rest is
named. Pure: no file is opened.
"""

import ast
import re
from typing import Any

from sft_play.config.commented import Line, commented_yaml
from sft_play.config.schema import settings
from sft_play.errors import ConfigError
from sft_play.notebooks import rows
from sft_play.notebooks.carried import Carried, setting_of
from sft_play.notebooks.document import Document
from sft_play.notebooks.notes import Note, changed, look
from sft_play.notebooks.recognise import (
    ARGUMENTS,
    SFT_TRAINERS,
    Found,
    Kind,
    Notebook,
    variable,
)
from sft_play.notebooks.values import Unknown, Values

# Keywords that say nothing about the run, or that the rows and the model answer for
SILENT = frozenset(
    """
    model tokenizer processing_class args train_dataset data_collator dataset_num_proc
    dataset_kwargs formatting_func device_map disable_log_stats
    max_lora_rank use_exact_model_name remove_unused_columns logging_dir task_type peft_config
    finetune_vision_layers finetune_language_layers finetune_attention_modules finetune_mlp_modules
    """.split()
)
SECRET = re.compile(r"(?:^|_)(?:token|key|secret|password)$")  # values that no report shows
# Values that ask for what happens here anyway
PLAIN = {
    "bias": ("none",),
    "loftq_config": (None, {}),
    "load_in_8bit": (False, None),
    "load_in_16bit": (False, True, None),
    "fast_inference": (False, None),
    "dtype": (None,),
    "eval_dataset": (None,),
    "logging_strategy": ("steps",),
    "dataset_text_field": ("text", "", None),
    "ddp_find_unused_parameters": (False, None),
}
QUANTISED_NAMES = ("-unsloth-bnb-4bit", "-bnb-4bit")
WHOLE_MODULES = ("embed_tokens", "lm_head")
# What get_peft_model takes where a notebook leaves it out; r is the same here
UNSLOTH_ALPHA = 16
COMPARES_CHECKPOINTS = (
    "train.load_best_model_at_end",
    "train.early_stopping_patience",
    "train.metric_for_best_model",
)
# Where the notebook says nothing the choice is made here, so a person should know
CHOSEN_HERE = {
    "train.learning_rate": "auto",
    "train.batch_size": "auto",
    "train.grad_accum": "auto",
    "train.lr_scheduler_type": "cosine",
    "train.warmup_steps": "0.03 of the run",
}


def export(document: Document, data: str | None) -> tuple[str, list[Note]]:
    """Return the text of a config, and what to say of it; `data` is data.train_path where given.

    Raises: ConfigError for a notebook that is no supervised fine-tuning on text.
    """
    notebook = Notebook(document)
    _refuse_other_kinds(document, notebook)
    values = Values(notebook)
    carried = Carried()
    for load in notebook.training_loads[-1:]:
        _take_load(carried, values, load)
    for call in (*_calls_of_arguments(notebook), *calls_of_adapters(notebook)):
        _take_keywords(carried, values, call)
    if not calls_of_adapters(notebook) and carried.values.get("tuning.mode") != "full":
        said = "adds no adapter, and trains adapters here; write tuning.mode: full to train all"
        carried.notes.append(look(None, said))
    _take_later_values(carried, notebook, values)
    _settle(carried, notebook, values)
    carried.notes += rows.notes_of_rows(notebook)
    rows.take_rows(carried, notebook, values, data)
    return _as_text(document, carried), _with_carried(carried)


def _refuse_other_kinds(document: Document, notebook: Notebook) -> None:
    if notebook.kind is not Kind.TEXT:
        raise ConfigError(
            f"NB={document.path}: {notebook.kind.value}; a config of SFT-Play is for supervised "
            "fine-tuning on text. OUT=converted.ipynb converts the notebook itself"
        )


def calls_of_adapters(notebook: Notebook) -> list[Found]:
    """Return the calls that say how adapters are made."""
    return [*notebook.methods("get_peft_model"), *notebook.functions(["LoraConfig"])]


def _calls_of_arguments(notebook: Notebook) -> list[Found]:
    """Return the calls of the trainer and of its arguments, which win and so come first."""
    arguments = [
        Found(code, call, notebook.name_of(call.func))
        for code, call in notebook.calls()
        if ARGUMENTS.fullmatch(notebook.name_of(call.func))
    ]
    trainers = [found for found in notebook.trainers if found.name in SFT_TRAINERS]
    return [*arguments[-1:], *trainers[-1:]]


def _take_load(carried: Carried, values: Values, load: Found) -> None:
    """Take the model, and in how many bits it is loaded."""
    name_node = load.keyword("model_name") or (load.call.args[0] if load.call.args else None)
    name = values.of(load.code, name_node) if name_node is not None else Unknown("nothing")
    if isinstance(name, str):
        carried.put(
            "model.name", _unquantised(carried, load.number, name), load.number, "model_name"
        )
    else:
        said = f"the model's name is {name.text}, which only running tells: write model.name"
        carried.notes.append(look(load.number, said))
    is_4_bit = values.keyword(load, "load_in_4bit")
    bits = True if load.keyword("load_in_4bit") is None else is_4_bit
    if load.keyword("load_in_4bit") is None and values.keyword(load, "load_in_16bit") is True:
        bits = False
    mode = "qlora" if bits is True else "lora"
    if values.keyword(load, "full_finetuning") is True:
        mode = "full"
    carried.put("tuning.mode", mode, load.number, f"load_in_4bit = {bits}, mode {mode}")
    _take_keywords(carried, values, load, skip=("model_name", "load_in_4bit", "full_finetuning"))


def _unquantised(carried: Carried, cell: int, name: str) -> str:
    """Return the name of the 16-bit weights that Unsloth's 4-bit ones are made of."""
    for ending in QUANTISED_NAMES:
        if name.startswith("unsloth/") and name.endswith(ending):
            plain = name.removesuffix(ending)
            said = (
                f"{name} holds 4-bit weights; qlora makes its own of {plain}: see that it is there"
            )
            carried.notes.append(look(cell, said))
            return plain
    return name


def _take_keywords(
    carried: Carried, values: Values, found: Found, skip: tuple[str, ...] = ()
) -> None:
    """Take every keyword of a call that has a counterpart, and name the others."""
    for name, value in _keywords(carried, values, found).items():
        if name in skip or name in SILENT or SECRET.search(name):
            continue
        if name in PLAIN and _is_one_of(value, PLAIN[name]):
            continue
        carried.take(found.number, name, value)


def _keywords(carried: Carried, values: Values, found: Found) -> dict[str, Any]:
    """Return a call's keywords with their values; those of a mapping where that can be read."""
    read: dict[str, Any] = {}
    for keyword in found.call.keywords:
        if keyword.arg is not None:
            read[keyword.arg] = values.of(found.code, keyword.value)
            continue
        unpacked = values.mapping(found.code, keyword.value)
        if unpacked is not None:
            read.update(unpacked)
        else:
            said = f"{found.name} takes keywords from a mapping, which are not read"
            carried.notes.append(look(found.number, said))
    return read


def _take_later_values(carried: Carried, notebook: Notebook, values: Values) -> None:
    """Take what is set after the arguments were made, such as `trainer.args.max_steps = 5`."""
    owners = {f"{name}.args" for name in notebook.trainer_names}
    owners.update(notebook.variables_of(ARGUMENTS))
    for code in notebook.parsed:
        for node in ast.walk(code.tree):
            target = node.targets[0] if isinstance(node, ast.Assign) else None
            if not isinstance(target, ast.Attribute) or variable(target.value) not in owners:
                continue
            path = setting_of(target.attr)
            if path is not None:
                carried.values.pop(path, None)
            carried.take(code.number, target.attr, values.of(code, node.value))


def _is_one_of(value: Any, plain: tuple[Any, ...]) -> bool:
    return any(value is part or value == part for part in plain)


def _settle(carried: Carried, notebook: Notebook, values: Values) -> None:
    """Mend what the settings must agree on, and name what the notebook leaves open."""
    found = carried.values
    if found.get("tuning.mode") == "full":
        for path in [path for path in found if path.startswith("tuning.lora.")]:
            del found[path]
    targets = found.get("tuning.lora.target_modules")
    if isinstance(targets, list) and set(targets) & set(WHOLE_MODULES):
        found["tuning.lora.target_modules"] = [
            name for name in targets if name not in WHOLE_MODULES
        ]
        whole = [name for name in targets if name in WHOLE_MODULES]
        found.setdefault("tuning.lora.modules_to_save", whole)
        carried.origins["tuning.lora.modules_to_save"] = "trained whole, as Unsloth does"
    if calls_of_adapters(notebook) and found.get("tuning.mode") != "full":
        origin = "Unsloth's own, where the notebook names none"
        found.setdefault("tuning.lora.alpha", UNSLOTH_ALPHA)
        carried.origins.setdefault("tuning.lora.alpha", origin)
    if found.get("train.eval_strategy", "no") == "no":
        for path in [path for path in COMPARES_CHECKPOINTS if path in found]:
            del found[path]
            carried.notes.append(look(None, f"{path} is left out: nothing is evaluated"))
    for path, choice in CHOSEN_HERE.items():
        if path not in found:
            carried.notes.append(look(None, f"the notebook does not set {path}: here {choice}"))
    if "train.epochs" in found and "train.max_steps" in found:
        carried.notes.append(look(None, "max_steps wins over num_train_epochs, as in the notebook"))
    for name, base in notebook.own_trainers.items():
        said = (
            f"{name} is a trainer of the notebook's own; what it changes of {base} is not carried"
        )
        carried.notes.append(look(None, said))
    carried.notes += [*_of_batch(found), *_of_resuming(notebook)]
    if "train.max_steps" in found:
        carried.notes.append(_of_steps(found))


def _of_batch(found: dict[str, Any]) -> list[Note]:
    """Say that a batch which is fixed for each GPU grows with their number."""
    batch, accumulation = found.get("train.batch_size"), found.get("train.grad_accum")
    if batch is None or accumulation is None:
        return []
    rows_of_update = batch * accumulation
    said = f"an update has {batch} x {accumulation} = {rows_of_update} rows for each GPU; for "
    return [
        look(
            None,
            f"{said}{rows_of_update} on any number of them write train.effective_batch_size: "
            f"{rows_of_update} and train.grad_accum: auto",
        )
    ]


def _of_resuming(notebook: Notebook) -> list[Note]:
    return [
        look(found.number, "a checkpoint of the notebook is not resumed by a run of SFT-Play")
        for found in notebook.train_calls
        if found.keyword("resume_from_checkpoint") is not None
    ]


def _of_steps(found: dict[str, Any]) -> Note:
    steps = found["train.max_steps"]
    sizes = (found.get("train.batch_size"), found.get("train.grad_accum"))
    sizes_known = all(isinstance(size, int) for size in sizes)
    seen = f", {steps * sizes[0] * sizes[1]} rows on one GPU" if sizes_known else ""
    return look(
        None,
        f"max_steps = {steps} is kept: the run ends after {steps} updates{seen}; delete "
        "train.max_steps for whole epochs",
    )


def _as_text(document: Document, carried: Carried) -> str:
    header = [
        f"Written by make convert-notebook from {document.path.name}.",
        "Numbers are the notebook's; docs/configuration.md lists all settings.",
    ]
    lines = [
        Line(path, carried.values[path], carried.origins[path])
        for path in settings()
        if path in carried.values
    ]
    return commented_yaml(header, lines)


def _with_carried(carried: Carried) -> list[Note]:
    """Return the notes, with one that counts the settings."""
    return [changed(None, f"{len(carried.values)} settings carried"), *carried.notes]
