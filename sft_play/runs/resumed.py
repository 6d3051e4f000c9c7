"""A run that is resumed: its settings as the layer below new ones, and which may change.

asked.json has what the user asked of a run before "auto" was resolved, where each value was
written, and how to repeat it. Loads no torch.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple, Self

from pydantic import ValidationError

from sft_play.config import layers
from sft_play.config.loader import LoadedConfig, RunSettings
from sft_play.config.messages import refuse, word
from sft_play.config.on_resume import CLASSES, CONTENT, OnResume, settings_of_class
from sft_play.config.schema import Config, SourceSection, settings
from sft_play.config.yaml_source import Located, parse_scalar
from sft_play.errors import CheckpointError, EnvironmentFault, first_line
from sft_play.runs import stamp
from sft_play.runs.checkpoints import step_of
from sft_play.runs.files import Json, write_json
from sft_play.runs.folder import RunFolder, first_fault
from sft_play.runs.tables import aligned

# Files may have moved, and the plan is this machine's: digests and the stamp decide
MAY_CHANGE = {path for path, kind in CLASSES.items() if kind is not OnResume.MUST_MATCH}
# Folder in a checkpoint with the optimizer's state, if FSDP divides the trained weights
DIVIDED_OPTIMIZER = "divided_optimizer"
FILES_OF_OPTIMIZER = {
    "whole": ("optimizer.pt", "scheduler.pt"),
    "fsdp": (f"{DIVIDED_OPTIMIZER}/.metadata", "scheduler.pt"),
    "deepspeed": ("latest",),
}
SCHEDULE_LENGTH = {"train.epochs", "train.max_steps"}
QUANTIZATION = {"tuning.bnb_4bit_quant_type", "tuning.bnb_4bit_use_double_quant"}

ASKED = "asked.json"
VALUE_LENGTH = 400  # characters of a value that are kept


class ChangedSetting(NamedTuple):
    """A setting that differs between a run and the one that continues from it."""

    path: str
    then: Any
    now: Any


@dataclass(frozen=True)
class Resumed:
    """A checkpoint to continue from, and the settings that its stamp says it was trained with."""

    checkpoint: Path
    saved: stamp.Stamp

    @property
    def then(self) -> Config:
        """The config of the run that wrote it. Raises CheckpointError for another version's."""
        try:
            return Config.of_run(self.saved.config)
        except ValidationError as error:
            raise CheckpointError(
                f"{self.checkpoint}: its stamp has settings of another version "
                f"({first_fault(error)}); resume it with that version, or start again"
            ) from None

    def refuse_changes(self, config: Config, origin: Mapping[str, str] | None = None) -> None:
        """Refuse a resolved config that would train something else than this run did.

        `origin` says who sets each setting now. Raises: CheckpointError with a line for each such
        setting: then, now, set by.
        """
        free = may_change(self.then, config, self.saved)
        refused = [change for change in self.changes(config) if change.path not in free]
        if not refused:
            return
        extension = ""
        if {change.path for change in refused} <= SCHEDULE_LENGTH:  # it would allow all of them
            extension = (
                "TRAIN_EXTEND=true, under a new RUN, trains longer on a schedule of the new "
                "length. "
            )
        rows = [("setting", "then", "now", "set by" if origin else "")]
        for path, then, now in refused:
            rows.append((path, word(then), word(now), origin[path] if origin else ""))
        table = "\n".join(f"  {line}" for line in aligned(rows, left=range(4)))
        raise CheckpointError(
            f"{self.checkpoint} cannot continue with other settings than it was trained with:\n"
            f"{table}\n"
            f"Leave these out: TRAIN_RESUME_FROM={config.train.resume_from} uses the settings of "
            f"the run. {extension}To start a new run, leave out TRAIN_RESUME_FROM and set a new "
            "RUN."
        )

    def changes(self, config: Config) -> list[ChangedSetting]:
        """Return the settings in which a resolved config differs from this run's."""
        then = self.then
        found = []
        for path in settings():
            value = attrgetter(path)
            if CLASSES[path] is not OnResume.OF_LAUNCH and value(then) != value(config):
                found.append(ChangedSetting(path, value(then), value(config)))
        return found


def resumed_run(resume_from: str | None) -> RunFolder | None:
    """Return the run folder around what `train.resume_from` names, None if there is none."""
    if resume_from is None:
        return None
    path = Path(resume_from)
    for folder in (path, path.parent, path.parent.parent):
        if (folder / "config.yaml").is_file() and (folder / "plan.json").is_file():
            return RunFolder(folder)
    return None


