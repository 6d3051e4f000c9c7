"""`make export FORMAT=fp8`, int4 and nvfp4: what transformers and compressed-tensors read of them."""

import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from published_models import write_published
from safetensors.torch import load_file, save_file
from tiny_models import Sizes, tiny_model
from transformers import AutoModelForCausalLM

from sft_play.errors import CheckpointError, ConfigError
from sft_play.evaluation.reopened import EXACT, Reopened
from sft_play.inference import exported as parity
from sft_play.inference.export import export_run
from sft_play.inference.export_compressed import KINDS, CompressedScores, compress_folder
from sft_play.inference.improvement import Losses, interval
from sft_play.models.compressed import Rounding
from sft_play.models.experts import expert_weights
from sft_play.runs import seal
from sft_play.runs.exports import ExportAsked
from sft_play.runs.files import read_json
from sft_play.runs.folder import RunFolder

WIDE = Sizes(hidden=128, head=32, intermediate=256, vocabulary=512)
# Bytes of a layer's weight, next to the 16 bits that it had: of 8 or 4 bits, and of its scales
BYTES = {"fp8": 0.5, "int4": 0.25 + 1 / 128, "nvfp4": 0.25 + 1 / 32}


@pytest.fixture(scope="module")
def copied(finished, tmp_path_factory) -> RunFolder:
    return RunFolder(shutil.copytree(finished("lora").path, tmp_path_factory.mktemp("c") / "run"))


@pytest.mark.usefixtures("opens_here")
@pytest.mark.parametrize("kind", KINDS)
def test_an_export_is_quantized_held_to_the_run_and_sealed(copied, kind, monkeypatch):
    monkeypatch.setattr(parity, "MOST_TOKENS", 4)
    lines = export_run(copied, ExportAsked(kind, least_gain=0.5), "cpu")
    folder = copied.path / "export" / kind
    assert seal.find_damage(folder) is None
    line = next(line for line in lines if line.startswith(f"{kind} "))
    assert "gain kept=" in line and "KL=" in line and "stops=" in line
    assert line in (folder / "README.md").read_text()
    named = read_json(folder / "config.json")["quantization_config"]
    assert (named["quant_method"], named["format"]) == ("compressed-tensors", KINDS[kind].format)
    plain = load_file(copied.path / "merged" / "model.safetensors")
    stored = load_file(folder / "model.safetensors")
    assert {"lm_head"} <= set(named["ignore"]) or "lm_head.weight" not in plain
    for name in ("model.norm.weight", "model.embed_tokens.weight"):
        assert stored[name].equal(plain[name].bfloat16())
    assert not any(name.endswith("proj.weight") for name in stored) or kind == "fp8"


@pytest.mark.usefixtures("opens_here")
def test_what_keeps_too_little_is_refused_with_the_worst_layers(copied, monkeypatch):
    asked = ExportAsked("int4", copied.path / "refused", least_gain=1.5)
    said = (
        r"it loses .* rows\); .*_proj \(0\.\d+\).* Nothing was published; FORMAT=safetensors "
        r"exports it without this loss, a run with TRAIN_DELIVER_AS=int4 is trained for it, EXPORT"
    )
    with pytest.raises(CheckpointError, match=said):
        export_run(copied, asked, "cpu")
    assert not (copied.path / "refused").exists()


@pytest.mark.usefixtures("opens_here")
def test_a_format_that_keeps_more_is_offered_with_what_it_keeps(copied):
    with pytest.raises(CheckpointError) as caught:
        export_run(copied, ExportAsked("nvfp4", copied.path / "x", least_gain=0.99), "cpu")
    assert re.search(r"; FORMAT=fp8 keeps [01]\.\d{3} of the improvement, ", str(caught.value))


def plain_folder(folder: Path, model_type: str = "llama", shards: bool = False) -> Path:
    model = tiny_model(model_type, WIDE, dtype=torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="200KB" if shards else "5GB")
    return folder


