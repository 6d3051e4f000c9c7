"""`make init`: a config for a model, rows and this machine, with the reason for each line.

Loads no torch, unless a tokenizer must be fetched.
"""

from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel

from sft_play.commands.call import Call, look, refuse_taken, write_out
from sft_play.config import foreign, loader
from sft_play.config.loader import CHOSEN, LoadedConfig
from sft_play.config.present import SettingLine, commented_yaml
from sft_play.config.schema import Config, env_name, settings
from sft_play.config.yaml_source import Located, YamlValue
from sft_play.errors import ConfigError
from sft_play.plan import next_command, recipe, report
from sft_play.plan.base_model import require_base
from sft_play.plan.devices import GIB
from sft_play.plan.recipe import RecipeFacts
from sft_play.plan.resolve import fastest, resolve_plan
from sft_play.plan.run_plan import PlannedRun, RunPlan
from sft_play.runs.model_folder import refuse_unsafe_base

NEEDED = ("model.name", "data.train_path")


@dataclass(frozen=True)
class Fit:
    """A config with a mode that fits this machine, its plan, and why this mode was chosen."""

    loaded: LoadedConfig
    planned: PlannedRun
    because: str


def init(call: Call) -> list[str]:
    """Write a config for MODEL_NAME and DATA_TRAIN_PATH to OUT; return the lines to print.

    Raises: ConfigError if OUT is taken or one of the two is missing; DataError for rows that
    cannot be used; EnvironmentFault if the model is nowhere; OutOfMemory if nothing fits.
    """
    from sft_play.data.row_facts import check_first_rows

    path = Path(call.environ.get("OUT") or "config.yaml")
    refuse_taken(path, call.overwrites)
    if call.environ.get("FROM"):
        return _translated(path, call)
    loaded = loader.load_merged(str(loader.BASE), call.environ, call.overrides)
    missing = [f"{env_name(name)}=..." for name in NEEDED if not loaded.is_set(name)]
    if missing:
        raise ConfigError(
            f"make init writes a config for a model and rows: add {' '.join(missing)}"
        )
    refuse_unsafe_base(loaded.config)
    require_base(loaded.config, call.environ)
    check_first_rows(loaded.config)
    facts = look(call, loaded, may_fetch=not call.invocation.gpus)
    fit = choose_mode(call, loaded, facts)
    plan = fit.planned.plan
    gpus = f"{plan.ranks.world_size} x {plan.gpu}" if plan.gpu else "a CPU"
    header = [
        " ".join(next_command.start_command(plan, {"CONFIG": str(path)})),
        f"Written by make init for {gpus}. Any number may be changed; auto chooses it again when a",
        "run is planned. docs/configuration.md lists all settings.",
    ]
    text = commented_yaml(header, _lines(fit, facts))
    write_out(path, text, call.overwrites)
    return _told(path, fit)


def _translated(path: Path, call: Call) -> list[str]:
    """Translate the config or command line of another program; return the lines to print."""
    source = call.environ["FROM"]
    said = foreign.translate(source)
    lines, told = said.lines, []
    if said.packed_tokens is not None:
        rows = _rows_of_step(said, call)
        told = [f"{rows.path} {rows.value}: {rows.comment}"]
        lines = sorted([*lines, rows], key=lambda line: list(settings()).index(line.path))
    header = [
        f"Written by make init from {' '.join(source.split())}.",
        "docs/configuration.md lists all settings.",
    ]
    text = commented_yaml(header, lines)
    if said.left:
        text += "\n# What no setting here takes:\n" + "".join(f"# {line}\n" for line in said.left)
    write_out(path, text, call.overwrites)
    told = [f"wrote {path}: {len(lines)} settings", *told]
    told += [f"left out: {line}" for line in said.left]
    try:
        loader.load_merged(str(path))
    except ConfigError as error:
        told += [f"to be mended: {line}" for line in str(error).splitlines()]
    return [*told, f"next make plan CONFIG={path}"]


def _rows_of_step(said: foreign.Translation, call: Call) -> SettingLine:
    """Return the rows of a step with as many tokens as the packed sequences of another program."""
    from sft_play.data.row_facts import look_at_rows

    name, default = "train.effective_batch_size", Config().train.effective_batch_size
    devices = max(1, call.hardware.count)
    tokens = said.packed_tokens * devices
    step = f"a step there is {tokens:,} tokens in packed sequences, with processes={devices}"
    config = Config.model_validate(loader.nested({line.path: line.value for line in said.lines}))
    facts: object = "no rows are named"
    if config.data.train_path is not None:
        facts = look_at_rows(config, call.environ, may_fetch=False)
    if isinstance(facts, str):
        return SettingLine(name, default, f"{step}; divide them by the tokens of a row ({facts})")
    mean = sum(facts.lengths) / len(facts.lengths)
    return SettingLine(
        name, max(1, round(tokens / mean)), f"{step}; a row has {mean:.0f} on average"
    )


