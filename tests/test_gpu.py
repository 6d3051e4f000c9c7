"""The training targets on real GPUs, each as a user types it: `make test-gpu`. Runs of one GPU share it, several at a time."""

import importlib.util
import itertools
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from make_runs import check_losses, losses, run_make

ROOT = Path(__file__).resolve().parents[1]
SHORT = {
    "TRAIN_MAX_STEPS": "6",
    "TRAIN_LOGGING_STEPS": "1",
    "TRAIN_GENERATION_MAX_ROWS": "8",
    "TRAIN_SAVE_STRATEGY": "no",
    "TRAIN_LEARNING_RATE": "2e-3",
    "CONFIG": "configs/tiny.yaml",
}
AT_ONCE = 4  # a run of the tiny model is a CPU's work, imports above all

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu
needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
needs_unsloth = pytest.mark.skipif(
    importlib.util.find_spec("unsloth") is None,
    reason="unsloth is not installed (make install-unsloth)",
)


def train(folder: Path, target: str, **variables: str) -> dict[str, Any]:
    """Run a make target to its end; return run.json, with plan.json and the log of the main rank in it."""
    run_make(target, folder, 500, **{**SHORT, **variables})
    plan, log = (folder / "run" / name for name in ("plan.json", "logs/rank-0.log"))
    return {
        **json.loads((folder / "run" / "run.json").read_text()),
        "plan": json.loads(plan.read_text()),
        "log": log.read_text(),
    }


def case(backend: str, mode: str, packing: bool, **variables: str) -> Any:
    """One run on one GPU: target and variables."""
    variables = {
        "TUNING_MODE": mode,
        "TRAIN_PACKING": str(packing).lower(),
        **({"TRAIN_LEARNING_RATE": "1e-3"} if mode == "full" else {}),
        **variables,
    }
    name = "-".join(
        [
            backend,
            mode,
            "packed" if packing else "padded",
            *(text.lower() for text in variables if text.startswith(("TRAIN_F", "TRAIN_G"))),
        ]
    )
    return pytest.param(
        f"train-{backend}",
        variables,
        id=name,
        marks=[needs_unsloth] if backend == "unsloth" else [],
    )


CASES = [
    case(backend, mode, packing)
    for backend, mode, packing in itertools.product(
        ("bnb", "unsloth"), ("lora", "qlora", "full"), (True, False)
    )
    if (backend, mode, packing) != ("unsloth", "full", True)  # which is refused
]
CHECKPOINTED = [
    case(backend, "lora", False, TRAIN_GRADIENT_CHECKPOINTING="true")
    for backend in ("bnb", "unsloth")
]
HALF = case("bnb", "lora", True, TRAIN_FP16="true", TRAIN_BF16="false")
PLAIN = case("bnb", "lora", False, TRAIN_FAST_PATH="false")

Run = Callable[[str, dict[str, str]], dict[str, Any]]


@pytest.fixture(scope="session")
def run(request, tmp_path_factory):
    """A function that returns the report of a run of CASES and their like; each runs once, and begins before it is asked for."""
    pool, runs = ThreadPoolExecutor(AT_ONCE), {}

    def start(target, variables):
        key = (target, *sorted(variables.items()))
        if key not in runs:
            runs[key] = pool.submit(train, tmp_path_factory.mktemp("run"), target, **variables)
        return runs[key]

    for item in request.session.items:
        parameters = getattr(getattr(item, "callspec", None), "params", {})
        is_skipped = any(mark.args and mark.args[0] for mark in item.iter_markers("skipif"))
        if (
            item.path == Path(__file__)
            and {"target", "variables"} == parameters.keys()
            and not is_skipped
        ):
            start(**parameters)
    yield lambda target, variables: start(target, variables).result()
    pool.shutdown(cancel_futures=True)


def report_of(run: Run, parameters: Any) -> dict[str, Any]:
    return run(*parameters.values)


def check_learned(report: dict[str, Any]) -> None:
    assert report["status"] == "done" and report["exit_class"] == 0 and report["device"] == "cuda"
    assert len(losses(report)) == 6 and all(loss < 20 for loss in losses(report))  # NaN is not
    assert sum(losses(report)[3:]) < sum(losses(report)[:3])
    assert report["metrics"]["after"]["eval_loss"] < report["metrics"]["before"]["eval_loss"]
    assert report["tokens_per_second"] > 0 and 0 < report["peak_bytes"]["measured"] < 20 * 2**30


