"""A notebook's settings as a config of SFT-Play: what has a counterpart is carried, and the rest is
named. Pure: no file is opened.
"""

import ast
import re
from dataclasses import replace
from typing import Any

from pydantic import ValidationError

from sft_play.config.loader import nested
from sft_play.config.messages import VALUES
from sft_play.config.present import Line, commented_yaml
from sft_play.config.schema import Config, settings
from sft_play.config.unknown import ADVICE, SAME_SETTING
from sft_play.errors import ConfigError
from sft_play.notebooks.changes import Changes
from sft_play.notebooks.code import Code
from sft_play.notebooks.document import Document
from sft_play.notebooks.recognize import ARGUMENTS, SFT_TRAINERS, Found, Kind, Notebook, variable
from sft_play.notebooks.values import AUTO, Unknown, Values

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
# What get_peft_model takes if a notebook leaves it out; r is the same here
UNSLOTH_ALPHA = 16
COMPARES_CHECKPOINTS = """
train.load_best_model_at_end train.early_stopping_patience
train.metric_for_best_model
""".split()
# If the notebook says nothing the choice is made here, so a person should know
CHOSEN_HERE = {
    "train.learning_rate": "auto",
    "train.batch_size": "auto",
    "train.grad_accum": "auto",
    "train.lr_scheduler_type": "cosine",
    "train.warmup_steps": "0.03 of the run",
}
TRACKERS = "mlflow tensorboard trackio wandb".split()
FILE_BUILDERS = "json csv parquet text".split()
TEMPLATE = "here the model's own chat template renders the rows; model.chat_template names another"
# Functions that change rows beyond their format
RESHAPES = "to_sharegpt apply_chat_template concatenate_datasets interleave_datasets".split()


class Carried(Changes):
    """The settings found so far in a notebook, each with where it comes from, and the notes."""

    def __init__(self, notebook: Notebook) -> None:
        super().__init__()
        self.notebook = notebook
        self.values = Values(notebook)
        self.lines: dict[str, Line] = {}

    def value(self, path: str) -> Any:
        """Return the value of a setting, None if it was not found."""
        return self.lines[path].value if path in self.lines else None

    def put(self, path: str, value: Any, word: str, where: Code | Found | None = None) -> None:
        """Take a setting; a second, other value for it is named and not taken."""
        origin = word if where is None else f"cell {where.number}: {word}"
        first = self.lines.setdefault(path, Line(path, value, origin))
        if first.value != value:
            taken = f"{path} is {first.value!r} by {first.comment}"
            self.look(f"{word} is not carried: {taken}", where)

    def take(self, where: Code | Found, name: str, value: Any) -> None:
        """Take a keyword's value, or say that it has no counterpart."""
        path = find_setting(name)
        said = f"{name} = {value.text if isinstance(value, Unknown) else repr(value)}"
        if path is None:
            advice = f": {ADVICE[name]}" if name in ADVICE else ""
            self.look(f"{said} has no setting here{advice}", where)
        elif isinstance(value, Unknown):
            self.look(f"{said}, which only running tells: write {path}", where)
        else:
            adapted = adapt_value(path, value)
            if isinstance(adapted, Unknown):
                self.look(f"{said} is not carried: {adapted.text}", where)
            elif adapted is not None:
                self.put(path, adapted, said, where)


