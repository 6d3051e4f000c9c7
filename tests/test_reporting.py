"""sft_play.reporting: report.html and report.json of a run, however it ended."""

import logging
from dataclasses import replace
from pathlib import Path

import pytest
from html_pages import Page
from report_folders import DONE, ROWS, answer_lines, loss_lines, run_folder, scored_lines
from run_files import write_holder

from sft_play.commands.call import Call
from sft_play.commands.runs import write_report_again
from sft_play.commands.train import failure_recorded
from sft_play.config.invocation import Invocation
from sft_play.errors import DataError, ExitClass
from sft_play.monitor.watch import run_table
from sft_play.reporting import bootstrap, charts
from sft_play.reporting.answers import ROWS_SHOWN, TEXT_LENGTH
from sft_play.reporting.page import report_page, write_report, write_report_or_warn
from sft_play.reporting.run_facts import RunFacts
from sft_play.reporting.verdict import Score
from sft_play.runs.files import read_json, write_text
from sft_play.runs.report import Check, LengthHistogram, LoggedStep, RunReport

HOSTILE = "<script>document.title='owned'</script></pre><img src=x onerror=alert(1)> & \"q\" 'so'"


def page_of(folder) -> Page:
    return Page(write_report(folder).read_text(encoding="utf-8"))


# The page


def test_the_page_has_verdict_scores_rows_checks_and_the_command_that_repeats_the_run(tmp_path):
    words = page_of(run_folder(tmp_path / "run")).words
    assert "Done: better on the held-out rows" in words
    assert "loss fell from 3.500 to 0.500, by -3.000 (95 % interval" in words
    assert "ROUGE-L rose from 0.250 to 0.750, by +0.500 (95 % interval" in words
    assert "Answers that changed most 0.250 → 1.000 (+0.750) rows.jsonl:2" in words
    assert "The two that improved most and the one that worsened most" in words
    before_checks, _, _ = words.partition("Checks")
    assert before_checks.index("more that improved") < before_checks.index("All answers are in")
    assert "the saved weights are finite and equal those in memory passed" in words
    assert "no training row is an evaluation row compared with test rows passed" in words
    assert "measured 1.00 GiB, predicted 2.00 GiB passed" in words
    assert "dropped: too_long 2 2" in words
    assert "were cut or left out because of their length" in words
    assert "make train TRAIN_LEARNING_RATE=0.001" in words
    chosen = words[words.index("Chosen for this run") :]
    assert chosen.index("train.learning_rate 0.001 · --set") < chosen.index("settings from the")


def test_the_page_runs_no_script_and_loads_nothing(tmp_path):
    text = write_report(run_folder(tmp_path / "run")).read_text(encoding="utf-8")
    loading = ("http:", "https:", "url(", "@import", "<script", "<link", "src=", "href=")
    assert not [word for word in loading if word in text]
    assert "default-src 'none'" in text
    assert "prefers-color-scheme: dark" in text
    assert len(text) < 100_000


def test_rows_settings_and_errors_with_markup_are_inert(tmp_path):
    report = replace(
        DONE,
        cause=HOSTILE,
        status="failed",
        exit_class=11,
        versions={HOSTILE: HOSTILE},
        checks=[Check(HOSTILE, passed=False, found=HOSTILE)],
    )
    hostile = {"prompt": HOSTILE, "expected": HOSTILE, "origin": HOSTILE}
    folder = run_folder(
        tmp_path / "run",
        report,
        before=answer_lines([0.0] * ROWS, HOSTILE, **hostile),
        after=answer_lines([1.0] * ROWS, HOSTILE, **hostile),
        overrides=(f"model.chat_template={HOSTILE}",),
    )
    page = page_of(folder)
    tags = {tag for tag, _ in page.tags}
    assert not tags & {"script", "img"}
    assert not {name for _, found in page.tags for name in found if name.startswith("on")}
    assert page.text.count("<script>") >= 5


def test_hidden_characters_and_half_surrogates_are_shown_and_do_not_stop_the_report(tmp_path):
    text = "a\u202eb\x00\ud800"
    folder = run_folder(tmp_path / "run", after=answer_lines([1.0] * ROWS, text))
    assert "a⟨U+202E⟩b⟨U+0000⟩⟨U+D800⟩" in page_of(folder).words