@pytest.mark.parametrize("target, variables", CASES)
def test_a_backend_trains_in_each_mode_packed_and_padded(run, target, variables):
    report = run(target, variables)
    check_learned(report)
    assert (f"train-{report['backend']}", report["mode"], report["world_size"]) == (
        target,
        variables["TUNING_MODE"],
        1,
    )
    assert (str(report["plan"]["packing"]).lower(), report["checkpointing"]) == (
        variables["TRAIN_PACKING"],
        "none",
    )
    fast = next(line for line in report["log"].splitlines() if "fast path:" in line)
    assert "loss x1" in fast, fast


@pytest.mark.parametrize("target, variables", CHECKPOINTED)
def test_checkpointing_changes_no_loss(run, target, variables):
    report = run(target, variables)
    assert report["checkpointing"] == "full"
    plain = run(
        target,
        {
            name: value
            for name, value in variables.items()
            if name != "TRAIN_GRADIENT_CHECKPOINTING"
        },
    )
    check_losses(losses(report), losses(plain))


@pytest.mark.parametrize("target, variables", [PLAIN])
def test_the_fast_path_changes_no_loss(run, target, variables):
    """But for rounding: the kernels' differences in bfloat16 move the adapters a little apart."""
    plain, fast = (
        run(target, variables),
        run(
            target, {name: value for name, value in variables.items() if name != "TRAIN_FAST_PATH"}
        ),
    )
    check_losses(losses(plain), losses(fast), rounding=5e-3)


@pytest.mark.parametrize("target, variables", [HALF])
def test_float16_trains_adapters_in_float32(run, target, variables):
    report = run(target, variables)
    check_learned(report)
    assert "compute=float16" in report["log"]


@needs_unsloth
@pytest.mark.parametrize("mode", ["lora", "qlora", "full"])
def test_unsloth_trains_the_same_loss(run, mode):
    """The first step's, accumulated, is the base model's on the same rows under both: adapters begin at zero. Later ones part with A's random start."""
    ours, theirs = (
        report_of(run, case(backend, mode, packing=False)) for backend in ("bnb", "unsloth")
    )
    assert "loss x1" in theirs["log"], "our loss on the output head of Unsloth's model"
    assert abs(losses(ours)[0] - losses(theirs)[0]) < 2e-2
    assert (
        abs(ours["metrics"]["before"]["eval_loss"] - theirs["metrics"]["before"]["eval_loss"])
        < 2e-2
    )
    if mode == "full":
        check_losses(losses(theirs), losses(ours))


@needs_unsloth
def test_unsloth_writes_its_code_into_the_run(run):
    report_of(run, case("unsloth", "lora", packing=False))
    assert not (ROOT / "unsloth_compiled_cache").exists()


def test_one_process_on_a_host_of_many_gpus_uses_one(tmp_path):
    assert train(tmp_path, "train")["engine"] == "PeftModelForCausalLM"


@needs_two
@pytest.mark.parametrize(
    "target, variables, engine",
    [
        ("train-distributed", {}, "DistributedDataParallel"),
        ("train-distributed", {"TUNING_MODE": "qlora"}, "DistributedDataParallel"),
        pytest.param(
            "train-distributed",
            {"TUNING_BACKEND": "unsloth"},
            "DistributedDataParallel",
            marks=needs_unsloth,
        ),
        ("train-deepspeed", {}, "DeepSpeedEngine"),
        (
            "train-deepspeed",
            {"DEEPSPEED_CONFIG": "configs/deepspeed_zero3.json"},
            "DeepSpeedEngine",
        ),
        (
            "train-deepspeed",
            {
                "DEEPSPEED_CONFIG": "configs/deepspeed_zero3.json",
                "TUNING_MODE": "full",
                "TRAIN_LEARNING_RATE": "1e-3",
            },
            "DeepSpeedEngine",
        ),
    ],
    ids=["ddp-lora", "ddp-qlora", "ddp-unsloth", "zero2-lora", "zero3-lora", "zero3-full"],
)
def test_two_gpus_train_together(tmp_path, target, variables, engine):
    report = train(tmp_path, target, NUM_GPUS="2", **variables)
    check_learned(report)
    assert (report["world_size"], report["engine"]) == (2, engine)


@needs_two
def test_two_gpus_learn_what_one_learns(tmp_path):
    one = train(tmp_path / "one", "train")
    two = train(tmp_path / "two", "train-distributed", NUM_GPUS="2")
    check_losses(losses(two), losses(one))
