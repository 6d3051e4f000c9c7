"""sft_play.plan.report: the text of `make plan`, and what can be typed from it."""

import json
import re
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from marks import long
from plan_examples import CPU, plan_for

from sft_play.config.loader import PROJECT_ROOT
from sft_play.plan import report
from sft_play.plan.advice import Advised
from sft_play.plan.devices import Gpu, Hardware
from sft_play.plan.launch import Launch, launch_command
from sft_play.plan.memory import GIB, PHASES
from sft_play.plan.run_plan import PlannedRun
from sft_play.plan.workload import Counted, workload
from sft_play.runs.files import json_text

LLAMA_8B = "model.name=meta-llama/Llama-3.1-8B"
QWEN = "model.name=Qwen/Qwen2.5-0.5B"
GPT_OSS = "model.name=openai/gpt-oss-20b"
COUNTED = Counted(1200, 65_000)
CONFIGS = sorted(
    path.name
    for path in (PROJECT_ROOT / "configs").glob("*.yaml")
    if path.name not in ("base.yaml", "run_unsloth.yaml")
)


def command_of(planned: PlannedRun) -> Launch:
    return launch_command(planned.plan.ranks, Path("outputs/<run>"), {})


def lines(planned: PlannedRun) -> list[str]:
    work = workload(planned.config, planned.plan, COUNTED)
    return report.plan_lines(planned, command_of(planned), ["make", "train"], work)


def line(planned: PlannedRun, label: str) -> str:
    """Return the text behind a label, however many lines it takes."""
    shown = lines(planned)
    first = next(number for number, row in enumerate(shown) if row.startswith(f"{label:<14}"))
    words = shown[first].removeprefix(label).split()
    for row in shown[first + 1 :]:
        if not row.startswith(" " * 14):
            break
        words += row.split()
    return " ".join(words)


