"""`make compare`: runs side by side, in the terminal, as JSON and as a page."""

import json
from dataclasses import replace

import pytest
from html_pages import Page
from report_folders import DONE, ROWS, answer_lines, loss_lines, run_folder, scored_lines

from sft_play.commands.call import Call
from sft_play.commands.runs import compare as compare_command
from sft_play.config.invocation import Invocation
from sft_play.errors import ConfigError, EnvironmentFault
from sft_play.reporting.compare import compare_runs
from sft_play.runs.files import write_text
from sft_play.runs.report import RunReport

LOW = answer_lines([0.5, 0.7] * (ROWS // 2))
HIGH = answer_lines([0.6, 0.9] * (ROWS // 2))


def call_in(output_dir, **variables: str) -> Call:
    return Call(Invocation(), {"TRAIN_OUTPUT_DIR": str(output_dir), **variables}, ())


@pytest.fixture
def two(tmp_path):
    """Two runs that differ in the learning rate and in the answers to the same rows."""
    faster = replace(DONE, tokens_per_second=4321.0)
    settings = ("train.learning_rate=0.002", "data.image_folder=/mnt/images")
    return [
        run_folder(tmp_path / "slow", after=LOW),
        run_folder(tmp_path / "fast", faster, after=HIGH, overrides=settings),
    ]


def test_runs_are_printed_with_scores_settings_that_differ_and_a_verdict(two, tmp_path):
    text = compare_command(call_in(tmp_path, RUNS="slow,fast"), (), None, as_json=False)
    lines = text.splitlines()
    assert lines[1].startswith("slow") and "1,234" in lines[1] and "1.00 GiB" in lines[1]
    assert lines[2].startswith("fast") and "4,321" in lines[2]
    between = lines[lines.index("settings that differ") + 1 : -4]
    assert between == ["  train.learning_rate", "    slow: 0.001", "    fast: 0.002", ""]
    assert (
        "fast against slow: loss +0.000 (95 % interval +0.000 to +0.000 over 20 rows): no clear difference"
        in lines
    )
    assert "fast against slow: ROUGE-L +0.150 (95 % interval +0.1" in text
    assert lines[-1] == f"page {tmp_path / 'compare-slow-fast.html'}"


def test_the_json_has_the_same_and_the_page_is_where_out_says(two, tmp_path):
    out = tmp_path / "pages" / "a.html"
    text = compare_command(call_in(tmp_path, OUT=str(out)), ["slow", "fast"], None, as_json=True)
    found = json.loads(text)
    assert [run["run"] for run in found["runs"]] == ["slow", "fast"]
    assert found["settings"] == [{"name": "train.learning_rate", "values": ["0.001", "0.002"]}]
    outcomes = {line["score"]["name"]: line["outcome"] for line in found["differences"]}
    assert outcomes == {"loss": "no clear difference", "ROUGE-L": "better"}
    assert found["page"] == str(out)
    page = Page(out.read_text(encoding="utf-8"))
    assert "2 runs side by side" in page.words
    legends = [found for tag, found in page.tags if tag == "polyline"]
    assert len(legends) >= 4, "two curves in every chart"


def test_every_metric_of_the_runs_is_compared(tmp_path):
    folders = []
    for name, right in (("one", 0.0), ("other", 1.0)):
        scores = {"rougeL": [0.5] * ROWS, "exact_match": [right] * 15 + [0.0] * 5}
        scores["bleu"] = [10.0] * ROWS
        after = {"eval_loss": 0.5, "rougeL": 0.5, "exact_match": 0.75 * right, "bleu": 20.0 + right}
        report = replace(DONE, metrics={"after": after})
        if name == "other":
            scores["words"] = [1.0] * ROWS
            after["words"] = 1.0
        folders.append(run_folder(tmp_path / name, report, after=scored_lines(scores)))
    comparison = compare_runs(folders)
    found = {line.score.name: line.score for line in comparison.differences}
    assert list(found) == ["loss", "ROUGE-L", "exact_match", "bleu"]
    assert found["exact_match"].outcome == "better" and found["exact_match"].difference.low > 0.5
    assert found["bleu"].change == 1.0, "of all answers, and not the mean of rows"
    assert found["bleu"].difference is None
    assert comparison.notes == ["other against one: words is not compared, one has none"]
    text = compare_command(call_in(tmp_path), ["one", "other"], None, as_json=False)
    assert "0.750 (0.550 to 0.900)" in text.splitlines()[2]


def test_a_score_of_all_answers_is_not_compared_where_the_rows_differ(tmp_path):
    scores = {"rougeL": [0.5] * ROWS, "bleu": [10.0] * ROWS}
    report = replace(DONE, metrics={"after": {"eval_loss": 0.5, "rougeL": 0.5, "bleu": 20.0}})
    one = run_folder(tmp_path / "one", report, after=scored_lines(scores))
    fewer = {name: values[:15] for name, values in scores.items()}
    other = run_folder(tmp_path / "other", report, after=scored_lines(fewer))
    notes = compare_runs([one, other]).notes
    assert notes[-1] == "other against one: bleu is of all rows, and the held-out rows differ"


def test_runs_with_other_test_rows_are_said_to_have_them(tmp_path):
    shared = answer_lines([0.5] * 15) + answer_lines([0.5] * 5, origin="else.jsonl:1")
    one = run_folder(tmp_path / "one", after=LOW)
    other = run_folder(tmp_path / "other", after=shared)
    write_text(other.evaluation / "after.losses.jsonl", loss_lines([5.0] * ROWS, tokens=9))
    comparison = compare_runs([one, other])
    assert [line.rows for line in comparison.differences] == [15]
    assert "20 samples with 180 tokens with loss and 20 samples with 200" in comparison.notes[0]
    assert "15 rows of both (20 and 20" in comparison.notes[1]
    none = answer_lines([0.5] * ROWS, origin="else.jsonl:1")
    comparison = compare_runs([one, run_folder(tmp_path / "third", after=none)])
    assert "0 scored held-out rows are the same" in comparison.notes[0]


def test_a_run_of_a_version_without_a_setting_differs_only_from_another_value(two):
    config = two[0].path / "config.yaml"
    lines = config.read_text().splitlines(keepends=True)
    config.write_text("".join(line for line in lines if "weight_decay" not in line))
    found = [setting.name for setting in compare_runs(two).settings]
    assert found == ["train.learning_rate"]


def test_a_run_that_failed_before_its_first_score_can_be_compared(two, tmp_path):
    failed = RunReport(status="failed", exit_class=11, cause="rows.jsonl:3: not JSON")
    run_folder(tmp_path / "broken", failed, before="", after="")
    text = compare_command(call_in(tmp_path), ["slow", "broken"], None, as_json=False)
    assert "Failed: data (exit class 11)" in text
    assert "broken against slow: loss is not compared, broken has none" in text


@pytest.mark.parametrize(
    ("runs", "out", "kind", "facts"),
    [
        ("", None, ConfigError, "2 6 RUNS=a,b fast slow"),
        ("a,b,c,d,e,f,g", None, ConfigError, "2 6 RUNS=a,b fast slow"),
        ("slwo,fast,elsewhere", None, ConfigError, "slwo slow? elsewhere"),
        ("slow,fast", "file/a.html", EnvironmentFault, "OUT= file/a.html"),
    ],
)
def test_what_cannot_be_compared_or_written_is_named(runs, out, kind, facts, two, tmp_path):
    (tmp_path / "file").touch()
    out = out and str(tmp_path / out)
    with pytest.raises(kind) as error:
        compare_command(call_in(tmp_path, RUNS=runs), (), out, as_json=False)
    assert all(fact in str(error.value) for fact in facts.split()), error.value
