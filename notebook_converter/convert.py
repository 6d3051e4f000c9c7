"""A notebook for one GPU becomes one for several: every edit of every cell. Pure."""

import ast
import re
from dataclasses import dataclass
from typing import Any

from notebook_converter.changes import Changes
from notebook_converter.code import Code, path_to
from notebook_converter.document import Document
from notebook_converter.memory import convert_statistics
from notebook_converter.recognize import Found, Kind, Notebook, variable

# What a person must know of each kind but text
ABOUT_KIND = {
    Kind.VISION: "trains on images: the load, memory and device are converted. Try it on a few "
    "rows first, because the vision encoder and the language model are split as one",
    Kind.AUDIO: "trains on sound: the load, memory and device are converted. Codecs that the "
    "notebook loads in addition to the model stay on the GPU that it names",
    Kind.REWARDS: "trains by reinforcement learning: generation with vLLM (fast_inference=True) is "
    "not split",
    Kind.PREFERENCES: "trains on preferences: a reference model, if there is one, needs a "
    "device map of its own",
    Kind.EMBEDDINGS: "trains an embedding model, which is small and takes no device_map: train it "
    "data-parallel with torchrun instead",
    Kind.OTHER: "trains by a trainer that is not TRL's SFTTrainer; read the converted cells",
    Kind.INFERENCE: "has no trainer: the model is split only for inference",
    Kind.NOTHING: "loads no model with Unsloth's FastLanguageModel, FastModel or FastVisionModel: "
    "nothing to convert",
}
# What may matter in a cell that cannot be read
RELEVANT = (
    "from_pretrained",
    "get_device_properties",
    "max_memory_reserved",
    '"cuda"',
    "'cuda'",
    "SFTTrainer",
    ".train(",
)
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
# What may be between the last argument of a call and its closing parenthesis
NO_CODE = re.compile(r"(?:[\s\\]|#[^\r\n]*[\r\n])*\)\Z")
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
ABOUT_BANNER = (
    "prints an effective batch size that it computes itself. A model split by device_map is one "
    "worker, so the number of GPUs does not multiply its batch"
)
# Variables that a notebook sets for itself, and what follows
VARIABLES = {
    "CUDA_VISIBLE_DEVICES": "the GPUs that it leaves out are not used: delete the line",
    "LOCAL_RANK": "it is torchrun's, and makes the load take that one GPU: delete the line",
    "RANK": "it is torchrun's: delete the line",
    "WORLD_SIZE": "it is torchrun's: delete the line",
}
# Calls that spread a model or start processes in another way
CALLS = {
    "DataParallel": "copies the model to each GPU, which a split or 4-bit one refuses: delete it",
    "DistributedDataParallel": "the trainer wraps the model itself: delete it",
    "notebook_launcher": "starts processes of its own, of which each would split the model: train "
    "with the script that OUT=train.py writes",
    "set_device": "chooses a GPU; device_map and torchrun do so here",
}
DEVICE = "device"
OTHER_NAME = "inference_device"  # if the notebook has a `device` of its own
SETS_DEVICE = '{name} = "cuda:0" if torch.cuda.is_available() else "cpu"\n'


@dataclass(frozen=True)
class Conversion:
    """The text of a converted notebook, and what was done."""

    text: str
    report: list[str]
    changed_cells: frozenset[int]


def convert(document: Document) -> Conversion:
    """Return the notebook converted for several GPUs; converting that again changes nothing."""
    notebook = Notebook(document)
    changes = Changes()
    for problem in document.problems:
        changes.look(problem)
    convert_cells(notebook, changes)
    sources = changes.sources()
    return Conversion(document.with_sources(sources), changes.report(), frozenset(sources))


def convert_cells(notebook: Notebook, changes: Changes) -> None:
    """Edit every cell, and say what a person must look at."""
    if notebook.kind in ABOUT_KIND:
        changes.look(ABOUT_KIND[notebook.kind])
    _look_at_unread_cells(notebook, changes)
    if notebook.kind in (Kind.NOTHING, Kind.EMBEDDINGS):
        return
    _look_at_devices(notebook, changes)
    for load in notebook.loads:
        if load in notebook.training_loads:
            _add_device_map(load, changes)
        elif load.argument("device_map") is None:
            changes.look("loads a model after training, for inference; left as it is", load)
    convert_statistics(notebook, changes)
    _add_banner(notebook, changes)
    for code in notebook.parsed:
        _name_device(notebook, code, changes)


def _look_at_unread_cells(notebook: Notebook, changes: Changes) -> None:
    """Name each code cell, or magic line, that is not read as Python and may matter."""
    for code in notebook.codes:
        if code.tree is None and any(word in code.source for word in RELEVANT):
            changes.look(f"left as it is, because it is not read as Python ({code.problem})", code)
        elif words := [word for word in RELEVANT if word in code.magics]:
            changes.look(f"a magic line with {', '.join(words)} is left as it is", code)


def _look_at_devices(notebook: Notebook, changes: Changes) -> None:
    """Name each line that decides about GPUs and processes: in Python, or by %env."""
    sets: list[tuple[Code, Any]] = []
    for code in notebook.codes:
        if "%env" in code.magics or "%set_env" in code.magics:
            sets += [(code, word) for word in code.magics.replace("=", " ").split()]
    for code, node in notebook.nodes(ast.Subscript):  # os.environ["key"] = ...
        if isinstance(node.ctx, ast.Store):
            sets.append((code, getattr(node.slice, "value", None)))
    for found in notebook.functions(["setdefault", "putenv"]):
        sets.append((found.code, getattr(found.argument("key", 0), "value", None)))
    for code, name in sets:
        if name in VARIABLES:
            changes.look(f"sets {name}: {VARIABLES[name]}", code)
    for found in notebook.functions(CALLS):
        changes.look(f"calls {found.name}: {CALLS[found.name]}", found)