def as_bash_reads(text: str) -> list[str]:
    """Return the words that a shell makes of a command."""
    command = ["bash", "-c", f"printf '%s\\0' {text}"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout.split("\0")[:-1]


# Layout of the text


HARDWARE = {
    "a100_pair": "2xA100-80GB",
    "h200_quad": "4xH200",
    "large": "2xA100-40GB",
    "medium": "1x16GiB",
    "multi_gpu_config": "2xA100-80GB",
    "rtx4090_sli": "2x4090",
    "small": "1x12GiB",
}


@pytest.mark.parametrize("name", HARDWARE)
def test_a_shipped_config_fits_its_hardware_and_opens_with_its_plan(name):
    path = PROJECT_ROOT / "configs" / f"{name}.yaml"
    plan = plan_for(HARDWARE[name], config=str(path)).plan
    assert plan.fits
    planned = re.search(r"(?m)^# .*not measured: ([\d.]+) GiB", path.read_text())
    assert float(planned[1]) == pytest.approx(plan.memory.predicted_peak / GIB, abs=0.06)


@pytest.mark.parametrize("name", sorted({Path(name).stem for name in CONFIGS} - set(HARDWARE)))
def test_every_other_shipped_config_trains_the_model_that_ships_anywhere(name):
    planned = plan_for(CPU, config=f"configs/{name}.yaml")
    assert planned.config.model.name.endswith("data/tiny_llama")
    assert planned.plan.fits


def test_the_table_is_the_bytes_of_the_plan():
    planned = plan_for("2xH200", LLAMA_8B)
    memory = planned.plan.memory
    shown = lines(planned)
    start = next(number for number, row in enumerate(shown) if row.startswith("GiB on each GPU"))
    header, *rows = shown[start : shown.index("", start)]
    starred = [f"{name}*" if name == memory.peak_phase else name for name in PHASES]
    assert header.split()[4:] == starred
    cells = {re.split(r"\s{2,}", row)[0]: row.split()[-len(PHASES) :] for row in rows}
    assert list(cells) == [
        "weights (bfloat16)",
        "adapters",
        "gradients",
        "optimizer",
        "activations",
        "logits and loss",
        "gradient buckets",
        "context, libraries",
        "total",
    ]
    assert cells["total"] == [f"{size / GIB:.2f}" for size in memory.totals().values()]
    assert cells["gradients"][0] == "-"  # nothing, rather than 0.00
    assert f"{memory.predicted_peak / GIB:.2f} GiB" in line(planned, "memory")


def test_the_plan_is_one_line_of_facts():
    planned = plan_for("2xH200", config="configs/multi_gpu_config.yaml")
    assert "batch=4 x 2 x accum=4 = 32" in report.plan_line(planned)
    selective = replace(planned.plan.layout, checkpointed_layers=5)
    changed = replace(planned, plan=replace(planned.plan, layout=selective))
    assert "checkpointing=selective:5/62" in report.plan_line(changed)


# What it says

FULL = f"{QWEN} tuning.mode=full"
FP4 = "tuning.bnb_4bit_use_double_quant=false tuning.bnb_4bit_quant_type=fp4"
MIXTURE = "model.name=Qwen/Qwen3-30B-A3B"
# GPUs, none for a CPU; settings, or a config; the label of a line; what the line must have
SHOWN = [
    ("1xH200", f"{LLAMA_8B} tuning.mode=qlora", "weights (NF4, double", ""),
    (
        "1xH200",
        f"{GPT_OSS} tuning.mode=qlora",
        "precision",
        "base weights in MXFP4 and NF4, adapters",
    ),
    ("1xH200", f"{LLAMA_8B} tuning.mode=qlora {FP4}", "weights (FP4)", ""),
    ("1xH200", LLAMA_8B, "weights (bfloat16)", ""),
    ("1xT4", QWEN, "weights (float16)", ""),
    ("1xH200", FULL, "weights (float32)", ""),
    ("1xH200", f"{FULL} model.dtype=bfloat16", "weights (bfloat16)", ""),
    ("2xH200", f"{FULL} deepspeed", "precision", "weights in bfloat16"),
    ("2xH200", f"{LLAMA_8B} deepspeed", "precision", "adapters in bfloat16"),
    ("2xH200", LLAMA_8B, "precision", "adapters in float32"),
    ("2xH200", "multi_gpu_config", "batch", "4 x 2 GPUs x 4 = 32 rows"),
    ("1xH200", "train.batch_size=2", "batch", "2 x 1 GPU x 16 = 32 rows"),
    (CPU, "train.batch_size=2", "batch", "2 x 1 process x 16 = 32 rows"),
    ("2xH200", "", "on", "2 x NVIDIA H200, DDP"),
    ("2xH200", "deepspeed", "on", "2 x NVIDIA H200, DeepSpeed ZeRO-2"),
    ("1x4090", "", "on", "1 x NVIDIA GeForce RTX 4090"),
    (CPU, "", "on", "CPU"),
    ("1x24GiB", "", "speed", "not known: GPU of 24 GiB"),
    ("1x24GiB", "", "run", "38 steps: 1 epoch of 1,200 rows and 65,000 tokens (counted)"),
    (CPU, "", "speed", "not known on a CPU"),
    ("1xH200", "train.bf16=false", "speed", "not known in float32"),
    ("1xH200", LLAMA_8B, "checkpointing", "none"),
    ("1xH200", LLAMA_8B, "packing", "more memory"),
    ("1xH200", "train.packing=false", "packing", "off"),
    ("1x4GiB", LLAMA_8B, "longest row", "1,024 tokens"),
    ("1xH200", MIXTURE, "plan", "3.35 billion active per token, 8 of 128 experts"),
    ("1xH200", MIXTURE, "plan", "on all linear layers and experts"),
    (
        "1xH200",
        MIXTURE,
        "experts",
        "642.5 million weights with an adapter per expert, 18.3 million",
    ),
    long("1xH200", f"{MIXTURE} tuning.lora.experts=none", "plan", "none on experts"),
    ("1xH200", f"{MIXTURE} tuning.lora.experts=shared", "plan", "one adapter for all experts"),
]


@pytest.mark.usefixtures("traces_nothing")
@pytest.mark.parametrize("gpus, asked, label, words", SHOWN)
def test_a_line_has_the_figures_of_the_plan(gpus, asked, label, words):
    *settings, last = asked.split() or [""]
    options = {"use_deepspeed": last == "deepspeed"}
    if "=" in last:
        settings.append(last)
    elif last not in ("", "deepspeed"):
        options["config"] = f"configs/{last}.yaml"
    assert words in line(plan_for(gpus, *settings, **options), label)


def test_speed_hours_and_the_longest_row_are_told_where_they_are_known():
    planned = plan_for("2xH200", LLAMA_8B)
    total = planned.plan.speed.tokens_per_second
    expected = f"{total:,.0f} tokens/s ({total / 2:,.0f} per GPU)"
    assert line(planned, "speed").startswith(expected)
    work = r"38 steps: .* [\d.]+ s of training, 0\.\d\d GPU-hours, [\d,]+ tokens/s"
    assert re.match(work, line(planned, "run"))
    pattern = r"[\d,]+ tokens at [\d,]+ tokens/s; [\d,]+ .* offloaded to [\d.]+ GiB"
    assert re.match(pattern, line(planned, "longest row"))
    a10g = Gpu(0, "NVIDIA A10G", 20 * GIB, 20 * GIB, (8, 6))
    rtx = Gpu(1, "NVIDIA GeForce RTX 3090", 20 * GIB, 20 * GIB, (8, 6))
    assert plan_for(Hardware("cuda", (a10g, rtx), 8, GIB)).plan.speed is None


def test_layers_that_are_recomputed_are_counted():
    settings = ("tuning.mode=qlora", "train.batch_size=4", "model.max_seq_len=2048")
    some = plan_for("1x4090", LLAMA_8B, *settings)
    layers = some.plan.layout.checkpointed_layers
    assert 0 < layers < 32
    assert f"first {layers} of 32 layers" in line(some, "checkpointing")


def test_packing_that_is_off_is_told_and_why(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)  # Unsloth is installed
    gemma = plan_for("1xH200", "model.name=google/gemma-3-4b-it", "tuning.backend=unsloth")
    assert re.match("off: .* gemma3_text ", line(gemma, "packing"))


def test_a_plan_that_does_not_fit_says_by_how_much_and_what_would():
    planned = plan_for("1x24GiB", LLAMA_8B, "train.batch_size=32", "train.weight_offloading=false")
    assert not planned.plan.fits
    assert line(planned, "memory").startswith("does NOT fit, by ")
    costly = Advised("TUNING_MODE=qlora", "4-bit weights", 9 * GIB, 0.97)
    changed = replace(planned, plan=replace(planned.plan, changes=(costly,)))
    assert "  TUNING_MODE=qlora  (9.00 GiB, 0.97 x the speed; 4-bit weights)" in lines(changed)
    assert facts_of(changed)["changes"] == [asdict(costly)]


# Commands


def test_the_command_that_is_shown_is_the_command_that_runs():
    planned = plan_for("2xH200")
    command = command_of(planned)
    make_words = ["make", "train-distributed", "NUM_GPUS=2", "DATA_SYSTEM_PROMPT='be brief'"]
    shown = report.plan_lines(planned, command, make_words, "nobody counted")
    text = "\n".join(shown)
    assert "length not known: nobody counted" in text
    start, runs = re.search(r"^start (.*)^which runs (.*)", text, re.DOTALL | re.MULTILINE).groups()
    assert as_bash_reads(start) == [
        "make",
        "train-distributed",
        "NUM_GPUS=2",
        "DATA_SYSTEM_PROMPT=be brief",
    ]
    env = [f"{name}={value}" for name, value in command.env.items() if name != "PATH"]
    assert as_bash_reads(runs) == [*env, *command.argv]


def test_the_plan_of_the_command_line_loads_no_heavy_library():
    code = """
import sys
from sft_play.commands import call as calls
from sft_play.commands import plan as planning
call = calls.read_call(None, (), "2xH200")
planned = planning.plan_for_display(call, True, False)
text = planning.plan_text(call, planned, False)
assert "tokens/s" in text and "GPU-hours" in text, text
assert "workload" in planning.plan_text(call, planned, True)
heavy = {"torch", "transformers", "numpy", "pyarrow", "pynvml"} & set(sys.modules)
assert not heavy, heavy
"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=PROJECT_ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# JSON


def facts_of(planned: PlannedRun, counted: Counted | None = COUNTED) -> dict[str, Any]:
    """Return what `plan --json` prints."""
    work = counted and workload(planned.config, planned.plan, counted)
    return json.loads(json_text(report.plan_json(planned.plan, command_of(planned), work)))


def test_json_has_plain_numbers_of_speed_and_work():
    planned = plan_for("2xH200", LLAMA_8B)
    facts = facts_of(planned)
    assert facts["speed"]["tokens_per_second"] == planned.plan.speed.tokens_per_second
    assert (facts["workload"]["steps"], facts["workload"]["samples"]) == (38, 1200)
    assert (facts["fits"], facts["changes"]) == (True, [])
    unknown = facts_of(plan_for(CPU), counted=None)
    assert (unknown["speed"], unknown["workload"]) == (None, None)


def test_json_has_the_names_that_scripts_rely_on():
    facts = facts_of(plan_for("2xH200"))
    names = "world_size per_device_batch_size grad_accum effective_batch checkpointing memory"
    assert {*names.split(), "checkpointed_layers"} <= facts.keys()
    assert facts["backend_of_collectives"] == "nccl"
    assert facts_of(plan_for(CPU))["backend_of_collectives"] == "gloo"


def test_json_has_the_components_of_the_peak_and_of_every_phase():
    facts = facts_of(plan_for("2xH200", LLAMA_8B))
    peak = facts["memory"].pop("predicted_peak")
    assert peak == sum(facts["memory"].values())
    assert set(facts["phases"]) == set(PHASES)
    for phase in facts["phases"].values():
        total = phase.pop("total")
        assert total == sum(phase.values())
