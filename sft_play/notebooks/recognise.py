"""What a notebook does: the calls that load, train and generate, and what kind of training it is.

Pure: syntax trees in, places out.
"""

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from sft_play.notebooks import code as codes
from sft_play.notebooks.code import Code
from sft_play.notebooks.document import Document

FAST_MODEL = re.compile(r"Fast\w*Model")
VISION_MODELS = ("FastVisionModel",)
EMBEDDING_MODELS = ("FastSentenceTransformer",)
SFT_TRAINERS = ("SFTTrainer", "UnslothTrainer")
ARGUMENTS = re.compile(r"(SFTConfig|(Unsloth|Seq2Seq)?TrainingArguments)")
REWARD_TRAINERS = ("GRPOTrainer", "RLOOTrainer", "PPOTrainer", "OnlineDPOTrainer", "RewardTrainer")
PREFERENCE_TRAINERS = ("DPOTrainer", "ORPOTrainer", "KTOTrainer", "CPOTrainer", "SimPOTrainer")
OTHER_TRAINERS = ("Trainer", "Seq2SeqTrainer", "SentenceTransformerTrainer")
TRAINERS = (*SFT_TRAINERS, *REWARD_TRAINERS, *PREFERENCE_TRAINERS, *OTHER_TRAINERS)
AUDIO_MODULES = frozenset({"torchaudio", "soundfile", "librosa", "snac", "xcodec2", "torchcodec"})


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
    """A call, and the cell that it is in."""

    code: Code
    call: ast.Call
    name: str  # what is called, such as FastModel or SFTTrainer

    @property
    def number(self) -> int:
        """The cell's number."""
        return self.code.number

    def keyword(self, name: str) -> ast.expr | None:
        """Return the value of a keyword argument, None where it is not given."""
        for keyword in self.call.keywords:
            if keyword.arg == name:
                return keyword.value
        return None

    @property
    def unpacks(self) -> bool:
        """Whether the call takes keywords from a mapping."""
        return any(keyword.arg is None for keyword in self.call.keywords)


