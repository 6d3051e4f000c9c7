"""`make eval`: the scores of a run, on every GPU. Loads no torch until this process scores."""

import importlib.util
from collections.abc import Sequence

from sft_play.commands.call import read_call
from sft_play.commands.each_gpu import own_place, processes_of, run_on_each
from sft_play.config.loader import LoadedConfig
from sft_play.config.tasks import TasksAsked, read_tasks
from sft_play.errors import EnvironmentFault
from sft_play.runs.folder import RunFolder


def score_run(
    run: RunFolder, device: str, asked: LoadedConfig, overrides: Sequence[str], compares: bool
) -> list[str]:
    """Score weights on rows, or on TASKS, on every GPU or NUM_GPUS; return the lines to print.

    The first of several processes prints them itself.
    """
    call = read_call(None, overrides)
    tasks = read_tasks(call.environ)
    if tasks is not None:
        require_lm_eval(tasks)
    place = own_place(call.environ)
    count = 1 if asked.config.model.device_map is not None else processes_of(call)
    if place is None and count > 1:
        run_on_each("eval", overrides, call, run, count)
        return []
    if tasks is None:
        from sft_play.inference.evaluate import evaluate_run

        lines = evaluate_run(run, device, asked, place, compares)
    else:
        from sft_play.inference.tasks import score_tasks

        lines = score_tasks(run, device, asked, tasks, place, compares)
    return lines if place is None or place.number == 0 else []


def require_lm_eval(asked: TasksAsked) -> None:
    """Raise EnvironmentFault where lm-eval is not installed."""
    if importlib.util.find_spec("lm_eval") is None:
        raise EnvironmentFault(
            f"TASKS={','.join(asked.names)}: tasks are lm-eval's, which is not installed: "
            "make install-tasks"
        )
