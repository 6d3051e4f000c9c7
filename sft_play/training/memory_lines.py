"""Memory of each GPU and time, in the words that Unsloth's notebooks print. Pure.

A GB in these lines is 2^30 bytes, as in those notebooks. On CPUs a line is about a process.
"""

from collections.abc import Sequence

from sft_play.runs.report import RankMemory, RunReport

GB = 2**30


def lines_before_training(ranks: Sequence[RankMemory]) -> list[str]:
    """Return what each GPU has and what is reserved once the weights are loaded."""
    if len(ranks) == 1:
        only = ranks[0]
        return [
            f"GPU = {only.name}. Max memory = {_gb(only.total_bytes)} GB.",
            f"{_gb(only.before_bytes)} GB of memory reserved.",
        ]
    lines = [
        f"{_label(rank)} = {rank.name}. Max memory = {_gb(rank.total_bytes)} GB. "
        f"Reserved = {_gb(rank.before_bytes)} GB."
        for rank in ranks
    ]
    total = sum(rank.total_bytes for rank in ranks)
    reserved = sum(rank.before_bytes for rank in ranks)
    lines.append(
        f"Total across {len(ranks)} GPUs: {_gb(total)} GB max, {_gb(reserved)} GB reserved"
    )
    return lines


def lines_after_training(report: RunReport) -> list[str]:
    """Return the peaks of each GPU, alone and for training, and the time that training took."""
    ranks = report.memory_by_rank or []
    seconds = report.seconds["train"]
    minutes = seconds / 60
    if len(ranks) == 1:
        return [
            f"{seconds:.1f} seconds used for training.",
            f"{minutes:.2f} minutes used for training.",
            *_lines_of_one(ranks[0]),
        ]
    return [
        *map(_line_of_several, ranks),
        *_total_lines(ranks),
        f"{seconds:.1f} seconds ({minutes:.2f} minutes) used for training.",
        *_parallel_lines(report),
    ]


def _lines_of_one(only: RankMemory) -> list[str]:
    what = "reserved" if _is_gpu(only) else "resident"
    of = "max memory" if _is_gpu(only) else "this host's memory"
    peak, training = only.peak_bytes, only.training_bytes
    return [
        f"Peak {what} memory = {_gb(peak)} GB.",
        f"Peak {what} memory for training = {_gb(training)} GB.",
        f"Peak {what} memory % of {of} = {only.percent(peak):.3f} %.",
        f"Peak {what} memory for training % of {of} = {only.percent(training):.3f} %.",
    ]


def _line_of_several(rank: RankMemory) -> str:
    what = "reserved" if _is_gpu(rank) else "resident"
    peak, training = rank.peak_bytes, rank.training_bytes
    return (
        f"{_label(rank)}: Peak {what} = {_gb(peak)} GB ({rank.percent(peak):.3f}%), "
        f"Training = {_gb(training)} GB ({rank.percent(training):.3f}%)"
    )


def _total_lines(ranks: Sequence[RankMemory]) -> list[str]:
    """Return the sum over GPUs; processes on one CPU share the host's memory, so there is none."""
    if not ranks or not all(map(_is_gpu, ranks)):
        return []
    total = sum(rank.total_bytes for rank in ranks)
    peak = sum(rank.peak_bytes for rank in ranks)
    training = sum(rank.training_bytes for rank in ranks)
    return [
        f"Total across {len(ranks)} GPUs: Peak = {_gb(peak)} GB ({100 * peak / total:.3f}%), "
        f"Training = {_gb(training)} GB ({100 * training / total:.3f}%)"
    ]


def _parallel_lines(report: RunReport) -> list[str]:
    world_size = report.world_size or 1
    if world_size == 1 or not report.tokens_per_second:
        return []
    what = "GPU" if report.device == "cuda" else "process"
    plural = f"{what}s" if what == "GPU" else "processes"
    each = report.tokens_per_second / world_size
    return [
        f"Training on {world_size} {plural} in parallel ({report.strategy}): "
        f"{report.tokens_per_second:.0f} tokens/s, {each:.0f} a {what}"
    ]


def _label(rank: RankMemory) -> str:
    """Return `GPU 0`: over several machines the ranks count on."""
    return f"GPU {rank.rank}" if _is_gpu(rank) else f"Process {rank.rank}"


def _is_gpu(rank: RankMemory) -> bool:
    return rank.device != "cpu"


def _gb(size_bytes: int) -> str:
    return f"{round(size_bytes / GB, 3)}"
