"""`make plan`. Loads no torch."""

import re
from pathlib import Path

from sft_play.commands.call import NO_ROWS, Call, as_text, load_config, plan_run, settle
from sft_play.config.loader import BASE, LoadedConfig
from sft_play.config.schema import env_name, settings
from sft_play.data.row_facts import count_rows_or_reason
from sft_play.plan import launch, next_command, report
from sft_play.plan.resolve import fastest
from sft_play.plan.run_plan import PlannedRun, RunPlan
from sft_play.plan.workload import Workload, workload
from sft_play.runs import folder as run_folders
from sft_play.runs.model_folder import refuse_unsafe_base

LAUNCH_VARIABLES = (
    "CONFIG NUM_GPUS DEVICE DEEPSPEED_CONFIG NNODES NODE_RANK MASTER_ADDR MASTER_PORT"
).split()


def plan_for_display(call: Call, distributed: bool, use_deepspeed: bool) -> PlannedRun:
    """Return the plan of `make plan`: the fastest strategy that fits, unless one is requested."""
    loaded = load_config(call)
    refuse_unsafe_base(loaded.config)
    loaded = settle(call, loaded, False, has_rows=not names_no_rows(call))
    if distributed or use_deepspeed:
        return plan_run(call, loaded, distributed, use_deepspeed)
    return fastest(loaded, call.invocation, call.hardware, call.environ)


def plan_text(call: Call, planned: PlannedRun, as_json: bool) -> str:
    """Return the text of `make plan`, or its JSON."""
    plan = planned.plan
    command = launch.launch_command(plan.ranks, Path("outputs/<run>"), call.environ)
    trained = NO_ROWS if names_no_rows(call) else work_or_reason(planned)
    if as_json:
        counts = None if isinstance(trained, str) else trained
        return as_text(report.plan_json(plan, command, counts))
    words = next_command.start_command(plan, given_variables(call))
    return "\n".join(report.plan_lines(planned, command, words, trained))


def names_no_rows(call: Call) -> bool:
    """Return whether a model is planned for other hardware, and no rows are named for it."""
    given = given_variables(call)
    has_rows = "DATA_TRAIN_PATH" in given or "CONFIG" in given
    return bool(call.invocation.gpus) and "MODEL_NAME" in given and not has_rows


def work_or_reason(planned: PlannedRun) -> Workload | str:
    """Return the training data of the complete run, or why its rows are not counted."""
    counted = count_rows_or_reason(planned.config)
    if isinstance(counted, str):
        return counted
    return workload(planned.config, planned.plan, counted)


def given_variables(call: Call, *left_out: str) -> dict[str, str]:
    """Return every variable that affects a run, with those of --set, which take precedence."""
    names = [*LAUNCH_VARIABLES, *sorted(env_name(path) for path in settings())]
    variables = {name: call.environ[name] for name in names if call.environ.get(name)}
    for override in call.overrides:
        path, _, value = override.partition("=")
        variables[env_name(path.strip())] = value.strip()
    return {name: value for name, value in variables.items() if name not in left_out}


def refuse_what_does_not_fit(plan: RunPlan) -> None:
    """Raise OutOfMemory for a plan that is not expected to fit.

    If the user set the micro-batch, warn instead.
    """
    if plan.fits:
        return
    error = next_command.does_not_fit(plan)
    if not plan.is_batch_explicit:
        raise error
    print(f"warning: {error}")


def run_stem(loaded: LoadedConfig) -> str:
    """Return the start of an unnamed run's name: from its config, otherwise from its model."""
    if loaded.source == BASE:
        name = re.sub(r"[^A-Za-z0-9._-]", "-", Path(loaded.config.model.name).name)
        return name.strip("._-") or BASE.stem
    return run_folders.stem_of(loaded.source)
