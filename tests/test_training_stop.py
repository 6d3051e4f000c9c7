"""Runs that end early: on request, by a fault, or because of another rank; run.json says which."""

import contextlib
import errno
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from marks import long
from rank_processes import start_rank, wait_for
from run_files import run_json, variables_of

from sft_kernels.process import Process
from sft_play.config.schema import TrainSection
from sft_play.errors import OF_PATH, DataError, DivergedError, EnvironmentFault, ExitClass
from sft_play.plan.launch import free_port
from sft_play.plan.run_plan import PlannedRun
from sft_play.runs.folder import RunFolder
from sft_play.stops import REPEAT_SECONDS, STOPPING, StopSignals
from sft_play.training import stop as stopping
from sft_play.training.callbacks import Progress
from sft_play.training.classify import classify
from sft_play.training.entry import run_worker
from sft_play.training.recorder import RunRecorder
from sft_play.training.state import Control, State
from sft_play.training.stop import StopOnSignal

ROOT = Path(__file__).resolve().parents[1]
ALONE = Process(0, 0, 1, torch.device("cpu"))
EVERY_STEP = TrainSection().stops_after


@pytest.fixture(scope="module")
def planned(plan_run):
    """A run that is planned once; the tests get copies."""
    return plan_run({})


@pytest.fixture
def folder(planned, tmp_path):
    return RunFolder(shutil.copytree(planned.path, tmp_path / "planned"))


@contextlib.contextmanager
def stopping_on_signals(recorder):
    with StopSignals() as signals, StopOnSignal(ALONE, signals, recorder, EVERY_STEP) as stop:
        yield stop


@pytest.fixture
def recorder(folder):
    return RunRecorder(folder, PlannedRun.read(folder), 0)


@pytest.fixture
def stop(recorder):
    """StopOnSignal of a single process that has begun its first step."""
    with stopping_on_signals(recorder) as stop:
        stop.on_pre_optimizer_step()
        yield stop


@pytest.mark.parametrize("number", STOPPING)
def test_a_signal_ends_the_run_after_the_step_with_a_checkpoint_and_without_an_evaluation(
    stop, number
):
    control, state = Control(should_evaluate=True), State(global_step=3, max_steps=10)
    stop.on_step_end(state, control)
    assert not (stop.signals.requested or stop.stopped or control.should_training_stop)
    signal.raise_signal(number)
    stop.on_step_end(state, control)
    assert stop.stopped and control.should_training_stop
    assert control.should_save and control.should_log and not control.should_evaluate
    assert control.should_epoch_stop, "what the end of an epoch brings is left out"


@pytest.mark.parametrize("event", ["on_save", "on_evaluate"])
def test_a_signal_during_a_save_or_an_evaluation_ends_the_run_without_another_step(stop, event):
    control, state = Control(), State(global_step=3, max_steps=10)
    signal.raise_signal(signal.SIGTERM)
    getattr(stop, event)(state, control)
    assert control.should_training_stop and control.should_save == (event == "on_evaluate")


def test_before_gradients_of_the_first_step_a_signal_interrupts(recorder):
    with stopping_on_signals(recorder), pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGHUP)


@pytest.mark.long
def test_a_run_that_is_stopped_while_it_is_scored_keeps_its_last_step_and_goes_on_with_the_scores(
    plan_run, run_worker, losses_of
):
    # answers take long enough for the signal
    folder = plan_run({"train.max_steps": 3, "train.predict_with_generate": True})
    thread = send_at(folder, "step 3/3", signal.SIGTERM)
    assert run_worker(folder) == ExitClass.STOPPED
    thread.join()
    report = folder.read_report()
    assert report.global_step == 3 and "after" not in report.metrics
    assert report.checkpoint == str(folder.checkpoints / "checkpoint-3")
    again = plan_run({"train.max_steps": 3, "train.resume_from": folder.path})
    assert run_worker(again) == ExitClass.DONE
    assert losses_of(again) == losses_of(folder)
    assert again.read_report().metrics["after"]["eval_loss"] < report.metrics["before"]["eval_loss"]


def second_signal(path: Path, number: int, seconds: float) -> None:
    """Be a rank in its second step that gets a signal and another one `seconds` later."""
    folder = RunFolder(path)
    with RunRecorder(folder, PlannedRun.read(folder), 0) as recorder:
        recorder.state = State(global_step=2)
        with stopping_on_signals(recorder) as stop:
            stop.on_pre_optimizer_step()
            signal.raise_signal(signal.SIGINT)
            stop.signals._requested_at -= seconds
            signal.raise_signal(number)


