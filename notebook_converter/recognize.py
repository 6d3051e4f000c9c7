"""What a notebook does: the calls that load, train and generate, and what kind of training it is.

Pure: syntax trees in, places out.
"""

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Any

from notebook_converter.code import Code, nodes_outside_strings, parse
from notebook_converter.document import Document

FAST_MODEL = re.compile(r"Fast\w*Model")
# Classes that tell what is trained
EMBEDDINGS = ("FastSentenceTransformer", "SentenceTransformerTrainer")
VISION = ("FastVisionModel", "UnslothVisionDataCollator")
SFT_TRAINERS = ("SFTTrainer", "UnslothTrainer")
ARGUMENTS = "SFTConfig TrainingArguments UnslothTrainingArguments Seq2SeqTrainingArguments".split()
REWARD_TRAINERS = "GRPOTrainer RLOOTrainer PPOTrainer OnlineDPOTrainer RewardTrainer".split()
PREFERENCE_TRAINERS = "DPOTrainer ORPOTrainer KTOTrainer CPOTrainer SimPOTrainer".split()
OTHER_TRAINERS = "Trainer Seq2SeqTrainer SentenceTransformerTrainer".split()
TRAINERS = (*SFT_TRAINERS, *REWARD_TRAINERS, *PREFERENCE_TRAINERS, *OTHER_TRAINERS)
AUDIO_MODULES = frozenset("torchaudio soundfile librosa snac xcodec2 torchcodec".split())


class Kind(StrEnum):
    """What a notebook trains, in words for the report."""

    TEXT = "supervised fine-tuning on text"
    VISION = "fine-tuning on images"
    AUDIO = "fine-tuning on sound"
    REWARDS = "reinforcement learning"
    PREFERENCES = "training on preferences"
    EMBEDDINGS = "training of an embedding model"
    OTHER = "training by transformers' own trainer"
    INFERENCE = "inference alone"
    NOTHING = "no model of Unsloth"


@dataclass(frozen=True)
class Found:
    """A call of `name`, or of `owner.name`, and the cell that it is in."""

    code: Code
    call: ast.Call
    name: str
    owner: str | None  # None if a function or class is called by itself

    @property
    def number(self) -> int:
        """The cell's number."""
        return self.code.number

    @property
    def place(self) -> tuple[int, int]:
        """Cell and line: the order in which calls run."""
        return self.number, self.call.lineno

    @property
    def receiver(self) -> str | None:
        """The variable whose method is called: `trainer` or `self.trainer`."""
        return variable(getattr(self.call.func, "value", None))

    @property
    def trainer(self) -> str | None:
        """The trainer of a call that trains: `trainer.train()` or `unsloth_train(trainer)`."""
        if self.name == "unsloth_train":
            return variable(self.argument("trainer", 0))
        return self.receiver

    @property
    def names_device_map(self) -> bool:
        """Whether a keyword is device_map, or a mapping that is written with it."""
        return any("device_map" in self.code.text(word) for word in self.call.keywords)

    def argument(self, name: str | None, position: int | None = None) -> ast.expr | None:
        """Return a keyword's value, of None that of `**mapping`; else that at a position."""
        given = [word.value for word in self.call.keywords if word.arg == name]
        if position is not None:
            given += self.call.args[position:]
        return given[0] if given else None


