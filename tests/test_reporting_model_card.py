"""The model card: what was measured, by the run's folder and the base's, and nothing else."""

import re
from dataclasses import replace
from pathlib import Path

import markdown
import pytest
from huggingface_hub import ModelCard
from report_folders import run_folder

from sft_play.config.schema import Config, ModelSection
from sft_play.reporting.answers import answer_scores
from sft_play.reporting.bootstrap import Estimate
from sft_play.reporting.card_facts import (
    CardFacts,
    ChosenSetting,
    Energy,
    base_config,
    chosen_settings,
    energy_of,
    hardware_of,
    has_soft_caps,
    licence_of,
)
from sft_play.reporting.model_card import card_text
from sft_play.reporting.verdict import Score
from sft_play.runs.exports import SavedStops
from sft_play.runs.metrics import GpuSample, MetricsLine
from sft_play.runs.report import RankMemory, RunReport
from sft_play.runs.resumed import AskedRun

STOPS = SavedStops(("<|im_end|>",), (7,))
NOTHING = CardFacts([], [], None, None, None)
CONFIG = Config.model_validate(
    {"model": {"name": "me/base", "max_seq_len": 256}, "train": {"learning_rate": 0.1}}
)


def card(report: RunReport | None = None, facts: CardFacts = NOTHING, **changes) -> str:
    report = report or RunReport(run="a", status="done", global_step=3)
    return card_text(CONFIG, report, STOPS, Path("out/adapter"), facts, **changes)


def test_a_run_that_measured_nothing_claims_nothing():
    text = card()
    for word in ("Scores", "energy", "hardware", "hours", "tokens/s", "interval", "## Data"):
        assert word not in text, word
    assert "- Nothing was scored." in text
    assert "does not say under which licence; look before you publish this" in text


LOSS = Score(
    "loss",
    *(Estimate(3.0, 10, 2.5, 3.5), Estimate(1.0, 10, 0.9, 1.1), Estimate(-2.0, 10)),
    higher_is_better=False,
)


def test_scores_have_their_intervals_and_the_command_that_prints_them_again():
    text = card(facts=replace(NOTHING, scores=[LOSS]))
    assert "| loss (nats a token) | 3 [2.5, 3.5] | 1 [0.9, 1.1] | -2 |" in text
    assert "`make eval RUN=a` scores them again." in text


@pytest.mark.parametrize(
    ("kind", "delivered", "has_scores"),
    [
        ("adapter", None, True),
        ("merged", None, True),
        ("safetensors", "int4", False),  # the scores are those of other weights
        ("int4", None, False),
        ("gguf", None, False),
        ("int4", "int4", True),
        ("fp8", "int4", False),
    ],
)
def test_the_hub_reads_the_scores_of_files_that_have_them(kind, delivered, has_scores):
    facts = replace(NOTHING, scores=[LOSS])
    train = CONFIG.train.model_copy(update={"deliver_as": delivered})
    config = CONFIG.model_copy(update={"train": train})
    report = RunReport(run="a: b", status="done", global_step=3)
    text = card_text(config, report, STOPS, Path("out/adapter"), facts, kind)
    results = ModelCard(text).data.eval_results or []
    found = [(result.metric_type, result.metric_value) for result in results]
    assert found == ([("loss", 1.0)] if has_scores else [])


def test_scores_of_other_metrics_have_the_intervals_of_the_run():
    after = {"eval_loss": 1.0, "answers": 20, "exact_match": 0.5}
    after |= {"exact_match_low": 0.25, "exact_match_high": 0.75}
    report = RunReport(run="a", metrics={"before": {"exact_match": 0.0}, "after": after})
    (score,) = answer_scores(report, [], [])
    assert score.after == Estimate(0.5, 0, 0.25, 0.75) and score.before == Estimate(0.0, 0)
    text = card(facts=replace(NOTHING, scores=[score]))
    assert "| exact_match | 0 | 0.5 [0.25, 0.75] |  |" in text


def test_hardware_hours_and_energy_are_those_that_were_measured():
    ranks = [RankMemory(n, "h", f"cuda:{n}", "NVIDIA H200", 1, 0, 0) for n in range(2)]
    report = RunReport(run="a", global_step=3, memory_by_rank=ranks, seconds={"total": 1800.0})
    facts = replace(NOTHING, hardware=hardware_of(report), energy=Energy(1.25, 2))
    text = card(report, facts)
    assert "| hardware | 2 × NVIDIA H200 |" in text and "| hours | 0.5 |" in text
    assert "| energy | 1.25 kWh by 2 GPUs (NVML) |" in text