def test_the_page_stays_small_however_long_the_answers_and_the_run_are(tmp_path):
    rows = 60
    long = [LoggedStep(step, loss=1 / step) for step in range(1, 2_001)]
    folder = run_folder(
        tmp_path / "run",
        replace(DONE, history=long),
        before=answer_lines([0.5] * rows, "b" * 5_000),
        after=answer_lines([1.0, 0.0] * (rows // 2), "a" * 5_000),
    )
    path = write_report(folder)
    assert path.stat().st_size < 60_000
    assert (folder.path / "report.json").stat().st_size < 60_000
    facts = RunFacts.read(folder)
    assert len(facts.improved) == len(facts.worsened) == ROWS_SHOWN
    assert f"({5_000 - TEXT_LENGTH:,} characters more)" in facts.improved[0].after


# How a run ended


@pytest.mark.parametrize(
    ("after", "rouge", "headline", "tone"),
    [
        (0.5, [0.25, 1.0], "Done: better on the held-out rows", "good"),
        (4.5, [0.0, 0.1], "Done, but worse on the held-out rows", "bad"),
        (0.5, [0.0, 0.5], "better on the held-out rows by loss, by no other score", "open"),
        (0.5, [0.0, 0.1], "the scores of the held-out rows do not agree", "open"),
        (3.5, [0.0, 0.5], "Done: no clear difference", "open"),
    ],
)
def test_a_run_is_called_better_only_where_its_scores_are(tmp_path, after, rouge, headline, tone):
    scores = rouge * (ROWS // 2)
    metrics = {
        "before": {"eval_loss": 3.5, "rougeL": 0.25},
        "after": {"eval_loss": after, "rougeL": sum(scores) / ROWS},
    }
    folder = run_folder(
        tmp_path / "run", replace(DONE, metrics=metrics), after=answer_lines(scores)
    )
    verdict = RunFacts.read(folder).verdict
    assert headline in verdict.headline
    assert verdict.tone == tone


@pytest.mark.parametrize(
    ("rows", "after", "headline"),
    [
        (6, 0.5, "Done: too few rows to tell (6); the loss fell from 3.500 to 0.500"),
        (9, 4.5, "Done: too few rows to tell (9); the loss rose from 3.500 to 4.500"),
        (10, 0.5, "Done: better on the held-out rows"),
    ],
)
def test_a_few_rows_say_nothing_for_sure(tmp_path, rows, after, headline):
    metrics = {"before": {"eval_loss": 3.5}, "after": {"eval_loss": after}}
    folder = run_folder(tmp_path / "run", replace(DONE, metrics=metrics), before="", after="")
    for when, loss in (("before", 3.5), ("after", after)):
        losses = loss_lines([10 * loss] * rows)
        write_text(folder.evaluation / f"{when}.losses.jsonl", losses)
    verdict = RunFacts.read(folder).verdict
    assert verdict.headline == headline
    assert (verdict.tone == "good") == (rows >= 10)
    assert "better" not in " ".join(verdict.reasons) or rows >= 10


def test_a_score_of_all_answers_together_is_claimed_if_its_intervals_are_apart():
    def bleu(low: float, high: float) -> bootstrap.Estimate:
        return bootstrap.Estimate((low + high) / 2, 20, low, high)

    for after, outcome in ((bleu(8, 12), "better"), (bleu(6, 9), "no clear difference")):
        assert Score("bleu", bleu(3, 7), after, None, True).outcome == outcome
    unknown = bootstrap.Estimate(9, 20)
    assert Score("bleu", bleu(3, 7), unknown, None, True).outcome == "no interval known"


def test_every_metric_of_a_run_is_in_its_report_with_intervals(tmp_path):
    before = {"rougeL": [0.25] * ROWS, "exact_match": [0.0] * ROWS, "bleu": [4.0] * ROWS}
    after = {"rougeL": [0.75] * ROWS, "exact_match": [0.0, 1.0] * 10, "bleu": [30.0] * ROWS}
    means = {"eval_loss": 1.0, "rougeL": 0.75, "exact_match": 0.5, "answers": 20}
    metrics = {
        "before": {"eval_loss": 3.5, "rougeL": 0.25, "exact_match": 0.0, "bleu": 3.0},
        # of all answers together: no mean of rows
        "after": {**means, "bleu": 25.0, "bleu_low": 20.0, "bleu_high": 31.0},
    }
    history = [LoggedStep.from_log({"step": 3, "eval_loss": 1.5, "eval_exact_match": 0.25})]
    folder = run_folder(
        tmp_path / "run",
        replace(DONE, metrics=metrics, history=history),
        before=scored_lines(before),
        after=scored_lines(after),
    )
    scores = {score.name: score for score in RunFacts.read(folder).scores}
    assert list(scores) == ["loss", "ROUGE-L", "bleu", "exact_match"]
    assert scores["exact_match"].outcome == "better"
    assert scores["exact_match"].difference.low > 0.2
    assert scores["bleu"].after == bootstrap.Estimate(25.0, 20, 20.0, 31.0)
    assert scores["bleu"].difference is None
    words = Page(report_page(RunFacts.read(folder))).words
    assert "exact_match (20 rows)" in words and "25.000 (20.000 to 31.000)" in words
    (line,) = run_table(tmp_path)
    assert "rougeL=0.750 bleu=25.000 [20.000, 31.000] exact_match=0.500" in line


def test_the_loss_has_intervals_where_rows_have_losses(tmp_path):
    metrics = {"before": {"eval_loss": 3.5}, "after": {"eval_loss": 3.45}}
    folder = run_folder(tmp_path / "run", replace(DONE, metrics=metrics), before="", after="")

    def loss(before: list[float] | None, after: list[float] | None) -> Score:
        for when, nats in (("before", before), ("after", after)):
            path = folder.evaluation / f"{when}.losses.jsonl"
            path.unlink() if nats is None else write_text(path, loss_lines(nats))
        (found,) = RunFacts.read(folder).scores
        return found

    old = loss(None, None)  # as in runs of earlier versions
    assert old.difference is None and old.outcome == "no interval known"
    before = [30.0, 40.0] * (ROWS // 2)
    by_chance = [nats + 3 * (-1) ** (row // 2) - 0.5 for row, nats in enumerate(before)]
    found = loss(before, by_chance)
    assert (found.before.mean, found.after.mean) == (3.5, pytest.approx(3.45))
    assert found.difference.mean == pytest.approx(-0.05)
    assert found.outcome == "no clear difference"
    assert loss(before, [nats - 0.5 for nats in before]).outcome == "better"


def test_a_failed_run_shows_class_cause_and_the_check_that_failed(tmp_path):
    report = replace(
        DONE,
        status="failed",
        exit_class=14,
        cause="loss=nan at step 30: the run has diverged; try TRAIN_LEARNING_RATE=0.0001",
        metrics={"before": {"eval_loss": 3.5, "rougeL": 0.25}},
    )
    words = page_of(run_folder(tmp_path / "run", report, after="")).words
    assert "Failed: diverged (exit class 14) loss=nan at step 30" in words
    assert "try TRAIN_LEARNING_RATE=0.0001 failed" in words


def test_a_run_that_fails_before_its_launch_has_a_report(tmp_path):
    folder = run_folder(tmp_path / "run", RunReport(status="planned"), before="", after="")
    with pytest.raises(DataError), failure_recorded(folder):
        raise DataError("rows.jsonl:7: not JSON; mend the line")
    words = Page((folder.path / "report.html").read_text(encoding="utf-8")).words
    assert "Failed: data (exit class 11) rows.jsonl:7: not JSON; mend the line" in words


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_stopped_or_killed_run_says_how_to_go_on(tmp_path, is_killed):
    report = replace(DONE, status="stopped", exit_class=75, cause="stopped on request", metrics={})
    if is_killed:
        report = replace(DONE, status="running", pid=2**22 + 1)  # no such process
    folder = run_folder(tmp_path / "run", report, before="", after="")
    if is_killed:
        write_holder(folder.path)
    assert RunFacts.read(folder).verdict.next is None
    write_text(folder.checkpoints / "checkpoint-40" / "MANIFEST.json", "{}")
    command = f"make train TRAIN_RESUME_FROM={folder.path}"
    assert RunFacts.read(folder).verdict.next == command


def test_a_report_that_is_written_anew_says_that_its_run_was_killed(tmp_path):
    killed = replace(DONE, status="running", exit_class=None, pid=2**22 + 1)  # no such process
    write_holder(run_folder(tmp_path / "run", killed, after="").path)
    call = Call(Invocation(run="run"), {"TRAIN_OUTPUT_DIR": str(tmp_path)}, ())
    page = Path(write_report_again(call))
    assert page == tmp_path / "run" / "report.html"
    assert "Died: the run was killed" in Page(page.read_text(encoding="utf-8")).words


def test_a_report_that_cannot_be_written_is_one_warning_and_changes_nothing(tmp_path, caplog):
    folder = run_folder(tmp_path / "run", after="{not JSON\n")
    before = folder.read_report()
    with caplog.at_level(logging.WARNING):
        write_report_or_warn(folder)
    (warning,) = caplog.messages
    assert "report.html cannot be written" in warning
    assert folder.read_report() == before


# What a run records for its report


def test_a_real_run_records_history_checks_and_lengths_and_writes_its_report(finished):
    folder = finished("lora")
    report = folder.read_report()
    steps = [entry for entry in report.history if entry.loss is not None]
    assert [entry.step for entry in steps] == [1, 2, 3]
    assert all(entry.learning_rate == 0.01 and entry.grad_norm > 0 for entry in steps)
    assert steps[0].tokens_per_second is None, "the first step compiles and allocates"
    assert all(entry.tokens_per_second > 0 for entry in steps[1:])
    assert {check.name for check in report.checks if check.passed} >= {
        "the base model knows every token of the rows",
        "the model is wrapped as the strategy demands",
        "the saved weights are finite and equal those in memory",
    }
    assert sum(report.lengths["train"].counts) == 10
    loss, rouge = RunFacts.read(folder).scores
    assert loss.after.mean == pytest.approx(report.metrics["after"]["eval_loss"], abs=1e-5)
    assert loss.difference is not None and rouge.difference is not None
    assert read_json(folder.path / "report.json")["run"] == folder.name


def test_a_check_that_fails_is_recorded_with_what_it_found(plan_run):
    from sft_play.plan.run_plan import PlannedRun
    from sft_play.training.recorder import RunRecorder
    from sft_play.training.state import State

    folder = plan_run({})
    with RunRecorder(folder, PlannedRun.read(folder), 0) as recorder:
        logged = [{"step": 1, "loss": 2.0}, {"step": 1, "epoch": 0.5}]
        recorder.state = State(global_step=1, log_history=logged)
        with recorder.check("rows are whole"):
            raise DataError("row 3 is half a row")
    report = folder.read_report()
    assert report.checks == [Check("rows are whole", False, "row 3 is half a row")]
    assert report.history == [LoggedStep(1, loss=2.0)]
    assert (report.status, report.exit_class) == ("failed", ExitClass.DATA)


def test_a_log_that_is_not_finite_leaves_its_number_out():
    assert LoggedStep.from_log({"step": 3, "loss": float("nan")}) is None
    found = LoggedStep.from_log({"step": 3, "loss": 1.0, "grad_norm": float("inf"), "epoch": 0.1})
    assert found == LoggedStep(3, loss=1.0)


# Intervals and charts


def test_an_interval_holds_the_mean_and_shrinks_with_more_rows():
    few = bootstrap.estimate([0.0, 1.0] * 10)
    many = bootstrap.estimate([0.0, 1.0] * 200)
    assert few.low < 0.5 == few.mean < few.high
    assert few.low < many.low < many.high < few.high
    # of 400 rows, the normal approximation: 1.96 * 0.5 / 20
    assert many.high - 0.5 == pytest.approx(0.049, abs=0.005)


def test_pairs_find_a_difference_that_is_hidden_between_rows():
    before = [number / 50 for number in range(50)]
    after = [score + 0.02 for score in before]
    difference = bootstrap.paired_difference(before, after)
    assert not difference.includes_zero and difference.mean == pytest.approx(0.02)
    assert bootstrap.paired_difference(before, before[::-1]).includes_zero


def test_few_rows_have_no_interval_and_weights_count():
    assert bootstrap.estimate([1.0, 2.0]).low is None
    assert bootstrap.estimate([1.0, 4.0], [3.0, 1.0]).mean == 1.75


@pytest.mark.parametrize("values", [[5.0], [0.0, 0.0], [1e-6, 3e-6], [-2.0, 1.0], [1e6, 3e6]])
def test_every_point_of_a_curve_lies_inside_the_drawing(values):
    points = list(enumerate(values, 1))
    chart = charts.line_chart("t", [charts.Series("s", points)])
    for step, value in chart.lines[0].points:
        assert charts.LEFT <= chart.x_axis.place(step) <= charts.RIGHT
        assert charts.TOP <= chart.y_axis.place(value) <= charts.BOTTOM
    labels = [label for _, label in chart.y_axis.ticks]
    assert 2 <= len(labels) == len(set(labels))


def test_bars_of_a_histogram_are_as_high_as_their_counts():
    chart = charts.histogram("t", LengthHistogram([0, 10, 20, 30], [1, 0, 4]))
    heights = [charts.BOTTOM - chart.y_axis.place(bar.count) for bar in chart.bars]
    assert heights == [pytest.approx(heights[2] / 4, abs=0.2), 0, charts.BOTTOM - charts.TOP]
    assert charts.histogram("t", LengthHistogram([], [])) is None
