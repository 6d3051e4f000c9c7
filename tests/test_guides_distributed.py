"""sft_play.distributed: what scripts and notebooks ask of their processes and GPUs."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rank_processes import run_two
from torch import distributed as torch_distributed

from sft_play import distributed
from sft_play.errors import ConfigError, DataError, EnvironmentFault

PLACE = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
ROWS = [{"text": f"row {number}"} for number in range(5)]


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    for name in (*distributed.SHOWN_VARIABLES, "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def gpus(monkeypatch):
    """A function that makes torch see GPUs of these capabilities."""

    def see(*capabilities: tuple[int, int]) -> None:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capabilities[index])

    return see


def launched_as_second(monkeypatch) -> None:
    for name, value in PLACE.items():
        monkeypatch.setenv(name, value)


def test_importing_loads_no_torch():
    program = "import sys, sft_play.distributed; assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0


def test_without_a_group_there_is_one_process_even_under_a_launcher(monkeypatch):
    launched_as_second(monkeypatch)
    assert distributed.is_distributed_available() is torch_distributed.is_available()
    assert (distributed.get_world_size(), distributed.get_rank()) == (1, 0)
    assert not torch_distributed.is_initialized()


def test_the_main_process_is_known_before_there_is_a_group(monkeypatch, capsys):
    assert distributed.is_main_process()
    launched_as_second(monkeypatch)
    here = distributed.context()
    assert not distributed.is_main_process()
    assert (here.num_processes, here.local_process_index, here.backend) == (2, 1, None)
    distributed.print_main("once")
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("count", "expected", "line"),
    [
        (0, None, "CPU mode - no device_map needed"),
        (1, None, "Single GPU mode - no device_map needed"),
        (2, "balanced", "Using device_map='balanced' to split model across 2 GPUs"),
    ],
)
def test_a_notebook_splits_the_model_over_several_gpus(gpus, capsys, count, expected, line):
    gpus(*[(9, 0)] * count)
    assert distributed.choose_device_map() == expected
    assert capsys.readouterr().out.splitlines()[:2] == [f"Detected {count} GPU(s)", line]


def test_a_launched_process_holds_the_model_on_its_own_gpu(gpus, monkeypatch):
    gpus((9, 0), (9, 0))
    launched_as_second(monkeypatch)
    assert distributed.choose_device_map() == {"": 1}


def test_a_process_without_a_gpu_of_its_own_is_refused(gpus, monkeypatch):
    gpus((9, 0))
    launched_as_second(monkeypatch)
    with pytest.raises(EnvironmentFault, match="start 1 processes"):
        distributed.choose_device_map()


def test_a_single_gpu_can_be_forced_but_not_on_launched_processes(gpus, monkeypatch):
    gpus((9, 0), (9, 0))
    monkeypatch.setenv("UNSLOTH_FORCE_SINGLE_GPU", "1")
    assert distributed.choose_device_map() == {"": 0}
    launched_as_second(monkeypatch)
    with pytest.raises(ConfigError, match="2 processes; start the script with python"):
        distributed.choose_device_map()


@pytest.mark.parametrize(
    ("capabilities", "dtype"),
    [
        ([], torch.float32),
        ([(7, 0)], torch.float16),
        ([(7, 5), (7, 5)], torch.float16),
        ([(8, 0)], torch.bfloat16),
        ([(9, 0), (7, 5)], torch.float16),
    ],
)
def test_the_number_type_is_one_that_every_gpu_computes(gpus, capabilities, dtype):
    gpus(*capabilities)
    assert distributed.choose_dtype() is dtype


def test_the_info_names_the_place_and_no_secret(monkeypatch, capsys):
    launched_as_second(monkeypatch)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    distributed.print_distributed_info()
    printed = capsys.readouterr().out
    assert printed.startswith("Process 1/2 (local 1) on ")
    assert "Main process: False" in printed
    assert "Process group: not initialized" in printed
    assert "RANK=1" in printed and "NCCL_DEBUG=INFO" in printed
    assert "hf_secret" not in printed


def test_every_gpu_of_one_process_has_its_lines(gpus, monkeypatch, capsys):
    gpus((7, 5), (7, 5))
    reserved = [1 << 30, 2 << 30]
    card = SimpleNamespace(name="Tesla T4", total_memory=16 << 30)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    monkeypatch.setattr(
        torch.cuda, "max_memory_reserved", lambda device: reserved[torch.device(device).index]
    )
    before = distributed.print_memory_before_training()
    reserved[:] = [5 << 30, 4 << 30]
    metrics = {"train_runtime": 90.0, "train_samples_per_second": 3.0}
    distributed.print_memory_after_training(before, metrics)
    assert capsys.readouterr().out.splitlines() == [
        "GPU 0 = Tesla T4. Max memory = 16.0 GB. Reserved = 1.0 GB.",
        "GPU 1 = Tesla T4. Max memory = 16.0 GB. Reserved = 2.0 GB.",
        "Total across 2 GPUs: 32.0 GB max, 3.0 GB reserved",
        "GPU 0: Peak reserved = 5.0 GB (31.250%), Training = 4.0 GB (25.000%)",
        "GPU 1: Peak reserved = 4.0 GB (25.000%), Training = 2.0 GB (12.500%)",
        "Total across 2 GPUs: Peak = 9.0 GB (28.125%), Training = 6.0 GB (18.750%)",
        "90.0 seconds (1.50 minutes) used for training.",
    ]


def test_a_dataset_is_broadcast_in_one_process_and_refused_without_a_group(monkeypatch):
    assert distributed.broadcast_dataset(ROWS) is ROWS
    with pytest.raises(DataError, match="rank 0 has no dataset"):
        distributed.broadcast_dataset(None)
    launched_as_second(monkeypatch)
    with pytest.raises(EnvironmentFault, match="no process group"):
        distributed.broadcast_dataset(ROWS)


def be_rank(folder: Path) -> None:
    """Take part in two broadcasts and both reports; the result is what this rank saw."""
    from datasets import Dataset, load_dataset

    torch_distributed.init_process_group("gloo")
    dataset = rows = None
    if distributed.get_rank() == 0:
        file = folder / "rows.jsonl"
        Dataset.from_list(ROWS).to_json(file)
        cache = str(folder / "cache")
        dataset = load_dataset("json", data_files=str(file), split="train", cache_dir=cache)
        dataset = dataset.select([4, 0, 2])
        rows = ROWS
    dataset = distributed.broadcast_dataset(dataset)
    assert [row["text"] for row in dataset] == ["row 4", "row 0", "row 2"]
    if distributed.get_rank() == 1:
        assert dataset.cache_files == []  # none of rank 0's files is needed
    assert distributed.broadcast_dataset(rows) == ROWS
    before = distributed.print_memory_before_training()
    assert [entry.rank for entry in before] == [0, 1]
    metrics = {"train_runtime": 2.0, "train_samples_per_second": 8.0}
    distributed.print_memory_after_training(before, metrics)
    here = distributed.context()
    assert (here.num_processes, here.backend) == (2, "gloo")
    assert distributed.get_world_size() == 2
    torch_distributed.destroy_process_group()


def test_two_ranks_share_rows_and_print_once(tmp_path):
    output = tmp_path / "output.txt"
    assert run_two(be_rank, tmp_path, output=output) == [0, 0], output.read_text()
    lines = output.read_text().splitlines()
    assert sum(line.startswith("Process 1: Peak resident = ") for line in lines) == 1
    speed = "Training on 2 processes in parallel (DDP): 8.00 samples/s, 4.00 a process"
    assert lines.count(speed) == 1