def test_energy_is_watts_by_the_time_between_lines():
    lines = [
        MetricsLine(1, 3, 0.0, gpus=(GpuSample(0, watts=999.0),)),
        MetricsLine(2, 3, 1800.0, gpus=(GpuSample(0, watts=300.0), GpuSample(1, watts=500.0))),
        MetricsLine(3, 3, 3600.0, gpus=(GpuSample(0, watts=400.0), GpuSample(1, watts=400.0))),
    ]
    assert energy_of(lines) == Energy(pytest.approx(0.8), 2)  # 800 W for an hour
    assert energy_of([MetricsLine(1, 3, 0.0), MetricsLine(2, 3, 9.0)]) is None


def test_a_chosen_setting_has_its_origin_and_no_private_folder():
    chosen = [
        ChosenSetting("data.train_path", "/home/me/secret/rows.jsonl", "/home/me/own.yaml:3"),
        ChosenSetting("tuning.lora.r", "8", "environment TUNING_LORA_R"),
    ]
    text = card(facts=replace(NOTHING, chosen=chosen))
    assert "| `data.train_path` | `rows.jsonl` | `own.yaml:3` |" in text
    assert "| `tuning.lora.r` | `8` | `environment TUNING_LORA_R` |" in text


def test_where_images_are_is_in_no_card(tmp_path):
    folder = run_folder(tmp_path / "a", overrides=("data.image_folder=/home/me", "train.seed=3"))
    chosen = {each.name for each in chosen_settings(folder, AskedRun.read(folder))}
    assert "train.seed" in chosen and "data.image_folder" not in chosen


def test_neither_html_nor_a_link_in_a_name_means_anything():
    hostile = "<img src=x onerror=alert(1)> ![](http://a.b/c) |`` \n</script>.jsonl"
    counts = dict.fromkeys(("rows_in", "rows_used", "tokens", "trained_tokens"), 9)
    data = {"train": {**counts, "sources": [{"name": hostile}]}}
    report = RunReport(run="a", global_step=3, data=data)
    config = {"model": {"name": hostile, "max_seq_len": 256}, "train": {"learning_rate": 0.1}}
    changed = Config.model_validate({**config, "data": {"system_prompt": hostile}})
    facts = replace(NOTHING, licence=hostile, chosen=[ChosenSetting("model.name", hostile, "x")])
    text = card_text(changed, report, SavedStops((hostile,), (7,)), Path(f"a/{hostile}"), facts)
    page = markdown.markdown(text, extensions=["tables", "fenced_code"])
    assert "onerror" in page
    assert not re.search("<(img|script|/script|a )", page)
    assert page.count("<table>") == text.count("| --- |\n"), "a cell ends where it is to end"


def test_the_licence_is_what_the_base_says(tmp_path):
    assert licence_of(tmp_path) is None
    (tmp_path / "LICENSE").write_text("MIT")
    assert licence_of(tmp_path) == "LICENSE in the base's folder"
    (tmp_path / "README.md").write_text(
        "---\nlanguage: en\nlicense: apache-2.0\n---\nlicense: no\n"
    )
    assert licence_of(tmp_path) == "apache-2.0 (README.md of the base)"


def test_limits_count_the_answers_that_did_not_end():
    after = {"rougeL": 0.5, "answers": 9, "cut_answers": 2, "max_new_tokens": 64}
    counts = dict.fromkeys(("rows_in", "rows_used", "tokens", "trained_tokens"), 9)
    report = RunReport(run="a", global_step=3, metrics={"after": after}, data={"test": counts})
    text = card(report)
    assert "9 held-out rows" in text and "2 of 9 answers did not end within 64 tokens." in text


def test_a_base_with_soft_caps_is_loaded_with_the_attention_that_computes_them(tmp_path):
    (tmp_path / "config.json").write_text('{"text_config": {"attn_logit_softcapping": 50.0}}')
    assert has_soft_caps(base_config(ModelSection(name=str(tmp_path))))
    assert not has_soft_caps(base_config(ModelSection(name="me/not-in-the-cache")))
    facts = replace(NOTHING, has_soft_caps=True)
    assert "generation_config=stops, attn_implementation='eager')" in card(facts=facts)
    assert "attn_implementation" not in card()