def settings_of_run(resume_from: str, has_config: bool) -> RunSettings | None:
    """Return what a resumed run was asked, as the layer below what is given now.

    None without a run folder: then CONFIG, which `has_config` says is given, is all there is.
    Raises: CheckpointError without either; ConfigError when config.yaml is of another version.
    """
    folder = resumed_run(resume_from)
    if folder is None:
        if Path(resume_from).is_dir() and not has_config:
            raise CheckpointError(
                f"train.resume_from={resume_from}: the config.yaml of its run is missing; "
                "set CONFIG to the one that it was trained with, or resume the run's folder"
            )
        return None
    problems: list[str] = []
    source = folder.path / "config.yaml"
    layer = layers.of_run(source, problems)
    refuse(problems)
    for path in settings_of_class(OnResume.OF_LAUNCH):
        layer.pop(path, None)
    asked = AskedRun.read(folder)
    shown = layers.displayed(source)
    for path in settings_of_class(OnResume.PLANNED):
        if path in asked.settings:
            layer[path] = Located(parse_scalar(asked.settings[path].value), shown)
    # a setting of an earlier version may be gone
    unset = {path for path, setting in asked.settings.items() if not setting.is_chosen} & set(layer)
    # else the plan may take another number of rows per step
    unset.discard("train.effective_batch_size")
    return RunSettings(layer, source, frozenset(unset))


def may_change(then: Config, now: Config, saved: stamp.Stamp) -> set[str]:
    """Return the settings that a run which resumes a checkpoint stamped `saved` may change."""
    free = set(MAY_CHANGE)
    is_constant = now.train.lr_scheduler_type == then.train.lr_scheduler_type == "constant"
    if is_constant or now.train.extend:
        free |= SCHEDULE_LENGTH  # a constant rate depends on no length
    if then.train.max_steps == now.train.max_steps is not None:
        free |= {"train.epochs"}  # max_steps overrides them
    if then.tuning.mode == now.tuning.mode == "full":
        free |= {path for path in settings() if path.startswith("tuning.lora.")}
    if "qlora" not in (then.tuning.mode, now.tuning.mode):
        free |= QUANTIZATION
    if now.train.allow_backend_change:
        free |= QUANTIZATION | {"tuning.backend"}
    is_moved = then.model.name != now.model.name and saved.base_digest is not None
    if is_moved and stamp.wanted_stamp(now).base_digest == saved.base_digest:
        free |= {"model.name"}
    if now.model.has_template_file:
        free |= {"model.chat_template"}  # the stamp has the digest of its text
    for name in CONTENT:
        value = attrgetter(name)
        if _beside_paths(value(then)) != _beside_paths(value(now)):
            free.discard(name)  # the digest of the rows says nothing of it
    return free


def _beside_paths(sources: str | list[str | SourceSection] | None) -> list[Any]:
    """Return the weight and the columns of each source of a data setting."""
    found = []
    for part in sources if isinstance(sources, list) else [sources]:
        is_section = isinstance(part, SourceSection)
        found.append((part.weight, part.columns) if is_section else (None, {}))
    return found


def refuse_other_steps(
    checkpoint: Path,
    saved: stamp.Stamp,
    data_digest: str,
    effective_batch: int,
    batch_unit: str | None = None,
) -> None:
    """Refuse to resume if the steps to come would not be those that were left.

    The digest and the rows per step are those of the run that continues, and so is what a batch
    counts, None before its rows are read. Raises: CheckpointError.
    """
    step = step_of(checkpoint)
    if step is not None and saved.global_step != step:
        raise CheckpointError(
            f"{checkpoint}: its stamp has step {saved.global_step}, so it was renamed, or "
            "copied over another one; choose another checkpoint"
        )
    if saved.data_digest != data_digest:
        further = ""
        if saved.mode != "full":
            run = resumed_run(str(checkpoint))
            has_adapter = run is not None and (run.path / "adapter").is_dir()
            named = run.path if has_adapter else checkpoint
            further = f"; to train its adapter further on these, set MODEL_ADAPTER={named} instead"
        raise CheckpointError(
            f"{checkpoint}: its run had other rows (digest {saved.data_digest}, now "
            f"{data_digest}), so the rows that are left to train are not known. Use the "
            f"files that it was trained on, or start a new run without TRAIN_RESUME_FROM{further}"
        )
    if saved.effective_batch != effective_batch:
        rows = saved.effective_batch
        raise CheckpointError(
            f"{checkpoint}: its run trained {rows} rows per step, and this one would train "
            f"{effective_batch}; set TRAIN_EFFECTIVE_BATCH_SIZE={rows} "
            "TRAIN_GRAD_ACCUM=auto"
        )
    if batch_unit not in (None, saved.batch_unit):
        raise CheckpointError(
            f"{checkpoint}: an earlier version trained it, whose steps counted each answer of a "
            "conversation as a row, so the rows that are left to train are not known; start a new "
            "run without TRAIN_RESUME_FROM"
        )


