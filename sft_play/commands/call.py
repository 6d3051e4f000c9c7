"""A command's variables and options, and the resulting config and plan. Loads no torch."""

import json
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sft_play.config import invocation as invocations
from sft_play.config import loader
from sft_play.config.backends import BACKENDS
from sft_play.config.loader import LoadedConfig
from sft_play.config.messages import invalid, not_utf8
from sft_play.config.yaml_source import Located
from sft_play.errors import ConfigError, EnvironmentFault
from sft_play.plan import cards, devices, recipe, sources
from sft_play.plan.base_model import model_inside, require_base
from sft_play.plan.config_json import load_positions
from sft_play.plan.counting import load_counted_shape
from sft_play.plan.resolve import resolve_plan
from sft_play.plan.run_plan import PlannedRun
from sft_play.runs.earlier_adapter import SETTING, refuse_other_base, settings_of_adapter
from sft_play.runs.files import free_name, write_text
from sft_play.runs.resumed import settings_of_run

NO_ROWS = "no DATA_TRAIN_PATH is given"
FIRST_MACHINE = "the-first-machine"  # used if nothing is launched


@dataclass(frozen=True)
class Call:
    """How a command was called: variables, their environment, and the values of --set."""

    invocation: invocations.Invocation
    environ: Mapping[str, str]
    overrides: tuple[str, ...]

    @property
    def overwrites(self) -> bool:
        """Whether OVERWRITE=1 allows the command to replace the file in OUT."""
        return self.words.text("OVERWRITE") == "1"

    @property
    def output_dir(self) -> Path:
        """Folder of the run folders, for commands that need no config."""
        folder = self.environ.get("TRAIN_OUTPUT_DIR", "outputs").strip()
        if not folder or not_utf8(folder):
            named = Located(folder, "environment TRAIN_OUTPUT_DIR")
            raise ConfigError(invalid("train.output_dir", named))
        return Path(folder)

    @property
    def machine(self) -> devices.Hardware:
        """This machine's hardware, according to DEVICE."""
        return devices.detect(self.invocation.device, self.environ)

    @property
    def hardware(self) -> devices.Hardware:
        """The hardware in GPUS, or this machine's."""
        gpus = self.invocation.gpus
        return cards.parse_hardware(gpus) if gpus else self.machine

    @property
    def pid_file(self) -> Path:
        """The file in which this project's TensorBoard stores its process id."""
        return self.output_dir / ".tensorboard.json"

    def given(self, path: str) -> str | None:
        """Return a setting's value in CONFIG, the environment or --set; None if it is not given."""
        config = self.invocation.config
        value = loader.given_value(path, config, self.environ, self.overrides)
        return None if value is None else str(value)

    @property
    def words(self) -> invocations.Words:
        """The reader of one command's variables; it collects their errors."""
        return invocations.Words(self.environ)


def read_call(
    config: str | None = None,
    overrides: Iterable[str] | None = None,
    gpus: str | None = None,
    environ: Mapping[str, str] | None = None,
    exact: bool = False,
) -> Call:
    """Return the call of a command; options of the command line take precedence over variables.

    The variables are those of this process unless `environ` is given.
    """
    environ = loader.environment() if environ is None else dict(environ)
    if config:
        environ["CONFIG"] = config
    if gpus:
        environ["GPUS"] = gpus
    if exact:
        environ["EXACT"] = "1"
    return Call(invocations.read_invocation(environ), environ, tuple(overrides or ()))


