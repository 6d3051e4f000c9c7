"""The model card: what was measured, by the run's folder and the base's, and nothing else."""

import re
from dataclasses import replace
from pathlib import Path

import markdown
import pytest
from huggingface_hub import ModelCard
from report_folders import DONE, run_folder

from sft_play.config.schema import Config, ModelSection
from sft_play.reporting.base_facts import BaseFacts
from sft_play.reporting.model_card import card_text
from sft_play.reporting.run_facts import RunFacts
from sft_play.runs import metrics
from sft_play.runs.exports import SavedStops
from sft_play.runs.metrics import GpuSample, MetricsLine
from sft_play.runs.report import RankMemory, RunReport

STOPS = SavedStops(("<|im_end|>",), (7,))
CONFIG = Config.model_validate(
    {"model": {"name": "me/base", "max_seq_len": 256}, "train": {"learning_rate": 0.1}}
)
RUN = RunReport(run="a", status="done", global_step=3)


@pytest.fixture
def facts(tmp_path):
    """Return the facts of a run whose test rows have no answers, from its run.json."""

    def read(report: RunReport = RUN, overrides: tuple[str, ...] = ()) -> RunFacts:
        folder = run_folder(tmp_path / "a", report, before="", after="", overrides=overrides)
        return RunFacts.read(folder)

    return read


def card(facts: RunFacts, config: Config = CONFIG, **changes) -> str:
    return card_text(facts, config, STOPS, Path("out/adapter"), **changes)


def test_a_run_that_measured_nothing_claims_nothing(facts):
    text = card(facts())
    for word in ("Scores", "energy", "hardware", "hours", "tokens/s", "interval", "## Data"):
        assert word not in text, word
    assert "- Nothing was scored." in text
    assert "does not say under which licence; look before you publish this" in text


def test_scores_have_their_intervals_and_the_command_that_prints_them_again(tmp_path):
    text = card(RunFacts.read(run_folder(tmp_path / "a", DONE)))
    assert "| loss (nats a token) | 3.5 [3.5, 3.5] | 0.5 [0.5, 0.5] | -3 [-3, -3] |" in text
    assert "| ROUGE-L | 0.25 [0.25, 0.25] | 0.75 [0.65, 0.85] | 0.5 [0.4, 0.6] |" in text
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
def test_the_hub_reads_the_scores_of_files_that_have_them(kind, delivered, has_scores, facts):
    train = CONFIG.train.model_copy(update={"deliver_as": delivered})
    config = CONFIG.model_copy(update={"train": train})
    report = replace(RUN, metrics={"before": {"eval_loss": 3.0}, "after": {"eval_loss": 1.0}})
    text = card(facts(report), config, kind=kind)
    results = ModelCard(text).data.eval_results or []
    found = [(result.metric_type, result.metric_value) for result in results]
    assert found == ([("loss", 1.0)] if has_scores else [])


def test_scores_of_other_metrics_have_the_intervals_of_the_run(facts):
    after = {"answers": 20, "max_new_tokens": 64, "exact_match": 0.5}
    after |= {"exact_match_low": 0.25, "exact_match_high": 0.75}
    report = replace(RUN, metrics={"before": {"exact_match": 0.0}, "after": after})
    assert "| exact_match | 0 | 0.5 [0.25, 0.75] |  |" in card(facts(report))


def test_hardware_hours_and_energy_are_those_that_were_measured(facts):
    ranks = [RankMemory(n, "h", f"cuda:{n}", "NVIDIA H200", 1, 0, 0) for n in range(2)]
    run = facts(replace(RUN, memory_by_rank=ranks, seconds={"total": 1800.0}))
    # watts of the first line count for no time: 800 W for 5,400 s, and 500 W for 360 s
    for seconds, watts in ((0.0, (999.0,)), (5400.0, (300.0, 500.0)), (5760.0, (400.0, 100.0))):
        gpus = tuple(GpuSample(rank, watts=used) for rank, used in enumerate(watts))
        metrics.append(run.folder.metrics, MetricsLine(1, 3, seconds, gpus=gpus))
    text = card(run)
    assert "| hardware | 2 × NVIDIA H200 |" in text and "| hours | 0.5 |" in text
    assert "| energy | 1.25 kWh by 2 GPUs (NVML) |" in text


def test_a_chosen_setting_has_its_origin_and_no_private_folder(facts):
    folders = ("data.train_path=/home/me/secret/rows.jsonl", "data.image_folder=/home/me")
    run = facts(overrides=(*folders, "train.seed=3"))
    asked = run.folder.path / "asked.json"
    asked.write_text(asked.read_text().replace("--set train.seed", "/home/me/own.yaml:3"))
    text = card(run)
    assert "| `data.train_path` | `rows.jsonl` | `--set data.train_path` |" in text
    assert "| `train.seed` | `3` | `own.yaml:3` |" in text and "image_folder" not in text


def test_neither_html_nor_a_link_in_a_name_means_anything(facts, tmp_path):
    hostile = "<img src=x onerror=alert(1)> ![](http://a.b/c) |`` <!-- .jsonl"
    counts = dict.fromkeys(("rows_in", "rows_used", "tokens", "trained_tokens"), 9)
    data = {"train": {**counts, "sources": [{"name": f"{hostile}\n</script>"}]}}
    base = tmp_path / hostile
    base.mkdir(parents=True)
    (base / "README.md").write_text(f"---\nlicense: {hostile}\n---\n")
    config = {"model": {"name": str(base), "max_seq_len": 256}, "train": {"learning_rate": 0.1}}
    changed = Config.model_validate({**config, "data": {"system_prompt": hostile}})
    run = facts(RunReport(run="a", global_step=3, data=data), (f"model.name={hostile}",))
    text = card_text(run, changed, SavedStops((hostile,), (7,)), Path(f"a/{hostile}"))
    page = markdown.markdown(text, extensions=["tables", "fenced_code"])
    assert page.count("onerror") > 6
    assert not re.search("<(img|script|/script|a )", page)
    assert page.count("<table>") == text.count("| --- |\n"), "a cell ends where it is to end"


def test_the_licence_is_what_the_base_says(tmp_path):
    base = BaseFacts(ModelSection(name=str(tmp_path)), {})
    assert base.licence is None
    (tmp_path / "LICENSE").write_text("MIT")
    assert base.licence == "LICENSE in the base's folder"
    (tmp_path / "README.md").write_text(
        "---\nlanguage: en\nlicense: apache-2.0\n---\nlicense: no\n"
    )
    assert base.licence == "apache-2.0 (README.md of the base)"


def test_limits_count_the_answers_that_did_not_end(facts):
    after = {"rougeL": 0.5, "answers": 9, "cut_answers": 2, "max_new_tokens": 64}
    counts = dict.fromkeys(("rows_in", "rows_used", "tokens", "trained_tokens"), 9)
    text = card(facts(replace(RUN, metrics={"after": after}, data={"test": counts})))
    assert "9 held-out rows" in text and "2 of 9 answers did not end within 64 tokens." in text


def test_a_base_with_soft_caps_is_loaded_with_the_attention_that_computes_them(facts, tmp_path):
    base = tmp_path / "base"
    base.mkdir()
    (base / "config.json").write_text('{"text_config": {"attn_logit_softcapping": 50.0}}')
    config = CONFIG.model_copy(update={"model": ModelSection(name=str(base), max_seq_len=256)})
    assert not BaseFacts.read(ModelSection(name="me/not-in-the-cache")).has_soft_caps
    run = facts()
    assert "generation_config=stops, attn_implementation='eager')" in card(run, config)
    assert "attn_implementation" not in card(run)