def export(document: Document, data: str | None) -> tuple[str, list[str]]:
    """Return the text of a config, and the report; `data` is data.train_path if given.

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
    adapters = notebook.methods("get_peft_model") + notebook.functions(["LoraConfig"])
    # the arguments win over the trainer, and so come first
    for call in notebook.arguments[-1:] + trainers[-1:] + adapters:
        _take_keywords(carried, call)
    if not adapters and carried.value("tuning.mode") != "full":
        carried.look(
            "adds no adapter, and trains adapters here; write tuning.mode: full to train all"
        )
    _take_later_values(carried)
    _agree(carried, has_adapters=bool(adapters))
    _look_at_choices(carried)
    _look_at_formatting(carried)
    _take_rows(carried, data)
    carried.changed(f"{len(carried.lines)} settings carried")
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
            carried.look(
                f"{name} holds 4-bit weights; qlora makes its own of {plain}: see that it is there",
                load,
            )
        carried.put("model.name", plain, "model_name", load)
    else:
        carried.look(
            f"the model's name is {name.text}, which only running tells: write model.name", load
        )
    bits = values.argument(load, "load_in_4bit")
    if load.argument("load_in_4bit") is None:
        bits = values.argument(load, "load_in_16bit") is not True
    mode = "qlora" if bits is True else "lora"
    if values.argument(load, "full_finetuning") is True:
        mode = "full"
    carried.put("tuning.mode", mode, f"load_in_4bit = {bits}, mode {mode}", load)
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
            carried.look(f"{name} takes keywords from a mapping, which are not read", found)
            continue
        for name, written in unpacked.items():
            given[name] = values.read(written.code, written.value)
    for name, value in given.items():
        if value not in PLAIN.get(name, ()) and name not in SILENT and not SECRET.search(name):
            carried.take(found, name, value)


def _take_later_values(carried: Carried) -> None:
    """Take what is set after the arguments were made, such as `trainer.args.max_steps = 5`."""
    notebook = carried.notebook
    owners = {f"{name}.args" for name in notebook.trainer_names}
    owners.update(notebook.variables_of(ARGUMENTS))
    for code, node in notebook.nodes(ast.Assign):
        target = node.targets[0]
        if isinstance(target, ast.Attribute) and variable(target.value) in owners:
            carried.lines.pop(find_setting(target.attr), None)
            carried.take(code, target.attr, carried.values.read(code, node.value))


def _agree(carried: Carried, has_adapters: bool) -> None:
    """Mend what the settings must agree on."""
    lines = carried.lines
    if carried.value("tuning.mode") == "full":
        for path in [path for path in lines if path.startswith("tuning.lora.")]:
            del lines[path]
    elif has_adapters and "tuning.lora.alpha" not in lines:
        origin = "Unsloth's own, if the notebook names none"
        carried.put("tuning.lora.alpha", UNSLOTH_ALPHA, origin)
    adapted, saved = "tuning.lora.target_modules", "tuning.lora.modules_to_save"
    targets = carried.value(adapted)
    whole = [name for name in targets if name in WHOLE_MODULES] if isinstance(targets, list) else []
    if whole:
        rest = [name for name in targets if name not in whole]
        lines[adapted] = replace(lines[adapted], value=rest)
        lines.setdefault(saved, Line(saved, whole, "trained whole, as Unsloth does"))
    options = "train.lr_scheduler_kwargs"
    if "train.lr_scheduler_type" not in lines and lines.pop(options, None) is not None:
        carried.look(f"{options} is left out: it is of a schedule that is not carried")
    if carried.value("train.eval_strategy") in (None, "no"):
        for path in COMPARES_CHECKPOINTS:
            if lines.pop(path, None) is not None:
                carried.look(f"{path} is left out: nothing is evaluated")


def _look_at_choices(carried: Carried) -> None:
    """Name what the notebook leaves open, and what its batch and steps are here."""
    notebook, lines = carried.notebook, carried.lines
    for path, choice in CHOSEN_HERE.items():
        if path not in lines:
            carried.look(f"the notebook does not set {path}: here {choice}")
    if "train.epochs" in lines and "train.max_steps" in lines:
        carried.look("max_steps wins over num_train_epochs, as in the notebook")
    for name, base in notebook.own_trainers.items():
        carried.look(
            f"{name} is a trainer of the notebook's own; what it changes of {base} is not carried"
        )
    batch, accumulation = carried.value("train.batch_size"), carried.value("train.grad_accum")
    steps = carried.value("train.max_steps")
    seen = ""
    if batch is not None and accumulation is not None:
        rows = batch * accumulation
        carried.look(
            f"an update has {batch} x {accumulation} = {rows} rows for each GPU; for {rows} on "
            f"any number of them write train.effective_batch_size: {rows} and train.grad_accum: "
            "auto"
        )
        seen = f", {(steps or 0) * rows} rows on one GPU"
    for call in notebook.train_calls:
        if call.argument("resume_from_checkpoint") is not None:
            carried.look("a checkpoint of the notebook is not resumed by a run of SFT-Play", call)
    if steps is not None:
        carried.look(
            f"max_steps = {steps} is kept: the run ends after {steps} updates{seen}; delete "
            f"train.max_steps for whole epochs"
        )


def _look_at_formatting(carried: Carried) -> None:
    """Name what of the notebook's formatting of rows has no counterpart, or another one."""
    notebook = carried.notebook
    for found in notebook.functions(["get_chat_template"])[:1]:
        node = found.argument("chat_template")
        template = "a template" if node is None else found.code.text(node)
        carried.look(f"get_chat_template with {template}: {TEMPLATE}", found)
    for found in notebook.methods("map"):
        if isinstance(found.argument("function", 0), ast.Name | ast.Lambda):
            carried.look(
                "rows are read as they are in the file, and the function of .map is not carried. "
                "For rows of another shape, write DATA=",
                found,
            )
            break
    for found in notebook.functions(RESHAPES):
        if found.owner is None:
            carried.look(f"{found.name} is not carried: {TEMPLATE}", found)
    for code, node in notebook.nodes(ast.Attribute):
        if node.attr == "eos_token":
            carried.look(f"a prompt of its own with EOS_TOKEN is not carried: {TEMPLATE}", code)
            break
    if not notebook.functions(["train_on_responses_only", "DataCollatorForCompletionOnlyLM"]):
        carried.look(
            "the notebook trains on prompts too; here answers alone carry loss, but for rows of "
            "plain text"
        )


