"""What a person sees of a run on a GPU: memory in words, load in TensorBoard and in metrics.jsonl."""

from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from test_gpu import needs_two, train

from sft_play.monitor.watch import frame
from sft_play.reporting.run_facts import RunFacts
from sft_play.runs.folder import RunFolder

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu


def events_of(folder: Path) -> EventAccumulator:
    events = EventAccumulator(str(folder / "run" / "tb"))
    events.Reload()
    return events


def check_gpu(events: EventAccumulator, rank: int) -> None:
    """Assert that TensorBoard has memory and load of a rank's GPU."""
    (allocated, *_), (reserved, *_), (used, *_) = (
        events.Scalars(f"gpu/{rank}/{name}")
        for name in ("mem_allocated_gib", "mem_reserved_gib", "used_gib")
    )
    assert 0 < allocated.value <= reserved.value <= used.value
    assert max(event.value for event in events.Scalars(f"gpu/{rank}/mem_peak_gib")) > 0
    assert all(0 <= event.value <= 100 for event in events.Scalars(f"gpu/{rank}/util_percent"))


def test_one_gpu_is_seen_in_the_log_in_tensorboard_and_in_the_terminal(tmp_path):
    report = train(tmp_path, "train", TRAIN_MAX_STEPS="12")
    (memory,) = report["memory_by_rank"]
    assert memory["name"] == torch.cuda.get_device_name(0)
    assert 0 < memory["before_bytes"] <= memory["peak_bytes"] < memory["total_bytes"]
    peak = round(memory["peak_bytes"] / 2**30, 3)
    assert f"GPU = {memory['name']}. Max memory = " in report["log"]
    assert f"Peak reserved memory = {peak} GB." in report["log"]
    events = events_of(tmp_path)
    check_gpu(events, 0)
    parts = ("forward", "backward", "optimizer")
    steps = {event.step: event.value for event in events.Scalars("train/step_seconds")}
    of_parts = {
        part: {event.step: event.value for event in events.Scalars(f"step/{part}_seconds")}
        for part in parts
    }
    for step in sorted(steps)[1:]:
        seconds = [of_parts[part][step] for part in parts]
        assert min(seconds) > 0 and sum(seconds) < 1.2 * steps[step]
    run = RunFacts.read(RunFolder(tmp_path / "run"))
    assert any(line.startswith(f"GPU 0 {memory['name']}: ") for line in frame(run))


@needs_two
def test_two_gpus_are_seen_each(tmp_path):
    report = train(tmp_path, "train-distributed", NUM_GPUS="2", TRAIN_MAX_STEPS="12")
    assert [rank["device"] for rank in report["memory_by_rank"]] == ["cuda:0", "cuda:1"]
    assert "Total across 2 GPUs: Peak = " in report["log"]
    events = events_of(tmp_path)
    for rank in (0, 1):
        check_gpu(events, rank)
    assert all(event.value >= 0 for event in events.Scalars("step/communication_seconds"))
