"""Processes that share the experts of a model: equal to one process, saved in one form, resumed."""

import itertools
import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import stored_forms
import torch
from marks import long
from peft import PeftModel
from rank_processes import run_two, run_two_workers
from run_files import run_json
from safetensors.torch import load_file, save_file
from torch import distributed
from transformers import AutoModelForCausalLM
from transformers.utils import logging as hf_logging

from sft_kernels.loss.head import summed_nll
from sft_kernels.process import Process
from sft_play.config.schema import Config
from sft_play.data.render import IGNORE_INDEX
from sft_play.models import expert_parallel
from sft_play.models.adapter_state import part_of, published_state
from sft_play.models.checkpointing import checkpoint_layers
from sft_play.models.load import WeightPlaces, load_model
from sft_play.runs.folder import RunFolder

pytestmark = pytest.mark.slow

EXPERTS = 6
# What is added to the logits of a router, for the experts of two ranks
ROUTERS = {
    "natural": [0.0] * EXPERTS,
    "skewed": [4.0, 0.0, 0.0, 0.0, 0.0, -1e4],  # no token reaches the last one
    "one rank": [1e3, 1e3, 0.0, 0.0, 0.0, 0.0],  # nor any of the other rank
}
# Tokens of the two micro-batches of each rank, in each step
RAGGED = (((2, 19), (1, 7)), ((1, 3), (2, 11)))
MOST_NORM = 0.5
STEPS = 3
Case = tuple[Path, dict[str, Any], int]  # base, changed settings, layers that are recomputed


def routed(base: Path, folder: Path, bias: list[float]) -> Path:
    """Return a copy of a base of gpt-oss whose routers add a bias to the logits of experts."""
    copy = shutil.copytree(base, folder, dirs_exist_ok=True)
    tensors = load_file(copy / "model.safetensors")
    for name in tensors:
        if name.endswith("router.bias"):
            tensors[name] = torch.tensor(bias)
    save_file(tensors, copy / "model.safetensors", {"format": "pt"})
    return copy


def rows_of(step: int) -> list[list[torch.Tensor]]:
    """Return the micro-batches of ids of each rank."""
    generator = torch.Generator().manual_seed(step)
    return [
        [torch.randint(3, 2000, shape, generator=generator) for shape in shapes]
        for shapes in RAGGED
    ]


def train(config: Config, process: Process, layers: int) -> tuple[torch.nn.Module, dict[str, Any]]:
    """Train a few steps as one of two ranks, or all rows alone; return the model and what was seen.

    `layers` are recomputed.
    """
    is_alone = process.world_size == 1
    model = load_model(config, process, WeightPlaces(is_expert_parallel=not is_alone)).train()
    checkpoint_layers(model, layers)
    expert_parallel.average_own_gradients(model, process)
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=1.0)  # Adam takes a step where gradients are rounding
    losses, norms = [], []
    for step in range(STEPS):
        ranks = rows_of(step)
        labelled = sum(ids[:, 1:].numel() for rank in ranks for ids in rank)
        total = 0.0
        for ids in itertools.chain(*(ranks if is_alone else [ranks[process.rank]])):
            labels = torch.cat([torch.full_like(ids[:, :1], IGNORE_INDEX), ids[:, 1:]], dim=1)
            loss = summed_nll(model(input_ids=ids, use_cache=False).logits, labels) / labelled
            (loss * process.world_size).backward()
            total += loss.item()
        if is_alone:
            norm = torch.nn.utils.clip_grad_norm_(trained, MOST_NORM)
        else:
            average(each for each in trained if part_of(each) is None)
            norm = expert_parallel.clip_gradients(trained, MOST_NORM)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(process.sum(total))
        norms.append(norm.item())
    return model, {"losses": losses, "norms": norms, "held": held_by_experts(model)}