def test_a_signal_in_the_last_moment_does_not_hide_how_a_run_has_ended(recorder):
    """The thread that watches signals wakes while the context closes, and ends before it is woken."""
    with stopping_on_signals(recorder) as stop:
        closed = stop._closed

        class LateEvent:
            is_set = closed.is_set

            def set(self):
                closed.set()
                os.write(stop._write_end, b"\0")
                stop._watcher.join()

        stop._closed = LateEvent()
    assert not stop._watcher.is_alive()
    assert recorder.report.cause is None


@pytest.mark.parametrize(
    "number, seconds, code",
    [
        (signal.SIGTERM, 0, 0),  # a launcher passes the signal on that the terminal sent
        (signal.SIGINT, REPEAT_SECONDS + 1, 75),
        (signal.SIGUSR1, REPEAT_SECONDS + 1, 0),  # make was killed while the run saves
    ],
)
def test_a_second_signal_of_the_user_leaves_at_once(folder, number, seconds, code):
    output = folder.path / "output.txt"
    arguments = (folder.path, number, seconds)
    rank = start_rank(second_signal, arguments, 0, free_port(), output, world_size=1)
    assert wait_for(rank) == code
    report = run_json(folder)
    assert report["status"] == ("stopped" if code else "running")
    if code:
        assert (report["exit_class"], report["global_step"]) == (75, 2)
        assert report["cause"].startswith("stopped at once on a second signal, at step 2 and ")
        assert report["cause"] in output.read_text()


def send_at(folder: RunFolder, text: str, number: int) -> threading.Thread:
    """Send this process a signal once the run's log holds `text`."""

    def watch():
        log, deadline = folder.logs / "rank-0.log", time.monotonic() + 60
        while time.monotonic() < deadline:
            if log.exists() and text in log.read_text():
                os.kill(os.getpid(), number)
                return
            time.sleep(0.01)

    thread = threading.Thread(target=watch)
    thread.start()
    return thread


@pytest.mark.parametrize("strategy", [long("no"), "epoch"])
def test_a_stopped_run_says_so_and_can_be_resumed(
    train_run, plan_run, run_worker, strategy, losses_of
):
    folder = plan_run(
        {"train.max_steps": 300, "train.save_strategy": strategy, "train.eval_strategy": strategy}
    )
    thread = send_at(folder, "step 2/", signal.SIGTERM)
    assert run_worker(folder) == ExitClass.STOPPED
    thread.join()
    report, step = run_json(folder), run_json(folder)["global_step"]
    assert (report["status"], report["exit_class"]) == ("stopped", 75) and 2 <= step < 300
    assert (
        report["cause"]
        == f"stopped on request at step {step}; continue with make train TRAIN_RESUME_FROM={folder.path}"
    )
    assert "after" not in report["metrics"] and [entry["step"] for entry in report["loss"]] == list(
        range(1, step + 1)
    )
    again = train_run({"train.max_steps": step + 2, "train.resume_from": folder.path})
    assert losses_of(again)[:step] == losses_of(folder) and len(losses_of(again)) == step + 2


def test_a_run_that_stops_after_a_fraction_is_scored_and_goes_on_as_if_it_had_not_stopped(
    plan_run, run_worker, losses_of
):
    schedule = {"train.max_steps": 4, "train.lr_scheduler_type": "cosine"}
    whole = plan_run(schedule)
    assert run_worker(whole) == ExitClass.DONE
    first = plan_run({**schedule, "train.stop_after": 0.5})
    assert run_worker(first) == ExitClass.STOPPED
    report = first.read_report()
    assert report.cause.startswith("stopped by train.stop_after at step 2; continue with")
    assert report.metrics["after"]["eval_loss"] != report.metrics["before"]["eval_loss"]
    second = plan_run({**schedule, "train.resume_from": first.path})
    assert run_worker(second) == ExitClass.DONE
    assert losses_of(second) == losses_of(whole)
    scores = [run.read_report().metrics["after"] for run in (second, whole)]
    assert scores[0]["eval_loss"] == scores[1]["eval_loss"]