def bytes_of_matrices(tensors: dict[str, torch.Tensor]) -> int:
    names = [name for name in tensors if "_proj" in name and "weight_shape" not in name]
    return sum(tensors[name].nbytes for name in names)


@pytest.mark.parametrize("shards", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_transformers_reads_the_numbers_that_were_rounded(kind, shards, tmp_path):
    plain = plain_folder(tmp_path / "plain", shards=shards)
    before = {path.name: path.read_bytes() for path in plain.glob("*.safetensors")}
    assert (len(before) > 1) == shards
    errors = compress_folder(plain, tmp_path / "packed", kind)
    assert {path.name: path.read_bytes() for path in plain.glob("*.safetensors")} == before
    assert 0 < min(errors.values()) <= max(errors.values()) < {"fp8": 0.05}.get(kind, 0.2)
    plain_model = AutoModelForCausalLM.from_pretrained(plain)
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "packed").eval()
    with torch.no_grad():
        assert read(torch.arange(24)[None]).logits.isfinite().all()  # unpacks
    assert len(errors) == 2 * 7
    for name, error in errors.items():
        was = plain_model.get_submodule(name).weight.float()
        now = read.get_submodule(name).weight.float()
        assert ((now - was).norm() / was.norm()).item() == pytest.approx(error, rel=0.02)
    if not shards:
        paths = [tmp_path / which / "model.safetensors" for which in ("packed", "plain")]
        packed, whole = (bytes_of_matrices(load_file(path)) for path in paths)
        assert packed / whole == pytest.approx(BYTES[kind], abs=0.02)
    others = read.state_dict().keys() & plain_model.state_dict().keys()
    kept = [name for name in others if name.removesuffix(".weight") not in errors]
    assert kept and all(
        read.state_dict()[name].equal(plain_model.state_dict()[name]) for name in kept
    )


@pytest.mark.parametrize(
    ("kind", "model_type"),
    [("fp8", "deepseek_v3"), ("fp8", "mixtral"), ("int4", "mixtral"), ("int4", "qwen3_moe")],
)
def test_experts_are_read_as_they_were_rounded(kind, model_type, tmp_path):
    sizes = replace(WIDE, expert=128)
    plain_model = tiny_model(model_type, sizes, dtype=torch.bfloat16)
    plain_model.save_pretrained(tmp_path / "plain")
    errors = compress_folder(tmp_path / "plain", tmp_path / "packed", kind)
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "packed").eval()
    weights = expert_weights(plain_model)
    per_expert = [name for name in errors if ".experts." in name]
    assert len(per_expert) == sum(3 * each.experts for each in weights) / 2 > 0
    rounding = Rounding.of(kind, [torch.nn.Linear(128, 8)], "a model")
    for each in weights:
        stacks = [model.get_parameter(each.name) for model in (plain_model, read)]
        for was, now in zip(*stacks, strict=True):
            assert now.detach().equal(rounding.weight(was.detach().bfloat16()))
    with torch.no_grad():
        assert read(torch.arange(24)[None]).logits.isfinite().all()
    config = read_json(tmp_path / "packed/config.json")["quantization_config"]
    stored = load_file(tmp_path / "packed/model.safetensors")
    routers = [name for name in stored if name.endswith("gate.weight")]
    assert routers and all(name.removesuffix(".weight") in config["ignore"] for name in routers)


def test_experts_that_nobody_reads_are_refused(tmp_path):
    sizes = replace(WIDE, expert=128)
    tiny_model("qwen3_moe", sizes, dtype=torch.bfloat16).save_pretrained(tmp_path / "moe")
    with pytest.raises(ConfigError, match=r"FORMAT=nvfp4: moe has experts, which transformers"):
        compress_folder(tmp_path / "moe", tmp_path / "no", "nvfp4")
    tiny_model("gpt_oss", sizes, dtype=torch.bfloat16).save_pretrained(tmp_path / "oss")
    with pytest.raises(ConfigError, match=r"FORMAT=fp8: oss has experts, in one tensor"):
        compress_folder(tmp_path / "oss", tmp_path / "no", "fp8")


