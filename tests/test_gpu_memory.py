"""On a GPU: the phases of a run as the allocator counts them, at no wait, and memory that really runs out."""

import os
import subprocess
import time
from pathlib import Path

import pytest
import torch
from conftest import NO_CONFIG
from run_files import run_json
from test_gpu_stalls import GPU, Watch, trainer_on_gpu, watch  # noqa: F401 (a fixture)
from test_out_of_memory import check_both_ended, write_faulty

from sft_kernels.process import Process
from sft_play.commands import call as calls
from sft_play.commands import train as training
from sft_play.config.invocation import Invocation
from sft_play.data.pipeline import tokenize_run
from sft_play.plan import launch
from sft_play.plan.memory import PHASES
from sft_play.plan.run_plan import read_plan
from sft_play.runs.resumed import AskedRun
from sft_play.training.memory import MemoryMeter, components

ROOT = Path(__file__).resolve().parents[1]
PYTHONPATH = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
pytestmark = pytest.mark.gpu
needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
SECONDS = 400


HOARD: list[torch.Tensor] = []


def fill_gpu() -> None:
    """Leave nothing to be had, of the card or of the allocator's own, down to its smallest block."""
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(1e-6)
    size = 2**26
    while size >= 512:
        try:
            HOARD.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
        except torch.cuda.OutOfMemoryError:
            size //= 2


def trained(trainer, *callbacks) -> dict[str, int]:
    """Train, and return the bytes that were held in the end."""
    for callback in callbacks:
        trainer.events.add(callback)
    trainer.start()
    trainer.memory.watch_optimizer(trainer.engine.optimizer)
    trainer.train()
    return components(trainer.engine.model, trainer.engine.optimizer, GPU)


@pytest.mark.parametrize("mode", ["lora", "full"])
def test_each_phase_holds_what_its_tensors_take_and_the_run_no_less(tmp_path, mode):
    trainer = trainer_on_gpu(tmp_path, mode, packed=False)
    held = trained(trainer)
    phases, peak, context = (
        trainer.memory.phase_peaks(),
        trainer.memory.run_peak_bytes(),
        trainer.memory.context_bytes(),
    )
    lasting, gradients = held["weights"] + held["adapters"], held["adapters"] or held["weights"]
    assert set(phases) == {"forward", "backward", "optimizer"}
    assert phases["forward"] > lasting + held["optimizer"] + context, "and activations"
    assert phases["optimizer"] >= lasting + held["optimizer"] + gradients + context - 2**20
    assert max(phases.values()) <= peak
    assert held["optimizer"] == pytest.approx(2 * gradients, rel=0.01), "Adam's two moments"


def test_looking_at_memory_makes_no_step_wait(tmp_path, watch):  # noqa: F811
    trained(trainer_on_gpu(tmp_path, "lora", packed=True), watch)
    assert watch.sites == []


def test_the_cost_of_a_phase_is_printed():
    memory, number = MemoryMeter(Process(0, 0, 1, GPU)), 2000
    started = time.perf_counter()
    for _ in range(number):
        memory.enter("forward")
    print(f"\na phase costs {(time.perf_counter() - started) / number * 1e6:.1f} us")
    block = torch.empty(1 << 28, dtype=torch.uint8, device=GPU)
    assert memory.peak_bytes() >= len(block)
    del block
    memory.enter("backward")
    assert memory.phase_peaks()["backward"] < memory.phase_peaks()["forward"] - (1 << 27), (
        "each phase has a peak of its own"
    )


