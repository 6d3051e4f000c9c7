"""`make watch`: what it shows of a run that continues, has ended, or was killed, and how it is left."""

import os
import re
import socket
import sys
import time
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from report_folders import DONE, run_folder
from run_files import GONE, run_json, write_holder
from terminals import Terminal

from sft_play.commands import runs as watching
from sft_play.commands.call import Call
from sft_play.config.invocation import Invocation
from sft_play.monitor.watch import bar, curve, frame, pipe_line, plain_line, seconds_left
from sft_play.reporting.run_facts import RunFacts
from sft_play.runs import lock, metrics
from sft_play.runs.folder import RunFolder
from sft_play.runs.metrics import GpuSample, MetricsLine, SampleAnswer
from sft_play.runs.report import STARTED_AT, RankMemory, RunReport

GIB = 2**30
NOW = 1_000_000.0
GPUS = tuple(GpuSample(rank, 97.0 - rank, 61.25, 650.0, 64.0) for rank in range(2))
ANSWER = SampleAnswer("Count\nto 3.", "1 2 3", "1 2\x1b[2J 3")
LINES = (
    MetricsLine(0, 40, NOW),
    MetricsLine(0, 40, NOW, {"test_loss": 3.5, "test_rougeL": 0.25}),
    MetricsLine(1, 40, NOW + 50, {"loss": 3.0}),
    MetricsLine(11, 40, NOW + 70, {"loss": 2.0, "tokens_per_second": 12345.0, "mfu": 0.4}, GPUS),
    MetricsLine(20, 40, NOW + 88, {"eval_loss": 2.25}, answers=(ANSWER,)),
    MetricsLine(21, 40, NOW + 90, {"loss": 1.0, "learning_rate": 1e-4, "grad_norm": 0.5}, GPUS),
)


def running(**changes: object) -> RunReport:
    """Return the run.json of a run whose main rank is this process."""
    memory = [
        RankMemory(rank, "one", f"cuda:{rank}", "NVIDIA H200", 140 * GIB, GIB, 2 * GIB)
        for rank in range(2)
    ]
    values = {
        "status": "running",
        "world_size": 2,
        "strategy": "ddp",
        "device": "cuda",
        "mode": "lora",
        "backend": "bnb",
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "started_at": time.strftime(STARTED_AT),
        "memory_by_rank": memory,
    }
    return RunReport(**values | changes)


def recorded(path: Path, report: RunReport, lines: tuple[MetricsLine, ...] = LINES) -> RunFacts:
    """Return what is known of a run with these files."""
    folder = RunFolder(path)
    path.mkdir()
    folder.write_report(report)
    for line in lines:
        metrics.append(folder.metrics, line)
    return replace(RunFacts.read(folder), read_at=NOW + 91)


def test_a_frame_has_progress_losses_speed_gpus_and_answers(tmp_path):
    shown = frame(recorded(tmp_path / "run", running()))
    assert shown[0].startswith("run run: running, lora with bnb, 2 x cuda (ddp), started ")
    # 20 steps in 40 s after the first one; 19 are left, and a second has gone since
    assert re.fullmatch(r"step   21/40 \S+ 52%, 1 min 30 s gone, 37 s left", shown[1])
    text = "\n".join(shown)
    assert "loss   1.0000 now, 3.0000 first, 1.0000 lowest" in text
    assert "loss   of the validation rows: 2.2500 at step 20" in text
    assert "rougeL of the held-out rows: 0.2500 at step 0" in text
    assert "speed  12.3k tokens/s, MFU 40%, learning rate 0.0001, gradient norm 0.5" in text
    assert "GPU 1 NVIDIA H200: 96 % busy, 61.2 of 140.0 GiB used, 650 W, 64 °C" in text
    assert shown[-3:] == ["prompt   Count to 3.", "expected 1 2 3", "answer   1 2 [2J 3"]


def test_a_run_that_goes_on_from_another_shows_its_losses_and_not_its_time(tmp_path):
    earlier = (MetricsLine(1, 40, values={"loss": 9.0}), MetricsLine(2, 40, values={"loss": 8.0}))
    later = tuple(replace(line, step=line.step + 2) for line in LINES)
    run = recorded(tmp_path / "run", running(), earlier + later)
    assert [loss for _, loss in run.logged("loss")] == [9.0, 8.0, 3.0, 2.0, 1.0]
    assert run.begun.step == 2
    assert seconds_left(run) == (40 - 23) * 2.0 - 1.0


def test_silence_is_said(tmp_path):
    run = recorded(tmp_path / "run", running())
    later = replace(run, read_at=NOW + 90 + 3600)
    assert "       no sign of life for 1 h 0 min" in frame(later)


def test_a_run_that_has_no_step_yet_shows_the_end_of_its_log(tmp_path):
    run = recorded(tmp_path / "run", running(world_size=None), ())
    run.folder.logs.mkdir()
    log = "2026-01-01 10:00:00,000 INFO sft_play.training.worker: loading x: 3 GB\n  more\n"
    (run.folder.logs / "rank-0.log").write_text(log)
    assert frame(run)[-1] == "log    loading x: 3 GB"


def test_a_half_written_line_is_read_once_it_is_whole(tmp_path):
    path = tmp_path / "metrics.jsonl"
    whole = LINES[3].to_json()
    path.write_text(LINES[0].to_json() + whole[:20])
    lines, offset = metrics.read_metrics(path)
    assert lines == [LINES[0]]
    path.write_text(LINES[0].to_json() + whole)
    assert metrics.read_metrics(path, offset) == ([LINES[3]], path.stat().st_size)


