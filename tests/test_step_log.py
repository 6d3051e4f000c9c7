"""What is logged of the steps since the last log, and the load of GPUs."""

import time
from dataclasses import replace

import pytest
import torch
from fake_nvml import NO_DRIVER, card

from sft_kernels.process import Process
from sft_play.plan.devices import NvmlUnavailable, sample_gpus
from sft_play.runs.metrics import GpuSample
from sft_play.training import observers
from sft_play.training.callbacks import EvalSpeedCallback
from sft_play.training.memory import FOLD_AT, MemoryMeter, StepTimes
from sft_play.training.observers import GpuSampler
from sft_play.training.step_log import RankLog, StepLog, gpu_values, losses_by_rank

ALONE = Process.alone(torch.device("cpu"))
RANK = RankLog(0.0, 0.0, None, {}, {"mem_allocated_gib": 1.0}, ())
SAMPLE = GpuSample(0, 90.0, 20.0, 300.0, 60.0)


def test_losses_weighted_by_token_shares_add_up_to_the_logged_loss():
    # two steps of 4 and 2 labeled tokens; nats of rank 0: 3 of 1 token, then 2 of 1
    ranks = [replace(RANK, loss=3 / 4 + 2 / 2, token_share=1 / 4 + 1 / 2)]
    ranks.append(replace(RANK, loss=6 / 4 + 1 / 2, token_share=3 / 4 + 1 / 2))
    values = losses_by_rank(ranks, steps=2)
    assert values["loss/rank_1"] == (6 / 4 + 1 / 2) / (5 / 4)
    weighted = [values[f"token_share/rank_{n}"] * values[f"loss/rank_{n}"] for n in (0, 1)]
    assert sum(weighted) == pytest.approx(((3 + 6) / 4 + (2 + 1) / 2) / 2)


def test_a_rank_without_labelled_tokens_has_no_loss():
    ranks = [replace(RANK, loss=1.0, token_share=1.0), RANK]
    assert losses_by_rank(ranks, steps=1) == {
        "token_share/rank_0": 1.0,
        "loss/rank_0": 1.0,
        "token_share/rank_1": 0.0,
    }
    assert losses_by_rank(ranks[:1], steps=1) == {}


def test_speed_counts_from_the_end_of_the_first_step_on():
    count = lambda lengths, labelled: 1e9  # noqa: E731
    log = StepLog(EvalSpeedCallback(), MemoryMeter(ALONE), count, peak_flops=1e12)
    model = torch.nn.Linear(1, 1)
    log.add_rows([8, 8], labelled=8)
    log.on_step_end()
    assert log.collect(1, model).speed == {}
    log.add_rows([10, 20], labelled=8)
    log.add_rows([30], labelled=8)
    time.sleep(0.01)
    speed = log.collect(3, model).speed
    seconds = speed["step_seconds"] * 2
    assert seconds >= 0.01
    assert speed["tokens_per_second"] == pytest.approx(60 / seconds)
    assert speed["samples_per_second"] == pytest.approx(3 / seconds)
    assert speed["mfu"] == pytest.approx(2e9 / seconds / 1e12)


def test_parts_of_a_step_last_until_the_next_and_what_is_no_part_counts_for_none():
    times = StepTimes(torch.device("cpu"))
    for _ in range(FOLD_AT):
        for part in ("forward", "backward", None):
            times.enter(part)
    time.sleep(0.02)
    times.enter("forward")
    time.sleep(0.01)
    times.enter(None)
    times.add("data", 1.0)
    seconds = times.take()
    assert seconds.keys() == {"forward", "backward", "data"}
    assert 0.01 <= seconds["forward"] < 0.02 and seconds["data"] == 1.0
    assert times.take() == {}


def test_the_load_of_each_gpu_stands_under_the_number_of_its_rank():
    ranks = [replace(RANK, gpus=(SAMPLE, replace(SAMPLE, rank=1, watts=None))), RANK]
    values = gpu_values(ranks, "cuda")
    assert values["gpu/0/watts"] == 300.0 and "gpu/1/watts" not in values
    assert values["gpu/1/util_percent"] == 90.0
    assert values["gpu/1/mem_allocated_gib"] == 1.0
    assert gpu_values([RANK], "cpu") == {"process/0/mem_allocated_gib": 1.0}


def test_a_sample_has_what_nvml_gives(plant):
    plant(card("GPU-a", watts=412, celsius=54), card("GPU-b", busy=None, memory_version=0))
    first, second = sample_gpus({3: "GPU-a", 4: "GPU-b"})
    # what the driver reserves is not counted, as by nvidia-smi
    assert first == GpuSample(3, 97, 10.0, 412, 54)
    # a GPU without separate memory uses the host's
    assert second == GpuSample(4, used_gib=second.used_gib) and second.used_gib > 0


def test_samples_are_averaged_since_the_last_log(monkeypatch):
    readings = iter([[SAMPLE], [replace(SAMPLE, busy_percent=50.0, used_gib=30.0, celsius=None)]])
    monkeypatch.setattr(observers, "SAMPLE_SECONDS", 0.0)

    def read(uuids):
        try:
            return next(readings)
        except StopIteration:
            raise NvmlUnavailable("no more") from None

    monkeypatch.setattr(observers, "sample_gpus", read)
    sampler = GpuSampler({0: "GPU-a"})
    sampler.start().join(10)
    assert sampler.latest()[0].busy_percent == 50.0
    assert sampler.mean_since_log() == (GpuSample(0, 70.0, 30.0, 300.0, None),)
    assert sampler.mean_since_log() == ()


def test_without_a_gpu_nothing_is_sampled(plant):
    plant(**NO_DRIVER)
    sampler = GpuSampler.of_machine(ALONE)
    assert sampler.start() is None
    assert (sampler.latest(), sampler.mean_since_log()) == ((), ())
