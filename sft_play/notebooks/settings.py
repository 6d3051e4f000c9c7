"""A notebook's settings as a config of SFT-Play: what has a counterpart is carried, and the rest is
named. Pure: no file is opened.
"""

import ast
import re
from dataclasses import replace
from typing import Any

from sft_play.config.present import commented_yaml
from sft_play.config.schema import settings
from sft_play.errors import ConfigError
from sft_play.notebooks.carried import Carried, find_setting
from sft_play.notebooks.document import Document
from sft_play.notebooks.recognise import ARGUMENTS, SFT_TRAINERS, Found, Kind, Notebook, variable
from sft_play.notebooks.values import Unknown

# Keywords that say nothing about the run, or that the rows and the model answer for
SILENT = frozenset(
    """
    model model_name load_in_4bit full_finetuning tokenizer processing_class args train_dataset
    data_collator dataset_num_proc dataset_kwargs formatting_func device_map disable_log_stats
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
FILE_BUILDERS = ("json", "csv", "parquet", "text")
TEMPLATE = "here the model's own chat template renders the rows; model.chat_template names another"
# Functions that change rows beyond their format
RESHAPES = ("to_sharegpt", "apply_chat_template", "concatenate_datasets", "interleave_datasets")


def export(document: Document, data: str | None) -> tuple[str, list[str]]:
    """Return the text of a config, and the report; `data` is data.train_path where given.

    Raises: ConfigError for a notebook that is no supervised fine-tuning on text.
    """
    notebook = Notebook(document)
    if notebook.kind is not Kind.TEXT:
        raise ConfigError(
            f"NB={document.path}: {notebook.kind.value}; a config of SFT-Play is for supervised "
            "fine-tuning on text. OUT=converted.ipynb converts the notebook itself"
        )
    carried = Carried(notebook)
    for load in notebook.training_loads[-1:]:
        _take_load(carried, load)
    trainers = [found for found in notebook.trainers if found.name in SFT_TRAINERS]
    adapters = [*notebook.methods("get_peft_model"), *notebook.functions(["LoraConfig"])]
    # the arguments win over the trainer, and so come first
    for call in (*notebook.arguments[-1:], *trainers[-1:], *adapters):
        _take_keywords(carried, call)
    if not adapters and carried.value("tuning.mode") != "full":
        said = "adds no adapter, and trains adapters here; write tuning.mode: full to train all"
        carried.look(None, said)
    _take_later_values(carried)
    _agree(carried, has_adapters=bool(adapters))
    _look_at_choices(carried)
    _look_at_formatting(carried)
    _take_rows(carried, data)
    carried.changed(None, f"{len(carried.lines)} settings carried")
    header = [
        f"Written by make convert-notebook from {document.path.name}.",
        "Numbers are the notebook's; docs/configuration.md lists all settings.",
    ]
    lines = [carried.lines[path] for path in settings() if path in carried.lines]
    return commented_yaml(header, lines), carried.report()


def _take_load(carried: Carried, load: Found) -> None:
    """Take the model, and in how many bits it is loaded."""
    values = carried.values
    name = values.argument(load, "model_name", 0) or Unknown("nothing")
    if isinstance(name, str):
        plain = re.sub(r"^(unsloth/.*?)(-unsloth)?-bnb-4bit$", r"\1", name)
        if plain != name:
            said = f"{name} holds 4-bit weights; qlora makes its own of {plain}: see that it is "
            carried.look(load.number, f"{said}there")
        carried.put("model.name", plain, load.number, "model_name")
    else:
        said = f"the model's name is {name.text}, which only running tells: write model.name"
        carried.look(load.number, said)
    bits = values.argument(load, "load_in_4bit")
    if load.argument("load_in_4bit") is None:
        bits = values.argument(load, "load_in_16bit") is not True
    mode = "qlora" if bits is True else "lora"
    if values.argument(load, "full_finetuning") is True:
        mode = "full"
    carried.put("tuning.mode", mode, load.number, f"load_in_4bit = {bits}, mode {mode}")
    _take_keywords(carried, load)


def _take_keywords(carried: Carried, found: Found) -> None:
    """Take every keyword of a call that has a counterpart, and name the others."""
    values = carried.values
    given: dict[str, Any] = {}
    for keyword in found.call.keywords:
        if keyword.arg is not None:
            given[keyword.arg] = values.read(found.code, keyword.value)
            continue
        unpacked = values.items(found.code, keyword.value)
        is_changed = any(owner == variable(keyword.value) for owner, _ in values.changed)
        if not unpacked or is_changed or not all(isinstance(name, str) for name in unpacked):
            name = found.owner if found.name == "from_pretrained" else found.name
            said = f"{name} takes keywords from a mapping, which are not read"
            carried.look(found.number, said)
            continue
        given |= {name: values.read(*written) for name, written in unpacked.items()}
    for name, value in given.items():
        if value not in PLAIN.get(name, ()) and name not in SILENT and not SECRET.search(name):
            carried.take(found.number, name, value)


def _take_later_values(carried: Carried) -> None:
    """Take what is set after the arguments were made, such as `trainer.args.max_steps = 5`."""
    notebook = carried.notebook
    owners = {f"{name}.args" for name in notebook.trainer_names}
    owners.update(notebook.variables_of(ARGUMENTS))
    for code, node in notebook.nodes(ast.Assign):
        target = node.targets[0]
        if isinstance(target, ast.Attribute) and variable(target.value) in owners:
            carried.lines.pop(find_setting(target.attr), None)
            carried.take(code.number, target.attr, carried.values.read(code, node.value))


def _agree(carried: Carried, has_adapters: bool) -> None:
    """Mend what the settings must agree on."""
    lines = carried.lines
    if carried.value("tuning.mode") == "full":
        for path in [path for path in lines if path.startswith("tuning.lora.")]:
            del lines[path]
    elif has_adapters and "tuning.lora.alpha" not in lines:
        origin = "Unsloth's own, where the notebook names none"
        carried.put("tuning.lora.alpha", UNSLOTH_ALPHA, None, origin)
    targets = carried.value("tuning.lora.target_modules")
    whole = [name for name in targets if name in WHOLE_MODULES] if isinstance(targets, list) else []
    if whole:
        adapted = [name for name in targets if name not in whole]
        path = "tuning.lora.target_modules"
        lines[path] = replace(lines[path], value=adapted)
        if "tuning.lora.modules_to_save" not in lines:
            origin = "trained whole, as Unsloth does"
            carried.put("tuning.lora.modules_to_save", whole, None, origin)
    if carried.value("train.eval_strategy") in (None, "no"):
        for path in COMPARES_CHECKPOINTS:
            if lines.pop(path, None) is not None:
                carried.look(None, f"{path} is left out: nothing is evaluated")


def _look_at_choices(carried: Carried) -> None:
    """Name what the notebook leaves open, and what its batch and steps are here."""
    notebook, lines = carried.notebook, carried.lines
    for path, choice in CHOSEN_HERE.items():
        if path not in lines:
            carried.look(None, f"the notebook does not set {path}: here {choice}")
    if "train.epochs" in lines and "train.max_steps" in lines:
        carried.look(None, "max_steps wins over num_train_epochs, as in the notebook")
    for name, base in notebook.own_trainers.items():
        owned = f"{name} is a trainer of the notebook's own"
        carried.look(None, f"{owned}; what it changes of {base} is not carried")
    batch, accumulation = carried.value("train.batch_size"), carried.value("train.grad_accum")
    steps = carried.value("train.max_steps")
    seen = ""
    if batch is not None and accumulation is not None:
        rows = batch * accumulation
        carried.look(
            None,
            f"an update has {batch} x {accumulation} = {rows} rows for each GPU; for {rows} on "
            f"any number of them write train.effective_batch_size: {rows} and train.grad_accum: "
            "auto",
        )
        seen = f", {(steps or 0) * rows} rows on one GPU"
    for call in notebook.train_calls:
        if call.argument("resume_from_checkpoint") is not None:
            said = "a checkpoint of the notebook is not resumed by a run of SFT-Play"
            carried.look(call.number, said)
    if steps is not None:
        said = f"max_steps = {steps} is kept: the run ends after {steps} updates{seen}; delete "
        carried.look(None, f"{said}train.max_steps for whole epochs")


def _look_at_formatting(carried: Carried) -> None:
    """Name what of the notebook's formatting of rows has no counterpart, or another one."""
    notebook = carried.notebook
    for found in notebook.functions(["get_chat_template"])[:1]:
        node = found.argument("chat_template")
        template = "a template" if node is None else found.code.text(node)
        carried.look(found.number, f"get_chat_template with {template}: {TEMPLATE}")
    for found in notebook.methods("map"):
        if isinstance(found.argument("function", 0), ast.Name | ast.Lambda):
            said = "rows are read as they are in the file, and the function of .map is not carried"
            carried.look(found.number, f"{said}: rows of a shape of its own need DATA=")
            break
    for found in notebook.functions(RESHAPES):
        if found.owner is None:
            carried.look(found.number, f"{found.name} is not carried: {TEMPLATE}")
    for code, node in notebook.nodes(ast.Attribute):
        if node.attr == "eos_token":
            said = "a prompt of its own with EOS_TOKEN is not carried"
            carried.look(code.number, f"{said}: {TEMPLATE}")
            break
    if not notebook.functions(["train_on_responses_only", "DataCollatorForCompletionOnlyLM"]):
        said = "the notebook trains on prompts too; here answers alone carry loss, but for rows of "
        carried.look(None, f"{said}plain text")


def _take_rows(carried: Carried, data: str | None) -> None:
    """Take data.train_path: what the user names, else what the notebook loads."""
    for split in carried.notebook.methods("train_test_split")[:1]:
        share = carried.values.argument(split, "test_size")
        if isinstance(share, float) and 0 < share < 0.5:
            carried.put("data.val_size", share, split.number, f"test_size = {share}")
        else:
            said = "train_test_split is not carried: data.val_size is a share under 0.5"
            carried.look(split.number, said)
    loads = carried.notebook.functions(["load_dataset"])
    if data is not None:
        carried.put("data.train_path", data, None, "DATA of make convert-notebook")
    elif loads:
        _take_source(carried, loads[0])
    else:
        carried.look(None, "loads no data set by name: give the file with DATA=rows.jsonl")
    if data is None and len(loads) > 1:
        said = "loads several data sets; the first is carried: see data.train_path"
        carried.look(loads[0].number, said)


def _take_source(carried: Carried, load: Found) -> None:
    """Take the rows of a load_dataset call, as far as they can be told."""
    values = carried.values
    path = values.argument(load, "path", 0)
    if path in FILE_BUILDERS:
        path = values.argument(load, "data_files")
        path = path.get("train") if isinstance(path, dict) else path
    if not isinstance(path, str):
        said = "the data set's name is told only by running: give it with DATA="
        carried.look(load.number, said)
        return
    split, subset = values.argument(load, "split"), values.argument(load, "name", 1)
    section = {"path": path}
    if isinstance(split, str) and split != "train":
        section["split"] = split
    if isinstance(subset, str):
        section["subset"] = subset
    source = path if len(section) == 1 else [section]
    carried.put("data.train_path", source, load.number, "load_dataset")