def test_a_run_that_is_stopped_before_it_has_learned_is_stopped_and_not_diverged(
    plan_run, run_worker
):
    folder = plan_run(
        {"train.max_steps": 300, "train.learning_rate": 1e-60}
    )  # as in a long warm-up: float32 weights do not move
    thread = send_at(folder, "step 1/", signal.SIGINT)
    assert run_worker(folder) == ExitClass.STOPPED
    thread.join()
    assert run_json(folder)["status"] == "stopped"


def test_a_run_that_is_stopped_before_its_first_step_stops_there(plan_run, run_worker):
    folder = plan_run({"train.max_steps": 300})
    thread = send_at(folder, "data train rows=10", signal.SIGTERM)
    assert run_worker(folder) == ExitClass.STOPPED
    thread.join()
    report = run_json(folder)
    assert (report["status"], report["exit_class"], report["global_step"]) == ("stopped", 75, 0)
    cause = "stopped on request before a first step; nothing is kept of its training"
    assert report["cause"] == cause
    assert not list(folder.checkpoints.glob("*"))


def planned_for_two(folder: RunFolder) -> PlannedRun:
    planned = PlannedRun.read(folder)
    ranks = replace(planned.plan.ranks, strategy="ddp", per_node=2)
    return replace(planned, plan=replace(planned.plan, ranks=ranks))


def wait_for_nobody(path: Path) -> None:
    """Be a rank that is told to stop while it waits in C++, where no signal is handled."""
    stopping.STUCK_SECONDS = 0.5
    folder = RunFolder(path)
    with RunRecorder(folder, planned_for_two(folder), 0) as recorder:
        two = Process(0, 0, 2, torch.device("cpu"))
        with StopSignals() as signals, StopOnSignal(two, signals, recorder, EVERY_STEP):
            store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True)
            threading.Timer(1, os.kill, (os.getpid(), signal.SIGTERM)).start()
            store.wait(["a key that no rank sets"], timedelta(seconds=60))


@pytest.mark.slow
def test_a_rank_that_is_told_to_stop_while_it_waits_for_one_that_is_gone_says_so(folder):
    rank = start_rank(wait_for_nobody, (folder.path,), 0, free_port())
    assert wait_for(rank) == ExitClass.PEER_LOST
    assert (run_json(folder)["status"], run_json(folder)["exit_class"]) == ("failed", 17)


@pytest.mark.slow
@pytest.mark.long
def test_stopping_make_stops_the_run_and_no_file_of_it_holds_a_secret(settings_of, tmp_path):
    secret = "hf_thisTokenIsNobodysAndMustNotBeSaved"
    settings = {
        "train.output_dir": tmp_path,
        "train.max_steps": 5000,
        "train.save_strategy": "steps",
        "train.save_steps": 1,
    }
    words = [f"{name}={value}" for name, value in variables_of(settings_of(settings)).items()]
    command = [
        "make",
        "train",
        "CONFIG=tests/fixtures/empty.yaml",
        "DEVICE=cpu",
        "RUN=run",
        f"PY={sys.executable}",
        *words,
    ]
    environ = {
        **os.environ,
        "HF_TOKEN": secret,
        "HUGGING_FACE_HUB_TOKEN": secret,
        "WANDB_API_KEY": secret,
    }
    make = subprocess.Popen(
        command, cwd=ROOT, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    shown = []
    for line in make.stdout:
        shown.append(line)
        if line.startswith("step 2/"):
            make.terminate()
    assert make.wait(60) != 0
    report = run_json(RunFolder(tmp_path / "run"))
    assert (report["status"], report["exit_class"]) == ("stopped", 75), "".join(shown)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) > 15
    assert not [path for path in files if secret.encode() in path.read_bytes()]
    assert secret not in "".join(shown)


def test_what_is_removed_behind_the_plan_is_named(plan_run, run_worker, tiny_base, tmp_path):
    model = shutil.copytree(tiny_base, tmp_path / "model")
    samples = tmp_path / "samples"
    for changes, gone, exit_class in (
        ({"model.name": model}, model, ExitClass.ENVIRONMENT),
        ({"data.cache_dir": samples}, samples, ExitClass.DATA),
    ):
        folder = plan_run(changes)
        shutil.rmtree(gone)
        assert run_worker(folder) == exit_class
        report = run_json(folder)
        assert (report["status"], report["exit_class"]) == ("failed", exit_class)
        assert str(gone) in report["cause"]