def test_a_run_of_another_host_is_not_taken_for_dead(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "is_local", lambda path: False)
    run = recorded(tmp_path / "run", running(host="elsewhere"))
    write_holder(run.folder.path, replace(GONE, host="elsewhere", boot="another"))
    run = run.read_again()
    assert run.goes_on and frame(run)[0].endswith(", on elsewhere")
    write_holder(run.folder.path, GONE)
    run.folder.write_report(running())
    run = run.read_again()
    assert not run.goes_on and frame(run)[0].startswith("run run: died")


def test_a_pipe_gets_a_line_a_log(tmp_path):
    run = recorded(tmp_path / "run", running())
    assert run.new_lines == run.lines and run.read_again().new_lines == []
    lines = [line for line in (pipe_line(run, line) for line in run.lines) if line is not None]
    assert lines[0].endswith("step 0/40 test_loss=3.5 test_rougeL=0.25")
    assert " mfu=0.4 tokens_per_second=12345 gpu_busy_percent=97,96 " in lines[2]
    assert lines[-1].endswith("gpu_used_gib=61.2,61.2 left=37s")
    assert pipe_line(run, MetricsLine(22, 40, NOW)) is None


def test_text_of_a_run_cannot_steer_the_terminal():
    assert plain_line("a\x1b]0;title\x07 b\r\n\tc\u202e") == "a ]0;title b c"


def test_a_curve_falls_from_left_to_right():
    assert curve([4.0, 3.0, 2.0, 0.0], width=4, height=2) == ["       4 ┤█▄▁ ", "       0 ┤███▁"]
    assert curve([1.0], width=4, height=1) == ["       1 ┤▁"]
    assert bar(2.0, 4) == "████" and bar(0.0, 4) == "░░░░"


# The command


def called(output_dir: Path, run: str | None = None) -> Call:
    return Call(Invocation(run=run), {"TRAIN_OUTPUT_DIR": str(output_dir)}, ())


def watched(output_dir: Path, run: str | None = None) -> str:
    """Return what the command prints into a pipe."""
    output = StringIO()
    watching.watch(called(output_dir, run), output)
    return output.getvalue()


@pytest.mark.parametrize(
    ("report", "verdict"),
    [
        (DONE, "Done: better on the held-out rows"),
        (replace(DONE, status="failed", exit_class=15), "Failed: out of memory (exit class 15)"),
        (replace(DONE, status="running", pid=2**22 + 1), "Died: the run was killed"),
    ],
)
def test_a_run_that_has_ended_is_shown_once_with_its_verdict(tmp_path, report, verdict):
    folder = run_folder(tmp_path / "run", report)
    write_holder(folder.path)
    for line in LINES:
        metrics.append(folder.metrics, line)
    text = watched(tmp_path)
    assert f"\n{verdict}" in text
    assert "loss   1.0000 now, 3.0000 first, 1.0000 lowest" in text


def test_of_several_machines_the_folder_with_the_figures_is_shown(tmp_path):
    for name in ("run", "run-node1"):
        run_folder(tmp_path / name)
        metrics.append(RunFolder(tmp_path / "run").metrics, LINES[0])
    assert watching.chosen_run(called(tmp_path)).name == "run"
    assert watching.chosen_run(called(tmp_path, "run-node1")).name == "run"


def test_a_pipe_ends_with_the_run_and_its_verdict(tmp_path, monkeypatch):
    folder = run_folder(tmp_path / "run", DONE)
    folder.write_report(running())
    metrics.append(folder.metrics, LINES[2])

    def go_on(seconds: float) -> None:
        metrics.append(folder.metrics, LINES[3])
        folder.write_report(DONE)

    monkeypatch.setattr(watching.time, "sleep", go_on)
    lines = watched(tmp_path).splitlines()
    assert "step 1/40 loss=3" in lines[1] and "step 11/40 loss=2" in lines[2]
    assert "Done: better on the held-out rows" in lines


def test_ctrl_c_gives_the_terminal_back_and_leaves_the_run_alone(tmp_path):
    folder = run_folder(tmp_path / "run", running())
    for line in LINES:
        metrics.append(folder.metrics, line)
    before = sorted((path, path.stat().st_mtime) for path in folder.path.rglob("*"))
    screen = {"TERM": "xterm-256color", "COLUMNS": "100", "LINES": "30"}
    environ = {"TRAIN_OUTPUT_DIR": str(tmp_path), **screen}
    to_screen = lambda: setattr(watching.watch, "__defaults__", (sys.stdout,))  # noqa: E731
    terminal = Terminal(["watch"], environ, to_screen)
    shown = terminal.wait_for("GPU 1 NVIDIA H200: 96 % busy")
    assert "\x1b[?1049h" in shown  # the terminal's other screen
    terminal.type("\x03")
    shown = terminal.wait_for(
        f"not watched any more; the run continues: make watch RUN={folder.path}"
    )
    assert terminal.exit_code() == 0
    assert "\x1b[?1049l" in shown and "\x1b[?25h" in shown and "Traceback" not in shown
    assert sorted((path, path.stat().st_mtime) for path in folder.path.rglob("*")) == before


def test_a_real_run_writes_what_is_watched(finished):
    folder = finished("lora")
    run = RunFacts.read(folder)
    logged = {entry["step"]: entry["loss"] for entry in run_json(folder)["loss"]}
    assert {step: pytest.approx(loss, rel=1e-5) for step, loss in logged.items()} == dict(
        run.logged("loss")
    )
    assert (run.lines[-1].step, run.lines[-1].steps) == (3, 3)
    assert [step for step, _ in run.logged("test_loss")] == [0, 3]
    answers = [line.answers for line in run.lines if line.answers][-1]
    assert len(answers) == 3 and all(answer.expected for answer in answers)
    assert frame(run)[1].startswith("step   3/3 ")