def average(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Average the gradients of two ranks, as DDP does."""
    for parameter in parameters:
        distributed.all_reduce(parameter.grad)
        parameter.grad /= 2


def held_by_experts(model: torch.nn.Module) -> int:
    """Return how many numbers of experts a rank holds, adapters included; a byte is one."""
    return sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)


def compare_with_one_process(cases: dict[str, Case], seen: Path) -> None:
    """Be a rank that trains each case with the other one and alone; write down both."""
    hf_logging.disable_default_handler()  # it has a file of the process that this is a fork of
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    rank = distributed.get_rank()
    found = {}
    for name, (base, changes, layers) in cases.items():
        sections: dict[str, dict[str, Any]] = {"model": {"name": str(base)}, "tuning": {}}
        for key, value in {"tuning.mode": "lora", **changes}.items():
            section, _, setting = key.partition(".")
            sections.setdefault(section, {})[setting] = value
        config = Config.model_validate(sections)
        places = (Process.alone(torch.device("cpu")), Process(rank, rank, 2, torch.device("cpu")))
        (alone, expected), (shared, computed) = (train(config, each, layers) for each in places)
        adapters, own = published_state(alone), published_state(shared)
        assert adapters.keys() == own.keys()
        found[name] = {
            "alone": expected,
            "shared": computed,
            "difference": max((own[key] - adapters[key]).abs().max().item() for key in own),
            "moved": max(own[key].abs().max().item() for key in own if "lora_B" in key),
            "reached": [
                int(own[key].view(len(own[key]), -1, EXPERTS).any(dim=1).any(dim=0).sum())
                for key in own
                if "experts" in key and "lora_B" in key
            ],
            "fused": shared.get_base_model().fast_path.on,
        }
    (seen / f"{rank}.json").write_text(json.dumps(found))


# By name: which routing, what differs from a plain lora run, and how many layers are recomputed
OWN_CODE = {"train.fast_path": False}
OF_EXPERTS = {"tuning.lora": {"target_modules": ["gate_up_proj", "down_proj"]}}
CASES = {
    "skewed": ("skewed", {}, 2),
    "own code": ("one rank", OWN_CODE, 1),
    "qlora": ("qwen3_moe", {"tuning.mode": "qlora"}, 1),
}
LONG_CASES = {
    "natural": ("natural", {}, 0),
    "one rank": ("one rank", {}, 2),
    "skewed, own code": ("skewed", OWN_CODE, 2),
    "mxfp4": ("mxfp4", {"tuning.mode": "qlora"}, 1),
    "qlora, own code": ("qwen3_moe", {"tuning.mode": "qlora", **OWN_CODE}, 0),
    "plain scales": (
        "qwen3_moe",
        {"tuning.mode": "qlora", "tuning.bnb_4bit_use_double_quant": False},
        0,
    ),
    "experts alone": ("one rank", {**OF_EXPERTS, **OWN_CODE}, 1),
    "attention alone": ("natural", {"tuning.lora": {"experts": "none"}}, 0),
    "one adapter for all": ("skewed", {"tuning.lora": {"experts": "shared"}}, 2),
    "files of each expert": ("mixtral", {}, 2),
}
NAMES = [*CASES, *(long(name) for name in LONG_CASES)]


@pytest.fixture(scope="module")
def compared(base_of, tmp_path_factory):
    """A function that returns what both ranks have seen of a case; all of a kind run at once."""
    folder = tmp_path_factory.mktemp("compared")
    seen: dict[str, list[dict[str, Any]]] = {}

    def base(name, mode):
        if name == "mxfp4":
            return stored_forms.mxfp4(folder / name)
        if name not in ROUTERS:
            return base_of(name, mode)
        return routed(base_of("gpt_oss"), folder / name, ROUTERS[name])

    def see(name):
        if name not in seen:
            kind = CASES if name in CASES else LONG_CASES
            cases = {
                case: (base(model, changes.get("tuning.mode", "lora")), changes, layers)
                for case, (model, changes, layers) in kind.items()
            }
            output = folder / "output.txt"
            exits = run_two(compare_with_one_process, cases, folder, output=output)
            assert exits == [0, 0], output.read_text()[-3000:]
            ranks = [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]
            seen.update({case: [rank[case] for rank in ranks] for case in cases})
        return seen[name]

    return see


@pytest.mark.parametrize("name", NAMES)
def test_ragged_rows_train_as_in_one_process_whatever_the_router_chooses(compared, name):
    _, changes, _ = (CASES | LONG_CASES)[name]
    for found in compared(name):
        alone, shared = found["alone"], found["shared"]
        assert shared["losses"] == pytest.approx(alone["losses"], abs=1e-5)
        assert shared["norms"] == pytest.approx(alone["norms"], rel=1e-5)
        assert min(shared["norms"]) > MOST_NORM, "clipping bites"
        assert found["difference"] < 1e-5
        assert found["moved"] > 0.01
        assert ("experts" in found["fused"]) == (changes.get("train.fast_path") is not False)


def test_experts_that_no_token_reaches_are_left_as_they_were(compared):
    for found in (*compared("skewed"), *compared("own code")):
        assert set(found["reached"]) <= {2, 5}


def test_each_rank_holds_its_part_of_experts_and_adapters(compared):
    for name in ("skewed", "qlora"):
        for found in compared(name):
            assert 0 < 2 * found["shared"]["held"] == found["alone"]["held"]


# 10 rows, 8 a step: two steps an epoch, and the second holds 2 rows and 6 fillers
SETTINGS = {
    "train.max_steps": 4,
    "train.learning_rate": 1e-3,
    "train.save_strategy": "steps",
    "train.save_steps": 3,
    "train.max_grad_norm": 0.05,
    "train.gradient_checkpointing": True,
}


@pytest.fixture(scope="module")
def trained(plan_run, run_worker, base_of):
    """A function that returns a finished run of one process or two, the same one to every test."""
    runs: dict[tuple, RunFolder] = {}

    def run(strategy="auto", model_type="qwen3_moe", **changes):
        key = (strategy, model_type, *changes.items())
        if key not in runs:
            ranks = 1 if strategy == "auto" else 2
            settings = {
                "model.name": base_of(model_type, str(changes.get("tuning.mode", "lora"))),
                "train.strategy": strategy,
                "train.grad_accum": 4 // ranks,  # of 2 rows
            }
            folder = plan_run({**SETTINGS, **settings, **changes}, num_gpus=ranks, may_trace=False)
            exits = run_two_workers(folder) if ranks == 2 else [run_worker(folder)]
            assert set(exits) == {0}, (folder.path / "output.txt").read_text()[-3000:]
            runs[key] = folder
        return runs[key]

    return run


def saved(folder: RunFolder) -> dict[str, torch.Tensor]:
    (path,) = folder.weights("lora").glob("*.safetensors")
    return load_file(path)


def logged(folder: RunFolder, name: str) -> list[float]:
    return [step[name] for step in run_json(folder)["history"] if step.get("loss") is not None]


def assert_equal_runs(one: RunFolder, other: RunFolder) -> None:
    assert logged(other, "loss") == pytest.approx(logged(one, "loss"), abs=1e-5)
    assert logged(other, "grad_norm") == pytest.approx(logged(one, "grad_norm"), rel=1e-4)
    torch.testing.assert_close(saved(other), saved(one), rtol=0, atol=1e-5)


VARIANTS = (
    {},
    {"model_type": "gpt_oss", "train.packing": False},
    {"model_type": "qwen3_5_moe", "train.fast_path": False},
    {"model_type": "glm4_moe", "train.gradient_checkpointing": False},
    {"tuning.mode": "qlora"},
    {"tuning.lora.target_modules": "[gate_up_proj, down_proj]"},
    {"train.probe": True, "train.optim": "adamw_torch"},
)


@pytest.mark.parametrize("changes", [VARIANTS[0], *(long(each) for each in VARIANTS[1:])])
def test_a_run_of_two_ranks_is_that_of_one_process(trained, changes):
    one, two = trained(**changes), trained("ep", **changes)
    assert_equal_runs(one, two)
    assert min(logged(two, "grad_norm")) > SETTINGS["train.max_grad_norm"], "clipping bites"
    assert run_json(two)["strategy"] == "ep"
    experts = [run_json(run)["experts"] for run in (one, two)]
    shares = [found.pop("largest_share") for found in experts]
    assert experts[0] == experts[1]
    assert shares[1] == pytest.approx(shares[0], abs=0.01)  # other fillers are counted


def test_what_is_saved_has_the_form_of_one_process(trained):
    one, two = trained(), trained("ep")
    for folders in ([run.weights("lora") for run in (one, two)], checkpoints(one, two)):
        names = [{path.name for path in folder.iterdir()} for folder in folders]
        assert {name for name in names[0] ^ names[1] if "rng_state" not in name} == set()
    states = [torch.load(folder / "optimizer.pt") for folder in checkpoints(one, two)]
    torch.testing.assert_close(states[1]["state"], states[0]["state"], rtol=0, atol=1e-5)


def checkpoints(*runs: RunFolder) -> list[Path]:
    return [run.checkpoints / "checkpoint-3" for run in runs]


@pytest.mark.parametrize(
    "begun, goes_on",
    [
        ("ep", "auto"),
        *(long(*pair) for pair in (("auto", "ep"), ("ep", "ep"), ("ep", "ddp"), ("ddp", "ep"))),
    ],
)
def test_a_run_goes_on_under_another_strategy(trained, begun, goes_on):
    whole = trained(begun)
    (checkpoint,) = checkpoints(whole)
    changes = {"train.resume_from": checkpoint, "train.elastic": True}
    assert_equal_runs(whole, trained(goes_on, **changes))


def test_plain_peft_opens_the_adapter(trained, base_of):
    ids = torch.arange(5, 25)[None]
    logits = []
    for folder in (trained(), trained("ep")):
        base = AutoModelForCausalLM.from_pretrained(base_of("qwen3_moe"), dtype=torch.float32)
        untrained = base(ids).logits
        model = PeftModel.from_pretrained(base, folder.weights("lora"))
        with torch.no_grad():
            logits.append(model(ids).logits)
        assert not torch.allclose(logits[-1], untrained)
    torch.testing.assert_close(logits[1], logits[0], rtol=0, atol=1e-5)