def test_a_run_trains_on_the_rows_that_were_tokenized_and_not_on_what_became_of_the_file(
    plan_run, run_worker, rows, tmp_path
):
    copy = shutil.copy(rows["train"], tmp_path / "train.jsonl")
    folder = plan_run({"data.train_path": copy})
    Path(copy).unlink()
    assert run_worker(folder) == 0


def test_a_run_of_two_that_is_started_as_one_is_class_13(plan_run, run_worker):
    folder = plan_run({"train.effective_batch_size": 8, "train.grad_accum": "auto"}, num_gpus=2)
    assert run_worker(folder) == ExitClass.ENVIRONMENT
    report = run_json(folder)
    assert (report["status"], report["exit_class"]) == ("failed", 13)
    assert "NUM_GPUS=1" in report["cause"]


def test_a_folder_that_is_no_run_is_class_13_with_one_sentence(tmp_path, capsys):
    assert run_worker(tmp_path) == ExitClass.ENVIRONMENT
    assert f"{tmp_path} is no run folder" in capsys.readouterr().err


GLOO = "[/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:52622: Connection reset by peer"
NCCL = "NCCL error in: ProcessGroupNCCL.cpp:3690, remote process exited"
PYTORCH_ZIP = "[enforce fail at inline_container.cc:672] . unexpected pos 576 vs 534"


@pytest.mark.parametrize(
    "error, expected",
    [
        (DataError("row 3"), ExitClass.DATA),
        (torch.OutOfMemoryError("CUDA out of memory"), ExitClass.OUT_OF_MEMORY),
        (OSError(28, "No space left on device", "/x/model.safetensors"), ExitClass.DISK_FULL),
        (RuntimeError(PYTORCH_ZIP), ExitClass.DISK_FULL),
        (RuntimeError(GLOO), ExitClass.PEER_LOST),
        (torch.distributed.DistBackendError(NCCL), ExitClass.PEER_LOST),
        (ValueError("a bug"), ExitClass.UNEXPECTED),
    ],
)
def test_an_error_has_an_exit_class(error, expected):
    assert classify(error)[0] == expected


@pytest.mark.parametrize("number", [*OF_PATH, errno.EROFS, errno.EACCES, errno.EPERM])
def test_what_the_system_refuses_has_its_path_and_what_to_do(number):
    exit_class, cause = classify(OSError(number, os.strerror(number), f"/x/{'a' * 300}"))
    assert exit_class is ExitClass.ENVIRONMENT
    path, advice = cause.removeprefix(f"{os.strerror(number)}: /x/aaa").split("; ", 1)
    assert len(path) < 120 and len(advice) > 20 and "Errno" not in cause


@pytest.fixture
def recorders(folder):
    """The recorders of two ranks of one launch on one folder."""
    return folder, [RunRecorder(folder, planned_for_two(folder), rank) for rank in (0, 1)]


@pytest.mark.parametrize("has_trained", [False, True])
def test_a_signal_while_the_cause_of_an_error_is_found_does_not_hide_it(recorders, has_trained):
    folder, (recorder, _) = recorders

    def found():
        signal.raise_signal(signal.SIGTERM)  # of the launcher, which misses rank 1, too
        return [1]

    recorder.find_gone = found
    with StopSignals(is_rank=True) as signals:
        signals.on_first = recorder.interrupt
        with recorder:
            if has_trained:
                with StopOnSignal(ALONE, signals, recorder, EVERY_STEP) as stop:
                    stop.on_pre_optimizer_step()
            raise RuntimeError("[gloo/transport/tcp/pair.cc:537] Connection closed by peer")
    report = run_json(folder)
    assert (report["status"], report["exit_class"]) == ("failed", 17)
    assert report["cause"].startswith("rank 1 ended without a word: ")


@contextlib.contextmanager
def swallowed_interrupt(recorder):
    """Record what happens inside after a signal whose interrupt went no further."""
    with StopSignals(is_rank=True) as signals:
        signals.on_first = recorder.interrupt
        with recorder:
            with contextlib.suppress(KeyboardInterrupt):
                signal.raise_signal(signal.SIGTERM)
            yield signals


