"""`make eval`: the scores of a run, on every GPU. Loads no torch until this process scores."""

from collections.abc import Sequence

from sft_play.commands.call import read_call
from sft_play.commands.each_gpu import own_place, processes_of, run_on_each
from sft_play.config.loader import LoadedConfig
from sft_play.runs.folder import RunFolder


def score_run(
    run: RunFolder, device: str, asked: LoadedConfig, overrides: Sequence[str], compares: bool
) -> list[str]:
    """Score a run's weights on every GPU, or on NUM_GPUS; return the lines to print.

    The first of several processes prints them itself.
    """
    call = read_call(None, overrides)
    place = own_place(call.environ)
    count = 1 if asked.config.model.device_map is not None else processes_of(call)
    if place is None and count > 1:
        run_on_each("eval", overrides, call, run, count)
        return []
    from sft_play.inference.evaluate import evaluate_run

    lines = evaluate_run(run, device, asked, place, compares)
    return lines if place is None or place.number == 0 else []