def choose_mode(call: Call, loaded: LoadedConfig, facts: RecipeFacts) -> Fit:
    """Return the mode that the user set, else lora if it fits on the GPUs, else qlora.

    Adapters whose base model fits on each GPU are fastest without ZeRO, so ZeRO is tried last.
    Raises: OutOfMemory if nothing fits.
    """
    hardware = call.hardware

    def planned(mode: str, sharded: bool = False) -> tuple[LoadedConfig, PlannedRun]:
        chosen = loaded
        if not loaded.is_set("tuning.mode"):
            chosen = loaded.with_values({"tuning.mode": Located(mode, f"{CHOSEN}by memory")})
        settled = recipe.settle_autos(chosen, facts)
        if sharded:
            return settled, fastest(settled, call.invocation, hardware, call.environ)
        return settled, resolve_plan(settled, call.invocation, hardware, call.environ, True, False)

    if loaded.is_set("tuning.mode"):
        settled, run = planned(loaded.config.tuning.mode, sharded=True)
        _refuse_too_large(run.plan)
        return Fit(settled, run, f"{loaded.origin['tuning.mode']}; {_memory(run.plan)}")
    settled, lora = planned("lora")
    on_host = lora.plan.step.offloaded_weight_layers
    if lora.plan.fits and not on_host:
        return Fit(settled, lora, f"adapters over unquantized weights fit: {_memory(lora.plan)}")
    needed = f"need {lora.plan.memory.predicted_peak / GIB:.1f} GiB"
    if on_host:
        needed = f"have {on_host} layers in host memory"
    reason = f"lora would {needed}; adapters over 4-bit weights fit"
    settled, qlora = planned("qlora")
    if not qlora.plan.fits:
        settled, qlora = planned("qlora", sharded=True)
    _refuse_too_large(qlora.plan)
    return Fit(settled, qlora, f"{reason}: {_memory(qlora.plan)}")


def _refuse_too_large(plan: RunPlan) -> None:
    if not plan.fits:
        raise next_command.does_not_fit(plan)


def _memory(plan: RunPlan) -> str:
    where = "each GPU" if plan.ranks.device == "cuda" else "this host"
    peak = plan.memory.predicted_peak / GIB
    return f"{peak:.1f} of the {plan.budget_bytes / GIB:.1f} GiB that {where} can give"


def _lines(fit: Fit, facts: RecipeFacts) -> list[SettingLine]:
    """Return the settings of the file: the chosen ones, and all that the user gave."""
    loaded = fit.loaded
    comments = {name: loaded.origin[name] for name in settings() if loaded.is_set(name)}
    comments.update(_comments(fit, facts))
    return [
        SettingLine(name, _plain(loaded.value(name)), comments[name])
        for name in settings()
        if name in comments
    ]


def _comments(fit: Fit, facts: RecipeFacts) -> dict[str, str]:
    """Return the reason for each setting that every such file contains."""
    loaded = fit.loaded
    layout = fit.planned.plan.layout
    model = fit.planned.plan.step.model
    takes = f", takes at most {facts.positions:,} tokens" if facts.positions else ""
    comments = {
        "model.name": f"{recipe.model_summary(model)}{takes}",
        "tuning.mode": fit.because,
        "train.batch_size": f"auto is by memory; here {layout.batch_size} rows",
        "train.grad_accum": f"auto reaches effective_batch_size; here {layout.grad_accum}",
        "train.effective_batch_size": "rows of an optimizer step",
        "data.train_path": _rows(loaded, facts),
    }
    for name in recipe.SETTINGS:
        comments[name] = loaded.origin[name].removeprefix(CHOSEN)
    if not loaded.config.data.val_path:
        comments["data.val_size"] = "share of the rows that is held out for evaluation"
    return comments


def _rows(loaded: LoadedConfig, facts: RecipeFacts) -> str:
    """Return the format of the training rows and their number."""
    from sft_play.data.sources import find_source, source_sections

    data = loaded.config.data
    kinds = []
    for section in source_sections(data.train_path):
        source = find_source(section, "data.train_path", data)
        columns = next(source.read()).row_format.required
        kinds.append(f"the columns {' and '.join(columns)}")
    read = ", ".join(dict.fromkeys(kinds))
    if isinstance(facts.rows, str):
        return f"rows from {read}"
    about = "about " if facts.rows.is_estimated else ""
    return f"{about}{facts.rows.rows:,} rows to train on, from {read}"


def _plain(value: object) -> YamlValue:
    """Return a setting's value for YAML."""
    if isinstance(value, BaseModel):
        return value.model_dump(exclude_defaults=True)
    if isinstance(value, list):
        return [_plain(part) for part in value]
    return value


def _told(path: Path, fit: Fit) -> list[str]:
    """Return the text to print for a written config."""
    plan = fit.planned.plan
    given = {"CONFIG": str(path)}
    lines = [f"wrote {path}", report.plan_line(fit.planned)]
    lines += [f"recipe {sentence}" for sentence in plan.recipe]
    lines.append(f"mode {fit.loaded.config.tuning.mode}: {fit.because}")
    lines.append(f"next {' '.join(next_command.make_command('preview', given))}")
    lines.append(f"next {' '.join(next_command.start_command(plan, given))}")
    return lines
