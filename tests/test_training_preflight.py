"""Two ranks that do not belong together end before weights load, and the cause says what and where."""

import os
import shutil
import socket
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
from faults.processes import have_another_peft
from plan_examples import EXAMPLE
from rank_processes import run_two_workers, start_rank, train_on_two, wait_for, work
from run_files import run_json

from sft_play.config.schema import TrainSection
from sft_play.errors import EnvironmentFault, ExitClass
from sft_play.plan.launch import free_port
from sft_play.plan.workload import checkpoint_bytes, run_bytes
from sft_play.runs.folder import RunFolder
from sft_play.training import preflight
from sft_play.training.preflight import RankFacts, machine_lines, refuse_little_memory

SHORT = {"train.max_steps": 1, "train.predict_with_generate": False, "train.probe": False}
HOST = socket.gethostname()


def causes(folders: list[RunFolder]) -> list[str]:
    return [run_json(folder)["cause"] for folder in folders]


def run_pair(folders: list[RunFolder], prepare=None) -> list[int]:
    """Run two ranks, each in a folder of its own, as two machines do; return their exit codes."""
    port = free_port()
    ranks = [
        start_rank(work, (folder.path, prepare), rank, port, folder.path / "output.txt")
        for rank, folder in enumerate(folders)
    ]
    return [wait_for(rank) for rank in ranks]


def test_ranks_that_agree_say_where_they_are_and_lose_no_time(plan_run):
    folder = plan_run(SHORT, num_gpus=2)
    train_on_two(folder)
    report = run_json(folder)
    assert report["seconds"]["preflight"] < 2
    names = [check["name"] for check in report["checks"] if check["passed"]]
    assert names[:2] == [
        "all ranks have the same versions, settings and rows",
        "sums over the ranks are right",
    ]
    log = (folder.logs / "rank-0.log").read_text()
    assert f"machine 0 host={HOST} ranks=2 device=CPU disk=" in log
    assert not list(folder.path.glob(".preflight-*"))


def test_two_machines_with_other_settings_end_with_both_values(plan_run):
    folders = [
        plan_run({**SHORT, "train.learning_rate": rate}, num_gpus=2) for rate in (0.01, 0.02)
    ]
    started = time.monotonic()
    assert run_pair(folders) == [10, 10]
    assert time.monotonic() - started < 30
    said = f"rank 1 on {HOST}: train.learning_rate is 0.02, and 0.01 for rank 0 on {HOST}; start"
    assert all(cause.startswith(said) for cause in causes(folders))


@pytest.mark.long
def test_two_machines_with_other_rows_end_with_the_class_of_data(plan_run, rows, tmp_path):
    fewer = tmp_path / "fewer.jsonl"
    fewer.write_text("".join(rows["train"].read_text().splitlines(keepends=True)[:8]))
    folders = [plan_run({**SHORT, "data.train_path": path}, 2) for path in (rows["train"], fewer)]
    assert run_pair(folders) == [11, 11]
    assert all(f"rank 1 on {HOST}: data_digest is " in cause for cause in causes(folders))


@pytest.mark.long
def test_the_same_rows_at_another_place_are_the_same(plan_run, rows, tmp_path):
    copy = shutil.copy(rows["train"], tmp_path / "copy.jsonl")
    places = {"data.train_path": copy, "data.image_folder": str(tmp_path)}
    folders = [
        plan_run({**SHORT, **own}, 2) for own in ({"data.train_path": rows["train"]}, places)
    ]
    assert run_pair(folders) == [0, 0]


def add_wrongly() -> None:
    """Let rank 1 get one element of each sum wrong."""
    from torch import distributed

    all_reduce = distributed.all_reduce

    def spoiled(tensor, *arguments, **options):
        result = all_reduce(tensor, *arguments, **options)
        if tensor.is_floating_point():
            tensor.view(-1)[7] += 1
        return result

    if os.environ["RANK"] == "1":
        distributed.all_reduce = spoiled


def have_little_disk() -> None:
    """Let rank 0 have 10 MiB on its disk."""
    from sft_play.training import preflight

    if os.environ["RANK"] == "0":
        preflight.shutil = SimpleNamespace(disk_usage=lambda _: SimpleNamespace(free=10 << 20))


def hang() -> None:
    """Let rank 1 be silent once the ranks have met, and rank 0 wait for 2 seconds."""
    from sft_play.training import preflight

    preflight.FIRST_SECONDS = 2.0
    if os.environ["RANK"] == "1":
        preflight.deadline = lambda *_, **__: time.sleep(60)


