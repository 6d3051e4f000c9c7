"""Checkpoints in other forms than 16 bits: read as the numbers that they store, or refused."""

import functools
import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import stored_forms
import torch
from bitsandbytes.functional import dequantize_4bit
from marks import long
from rank_processes import run_ranks
from run_files import run_json
from safetensors.torch import load_file
from stored_forms import TINY_LLAMA, change_config, change_tensors, copy_of
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from sft_kernels.process import Process
from sft_play.config.schema import Config
from sft_play.errors import ConfigError, EnvironmentFault
from sft_play.inference.merge import merge_run
from sft_play.models import stored_weights
from sft_play.models.load import load_base
from sft_play.models.stored_weights import dequantized
from sft_play.runs.files import read_json

CPU = Process.alone(torch.device("cpu"))
DEQUANTIZED = (
    "fp8_block", "fp8_tensor", "fbgemm", "compressed_fp8", "compressed_int8", "bnb_8bit",
)  # fmt: skip
ZERO3 = str(TINY_LLAMA.parents[1] / "configs" / "deepspeed_zero3.json")
ROWS = TINY_LLAMA.parent / "desk" / "test.jsonl"


@pytest.fixture(scope="module")
def twin(tmp_path_factory):
    """A function that returns the folder of the shipped model in another form."""
    made: dict[str, Path] = {}

    def folder(form):
        if form not in made:
            target = tmp_path_factory.mktemp("twins") / form
            made[form] = getattr(stored_forms, form)(target)
        return made[form]

    return folder


def config_of(base: Path, mode: str, **tuning: object) -> Config:
    return Config.model_validate(
        {"model": {"name": str(base), "max_seq_len": 64}, "tuning": {"mode": mode, **tuning}}
    )


@functools.cache
def ids_of_rows() -> list[Tensor]:
    """Return the ids (1, T) of the first rows of the shipped set."""
    tokenizer = AutoTokenizer.from_pretrained(TINY_LLAMA)
    rows = [json.loads(line)["messages"] for line in ROWS.read_text().splitlines()[:24]]
    return [tokenizer.apply_chat_template(row, return_tensors="pt")["input_ids"] for row in rows]


def loss_of(model) -> float:
    """Return the mean loss of the first rows of the shipped set, in nats a token."""
    total, tokens = 0.0, 0
    for ids in ids_of_rows():
        with torch.no_grad():
            loss = model(input_ids=ids, labels=ids).loss.item()
        total += loss * ids.shape[1]
        tokens += ids.shape[1]
    return total / tokens


def largest(model) -> float:
    found = 0.0
    for name, weight in model.named_parameters():
        if name.endswith("_proj.weight"):
            state = getattr(weight, "quant_state", None)
            plain = weight if state is None else dequantize_4bit(weight.data, state)
            found = max(found, plain.detach().abs().max().item())
    return found


@dataclass(frozen=True)
class Measured:
    """What the shipped model has, measured once."""

    loss: float
    largest: float


@pytest.fixture(scope="module")
def plain():
    model = load_base(config_of(TINY_LLAMA, "lora"), CPU)
    return Measured(loss_of(model), largest(model))


@pytest.mark.parametrize("mode", ["lora", "full", "qlora"])
@pytest.mark.parametrize("form", DEQUANTIZED)
def test_each_form_is_read_as_the_numbers_that_it_stores(twin, plain, form, mode):
    model = load_base(config_of(twin(form), mode), CPU)
    assert largest(model) == pytest.approx(plain.largest, rel=0.02)
    if mode != "qlora":
        assert loss_of(model) == pytest.approx(plain.loss, rel=0.02)
        assert not hasattr(model.config, "quantization_config")


