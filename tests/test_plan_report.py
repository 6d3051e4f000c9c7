"""The text of `make plan`: what a person reads, and what can be typed from it."""

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from sft_play import commands
from sft_play.config import invocation
from sft_play.config.loader import PROJECT_ROOT, load
from sft_play.plan import report
from sft_play.plan.advice import Change
from sft_play.plan.devices import GIB, Gpu, Hardware, parse
from sft_play.plan.launch import launch_command
from sft_play.plan.memory import PHASES
from sft_play.plan.resolve import Plan, resolve
from sft_play.plan.workload import Counted, workload

EMPTY = "tests/fixtures/empty.yaml"
CPU = Hardware("cpu", (), 8, 64 * GIB)
EIGHT = "model.name=meta-llama/Llama-3.1-8B"
CONFIGS = sorted(
    path.name
    for path in (PROJECT_ROOT / "configs").glob("*.yaml")
    if path.name not in ("base.yaml", "run_unsloth.yaml")
)


@pytest.fixture(autouse=True)
def _in_the_project(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(PROJECT_ROOT)


def planned(
    words: str | Hardware, *settings: str, config: str = EMPTY, deepspeed: bool = False
) -> Plan:
    hardware = parse(words) if isinstance(words, str) else words
    return resolve(load(config, {}, settings), invocation.read({}), hardware, {}, True, deepspeed)


def lines(plan: Plan) -> list[str]:
    command = launch_command(plan.ranks, Path("outputs/<run>"), {})
    return report.lines(plan, command, ["make", "train"], workload(plan, Counted(1200, 65_000)))


def line(plan: Plan, about: str) -> str:
    """The text of a line, however many rows it takes."""
    shown = lines(plan)
    first = next(number for number, row in enumerate(shown) if row.startswith(f"{about:<14}"))
    rest = shown[first + 1 :]
    behind = next(
        number for number, row in enumerate([*rest, "end"]) if not row.startswith(" " * 14)
    )
    return " ".join(" ".join([shown[first].removeprefix(about), *rest[:behind]]).split())


def as_bash_reads(text: str) -> list[str]:
    return subprocess.run(
        ["bash", "-c", f"printf '%s\\0' {text}"], capture_output=True, text=True, check=True
    ).stdout.split("\0")[:-1]


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("words", ["2xH200", "1x24GiB", "2x4090"])
def test_every_shipped_config_is_told_in_110_columns(config: str, words: str) -> None:
    shown = lines(planned(words, config=f"configs/{config}"))
    longest_word = max(len(word) for row in shown for word in row.split())
    assert max(map(len, shown)) <= max(report.WIDTH, report.LABEL + longest_word + 2)
    assert not [row for row in shown if row != row.rstrip()]


def test_the_table_is_the_bytes_of_the_plan() -> None:
    plan = planned("2xH200", EIGHT)
    shown = lines(plan)
    start = next(number for number, row in enumerate(shown) if row.startswith("GiB on each GPU"))
    header, *rows = (row for row in shown[start : shown.index("", start)])
    assert header.split()[4:] == [
        f"{name}*" if name == plan.memory.peak_phase else name for name in PHASES
    ]
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
    assert cells["total"] == [f"{phase.total / GIB:.2f}" for phase in plan.memory.phases.values()]
    assert cells["gradients"][0] == "-"  # nothing, rather than 0.00
    assert f"{plan.memory.predicted_peak / GIB:.2f} GiB" in line(plan, "memory")


@pytest.mark.parametrize(
    ("plan", "weights"),
    [
        (("1xH200", EIGHT, "tuning.mode=qlora"), "NF4, double quantised"),
        (
            (
                "1xH200",
                EIGHT,
                "tuning.mode=qlora",
                "tuning.bnb_4bit_use_double_quant=false",
                "tuning.bnb_4bit_quant_type=fp4",
            ),
            "FP4",
        ),
        (("1xH200", EIGHT), "bfloat16"),
        (("1xT4", "model.name=Qwen/Qwen2.5-0.5B"), "float16"),
        (("1xH200", "model.name=Qwen/Qwen2.5-0.5B", "tuning.mode=full"), "float32"),
        (
            ("1xH200", "model.name=Qwen/Qwen2.5-0.5B", "tuning.mode=full", "model.dtype=bfloat16"),
            "bfloat16",
        ),
    ],
)
def test_weights_are_named_as_they_are_held(plan: tuple[str, ...], weights: str) -> None:
    assert any(row.startswith(f"weights ({weights})") for row in lines(planned(*plan)))


def test_deepspeed_holds_all_weights_in_the_type_of_its_products() -> None:
    full = planned("2xH200", "model.name=Qwen/Qwen2.5-0.5B", "tuning.mode=full", deepspeed=True)
    assert (
        line(full, "precision")
        == "computes in bfloat16; weights in bfloat16; optimizer adamw_torch_fused"
    )
    adapters = [
        line(planned("2xH200", EIGHT, deepspeed=engine), "precision") for engine in (True, False)
    ]
    assert ["adapters in bfloat16" in adapters[0], "adapters in float32" in adapters[1]] == [
        True,
        True,
    ]


def test_the_arithmetic_of_the_batch_is_shown() -> None:
    assert line(planned("2xH200", config="configs/multi_gpu_config.yaml"), "batch").startswith(
        "4 x 2 GPUs x 4 = 32 rows a step"
    )
    assert line(planned("1xH200", "train.batch_size=2"), "batch").startswith(
        "2 x 1 GPU x 16 = 32 rows"
    )
    assert line(planned(CPU, "train.batch_size=2"), "batch").startswith(
        "2 x 1 process x 16 = 32 rows"
    )


def test_where_it_runs_is_named() -> None:
    assert line(planned("2xH200"), "on") == "2 x NVIDIA H200, DDP"
    assert line(planned("2xH200", deepspeed=True), "on") == "2 x NVIDIA H200, DeepSpeed ZeRO-2"
    assert line(planned("1x4090"), "on") == "1 x NVIDIA GeForce RTX 4090, one process"
    assert line(planned(CPU), "on") == "1 x a process on the CPU, one process"


def test_speed_and_hours_are_told_where_they_are_known() -> None:
    plan = planned("2xH200", EIGHT)
    assert line(plan, "speed").startswith(
        f"{plan.speed.tokens_per_second:,.0f} tokens/s ({plan.speed.tokens_per_second / 2:,.0f} a GPU) where rows are full, MFU "
    )
    assert re.match(
        r"38 steps: 1 epoch of 1,200 rows, 65,000 tokens \(counted\); [\d.]+ s of training, 0\.\d\d GPU-hours, [\d,]+ tokens/s on these rows",
        line(plan, "run"),
    )
    assert (
        line(planned("1x24GiB"), "speed")
        == "not known: GPU of 24 GiB is no card whose data sheet is known here"
    )
    assert (
        line(planned("1x24GiB"), "run")
        == "38 steps: 1 epoch of 1,200 rows, 65,000 tokens (counted)"
    )
    assert line(planned(CPU), "speed") == "not known on a CPU"
    assert line(planned("1xH200", "train.bf16=false"), "speed") == "not known in float32"
    mixed = Hardware(
        "cuda",
        tuple(
            Gpu(index, name, 20 * GIB, 20 * GIB, (8, 6))
            for index, name in enumerate(("NVIDIA A10G", "NVIDIA GeForce RTX 3090"))
        ),
        8,
        GIB,
    )
    assert planned(mixed).speed is None


def test_what_is_computed_again_is_told() -> None:
    assert line(planned("1xH200", EIGHT), "checkpointing") == "none: no layer is computed twice"
    some = planned(
        "1x4090", EIGHT, "tuning.mode=qlora", "train.batch_size=4", "model.max_seq_len=2048"
    )
    assert 0 < some.chosen.checkpointed_layers < 32
    assert (
        line(some, "checkpointing")
        == f"the first {some.chosen.checkpointed_layers} of 32 layers are computed again in the backward pass"
    )
    assert line(planned("1xH200", "train.packing=false"), "packing") == "off"
    assert line(planned("1xH200", "model.name=google/gemma-3-4b-it"), "packing").startswith(
        "off: nobody has looked whether gemma3 keeps packed documents apart"
    )


def test_a_plan_that_does_not_fit_says_by_how_much_and_what_would() -> None:
    plan = planned("1x24GiB", EIGHT, "train.batch_size=32")
    assert not plan.fits and line(plan, "memory").startswith("does NOT fit, by ")
    plain, costly = (
        Change("TRAIN_BATCH_SIZE=1 TRAIN_GRAD_ACCUM=32", "", 20 * GIB, None),
        Change("TUNING_MODE=qlora", "4-bit weights", 9 * GIB, 0.97),
    )
    changed = dataclasses.replace(plan, changes=(plain, costly))
    shown = lines(changed)
    start = shown.index("it fits, by estimate, with")
    assert shown[start + 1 : start + 3] == [
        "  TRAIN_BATCH_SIZE=1 TRAIN_GRAD_ACCUM=32  (20.00 GiB)",
        "  TUNING_MODE=qlora  (9.00 GiB, 0.97 x the speed; 4-bit weights)",
    ]
    assert changed.as_json()["changes"][1] == {
        "words": "TUNING_MODE=qlora",
        "costs": "4-bit weights",
        "predicted_peak": 9 * GIB,
        "relative_speed": 0.97,
    }
    assert planned("1xH200").fits and not planned("1xH200").changes


def test_the_command_that_is_shown_is_the_command_that_runs() -> None:
    plan = planned("2xH200")
    command = launch_command(plan.ranks, Path("outputs/<run>"), {})
    shown = report.lines(
        plan,
        command,
        ["make", "train-distributed", "NUM_GPUS=2", "DATA_SYSTEM_PROMPT='be brief'"],
        "nobody counted",
    )
    start, ends = (
        next(number for number, row in enumerate(shown) if row.startswith(about))
        for about in ("start", "which runs")
    )
    assert as_bash_reads("\n".join(shown[start:ends]).removeprefix("start")) == [
        "make",
        "train-distributed",
        "NUM_GPUS=2",
        "DATA_SYSTEM_PROMPT=be brief",
    ]
    words = as_bash_reads("\n".join(shown[ends:]).removeprefix("which runs"))
    env = [f"{name}={value}" for name, value in command.env.items() if name != "PATH"]
    assert words == [*env, *command.argv]
    assert "length not known: nobody counted" in "\n".join(shown)


@pytest.mark.parametrize(
    ("environ", "overrides", "words"),
    [
        ({}, (), ["make", "train"]),
        (
            {"GPUS": "2xH200", "CONFIG": "small"},
            (),
            ["make", "train-distributed", "CONFIG=small", "NUM_GPUS=2"],
        ),
        (
            {"TRAIN_BATCH_SIZE": "2"},
            ("tuning.lora.r=8",),
            ["make", "train", "TRAIN_BATCH_SIZE=2", "TUNING_LORA_R=8"],
        ),
        (
            {"DATA_SYSTEM_PROMPT": "be brief; rm x"},
            (),
            ["make", "train", "DATA_SYSTEM_PROMPT='be brief; rm x'"],
        ),
        ({"HOME": "/x", "PATH": "/bin"}, ("train.epochs=2",), ["make", "train", "TRAIN_EPOCHS=2"]),
    ],
)
def test_what_to_type_repeats_what_was_asked(
    environ: dict[str, str], overrides: tuple[str, ...], words: list[str]
) -> None:
    call = commands.Call(invocation.read(environ), environ, overrides)
    plan = planned(environ.get("GPUS", CPU))
    assert commands.make_words(call, plan) == words


def test_the_plan_of_the_command_line_loads_no_heavy_library() -> None:
    code = (
        "import sys; from sft_play import commands\n"
        "text, _ = commands.show_plan(commands.call(None, (), '2xH200'), True, False, False, False)\n"
        "assert 'tokens/s' in text and 'GPU-hours' in text, text\n"
        "assert 'workload' in commands.show_plan(commands.call(None, (), '2xH200'), True, False, False, True)[0]\n"
        "heavy = {'torch', 'transformers', 'numpy', 'pyarrow', 'pynvml'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=PROJECT_ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_json_has_plain_numbers_of_speed_and_work() -> None:
    plan = planned("2xH200", EIGHT)
    command = launch_command(plan.ranks, Path("outputs/<run>"), {})
    facts = json.loads(
        commands.as_text(commands.plan_json(plan, command, workload(plan, Counted(1200, 65_000))))
    )
    assert facts["speed"]["tokens_per_second"] == plan.speed.tokens_per_second
    assert (
        facts["workload"]["steps"],
        facts["workload"]["samples"],
        facts["fits"],
        facts["changes"],
    ) == (38, 1200, True, [])
    unknown = commands.plan_json(planned(CPU), command, "nobody counted")
    assert (unknown["speed"], unknown["workload"]) == (None, None)