def check_resumable(
    checkpoint: Path, saved: stamp.Stamp, strategy: str, world_size: int, is_elastic: bool = False
) -> None:
    """Raise CheckpointError unless this run can load the checkpoint's optimizer.

    Trainer would silently start a new one. `saved` is the checkpoint's stamp. DeepSpeed saves a
    shard of the optimizer for each rank, so the world size must be the same. FSDP divides the
    optimizer of a full run, whose parts fit any world size; that of adapters is complete. Still,
    another world size is taken only if the user says so (`is_elastic`).
    """
    is_full = saved.mode == "full"
    form = _form_of_optimizer(strategy, is_full)
    saved_form = _form_of_optimizer(saved.strategy, is_full)
    has_other_world_size = saved.world_size != world_size
    if saved_form != form or (form == "deepspeed" and has_other_world_size):
        saved_by = f"strategy={saved.strategy} world={saved.world_size}"
        command = "make train or make train-distributed TRAIN_STRATEGY=ddp"
        if saved_form == "deepspeed":
            command = f"make train-deepspeed NUM_GPUS={saved.world_size}"
        elif saved_form == "fsdp":
            command = "make train-distributed TRAIN_STRATEGY=fsdp"
        raise CheckpointError(
            f"{checkpoint}: its optimizer was saved by {saved_by}, and this run is "
            f"strategy={strategy} world={world_size}; continue with {command}"
        )
    if has_other_world_size and not is_elastic:
        raise CheckpointError(
            f"{checkpoint}: {saved.world_size} processes trained it, and this run has "
            f"{world_size}. Continue with NUM_GPUS={saved.world_size}, or set ELASTIC=1. "
            "Every row is then trained once, as before, but sums round differently and dropout "
            "draws other numbers"
        )
    needed = FILES_OF_OPTIMIZER[form]
    missing = [name for name in needed if not (checkpoint / name).is_file()]
    if missing:
        raise CheckpointError(
            f"{checkpoint}: has no {', '.join(missing)}, so the run would start its optimizer "
            "again; choose another checkpoint"
        )


def _form_of_optimizer(strategy: str, is_full: bool) -> str:
    """Return how the optimizer lies in a checkpoint, a key of FILES_OF_OPTIMIZER."""
    if strategy == "deepspeed" or (strategy == "fsdp" and is_full):
        return strategy
    return "whole"


@dataclass(frozen=True)
class AskedSetting:
    """A setting as the user, a file or the schema has it."""

    value: str  # as YAML spells it; "auto" stands as it is
    origin: str  # such as configs/tiny.yaml:20, or environment TRAIN_EPOCHS
    is_chosen: bool  # by the user, not by the schema or configs/base.yaml


@dataclass(frozen=True)
class AskedRun:
    """The settings of a run by dotted name, and the shell command that repeats it."""

    command: str
    settings: dict[str, AskedSetting]

    @classmethod
    def of(cls, loaded: LoadedConfig, command: str) -> Self:
        """Return what a loaded config asks."""
        asked = {}
        for path in settings():
            value = word(loaded.value(path), VALUE_LENGTH)
            asked[path] = AskedSetting(value, loaded.origin[path], loaded.is_set(path))
        return cls(command, asked)

    def write(self, folder: RunFolder) -> None:
        """Write asked.json."""
        write_json(folder.path / ASKED, asdict(self))

    @classmethod
    def read(cls, folder: RunFolder) -> Self:
        """Return what asked.json says. Raises EnvironmentFault for a run of another version."""
        try:
            values: Json = json.loads(folder.read_input(ASKED))
            found = {name: AskedSetting(**facts) for name, facts in values["settings"].items()}
            return cls(values["command"], found)
        except (ValueError, KeyError, TypeError) as error:
            raise EnvironmentFault(
                f"{folder.path / ASKED}: {first_line(error)}. It was edited, or written by another "
                "version of SFT-Play: train again"
            ) from None