def test_weights_in_4_bits_train_as_they_are_under_qlora_alone(twin, plain):
    base = twin("bnb_4bit")
    model = load_base(config_of(base, "qlora"), CPU)
    stored = load_file(base / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(model.get_parameter(name).data, stored[name]), "packed again"
    assert largest(model) == pytest.approx(plain.largest, rel=0.02)
    for mode in ("lora", "full"):
        with pytest.raises(ConfigError, match=r"in 4 bits.*set TUNING_MODE=qlora, or MODEL_NAME"):
            load_base(config_of(base, mode), CPU)


def test_a_float8_base_is_made_of_the_numbers_that_fp8_files_store(twin, plain):
    model = load_base(config_of(twin("fp8_block"), "lora", base_dtype="float8"), CPU)
    assert loss_of(model) == pytest.approx(plain.loss, rel=0.1)


@pytest.mark.parametrize(
    "name",
    [
        "mtp.layers.0.mlp.up_proj.weight",
        "model.layers.6.eh_proj.weight",  # behind the last of 6 layers, as in DeepSeek V3
        "model.layers.0.self_attn.rotary_emb.inv_freq",
        "v_head.summary.weight",
        "model.layers.0.self_attn.k_proj.k_scale",
    ],
)
def test_tensors_that_have_a_reason_may_be_unused(tmp_path, name):
    base = copy_of(tmp_path / "model")
    change_tensors(base, lambda tensors: {**tensors, name: torch.ones(4)})
    assert name not in load_base(config_of(base, "lora"), CPU).state_dict()


@pytest.mark.parametrize(
    ("fields", "added", "unused"),
    [
        ({}, [], 18),
        ({"num_nextn_predict_layers": 1}, [], 9),  # the first of two layers too many
        ({"num_nextn_predict_layers": 2}, [], 0),
        ({"mtp_num_layers": 2}, [], 0),
        ({"num_nextn_predict_layers": 2}, ["model.layers.6.enorm.weight"], 18),
        ({}, ["model.layers.4.enorm.weight", "model.layers.5.shared_head.norm.weight"], 0),
        ({}, ["model.layers.0.eh_proj.weight"], 19),
    ],
)
def test_layers_after_the_last_one_need_a_sign_that_they_predict_tokens(
    tmp_path, fields, added, unused
):
    base = copy_of(tmp_path / "model")
    change_config(base, num_hidden_layers=4, **fields)
    change_tensors(base, lambda tensors: tensors | {name: torch.ones(4) for name in added})
    if not unused:
        assert len(load_base(config_of(base, "lora"), CPU).model.layers) == 4
        return
    with pytest.raises(EnvironmentFault, match=rf": {unused} tensors of its .*layers\.[045]\."):
        load_base(config_of(base, "lora"), CPU)


def test_a_form_that_config_json_does_not_name_is_found_in_the_files(twin, tmp_path, plain):
    base = copy_of(tmp_path / "model", twin("fp8_block"))
    change_config(base, quantization_config=None)
    model = load_base(config_of(base, "lora"), CPU)
    assert loss_of(model) == pytest.approx(plain.loss, rel=0.01)


def test_old_configs_links_and_files_beside_the_shards_are_loaded(tmp_path, plain):
    base = copy_of(tmp_path / "blobs")
    (base / "consolidated.safetensors").write_bytes(b"of another program")
    change_config(base, architectures=None, dtype=None, torch_dtype="bfloat16")
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    for path in base.iterdir():
        (snapshot / path.name).symlink_to(path)
    snapshot.chmod(0o555)
    assert loss_of(load_base(config_of(snapshot, "lora"), CPU)) == plain.loss


def test_the_last_block_of_a_weight_may_be_a_part_of_one():
    stored = torch.ones(5, 3, dtype=torch.float8_e4m3fn)
    scale = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    expected = torch.tensor([[1.0, 1.0, 2.0]] * 2 + [[3.0, 3.0, 4.0]] * 2 + [[5.0, 5.0, 6.0]])
    assert torch.equal(dequantized(stored, scale, block=(2, 2)), expected)
    with pytest.raises(ValueError, match="do not fit"):
        dequantized(stored, scale, block=None)


def test_scales_may_be_exponents_zero_points_and_of_each_expert():
    stored = torch.full((2, 4, 4), 3, dtype=torch.int8)
    assert (dequantized(stored, torch.tensor([1.0, 2.0]))[1] == 6).all()
    assert (dequantized(stored[0], torch.tensor([[129]], dtype=torch.uint8)) == 12).all()
    assert (dequantized(stored[0], torch.tensor(2.0), torch.tensor([1])) == 4).all()


def test_experts_of_mxfp4_are_read_a_few_at_a_time(monkeypatch):
    codes = torch.randint(0, 256, (5, 6, 2, 16), dtype=torch.uint8)
    exponents = torch.randint(110, 130, (5, 6, 2), dtype=torch.uint8)
    expected = convert_moe_packed_tensors(codes, exponents)
    read: list[int] = []

    def convert(few, scales):
        read.append(len(few))
        return convert_moe_packed_tensors(few, scales)

    monkeypatch.setattr(stored_weights, "convert_moe_packed_tensors", convert)
    assert torch.equal(dequantized(codes, exponents=exponents), expected)
    assert read == [2, 2, 1]


SETTINGS = {
    "data.train_path": ROWS,
    "data.val_path": None,
    "train.learning_rate": 0.0001,
    "train.reopen_saved": True,
}


@pytest.mark.usefixtures("opens_here")
@pytest.mark.parametrize(
    "form, mode",
    [
        long("fp8_block", "lora"),  # as qlora, but for the packing
        ("fp8_block", "qlora"),
        long("fp8_tensor", "full"),
        long("bnb_4bit", "qlora"),  # as fp8_block, but for the unpacking
        ("mxfp4", "lora"),
    ],
)
def test_a_run_ends_green_and_leaves_a_plain_model(train_run, twin, form, mode):
    changes = {"model.name": twin(form), "tuning.mode": mode}
    folder = train_run({**SETTINGS, **changes}, may_trace=False)
    saved = folder.weights(mode)
    if mode != "full":
        card = (saved / "README.md").read_text()
        assert ("(dequantize=True)" in card) == (form != "bnb_4bit")
        assert "tensor by tensor" in merge_run(folder)[-1]
        saved = folder.path / "merged"
    assert "quantization_config" not in read_json(saved / "config.json")
    dtypes = {tensor.dtype for tensor in load_file(saved / "model.safetensors").values()}
    assert dtypes == {torch.float32 if mode == "full" or form == "mxfp4" else torch.bfloat16}
    before = run_json(folder)["metrics"]["before"]["eval_loss"]
    assert before < 3 or form == "mxfp4", "no better than noise"
    _, info = AutoModelForCausalLM.from_pretrained(saved, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]


@pytest.mark.long
@pytest.mark.parametrize(
    "form, mode, engine",
    [("bnb_4bit", "qlora", "fsdp"), ("fp8_block", "full", "fsdp"), ("fp8_block", "lora", "zero3")],
)
def test_divided_among_ranks_it_is_the_same_model(twin, plan_run, form, mode, engine):
    changes = {"model.name": twin(form), "tuning.mode": mode}
    zero3 = ZERO3 if engine == "zero3" else None
    if zero3 is None:
        changes["train.strategy"] = engine
    folder = plan_run({**SETTINGS, **changes}, num_gpus=2, deepspeed_config=zero3)
    assert set(run_ranks(folder, 2)) == {0}, run_json(folder)["cause"]
    assert run_json(folder)["metrics"]["before"]["eval_loss"] < 3, "no better than noise"