@pytest.mark.parametrize(
    "error, has_trained, exit_class",
    [
        (RecursionError("numpy.dtypes imports numpy.dtypes"), False, ExitClass.STOPPED),
        (DataError("line 3 of a file has no messages"), False, ExitClass.DATA),
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/x"), False, ExitClass.DISK_FULL),
        (ValueError("a bug"), True, ExitClass.UNEXPECTED),
    ],
)
def test_after_a_swallowed_interrupt_an_import_that_fails_is_a_stop_and_other_causes_are_told(
    recorders, error, has_trained, exit_class, caplog
):
    folder, (recorder, _) = recorders
    with swallowed_interrupt(recorder) as signals:
        if has_trained:
            with StopOnSignal(ALONE, signals, recorder, EVERY_STEP) as stop:
                stop.on_pre_optimizer_step()
        raise error
    report = run_json(folder)
    is_stop = exit_class == ExitClass.STOPPED
    status = "stopped" if is_stop else "failed"
    assert (report["status"], report["exit_class"]) == (status, int(exit_class))
    assert ("stopped on request" in report["cause"]) == is_stop
    assert str(error) in caplog.text, "the log file keeps it"


def test_the_cause_is_that_of_the_rank_that_failed_first(recorders, capsys):
    folder, (main_rank, other) = recorders
    seen = []
    with main_rank:
        with other:
            raise DataError("rank 1 read a bad row")
        main_rank.update(data={})  # it continues until it misses the other
        seen.append(run_json(folder)["status"])
        raise RuntimeError("[gloo/transport/tcp/pair.cc:537] Connection closed by peer")
    report = run_json(folder)
    assert seen == ["failed"]
    assert (report["status"], report["exit_class"], report["cause"]) == (
        "failed",
        11,
        "rank 1 read a bad row",
    )
    assert (main_rank.exit_class, other.exit_class) == (ExitClass.PEER_LOST, ExitClass.DATA)
    assert capsys.readouterr().err == "rank 1: rank 1 read a bad row\n"


def test_a_rank_that_gives_up_says_why_once_and_what_to_type(recorders, caplog, monkeypatch):
    """The watch's thread does so while the main thread waits, which may fail with the same words."""
    codes = []
    monkeypatch.setattr(os, "_exit", codes.append)
    _, (main_rank, _) = recorders
    main_rank.note(next="make train TRAIN_RESUME_FROM=a")
    main_rank.abandon("rank 1 is silent")
    with main_rank:
        raise EnvironmentFault("rank 1 is silent")
    assert codes == [17]
    assert caplog.text.count("rank 1 is silent\nexit class 17 (peer_lost), rank 0") == 1
    assert caplog.text.count("rank 1 is silent") == 1, "once, though the other thread came, too"
    assert "\ngo on with make train TRAIN_RESUME_FROM=a\n" in caplog.text


def test_what_would_happen_again_is_not_to_be_typed_again(recorders, caplog):
    _, (main_rank, _) = recorders
    main_rank.note(next="make train TRAIN_RESUME_FROM=a")
    with main_rank:
        raise DivergedError("the loss is no number")
    assert "exit class 14" in caplog.text and "continue with" not in caplog.text


def test_a_new_launch_on_the_folder_of_a_failed_one_starts_anew(recorders):
    folder, (main_rank, other) = recorders
    with other:
        raise DataError("the launch before")
    main_rank.note(launcher_pid=main_rank.report.launcher_pid + 1)
    main_rank.__enter__()
    assert run_json(folder)["status"] == "running"


def test_a_report_that_cannot_be_written_does_not_hide_the_cause(folder, caplog):
    with RunRecorder(folder, PlannedRun.read(folder), 0):
        (folder.path / "run.json").unlink()
        (folder.path / "run.json").mkdir()
        raise DivergedError("the loss is no number")
    assert "the loss is no number\nexit class 14 (diverged), rank 0" in caplog.text
    assert "run.json cannot be written" in caplog.text


def test_steps_that_take_long_say_that_training_goes_on(caplog, monkeypatch):
    monkeypatch.setattr("sft_play.progress.EVERY_SECONDS", 0.05)
    caplog.set_level("INFO")
    state = State(max_steps=9)
    with contextlib.closing(Progress(ALONE)) as progress:
        progress.on_step_begin(state, None)
        time.sleep(0.2)
        progress.on_step_end(state, None)
        said = caplog.text.count("computing the first step: 0/9 steps")
        time.sleep(0.2)
    assert said >= 2 and caplog.text.count("computing the first step") == said
    assert "training: 1/9 steps" in caplog.text