@pytest.mark.parametrize(
    "prepare, exit_class, said",
    [
        (have_another_peft, 13, f"rank 1 on {HOST}: version of peft is 0.1.0, and "),
        (add_wrongly, 13, "rank 1: 1 of 4096 elements of a sum over 2 ranks are wrong"),
        (have_little_disk, 13, f"rank 0 on {HOST}: 0.0 GiB are free on the disk of its run folder"),
    ],
)
def test_what_is_wrong_with_one_rank_ends_both(plan_run, prepare, exit_class, said):
    folder = plan_run(SHORT, num_gpus=2)
    assert run_two_workers(folder, prepare) == [exit_class] * 2
    assert run_json(folder)["cause"].startswith(said)


def test_a_rank_that_is_not_answered_gives_up(plan_run):
    folder = plan_run(SHORT, num_gpus=2)
    port = free_port()
    ranks = [start_rank(work, (folder.path, hang), rank, port) for rank in (0, 1)]
    started = time.monotonic()
    assert wait_for(ranks[0]) == 17
    assert time.monotonic() - started < 30
    ranks[1].kill()
    ranks[1].join()
    assert "their first collectives did not end within 2 s" in run_json(folder)["cause"]


# Pure parts


def facts(rank: int, free_gib: float | None = None, **changes) -> RankFacts:
    free = None if free_gib is None else int(free_gib * 2**30)
    found = RankFacts(rank, f"host-{rank // 2}", rank // 2, "NVIDIA H200", free, 2**40, True)
    return replace(found, **changes)


def context_of(fits: bool = True, probe: bool = False, explicit: bool = True) -> SimpleNamespace:
    memory = SimpleNamespace(predicted_peak=60 * 2**30, peak=SimpleNamespace(context=2**30))
    plan = SimpleNamespace(fits=fits, is_batch_explicit=explicit, memory=memory)
    config = SimpleNamespace(train=SimpleNamespace(probe=probe))
    return SimpleNamespace(plan=plan, config=config)


def test_a_gpu_that_another_program_took_is_named():
    ranks = [facts(0, 80), facts(1, 80), facts(2, 20), facts(3, 80)]
    with pytest.raises(EnvironmentFault, match=r"rank 2 on host-1: its GPU has 20.0 GiB free, and"):
        refuse_little_memory(ranks, context_of())
    refuse_little_memory(ranks, context_of(probe=True, explicit=False))
    refuse_little_memory(ranks, context_of(fits=False))
    refuse_little_memory([facts(0, 59)], context_of())


def test_each_machine_is_one_line():
    ranks = [facts(0, 80), facts(1, 79), facts(2, 80), facts(3, 80, has_main_folder=False)]
    ranks[2] = replace(ranks[2], has_main_folder=False)
    lines = machine_lines(ranks)
    assert (
        lines[0] == "machine 0 host=host-0 ranks=2 device=NVIDIA H200 free=79.0GiB disk=1024.0GiB"
    )
    assert lines[1].startswith("machine 1 host=host-1") and lines[1].endswith("of its own")


def test_what_a_run_writes_is_its_weights_and_the_checkpoints_that_are_kept():
    step = replace(EXAMPLE.step, mode="lora", optim="adamw_torch")
    one = checkpoint_bytes(step)
    assert one == step.adapter_weights * 12  # float32, and two moments

    def checkpoints(**settings):
        train = TrainSection(effective_batch_size=8, epochs=2, **settings)
        beside = run_bytes(step, train, rows=80) - step.adapter_weights * 4 - (50 << 20)
        assert beside % one == 0
        return beside // one

    assert checkpoints(save_strategy="no") == 1, "a run that is stopped"
    assert checkpoints(save_strategy="epoch") == 2
    assert checkpoints(save_strategy="steps", save_steps=2) == 3, "two kept, and the newest"
    assert checkpoints(save_strategy="steps", save_steps=2, save_total_limit=None) == 10
    zero = replace(step, mode="full", zero_stage=2, weight_bytes=2)
    assert checkpoint_bytes(zero) == step.model.parameters * 14


def test_workers_whose_batches_do_not_fit_into_shared_memory_are_refused(
    plan_run, run_worker, monkeypatch
):
    usage = shutil.disk_usage("/dev/shm")._replace(free=1 << 10)
    own = shutil.disk_usage
    monkeypatch.setattr(
        preflight.shutil, "disk_usage", lambda path: usage if "shm" in str(path) else own(path)
    )
    folder = plan_run({"train.dataloader_num_workers": 2, "train.max_steps": 1})
    assert run_worker(folder) == ExitClass.ENVIRONMENT
    cause = run_json(folder)["cause"]
    assert "MiB of /dev/shm are free, and batches of 2 workers take" in cause
    assert cause.endswith("or set TRAIN_DATALOADER_NUM_WORKERS=0")
    assert run_worker(plan_run({"train.max_steps": 1})) == 0