def load_config(call: Call, backend: str | None = None) -> LoadedConfig:
    """Return the merged config of a call; `backend` is set by a target such as train-unsloth.

    If `train.resume_from` names a run, its settings are the layer below the given ones.
    """
    path = call.invocation.config
    target = None
    if backend:
        target = {"tuning.backend": Located(backend, f"make train-{backend}")}
    resume_from = call.given("train.resume_from")
    resumed = settings_of_run(resume_from, path is not None) if resume_from else None
    if backend and resumed is None:
        path = path or BACKENDS[backend].default_config
    # also of the target's config
    named = loader.given_value(SETTING, path, call.environ, call.overrides)
    adapter = settings_of_adapter(str(named), call.output_dir) if named else None
    loaded = loader.load_merged(path, call.environ, call.overrides, target, resumed, adapter)
    inner = model_inside(Path(loaded.config.model.name))
    if inner is not None:
        sys.stderr.write(f"{loaded.described('model.name')}: the model inside it is {inner}\n")
        found = Located(str(inner), loaded.origin["model.name"])
        loaded = loaded.with_values({"model.name": found})
    refuse_other_base(loaded.config)
    return loaded


def look(
    call: Call, loaded: LoadedConfig, may_fetch: bool, has_rows: bool = True
) -> recipe.RecipeFacts:
    """Return the inputs of the recipe, after reading model and rows, if there are rows.

    Raises: EnvironmentFault if the model is not found. `may_fetch` is passed to `look_at_rows`.
    """
    sources.require_rows(loaded)
    model = loaded.config.model
    shape = load_counted_shape(loaded.config, call.environ)
    if not recipe.depends_on_rows(loaded.config):
        return recipe.RecipeFacts(shape.parameters)
    from sft_play.data.row_facts import look_at_rows

    positions = load_positions(model, call.environ, may_fetch)
    rows = look_at_rows(loaded.config, call.environ, may_fetch) if has_rows else NO_ROWS
    return recipe.RecipeFacts(shape.parameters, positions, rows)


def settle(
    call: Call, loaded: LoadedConfig, may_fetch: bool, has_rows: bool = True
) -> LoadedConfig:
    """Return the config with the numbers of the recipe. Raises: as `look`."""
    require_base(loaded.config, call.environ)
    if recipe.is_settled(loaded.config):
        return loaded
    return recipe.settle_autos(loaded, look(call, loaded, may_fetch, has_rows))


def plan_run(
    call: Call,
    loaded: LoadedConfig,
    distributed: bool = False,
    use_deepspeed: bool = False,
    hardware: devices.Hardware | None = None,
) -> PlannedRun:
    """Return the plan for `hardware`, for the hardware in GPUS, or for this machine."""
    is_elsewhere = bool(call.invocation.gpus)
    loaded = settle(call, loaded, may_fetch=not is_elsewhere)
    distributed = distributed or is_elsewhere
    hardware = hardware or call.hardware
    return resolve_plan(loaded, call.invocation, hardware, call.environ, distributed, use_deepspeed)


def without_meeting(call: Call) -> Call:
    """Return a call that launches nothing: several machines need no address.

    Its output contains FIRST_MACHINE instead.
    """
    if call.invocation.nnodes < 2 or call.environ.get("MASTER_ADDR", "").strip():
        return call
    environ = {**call.environ, "MASTER_ADDR": FIRST_MACHINE}
    return replace(call, invocation=invocations.read_invocation(environ), environ=environ)


def as_text(value: Any) -> str:
    """Return plain data as JSON for --json."""
    return json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False)


def refuse_taken(path: Path, replaces: bool, option: str = "OUT=") -> None:
    """Raise ConfigError for a path at which something is that a command must not replace."""
    if os.path.lexists(path) and (path.is_dir() or not replaces):
        free = f"{option}{path} exists; {option}{free_name(path)} is free"
        raise ConfigError(free if path.is_dir() else f"{free}, and OVERWRITE=1 replaces the file")


def write_out(path: Path, text: str, replaces: bool, option: str = "OUT=") -> None:
    """Write the requested output of a command; it `replaces` a file if that may be lost.

    Raises: ConfigError if something is there; EnvironmentFault if it cannot be written.
    """
    refuse_taken(path, replaces, option)
    try:
        write_text(path, text)
    except OSError as error:
        raise EnvironmentFault(
            f"{option}{path}: {error.strerror}; name a file in a folder that can be written"
        ) from None
