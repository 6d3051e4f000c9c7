"""What converted cells print on no GPU, one and two, with torch's counters set."""

import json
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from notebook_files import FOLDER, converted

GIB = 1024**3
NAME = "NVIDIA H200"


@pytest.fixture
def gpus(monkeypatch) -> Any:
    """Return a function that sets the number of GPUs and what is reserved on each, in GiB."""

    def be(reserved: list[float]) -> None:
        stats = SimpleNamespace(name=NAME, total_memory=100 * GIB)
        cuda = {
            "device_count": lambda: len(reserved),
            "is_available": lambda: bool(reserved),
            "get_device_properties": lambda index: stats,
            "max_memory_reserved": lambda index=0: int(reserved[index] * GIB),
        }
        for name, function in cuda.items():
            monkeypatch.setattr(torch.cuda, name, function)

    monkeypatch.delenv("LOCAL_RANK", raising=False)
    return be


def cells(text: str, *numbers: int) -> list[str]:
    sources = ["".join(cell["source"]) for cell in json.loads(text)["cells"]]
    return [sources[number - 1] for number in numbers]


ALPACA = FOLDER / "alpaca.ipynb"
BEFORE, AFTER = 7, 9  # the cells with memory statistics
STATS = SimpleNamespace(metrics={"train_runtime": 90.0})


def printed_by(
    text: str, gpus: Any, counts: tuple[list[float], list[float]], capsys: Any
) -> list[str]:
    """Return what the statistics of a notebook print, before and after training."""
    before, after = cells(text, BEFORE, AFTER)
    variables = {"torch": torch, "trainer_stats": STATS}
    gpus(counts[0])
    exec(before, variables)
    gpus(counts[1])
    exec(after, variables)
    return capsys.readouterr().out.splitlines()


def test_one_gpu_prints_what_it_printed(gpus, capsys):
    counts = ([2.5], [10.0])
    old = printed_by(ALPACA.read_text(encoding="utf-8"), gpus, counts, capsys)
    new = printed_by(converted(ALPACA).text, gpus, counts, capsys)
    assert old == new
    assert old[:2] == [f"GPU = {NAME}. Max memory = 100.0 GB.", "2.5 GB of memory reserved."]


def test_two_gpus_print_a_line_each_and_the_total(gpus, capsys):
    lines = printed_by(converted(ALPACA).text, gpus, ([2.5, 1.0], [10.0, 5.0]), capsys)
    assert lines == [
        f"GPU 0 = {NAME}. Max memory = 100.0 GB. Reserved = 2.5 GB.",
        f"GPU 1 = {NAME}. Max memory = 100.0 GB. Reserved = 1.0 GB.",
        "",
        "Total across 2 GPUs: 200.0 GB max, 3.5 GB reserved",
        "GPU 0: Peak reserved = 10.0 GB (10.0%), Training = 7.5 GB (7.5%)",
        "GPU 1: Peak reserved = 5.0 GB (5.0%), Training = 4.0 GB (4.0%)",
        "",
        "Total across 2 GPUs: Peak = 15.0 GB (7.5%), Training = 11.5 GB (5.75%)",
        "",
        "90.0 seconds (1.5 minutes) used for training.",
    ]


def test_no_gpu_prints_the_time_alone(gpus, capsys):
    lines = printed_by(converted(ALPACA).text, gpus, ([], []), capsys)
    assert lines == ["", "90.0 seconds (1.5 minutes) used for training."]


def test_a_process_of_torchrun_measures_its_own_gpu(gpus, capsys, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "0")
    lines = printed_by(converted(ALPACA).text, gpus, ([2.5, 0.0], [10.0, 0.0]), capsys)
    assert lines[:2] == [f"GPU = {NAME}. Max memory = 100.0 GB.", "2.5 GB of memory reserved."]


def load(text: str) -> dict[str, Any]:
    """Run the loading cell of the alpaca notebook; return the keywords of its load."""
    given: dict[str, Any] = {}

    def from_pretrained(**keywords: Any) -> tuple[None, None]:
        given.update(keywords)
        return None, None

    fake = SimpleNamespace(FastLanguageModel=SimpleNamespace(from_pretrained=from_pretrained))
    sys.modules["unsloth"] = fake
    try:
        (source,) = cells(text, 3)
        exec(source, {})
    finally:
        del sys.modules["unsloth"]
    return given


@pytest.mark.parametrize(
    ("reserved", "local_rank", "device_map", "words"),
    [
        ([], None, None, "Detected 0 GPU(s)\nSingle GPU mode"),
        ([0.0], None, None, "Detected 1 GPU(s)\nSingle GPU mode"),
        ([0.0, 0.0], None, "balanced", "Detected 2 GPU(s)\nUsing device_map='balanced'"),
        ([0.0, 0.0], "1", {"": 1}, "Detected 2 GPU(s)"),
        ([], "1", None, "Detected 0 GPU(s)"),
    ],
)
def test_the_load_gets_a_map_on_several_gpus_alone(
    reserved, local_rank, device_map, words, gpus, capsys, monkeypatch
):
    gpus(reserved)
    if local_rank is not None:
        monkeypatch.setenv("LOCAL_RANK", local_rank)
    before = load(ALPACA.read_text(encoding="utf-8"))
    after = load(converted(ALPACA).text)
    assert after.pop("device_map", None) == device_map
    assert after == before
    assert capsys.readouterr().out.startswith(words)