@pytest.fixture
def plan(settings_of, tmp_path):
    """A function that plans a run on GPUs and returns its folder and the command that starts another worker on it."""

    def start(script, changes, num_gpus=1, use_deepspeed=False):
        settings = settings_of(
            {"train.output_dir": tmp_path, "train.predict_with_generate": False, **changes}
        )
        words = tuple(
            f"{name}={'null' if value is None else value}" for name, value in settings.items()
        )
        call = calls.Call(
            Invocation(config=str(NO_CONFIG), device="cuda", num_gpus=num_gpus, run="run"),
            dict(os.environ),
            words,
        )
        loaded = calls.load_config(call)
        planned = calls.plan_run(call, loaded, num_gpus > 1, use_deepspeed)
        folder = training.new_run(call, loaded, planned.config)
        planned.write(folder)
        AskedRun.of(loaded, "make train").write(folder)
        folder.write_report(training.planned_report(folder))
        planned = tokenize_run(folder, planned)
        planned.write(folder)
        ranks = planned.plan.ranks
        command = launch.launch_command(ranks, folder.path, os.environ)
        if ranks.strategy == "ddp":
            config = launch.accelerate_config(ranks, training.mixed_precision(planned.config))
            launch.write_accelerate_config(folder.path / "accelerate.yaml", config, "Of a test.")
        return folder, launch.Launch(
            tuple(str(script) if word == str(launch.WORKER) else word for word in command.argv),
            command.env,
        )

    return start


def ended(command: launch.Launch) -> tuple[int, str]:
    environ = {**os.environ, **command.env, "PYTHONPATH": PYTHONPATH}
    done = subprocess.run(
        command.argv,
        cwd=ROOT,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SECONDS,
    )
    return done.returncode, done.stdout


def test_a_run_measures_all_of_its_phases(plan):
    folder, command = plan(launch.WORKER, {"train.save_strategy": "steps", "train.save_steps": 2})
    code, output = ended(command)
    assert code == 0, output[-3000:]
    report, planned = run_json(folder), read_plan(folder)
    measured, predicted = (report["memory"][name] for name in ("measured", "predicted"))
    assert measured.keys() == predicted.keys() == set(PHASES)
    assert max(measured.values()) <= report["peak_bytes"]["measured"]
    assert planned.gpu == torch.cuda.get_device_name(0)
    assert len(planned.used_before_bytes) == 1
    print(
        "\n"
        + "\n".join(
            f"{name:<12}{predicted[name] / 2**20:>9.1f} MiB predicted{measured[name] / 2**20:>9.1f} measured"
            for name in PHASES
        )
    )


def test_a_gpu_that_runs_out_of_memory_ends_the_run_with_a_table_and_the_next_command(
    plan, tmp_path
):
    folder, command = plan(write_faulty(tmp_path, 0, fill_gpu), {"train.packing": False})
    code, output = ended(command)
    report = run_json(folder)
    assert (code, report["exit_class"], report["status"]) == (15, 15, "failed"), output[-3000:]
    found = report["out_of_memory"]
    assert (found["rank"], found["device"], found["step"], found["phase"]) == (
        0,
        "cuda:0",
        3,
        "forward",
    )
    assert found["asked_bytes"] > 0 and found["free_bytes"] is not None
    assert (
        report["cause"].startswith("rank 0 ran out of memory on cuda:0 in forward at step 3; ")
        and "TRAIN_BATCH_SIZE=1" in found["next"]
    )
    sizes = found["components"]
    assert all(size["measured"] is not None for size in sizes.values())
    for name in ("weights", "adapters", "optimizer"):
        assert sizes[name]["measured"] == pytest.approx(
            sizes[name]["predicted"], rel=0.1, abs=2**20
        ), sizes
    assert f"{'weights':<12}{sizes['weights']['predicted'] / 2**30:>12.2f}" in output


@needs_two
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("uses_deepspeed", [False, True], ids=["ddp", "zero2"])
def test_a_gpu_that_runs_out_of_memory_ends_all_ranks_while_they_wait_in_nccl(
    plan, tmp_path, uses_deepspeed, rank
):
    folder, command = plan(
        write_faulty(tmp_path, rank, fill_gpu),
        {"train.max_steps": 3000, "train.packing": False},
        2,
        uses_deepspeed,
    )
    code, output = ended(command)
    assert code != 0
    check_both_ended(folder, rank, output, f"cuda:{rank}")
