"""`make plan`. Loads no torch, unless the real model is traced."""

import dataclasses
from pathlib import Path

from sft_play.commands.call import Call, as_text, hardware_of, load_config, plan_run, settle
from sft_play.config.schema import env_name, settings
from sft_play.data.row_estimates import count_rows_or_reason
from sft_play.plan import accuracy, launch, next_command, report
from sft_play.plan.resolve import fastest
from sft_play.plan.run_plan import PlannedRun
from sft_play.plan.workload import workload
from sft_play.runs.base_files import refuse_unsafe_base

LAUNCH_VARIABLES = (
    "CONFIG",
    "NUM_GPUS",
    "DEVICE",
    "DEEPSPEED_CONFIG",
    "NNODES",
    "NODE_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
)


def plan_for_display(call: Call, distributed: bool, use_deepspeed: bool) -> PlannedRun:
    """Return the plan of `make plan`: the fastest strategy that fits, unless one is asked for."""
    loaded = load_config(call)
    refuse_unsafe_base(loaded.config)
    loaded = settle(call, loaded, may_fetch=False)
    if distributed or use_deepspeed:
        return plan_run(call, loaded, distributed, use_deepspeed)
    return fastest(loaded, call.invocation, hardware_of(call), call.environ)


def plan_text(call: Call, planned: PlannedRun, with_trace: bool, as_json: bool) -> str:
    """Return the text of `make plan`, or its JSON."""
    plan = planned.plan
    command = launch.launch_command(plan.ranks, Path("outputs/<run>"), call.environ)
    counted = count_rows_or_reason(planned.config)
    trained = counted if isinstance(counted, str) else workload(planned.config, plan, counted)
    output_dir = Path(planned.config.train.output_dir)
    near = accuracy.of_runs(output_dir, plan.ranks.device, plan.gpu)
    traced = None
    if with_trace or call.invocation.exact:
        from sft_play.models import trace  # torch: seconds

        traced = trace.trace_step(trace.setup_of(planned))
    if as_json:
        exact = None
        if traced is not None:
            exact = {**traced.as_json(), "phases": report.phases_json(traced.phases(plan.memory))}
        counts = None if isinstance(trained, str) else trained
        facts = report.plan_json(plan, command, counts)
        return as_text({**facts, "accuracy": dataclasses.asdict(near), "exact": exact})
    words = next_command.start_command(plan, given_variables(call), override_variables(call))
    lines = report.lines(planned, command, words, trained) + accuracy.lines(near)
    if traced is not None:
        lines += report.trace_lines(traced.phases(plan.memory), plan.memory)
    return "\n".join(lines)


def given_variables(call: Call) -> dict[str, str]:
    """Return every variable of the environment that means something to a run."""
    names = [*LAUNCH_VARIABLES, *sorted(env_name(path) for path in settings())]
    return {name: call.environ[name] for name in names if call.environ.get(name)}


def override_variables(call: Call) -> dict[str, str]:
    """Return the words of --set as variables."""
    variables = {}
    for override in call.overrides:
        path, _, value = override.partition("=")
        variables[env_name(path.strip())] = value.strip()
    return variables