def _take_rows(carried: Carried, data: str | None) -> None:
    """Take data.train_path: what the user names, else what the notebook loads."""
    for split in carried.notebook.methods("train_test_split")[:1]:
        share = carried.values.argument(split, "test_size")
        if isinstance(share, float) and 0 < share < 0.5:
            carried.put("data.val_size", share, f"test_size = {share}", split)
        else:
            carried.look(
                "train_test_split is not carried: data.val_size is a share under 0.5", split
            )
    loads = carried.notebook.functions(["load_dataset"])
    if data is not None:
        carried.put("data.train_path", data, "DATA of make convert-notebook")
    elif loads:
        _take_source(carried, loads[0])
    else:
        carried.look("loads no data set by name: give the file with DATA=rows.jsonl")
    if data is None and len(loads) > 1:
        said = "loads several data sets; the first is carried: see data.train_path"
        carried.look(said, loads[0])


def _take_source(carried: Carried, load: Found) -> None:
    """Take the rows of a load_dataset call, as far as they can be told."""
    values = carried.values
    path = values.argument(load, "path", 0)
    if path in FILE_BUILDERS:
        path = values.argument(load, "data_files")
        path = path.get("train") if isinstance(path, dict) else path
    if not isinstance(path, str):
        carried.look("the data set's name is known only at run time: set it with DATA=", load)
        return
    split, subset = values.argument(load, "split"), values.argument(load, "name", 1)
    section = {"path": path}
    if isinstance(split, str) and split != "train":
        section["split"] = split
    if isinstance(subset, str):
        section["subset"] = subset
    source = path if len(section) == 1 else [section]
    carried.put("data.train_path", source, "load_dataset", load)


def find_setting(name: str) -> str | None:
    """Return the setting that takes the value of a keyword, None if there is none."""
    for section in ("train", "tuning.lora", "model"):
        if f"{section}.{name}" in settings():
            return f"{section}.{name}"
    return SAME_SETTING.get(name)


def adapt_value(path: str, value: Any) -> Any:
    """Return a value as its setting has it.

    None leaves the setting out, an Unknown says why it is not carried.
    """
    match path:
        case "train.max_steps":
            value = value if isinstance(value, int) and value > 0 else None
        case "train.gradient_checkpointing":
            value = bool(value)
        case "train.optim":
            value = VALUES.get((path, str(value)), value)
        case "train.bf16" | "train.fp16":
            value = value if value in (True, False, AUTO) else None
        case "train.report_to":
            names = value if isinstance(value, list) else [value]
            value = [] if names in (["none"], [None]) else names
            if not set(value) <= set(TRACKERS):
                return Unknown(f"train.report_to has {', '.join(TRACKERS)} and none")
        case "tuning.lora.init_lora_weights":
            value = None if value is True else value
        case "tuning.lora.target_modules":
            if isinstance(value, str) and value != "all-linear":
                return Unknown("write a list of names")
        case "train.resume_from":
            return Unknown("name a run of SFT-Play in train.resume_from")
    if value is not None and not is_valid(path, value):
        return Unknown(f"{path} takes other values, which docs/configuration.md lists")
    return value


def is_valid(path: str, value: Any) -> bool:
    """Return whether a setting takes a value."""
    try:
        Config.model_validate(nested({path: value}))
    except ValidationError:
        return False
    return True
