"""Lines about a stage that takes long."""

import io
import logging
import time

import pytest

from sft_play import progress
from sft_play.progress import Output, Pace, Stage, drawing, watched_stage


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def test_a_line_has_count_rate_and_time_left():
    clock = Clock()
    stage = Stage("generating answers", 128, "answers", clock=clock)
    clock.seconds = 5.0
    assert stage.line() == "generating answers: 0/128 answers, 5 s so far"
    clock.seconds = 30.0
    stage.advance(96)
    assert stage.line() == "generating answers: 96/128 answers, 3.2 answers/s, 10 s left"
    stage.advance(32)  # as of a compressed file, which is read before its rows are
    assert stage.line() == "generating answers: 128/128 answers, 30 s so far"


def test_a_stage_without_a_count_says_what_it_measures():
    clock = Clock()
    stage = Stage("loading llama", measure=lambda: "3.2 GiB on cuda:0", clock=clock)
    clock.seconds = 75.0
    assert stage.line() == "loading llama: 1 min 15 s so far, 3.2 GiB on cuda:0"


def test_lines_come_while_one_call_takes_long_and_only_from_the_main_rank(monkeypatch, caplog):
    monkeypatch.setattr(progress, "EVERY_SECONDS", 0.01)
    caplog.set_level(logging.INFO, progress.logger.name)
    with watched_stage(Stage("loading")):
        deadline = time.monotonic() + 5.0
        while not caplog.messages and time.monotonic() < deadline:
            time.sleep(0.005)
    assert caplog.messages[0] == "loading: 0 s so far"
    caplog.clear()
    with watched_stage(Stage("loading"), is_shown=False):
        time.sleep(0.03)
    assert caplog.messages == []


def test_a_stage_inside_another_speaks_in_its_place(monkeypatch, caplog):
    monkeypatch.setattr(progress, "EVERY_SECONDS", 0.01)
    caplog.set_level(logging.INFO, progress.logger.name)
    with watched_stage(Stage("loading")):
        with watched_stage(Stage("checking kernels")):
            caplog.clear()
            time.sleep(0.05)
            inner = set(caplog.messages)
        caplog.clear()
        time.sleep(0.05)
        outer = set(caplog.messages)
    assert inner == {"checking kernels: 0 s so far"}
    assert outer == {"loading: 0 s so far"}


@pytest.mark.parametrize(("since", "waits"), [(1, 7), (6, 2), (7.9, 1), (12, 1), (17, 8)])
def test_a_new_stage_waits_for_what_is_left_of_eight_seconds(monkeypatch, since, waits):
    monkeypatch.setattr(progress, "_said_at", time.monotonic() - since)
    assert progress._seconds_to_first_line() == pytest.approx(waits, abs=0.1)


def test_a_short_stage_says_nothing_and_a_long_one_every_eight_seconds(caplog):
    caplog.set_level(logging.INFO, progress.logger.name)
    clock = Clock()
    pace = Pace(Stage("tokenizing rows", 40_000_000, "bytes", clock=clock))
    for _ in range(10):
        clock.seconds += 2.0
        pace.advance(1_000_000)
    assert caplog.messages == [
        "tokenizing rows: 4.0M/40.0M bytes, 500.0k bytes/s, 1 min 12 s left",
        "tokenizing rows: 8.0M/40.0M bytes, 500.0k bytes/s, 1 min 4 s left",
    ]


@pytest.mark.parametrize(
    ("seconds", "words"), [(9.4, "9 s"), (200, "3 min 20 s"), (7260, "2 h 1 min")]
)
def test_a_duration_has_two_units_at_most(seconds, words):
    assert progress.duration(seconds) == words


def test_names_cannot_make_a_terminal_do_anything():
    stream = io.StringIO()
    output = Output(stream, "standard output", None)
    output.write("run a\x1b[31m\x9b\u0007 \r\t\n")
    with drawing():
        output.write("\x1b[1m")
    assert stream.getvalue() == "run a\\x1b[31m\\x9b\\x07 \r\t\n\x1b[1m"
