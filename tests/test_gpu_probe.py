"""On a GPU: what a probe predicts is what is measured, and a run that was probed is the run that was not."""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from calls import outcome_of
from make_runs import check_losses, losses

from sft_play.plan.probe_fit import MeasuredFit, ProbePoint
from sft_play.plan.run_plan import read_plan
from sft_play.runs.folder import RunFolder
from sft_play.training.engine import create_accelerator

GIB = 2**30
ROWS, LONGEST = 64, 1024
# lora fused and plain, qlora, and full in both optimizers whose steps differ in memory
PLAIN_LORA = {"TUNING_MODE": "lora", "TRAIN_FAST_PATH": "false"}
CASES = [
    {"TUNING_MODE": "lora"},
    PLAIN_LORA,
    {"TUNING_MODE": "lora", "TUNING_LORA_DROPOUT": "0.1"},
    {"TUNING_MODE": "qlora", "TRAIN_PACKING": "false"},
    {"TUNING_MODE": "full"},
    {"TUNING_MODE": "full", "TRAIN_OPTIM": "adamw_8bit"},
    {"TUNING_MODE": "full", "TRAIN_FP16": "true", "TRAIN_BF16": "false"},
]

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def base(tokenizer, tmp_path_factory):
    """A Llama of 8 layers whose activations outweigh its weights, with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=8,
        num_attention_heads=16,
        num_key_value_heads=4,
        max_position_embeddings=LONGEST,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    folder = tmp_path_factory.mktemp("base")
    LlamaForCausalLM(shape).to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def long_rows(tmp_path_factory):
    """Rows as long as rows may be, or nearly: a step of the run is then a step of the probe."""
    path = tmp_path_factory.mktemp("rows") / "long.jsonl"
    records = [
        {
            "question": f"Count from {number}.",
            "answer": " ".join(str(number + k) for k in range(150)),
        }
        for number in range(ROWS)
    ]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def train(folder: Path, base: Path, rows: Path, **variables: str) -> dict[str, Any]:
    """Run `make train` to its end; return run.json with plan.json and the saved weights in it."""
    from safetensors.torch import load_file

    words = {
        "CONFIG": "tests/fixtures/empty.yaml",
        "MODEL_NAME": str(base),
        "MODEL_MAX_SEQ_LEN": str(LONGEST),
        "DATA_TRAIN_PATH": str(rows),
        "DATA_TOO_LONG": "split",
        "TRAIN_EFFECTIVE_BATCH_SIZE": "16",
        "TRAIN_MAX_STEPS": "4",
        "TRAIN_LEARNING_RATE": "1e-3",
        "TRAIN_LOGGING_STEPS": "1",
        "TRAIN_SAVE_STRATEGY": "no",
        "TRAIN_PREDICT_WITH_GENERATE": "false",
        "TRAIN_OUTPUT_DIR": str(folder),
        "RUN": "run",
        "PY": sys.executable,
        **variables,
    }
    command = ["make", "train", *(f"{name}={value}" for name, value in words.items())]
    done = outcome_of(command, os.environ, 500)
    run = folder / "run"
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    weights = load_file(
        next(
            (run / ("model" if variables["TUNING_MODE"] == "full" else "adapter")).glob(
                "*.safetensors"
            )
        )
    )
    return {
        **json.loads((run / "run.json").read_text()),
        "plan": json.loads((run / "plan.json").read_text()),
        "planned": read_plan(RunFolder(run)),
        "weights": weights,
    }


def named(variables: dict[str, str]) -> str:
    return "-".join(variables.values())


@pytest.fixture(scope="module")
def probed_run(base, long_rows, tmp_path_factory):
    """A function that returns the probed run of a case, trained once for all tests."""
    runs: dict[str, dict[str, Any]] = {}

    def run(variables):
        name = named(variables)
        if name not in runs:
            runs[name] = train(tmp_path_factory.mktemp("probed"), base, long_rows, **variables)
        return runs[name]

    return run


def are_equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two runs logged the same losses and saved the same weights, to the bit."""
    return one["loss"] == other["loss"] and all(
        torch.equal(tensor, other["weights"][name]) for name, tensor in one["weights"].items()
    )