def _add_device_map(load: Found, changes: Changes) -> None:
    """Count the GPUs before a load, and give it a device map."""
    given, vllm = load.argument(VARIABLE), load.argument("fast_inference")
    if given is not None and variable(given) != VARIABLE:
        changes.look(
            f"the load has device_map={load.code.text(given)} of its own, which is kept; "
            "'balanced' would split the model evenly",
            load,
        )
    elif load.names_device_map:
        changes.kept("the load has a device_map already", load)
    elif load.argument(None) is not None:
        changes.look(
            f"{load.owner}.from_pretrained: `**` takes keywords from a mapping: add device_map to "
            "it by hand",
            load,
        )
    elif vllm is not None and getattr(vllm, "value", True):
        changes.look(
            "fast_inference=True starts vLLM, which takes no device_map: the load is unchanged",
            load,
        )
    else:
        changes.insert_before(load.code, load.call, DETECTION)
        add_argument(load, ARGUMENT, changes)
        changes.changed(f"counts the GPUs, and {load.owner}.from_pretrained gets device_map", load)


def add_argument(found: Found, text: str, changes: Changes) -> None:
    """Add a last argument to a call, in the call's own layout."""
    code, call = found.code, found.call
    end = code.span(call)[1]
    start, after = max(map(code.span, [call.func, *call.args, *call.keywords]))
    place = NO_CODE.search(code.source, min(after, end - 1), end).start()
    line_end, before = code.end_of_line(place), code.source[place - 1]
    comma = "" if before in "(," else ","
    if before == "(" or line_end >= end:
        space = "" if before == "(" else " "
        changes.replace(code, (place, place), f"{comma}{space}{text}")
        return
    comment, indent = code.source[place:line_end], code.line_at(start).indent
    changes.replace(code, (place, line_end), f"{comma}{comment}{code.newline}{indent}{text},")


def _add_banner(notebook: Notebook, changes: Changes) -> None:
    """Print how many rows an update really has, before each training."""
    if not notebook.trainers:
        return
    for code, node in notebook.nodes(ast.Constant):
        if not isinstance(node.value, str) or MARK not in node.value:
            continue
        attributes = {getattr(part, "attr", None) for part in ast.walk(code.tree)}
        if attributes & {"n_gpu", "world_size"}:
            changes.kept("prints the effective batch size already", code)
        else:
            changes.look(ABOUT_BANNER, code)
        return
    calls = [found for found in notebook.train_calls if found.trainer in notebook.trainer_names]
    calls = calls or notebook.train_calls
    if not calls:
        changes.look(
            "no call of trainer.train() was found, so nothing prints the effective batch size"
        )
    for found in {found.number: found for found in reversed(calls)}.values():  # first of a cell
        changes.insert_before(found.code, found.call, BANNER.format(trainer=found.trainer))
        changes.changed("prints the effective batch size before training", found)


def _name_device(notebook: Notebook, code: Code, changes: Changes) -> None:
    """Let the inputs of a cell go to a device that has a number."""
    moves = [move for move in moves_to_cuda(notebook) if move.code is code]
    inputs = [move for move in moves if not is_model(move)]
    if len(inputs) < len(moves):
        changes.look(
            "moves a model with .to or .cuda, which a split model refuses; delete it", code
        )
    if not inputs:
        return
    imports = "" if "torch" in notebook.modules else "import torch\n\n"
    name = _device_name(notebook)
    # a name that is set in the cell's own statements reaches all the cell
    outermost = path_to(code.tree, inputs[0].call)[0]
    changes.insert_before(code, outermost, imports + SETS_DEVICE.format(name=name))
    for move in inputs:
        word = move.argument("device", 0)
        if word is not None:
            changes.replace(code, code.span(word), name)
        else:
            end = code.span(move.call)[1]
            start = code.source.rindex("cuda", code.span(move.call.func.value)[1], end)
            changes.replace(code, (start, end), f"to({name})")
    changes.changed(f'inputs go to {name}, which is "cuda:0" or "cpu"', code)


def moves_to_cuda(notebook: Notebook) -> list[Found]:
    """Return the calls that move something to the GPU without a number."""
    moves = [(move, move.argument("device", 0)) for move in notebook.methods("to")]
    named = [move for move, word in moves if getattr(word, "value", None) == "cuda"]
    calls = notebook.methods("cuda")
    return named + [found for found in calls if not found.call.args and not found.call.keywords]


def is_model(move: Found) -> bool:
    """Return whether what is moved is a model by its name."""
    return (move.receiver or "").lower().endswith("model")


def _device_name(notebook: Notebook) -> str:
    """Return a name for the device that the notebook does not use for something else."""
    sets = SETS_DEVICE.format(name=DEVICE).strip()
    ours = sum(code.text(node) == sets for code, node in notebook.nodes(ast.Assign))
    named = sum(node.arg == DEVICE for _, node in notebook.nodes(ast.arg))
    for _, node in notebook.nodes(ast.Name):
        named += node.id == DEVICE and isinstance(node.ctx, ast.Store)
    return DEVICE if named == ours else OTHER_NAME