class Notebook:
    """The code cells of a document, and the calls that matter in them."""

    def __init__(self, document: Document) -> None:
        self.document = document
        self.codes = [
            codes.parse(cell.number, cell.source) for cell in document.cells if cell.kind == "code"
        ]
        self.parsed = [code for code in self.codes if code.tree is not None]

    @cached_property
    def aliases(self) -> dict[str, str]:
        """What an imported name is called in its module: `import A as B` gives {"B": "A"}.

        A trainer class of the notebook's own counts as the one that it is made of.
        """
        imported = {
            alias.asname: alias.name
            for code in self.parsed
            for node in ast.walk(code.tree)
            if isinstance(node, ast.Import | ast.ImportFrom)
            for alias in node.names
            if alias.asname
        }
        return imported | self.own_trainers

    @cached_property
    def own_trainers(self) -> dict[str, str]:
        """Classes of the notebook that are made of a trainer, each with that trainer."""
        return {
            node.name: base.id
            for code in self.parsed
            for node in ast.walk(code.tree)
            if isinstance(node, ast.ClassDef)
            for base in node.bases
            if isinstance(base, ast.Name) and base.id in TRAINERS
        }

    @cached_property
    def modules(self) -> frozenset[str]:
        """The top-level modules that the notebook imports."""
        names = set()
        for code in self.parsed:
            for node in ast.walk(code.tree):
                if isinstance(node, ast.Import):
                    names.update(alias.name.split(".")[0] for alias in node.names)
                elif isinstance(node, ast.ImportFrom) and node.module:
                    names.add(node.module.split(".")[0])
        return frozenset(names)

    def calls(self) -> Iterator[tuple[Code, ast.Call]]:
        """Yield every call, in the order in which the calls are written."""
        for code in self.parsed:
            for call in sorted(
                codes.calls_in(code.tree), key=lambda node: (node.lineno, node.col_offset)
            ):
                yield code, call

    def methods(self, name: str) -> list[Found]:
        """Return the calls of a class's method, such as FastModel.from_pretrained."""
        return [
            Found(code, call, self.name_of(call.func.value))
            for code, call in self.calls()
            if isinstance(call.func, ast.Attribute) and call.func.attr == name
        ]

    def functions(self, names: Iterable[str]) -> list[Found]:
        """Return the calls of functions and classes with these names."""
        wanted = frozenset(names)
        return [
            Found(code, call, self.name_of(call.func))
            for code, call in self.calls()
            if self.name_of(call.func) in wanted
        ]

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
            found for found in self.methods("from_pretrained") if FAST_MODEL.fullmatch(found.name)
        ]

    @cached_property
    def trainers(self) -> list[Found]:
        """The calls that make a trainer."""
        return self.functions(TRAINERS)

    @cached_property
    def training_loads(self) -> list[Found]:
        """The loads of what is trained: those before the trainer, all where there is none."""
        if not self.trainers:
            return self.loads
        return [load for load in self.loads if _place(load) < _place(self.trainers[-1])]

    @cached_property
    def trainer_names(self) -> frozenset[str]:
        """The variables that hold a trainer, such as `trainer` and `self.trainer`."""
        makers = (*TRAINERS, "train_on_responses_only")
        return self.variables_of(re.compile("|".join(makers)))

    def variables_of(self, makers: re.Pattern[str]) -> frozenset[str]:
        """Return the variables that hold what a call of a function with such a name returned."""
        return frozenset(
            ast.unparse(target)
            for code in self.parsed
            for node in ast.walk(code.tree)
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)
            if makers.fullmatch(self.name_of(node.value.func))
            for target in node.targets
            if isinstance(target, ast.Name | ast.Attribute)
        )

    @cached_property
    def train_calls(self) -> list[Found]:
        """The calls that train: `trainer.train()` and `unsloth_train(trainer)`."""
        return [
            Found(code, call, trainer)
            for code, call in self.calls()
            if (trainer := self._trained(call)) is not None
        ]

    def _trained(self, call: ast.Call) -> str | None:
        """Return the trainer's variable where a call trains."""
        if self.name_of(call.func) == "unsloth_train" and call.args:
            return variable(call.args[0])
        if not isinstance(call.func, ast.Attribute) or call.func.attr != "train":
            return None
        name = variable(call.func.value)
        if name is None:
            return None
        return name if name in self.trainer_names or name.lower().endswith("trainer") else None

    @cached_property
    def kind(self) -> Kind:
        """What the notebook trains."""
        trainers = {found.name for found in self.trainers}
        loaders = {found.name for found in self.loads}
        if self.functions(EMBEDDING_MODELS) or self._loads_embeddings(trainers):
            return Kind.EMBEDDINGS
        if not self.loads:
            return Kind.NOTHING
        if trainers & set(REWARD_TRAINERS):
            return Kind.REWARDS
        if trainers & set(PREFERENCE_TRAINERS):
            return Kind.PREFERENCES
        if loaders & set(VISION_MODELS) or self.functions(["UnslothVisionDataCollator"]):
            return Kind.VISION
        if trainers and self.modules & AUDIO_MODULES:
            return Kind.AUDIO
        if trainers & set(SFT_TRAINERS):
            return Kind.TEXT
        return Kind.OTHER if trainers or self.train_calls else Kind.INFERENCE

    def _loads_embeddings(self, trainers: set[str]) -> bool:
        if "SentenceTransformerTrainer" in trainers:
            return True
        return any(load.name in EMBEDDING_MODELS for load in self.methods("from_pretrained"))

    def bound_names(self) -> set[str]:
        """Return the names that the notebook's own code gives a value."""
        return {
            node.id
            for code in self.parsed
            for node in ast.walk(code.tree)
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        }


def variable(node: ast.expr) -> str | None:
    """Return `a` or `self.a` as it is written, None for another expression."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        return f"{node.value.id}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else None


def _place(found: Found) -> tuple[int, int]:
    return found.number, found.call.lineno
