"""The memory of each GPU in the words of Unsloth's notebooks, single and for several GPUs."""

from dataclasses import replace

from sft_play.runs.report import RankMemory, RunReport
from sft_play.training.memory_lines import lines_after_training, lines_before_training

GIB = 2**30
T4 = RankMemory(
    rank=0,
    host="one",
    device="cuda:0",
    name="Tesla T4",
    total_bytes=16 * GIB,
    before_bytes=4 * GIB,
    peak_bytes=6 * GIB,
)
OTHER = replace(T4, rank=1, device="cuda:1", peak_bytes=8 * GIB)
CPU = replace(T4, device="cpu", name="CPU")


def report(*ranks: RankMemory, device: str = "cuda") -> RunReport:
    return RunReport(
        world_size=len(ranks),
        device=device,
        strategy="ddp",
        seconds={"train": 90.0},
        tokens_per_second=2000.0,
        memory_by_rank=list(ranks),
    )


def test_one_gpu_has_the_lines_of_the_notebook():
    assert lines_before_training([T4]) == [
        "GPU = Tesla T4. Max memory = 16.0 GB.",
        "4.0 GB of memory reserved.",
    ]
    assert lines_after_training(report(T4)) == [
        "90.0 seconds used for training.",
        "1.50 minutes used for training.",
        "Peak reserved memory = 6.0 GB.",
        "Peak reserved memory for training = 2.0 GB.",
        "Peak reserved memory % of max memory = 37.500 %.",
        "Peak reserved memory for training % of max memory = 12.500 %.",
    ]


def test_several_gpus_have_a_line_each_and_a_total():
    assert lines_before_training([T4, OTHER]) == [
        "GPU 0 = Tesla T4. Max memory = 16.0 GB. Reserved = 4.0 GB.",
        "GPU 1 = Tesla T4. Max memory = 16.0 GB. Reserved = 4.0 GB.",
        "Total across 2 GPUs: 32.0 GB max, 8.0 GB reserved",
    ]
    assert lines_after_training(report(T4, OTHER)) == [
        "GPU 0: Peak reserved = 6.0 GB (37.500%), Training = 2.0 GB (12.500%)",
        "GPU 1: Peak reserved = 8.0 GB (50.000%), Training = 4.0 GB (25.000%)",
        "Total across 2 GPUs: Peak = 14.0 GB (43.750%), Training = 6.0 GB (18.750%)",
        "90.0 seconds (1.50 minutes) used for training.",
        "Training on 2 GPUs in parallel (ddp): 2000 tokens/s, 1000 a GPU",
    ]


def test_processes_on_a_cpu_share_the_memory_of_their_host():
    lines = lines_after_training(report(CPU, replace(CPU, rank=1), device="cpu"))
    assert lines == [
        "Process 0: Peak resident = 6.0 GB (37.500%), Training = 2.0 GB (12.500%)",
        "Process 1: Peak resident = 6.0 GB (37.500%), Training = 2.0 GB (12.500%)",
        "90.0 seconds (1.50 minutes) used for training.",
        "Training on 2 processes in parallel (ddp): 2000 tokens/s, 1000 a process",
    ]


def test_one_process_on_a_cpu_has_no_lines_of_a_notebook():
    assert lines_after_training(report(CPU, device="cpu")) == []