def test_routers_and_gates_stay(tmp_path):
    hybrid = plain_folder(tmp_path / "hybrid", "qwen3_5")
    errors = compress_folder(hybrid, tmp_path / "packed", "fp8")
    ignored = read_json(tmp_path / "packed/config.json")["quantization_config"]["ignore"]
    assert any(name.endswith("in_proj_a") for name in ignored)
    assert not any(name.endswith("in_proj_a") for name in errors)
    assert any(name.endswith("in_proj_qkv") for name in errors)


def test_files_of_other_names_and_sizes_are_refused(tmp_path, tokenizer):
    plain = plain_folder(tmp_path / "plain")
    tensors = load_file(plain / "model.safetensors")
    renamed = {name.replace("q_proj", "query"): tensor for name, tensor in tensors.items()}
    save_file(renamed, plain / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"have no model\.layers\.0\.self_attn\.q_proj\.weight"):
        compress_folder(plain, tmp_path / "packed", "fp8")
    small = tmp_path / "small"
    tiny_model("llama").save_pretrained(small)  # 48 features between the matrices of an MLP
    with pytest.raises(ConfigError, match="no multiple of 32; fp8 takes any"):
        compress_folder(small, tmp_path / "no", "int4")


def test_a_model_that_reads_images_keeps_its_encoders(tmp_path, tokenizer):
    write_published("gemma3", tmp_path / "plain", tokenizer, dtype=torch.bfloat16)
    errors = compress_folder(tmp_path / "plain", tmp_path / "packed", "fp8")
    assert errors and not any("vision" in name or "projector" in name for name in errors)


def test_the_share_of_a_gain_is_counted_in_nats_and_drawn_over_rows():
    table = np.array([(20.0, 10.0, 10, 10.5), (30.0, 10.0, 10, 11.0)])
    said = Reopened(2, 1.0, 1.0, 1.0, 0.0, 2, 2, 0, EXACT)
    scores = CompressedScores(table, said, 0.95)
    assert scores.losses.gain_kept == pytest.approx(1 - 1.5 / 30)
    assert interval(table) == (pytest.approx(0.95), pytest.approx(0.95))
    stricter = replace(scores, least_gain=0.96, errors={"a": 0.1})
    assert scores.faults() == [] and "it loses 5 % of the" in stricter.faults()[0]
    assert stricter.faults()[1] == "the weights with the largest errors are a (0.100)"
    assert scores.publishing_gain in (0.94, 0.95)
    assert not replace(scores, least_gain=scores.publishing_gain).faults()
    worse = CompressedScores(np.array([(20.0, 10.0, 10, 50.0)]), said, 0.95)
    assert worse.losses.gain_kept < 0 and worse.publishing_gain is None
    nothing = CompressedScores(np.array([(10.0, 10.0, 10, 11.0)]), said, 0.95)
    assert "1.100 instead of 1.000" in nothing.faults()[0] and nothing.publishing_gain is None
    ends_late = CompressedScores(table, replace(said, kl=0.5, stops=1), 0.9)
    assert ends_late.faults() == ["generation continues after the trained stop in 1 rows"]
    assert ends_late.line("int4").endswith("[0.950, 0.950] KL=5.0e-01 top-1=1.000 stops=1/2")


def test_losses_of_the_same_rows_are_compared_with_the_base():
    losses = Losses(1.669, 1.583, 1.890, 8)
    assert str(losses) == "eval_loss 1.669 instead of 1.583 (8 rows)"
    assert losses.faults(0.95) == [f"it loses 28 % of the improvement, more than 5 %: {losses}"]
    assert losses.faults(0.7) == []
    worse = Losses(2.0, 1.583, 1.890, 8)
    said = "worse than the base: eval_loss 2.000 instead of 1.583, and the base has 1.890 (8 rows)"
    assert worse.faults(0.95) == [said]
    assert Losses(1.595, 1.583, 1.590, 8).faults(0.95) == [], "less than can be told from noise"
    assert Losses(float("nan"), 1.5, 1.9, 8).faults(0.0)