class Notebook:
    """The code cells of a document, and the calls that matter in them."""

    def __init__(self, document: Document) -> None:
        self.document = document
        cells = [cell for cell in document.cells if cell.kind == "code"]
        self.codes = [parse(cell.number, cell.source) for cell in cells]
        self.parsed = [code for code in self.codes if code.tree is not None]

    def nodes(self, *kinds: type[ast.AST]) -> Iterator[tuple[Code, Any]]:
        """Yield the nodes of these kinds, each with its cell."""
        for code in self.parsed:
            for node in ast.walk(code.tree):
                if isinstance(node, kinds):
                    yield code, node

    @cached_property
    def aliases(self) -> dict[str, str]:
        """What an imported name is called in its module: `import A as B` gives {"B": "A"}.

        A trainer class of the notebook's own counts as the one that it is made of.
        """
        imported = {
            alias.asname: alias.name
            for _, node in self.nodes(ast.Import, ast.ImportFrom)
            for alias in node.names
            if alias.asname
        }
        own_trainers = {
            node.name: base.id
            for _, node in self.nodes(ast.ClassDef)
            for base in node.bases
            if isinstance(base, ast.Name) and base.id in TRAINERS
        }
        return imported | own_trainers

    @cached_property
    def modules(self) -> frozenset[str]:
        """The top-level modules that the notebook imports."""
        names = [node.module or "" for _, node in self.nodes(ast.ImportFrom)]
        names += [alias.name for _, node in self.nodes(ast.Import) for alias in node.names]
        return frozenset(name.split(".")[0] for name in names)

    @cached_property
    def calls(self) -> list[Found]:
        """Every call, in the order in which the calls are written."""
        found = []
        for code in self.parsed:
            for node in nodes_outside_strings(code.tree):
                if isinstance(node, ast.Call):
                    is_method = isinstance(node.func, ast.Attribute)
                    owner = self.name_of(node.func.value) if is_method else None
                    found.append(Found(code, node, self.name_of(node.func), owner))
        return sorted(found, key=lambda each: (*each.place, each.call.col_offset))

    def methods(self, name: str) -> list[Found]:
        """Return the calls of a class's method, such as FastModel.from_pretrained."""
        return [found for found in self.functions([name]) if found.owner is not None]

    def functions(self, names: Iterable[str]) -> list[Found]:
        """Return the calls of functions and classes with these names."""
        return [found for found in self.calls if found.name in names]

    def name_of(self, node: ast.expr) -> str:
        """Return the last name of `a.b.Name`, as its module calls it."""
        if isinstance(node, ast.Attribute):
            return node.attr
        name = node.id if isinstance(node, ast.Name) else ""
        return self.aliases.get(name, name).rpartition(".")[2]

    @cached_property
    def loads(self) -> list[Found]:
        """The calls that load a model with Unsloth."""
        return [
            load for load in self.methods("from_pretrained") if FAST_MODEL.fullmatch(load.owner)
        ]

    @cached_property
    def trainers(self) -> list[Found]:
        """The calls that make a trainer."""
        return self.functions(TRAINERS)

    @cached_property
    def arguments(self) -> list[Found]:
        """The calls that make a trainer's arguments."""
        return self.functions(ARGUMENTS)

    @cached_property
    def training_loads(self) -> list[Found]:
        """The loads of what is trained: those before the trainer, all if there is none."""
        if not self.trainers:
            return self.loads
        return [load for load in self.loads if load.place < self.trainers[-1].place]

    @cached_property
    def trainer_names(self) -> frozenset[str]:
        """The variables that hold a trainer, such as `trainer` and `self.trainer`."""
        makers = (*TRAINERS, "train_on_responses_only")
        made = {
            variable(target)
            for _, node in self.nodes(ast.Assign)
            if isinstance(node.value, ast.Call) and self.name_of(node.value.func) in makers
            for target in node.targets
        }
        return frozenset(made - {None})

    @cached_property
    def train_calls(self) -> list[Found]:
        """The calls that train: `trainer.train()` and `unsloth_train(trainer)`."""
        made = []
        for found in self.functions(["train", "unsloth_train"]):
            trainer = found.trainer or ""
            is_trainer = trainer in self.trainer_names or trainer.lower().endswith("trainer")
            if trainer and (is_trainer or found.name == "unsloth_train"):
                made.append(found)
        return made

    @cached_property
    def kind(self) -> Kind:
        """What the notebook trains."""
        used = {name for found in self.calls for name in (found.name, found.owner)}
        if not used.isdisjoint(EMBEDDINGS):
            return Kind.EMBEDDINGS
        if not self.loads:
            return Kind.NOTHING
        if not used.isdisjoint(REWARD_TRAINERS):
            return Kind.REWARDS
        if not used.isdisjoint(PREFERENCE_TRAINERS):
            return Kind.PREFERENCES
        if not used.isdisjoint(VISION):
            return Kind.VISION
        if self.trainers and self.modules & AUDIO_MODULES:
            return Kind.AUDIO
        if not used.isdisjoint(SFT_TRAINERS):
            return Kind.TEXT
        return Kind.OTHER if self.trainers or self.train_calls else Kind.INFERENCE


def variable(node: ast.AST) -> str | None:
    """Return `a` or `self.a` as it is written, None for another expression."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        return f"{node.value.id}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else None