@pytest.mark.parametrize("variables", CASES, ids=named)
def test_a_probed_run_on_a_gpu_is_the_run_that_was_not(
    probed_run, base, long_rows, tmp_path, variables
):
    """To the bit, unless two runs without a probe differ from each other, as kernels that sum in no fixed order let them: then in the first step."""
    probed = probed_run(variables)
    facts, plan = probed["probe"], probed["plan"]
    same = {
        "TRAIN_BATCH_SIZE": str(plan["layout"]["batch_size"]),
        "TRAIN_GRADIENT_CHECKPOINTING": str(plan["layout"]["checkpointed_layers"] > 0).lower(),
    }
    plain = train(tmp_path / "plain", base, long_rows, **variables, **same, TRAIN_PROBE="false")
    assert len(probed["loss"]) == 4 and probed["loss"][0] == plain["loss"][0]
    if not are_equal(probed, plain):
        again = train(tmp_path / "again", base, long_rows, **variables, **same, TRAIN_PROBE="false")
        assert not are_equal(plain, again), (
            "runs without a probe agree to the bit, and the probed one does not"
        )
        check_losses(losses(probed), losses(plain))
    assert facts["seconds"] < 60 and facts["points"]


@pytest.mark.parametrize("variables", CASES, ids=named)
def test_a_fit_of_two_small_steps_predicts_a_larger_one_within_5_percent(probed_run, variables):
    probed = probed_run(variables)
    facts, plan = probed["probe"], probed["planned"]
    assert (
        len(facts["points"]) == 3
        and facts["points"][2]["tokens"] >= 4 * facts["points"][1]["tokens"]
    )
    points = [ProbePoint(**point) for point in facts["points"]]
    phases = MeasuredFit(plan.step, *points[:2]).phases(plan.layout)
    predicted = max(phases[name] for name in points[2].phases)
    print(
        f"\nprobe {named(variables)} predicted={predicted / GIB:.3f}GiB verified={facts['verified_bytes'] / GIB:.3f}GiB in {facts['seconds']:.1f}s"
    )
    assert facts["verified_bytes"] == pytest.approx(predicted, rel=0.05)


def test_less_memory_means_smaller_steps_and_the_same_losses(probed_run, base, long_rows, tmp_path):
    """Memory is short because this process holds the rest of it."""
    wide = probed_run(PLAIN_LORA)
    free, _ = torch.cuda.mem_get_info()
    held = torch.empty(
        max(0, free - int(0.5 * wide["probe"]["verified_bytes"])), dtype=torch.uint8, device="cuda"
    )
    narrow = train(tmp_path / "narrow", base, long_rows, **PLAIN_LORA)
    del held
    torch.cuda.empty_cache()
    assert narrow["probe"]["verified_bytes"] < wide["probe"]["verified_bytes"]
    check_losses(losses(narrow), losses(wide))


def test_a_gpu_counts_what_a_rehearsal_takes_and_gives_it_back(base, plan_run, build_loop):
    from sft_kernels.process import Process
    from sft_play.plan.step import Layout
    from sft_play.training.dry_run import DryRun, digest
    from sft_play.training.memory import MemoryMeter

    trainer, _ = build_loop(
        plan_run({"model.name": base, "tuning.mode": "full", "model.max_seq_len": LONGEST})
    )
    device = torch.device("cuda", 0)
    trainer.engine.model.to(device)
    trainer.engine.args = replace(trainer.engine.args, use_cpu=False)
    trainer.engine.accelerator = create_accelerator(trainer.engine.args)
    trainer.engine.prepare(steps=1)
    before, held = digest(trainer.engine.model), torch.cuda.memory_allocated(device)
    trainer.memory = MemoryMeter(Process.alone(device))
    with DryRun(trainer, steps_optimizer=True) as dry_run:
        point = dry_run.measure(Layout(2, 2, 1, LONGEST))
        assert min(point.phases.values()) > held
        torch.cuda.set_per_process_memory_fraction(
            (held + 2**28) / torch.cuda.mem_get_info(device)[1], device
        )
        try:
            assert dry_run.measure(Layout(8, 2, 1, LONGEST)) is None
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0, device)
    assert digest(trainer.engine.model) == before and not trainer.engine.optimizer.optimizer.state
    assert torch.cuda.memory_allocated(device) <= held + 2**26  # cuBLAS keeps its workspaces
