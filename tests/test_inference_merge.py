"""`make merge`: a plain model folder, measured before it is published; planted faults are found."""

import errno
import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from bitsandbytes.functional import dequantize_4bit, quantize_4bit
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from sft_play import cli
from sft_play.errors import CheckpointError, ConfigError
from sft_play.evaluation import reopened
from sft_play.evaluation.reopened import Bound
from sft_play.inference.load import load_run
from sft_play.inference.merge import merge_run
from sft_play.models import merging, shards
from sft_play.runs.files import read_json
from sft_play.runs.folder import RunFolder
from sft_play.runs.seal import find_damage, is_sealed, seal

pytestmark = pytest.mark.usefixtures("opens_here")


def logits(model, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=ids).logits.float()


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(8, 500, (2, 24), generator=torch.Generator().manual_seed(0))


def test_a_merged_model_computes_what_the_adapter_does(finished, ids):
    folder = finished("lora")
    line, published = merge_run(folder)
    assert line.startswith("merged eval_loss=") and line.endswith("stops=6/6")
    assert published.startswith(f"merged {folder.path / 'merged'} (tensor by tensor, ")
    merged = AutoModelForCausalLM.from_pretrained(folder.path / "merged")
    assert merged.dtype == torch.float32, "the base is stored in float32"
    adapted = load_run(folder, "cpu").model
    with adapted.disable_adapter():
        base = logits(adapted, ids)
    expected = logits(adapted, ids)
    assert (expected - base).abs().max() > 0.1, "an adapter that does nothing proves nothing"
    assert (
        logits(merged, ids) - expected
    ).abs().max() < 1e-5  # (W + BA)x for Wx + B(Ax), in float32


def test_a_merged_folder_is_a_plain_model_with_tokenizer_template_and_stamp(copied, tokenizer):
    folder, sampling = copied, {"do_sample": True, "temperature": 0.7, "top_k": 20}
    change(folder.weights("lora") / "generation_config.json", **sampling)  # as the base's says
    merge_run(folder)
    target = folder.path / "merged"
    generation = read_json(target / "generation_config.json")
    assert generation.items() >= sampling.items()
    own = AutoTokenizer.from_pretrained(target)
    assert own.chat_template == tokenizer.chat_template and own.get_vocab() == tokenizer.get_vocab()
    stamp = read_json(target / "stamp.json")
    assert stamp["merged"] is True and stamp["mode"] == "lora" and stamp["global_step"] == 3
    assert not list(target.glob("adapter*")) and find_damage(target) is None, "it is sealed"
    weights = load_file(target / "model.safetensors")
    assert (
        weights.keys()
        == load_file(Path(folder.read_config().model.name) / "model.safetensors").keys()
    )


def test_a_base_in_bfloat16_is_merged_in_float32_and_stored_in_bfloat16(
    train_run, tiny_base, tmp_path
):
    base = shutil.copytree(tiny_base, tmp_path / "base")
    AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16).save_pretrained(base)
    folder = train_run({"model.name": base, "train.predict_with_generate": False})
    merge_run(folder)
    before, after = (
        load_file(base / "model.safetensors"),
        load_file(folder.path / "merged" / "model.safetensors"),
    )
    adapter = load_file(folder.weights("lora") / "adapter_model.safetensors")
    name, scale = "model.layers.1.mlp.up_proj", 32 / 16  # alpha / r
    a, b = (adapter[f"base_model.model.{name}.lora_{part}.weight"] for part in "AB")
    assert {tensor.dtype for tensor in after.values()} == {torch.bfloat16}
    # one rounding, of the sum: torch.equal allows no second one
    assert torch.equal(
        after[f"{name}.weight"], (before[f"{name}.weight"].float() + scale * (b @ a)).bfloat16()
    )
    assert not torch.equal(after[f"{name}.weight"], before[f"{name}.weight"])


def test_a_4_bit_adapter_is_merged_into_both_bases_and_the_better_is_kept(finished, tiny_base):
    folder = finished("qlora")
    lines = merge_run(folder)
    report = read_json(folder.path / "merge_report.json")
    stored, rounded = (report["candidates"][name] for name in ("as stored", "rounded to 4 bits"))
    assert report["kept"] == "rounded to 4 bits" and lines[1].endswith(", kept")
    assert rounded["kl"] < 1e-9 < stored["kl"] and rounded["top1_agreement"] == 1
    merged = load_file(folder.path / "merged" / "model.safetensors")
    base = load_file(tiny_base / "model.safetensors")
    adapter = load_file(folder.weights("qlora") / "adapter_model.safetensors")
    name = "model.layers.0.self_attn.q_proj"
    a, b = (adapter[f"base_model.model.{name}.lora_{part}.weight"] for part in "AB")
    packed = quantize_4bit(
        base[f"{name}.weight"], quant_type="nf4", compress_statistics=True, blocksize=64
    )
    expected = dequantize_4bit(*packed) + 2 * (b @ a)
    assert torch.allclose(merged[f"{name}.weight"], expected, atol=1e-7)  # weights of 0.02
    assert torch.equal(merged["model.embed_tokens.weight"], base["model.embed_tokens.weight"])


def test_a_run_that_trained_every_weight_has_nothing_to_merge(finished, tiny_base):
    folder = finished("full")
    with pytest.raises(ConfigError, match="is a plain model already"):
        merge_run(folder)
    trained, base = (
        load_file(path / "model.safetensors") for path in (folder.weights("full"), tiny_base)
    )
    assert trained.keys() == base.keys() and not any(
        torch.equal(trained[name], base[name]) for name in base
    )
    assert AutoTokenizer.from_pretrained(folder.weights("full")).chat_template


# Faults


def why_not(folder: RunFolder) -> list[str]:
    """Merge a run whose merge must not be published, and return why not."""
    shutil.rmtree(folder.path / "merged", ignore_errors=True)
    with pytest.raises(CheckpointError, match=r"was not merged: .*merge_report\.json has the"):
        merge_run(folder)
    assert not list(folder.path.glob("*merged*/")), "nothing is published, nothing is left"
    report = read_json(folder.path / "merge_report.json")
    assert report["kept"] is None
    return [*report["why_not"], *filter(None, [report.get("cause")])]


def change(path: Path, **values) -> None:
    """Change a JSON file of an adapter, and seal it again: what the seal does not tell is planted."""
    path.write_text(json.dumps({**read_json(path), **values}))
    if is_sealed(path.parent):
        seal(path.parent)


@pytest.mark.parametrize(
    ("name", "value"),
    [("lora_alpha", 16), ("r", 32), ("use_rslora", True), ("alpha_pattern", {"q_proj": 8})],
)
def test_another_scale_than_the_run_trained_with_is_refused(copied, name, value):
    change(copied.weights("lora") / "adapter_config.json", **{name: value})
    with pytest.raises(CheckpointError, match=f"adapter_config.json: {name}="):
        merge_run(copied)


def test_a_refused_merge_is_in_the_report_and_that_of_the_published_one_is_kept(copied, caplog):
    target, adapter = copied.path / "merged", copied.weights("lora") / "adapter_config.json"
    report, earlier = (
        copied.path / name for name in ("merge_report.json", "merge_report.earlier.json")
    )
    merge_run(copied)
    published = report.read_text()
    own = adapter.read_text()
    change(adapter, lora_alpha=16)
    for _ in range(2):  # the second refusal leaves the published report alone, too
        with pytest.raises(CheckpointError) as caught:
            merge_run(copied)
        found = read_json(report)
        assert (found["kept"], found["why_not"]) == (None, [str(caught.value)])
        assert earlier.read_text() == published and find_damage(target) is None
        assert caplog.messages[-1] == (
            f"{target} is still that of an earlier merge, whose report is merge_report.earlier.json"
        )
    change(adapter, **json.loads(own))
    merge_run(copied)
    assert read_json(report)["kept"] == "as stored" and not earlier.exists()


def test_a_wrong_scale_is_found_by_the_scores_too(copied, monkeypatch):
    change(copied.weights("lora") / "adapter_config.json", lora_alpha=16)
    monkeypatch.setattr("sft_play.inference.merge.refuse_other_adapter", lambda *_: None)
    first, *_, cause = why_not(copied)
    assert first.startswith("KL=")
    assert cause.startswith("the merged float32 model is worse than the adapter: eval_loss ")
    assert "so it or its base has changed since the run. The run's checkpoints/ contain" in cause


def refused_here(folder: RunFolder, monkeypatch) -> str:
    """Merge in bfloat16 while no rounding is allowed, and return the refusal."""
    monkeypatch.setattr(reopened, "ROUNDED", Bound(1e-12, 1e-12))
    with pytest.raises(CheckpointError) as caught:
        merge_run(folder, "bfloat16")
    return str(caught.value)


def refused_rounding(folder: RunFolder, monkeypatch) -> str:
    """Return a refusal whose cause is rounding, which the report has, too."""
    said = refused_here(folder, monkeypatch)
    report = read_json(folder.path / "merge_report.json")
    assert report["cause"] in said and report["kept"] is None
    merged, run = (report["candidates"]["as stored"][f"{of}eval_loss"] for of in ("", "run_"))
    assert report["float32_eval_loss"] == pytest.approx(run) != merged
    return said


def test_a_merge_that_rounding_makes_worse_says_how_much_is_lost_and_the_remedy_works(
    copied, monkeypatch
):
    def coarse(tensor: torch.Tensor) -> torch.Tensor:
        return (tensor * 32).round() / 32

    really = shards.ShardWriter.add
    monkeypatch.setattr(
        shards.ShardWriter,
        "add",
        lambda self, name, tensor: really(
            self, name, coarse(tensor) if tensor.dtype == torch.bfloat16 else tensor
        ),
    )
    said = refused_rounding(copied, monkeypatch)
    assert "the merged bfloat16 model is worse than the adapter: eval_loss " in said
    assert re.search(r"\(6 rows\), because rounding to bfloat16 loses \d+ % of the improve", said)
    assert "Type MODEL_DTYPE=float32 to merge without this loss. " in said
    assert merge_run(copied, "float32")[-1].startswith("merged ")


def test_an_adapter_that_improves_less_than_rounding_costs_is_offered_itself(copied, monkeypatch):
    file = copied.weights("lora") / "adapter_model.safetensors"
    tensors = load_file(file)
    small = {name: tensor * (1e-6 if "lora_B" in name else 1) for name, tensor in tensors.items()}
    save_file(small, file, metadata={"format": "pt"})
    seal(file.parent)
    (copied.evaluation / "reference.safetensors").unlink()  # made again, by this adapter
    said = refused_rounding(copied, monkeypatch)
    assert "Rounding to bfloat16 costs " in said and "training improved these rows by " in said
    assert f"make export RUN={copied.name} FORMAT=adapter exports the adapter itself" in said
    assert "MODEL_DTYPE=float32" in said and "a longer run (TRAIN_EPOCHS) may improve more" in said


def test_a_refusal_whose_cause_cannot_be_measured_is_still_a_refusal(copied, monkeypatch):
    def full(*_) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("sft_play.inference.merge.losses_now", full)
    said = refused_here(copied, monkeypatch)
    assert "KL=" in said and "The cause could not be measured: " in said


def test_a_4_bit_adapter_is_not_merged_into_another_base(
    finished, tiny_base, tmp_path, monkeypatch
):
    run = RunFolder(shutil.copytree(finished("qlora").path, tmp_path / "run"))
    other = shutil.copytree(tiny_base, tmp_path / "other")
    tensors = load_file(other / "model.safetensors")
    tensors["model.norm.weight"] += 1
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    config = (run.path / "config.yaml").read_text()
    (run.path / "config.yaml").write_text(config.replace(str(tiny_base), str(other)))
    with pytest.raises(CheckpointError, match="base_digest"):
        merge_run(run)
    # and where no digest tells, as for a base of the hub, the scores do
    change(run.weights("qlora") / "stamp.json", base_digest=None, base_model=str(other))
    monkeypatch.setattr("sft_play.runs.stamp.digest_of_model", lambda _: None)
    assert why_not(run)[0].startswith("KL=")


def test_a_tied_head_that_is_lost_is_found(copied, monkeypatch):
    really = merging.write_config

    def untied(config, model, target, dtype, unties):
        really(config, model, target, dtype, unties=True)

    monkeypatch.setattr(merging, "write_config", untied)
    assert why_not(copied)[0].startswith("KL=")


def test_a_changed_template_and_the_eos_of_the_base_are_found(copied):
    weights = copied.weights("lora")
    template = weights / "chat_template.jinja"
    template.write_text("Answer now. " + template.read_text())
    change(weights / "generation_config.json", eos_token_id=3)
    assert why_not(copied) == [
        "generation continues after the trained stop in 6 rows",
        "the chat template writes 2 prompts otherwise",
    ]


def test_a_changed_bit_that_no_score_shows_is_found_by_the_seal(copied):
    file = copied.weights("lora") / "adapter_model.safetensors"
    data = bytearray(file.read_bytes())
    data[-4] ^= 1  # the last bit of a float32
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"adapter_model.safetensors has SHA-256 .* sealed"):
        merge_run(copied)


def test_an_adapter_that_lacks_tensors_is_refused(copied):
    file = copied.weights("lora") / "adapter_model.safetensors"
    tensors = load_file(file)
    del tensors["base_model.model.model.layers.0.mlp.up_proj.lora_B.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    seal(file.parent)
    with pytest.raises(CheckpointError, match=r"1 tensors .* missing, model\.layers\.0\.mlp"):
        merge_run(copied)


def test_rows_that_the_base_does_not_have_are_refused():
    with pytest.raises(CheckpointError, match=r"\(5, 2\).*\(4, 2\)"):
        merging._replaced(torch.zeros(5, 2), "model.embed_tokens.weight", torch.zeros(4, 2))


def test_a_run_without_a_reference_is_measured_against_its_own_model(copied):
    (copied.evaluation / "reference.safetensors").unlink()
    assert merge_run(copied)[0].endswith("stops=6/6")


# Files


def test_shards_of_any_size_hold_the_same_weights_and_an_index(copied, monkeypatch):
    merge_run(copied)
    whole = load_file(copied.path / "merged" / "model.safetensors")
    monkeypatch.setattr(shards, "SHARD_BYTES", 40_000)
    merge_run(copied, "bfloat16")
    target = copied.path / "merged"
    parts = sorted(target.glob("model-*-of-*.safetensors"))
    assert len(parts) > 3 and not (target / "model.safetensors").exists()
    found = {name: tensor for part in parts for name, tensor in load_file(part).items()}
    assert found.keys() == whole.keys()
    assert all(torch.equal(found[name], whole[name].bfloat16()) for name in whole)
    assert read_json(target / "config.json")["dtype"] == "bfloat16"
    assert AutoModelForCausalLM.from_pretrained(target).dtype == torch.bfloat16


def test_the_command_stores_it_in_the_type_that_is_asked_for(copied):
    variables = {"RUN": str(copied.path), "MODEL_DTYPE": "float16"}
    done = CliRunner().invoke(cli.app, ["merge"], env=variables)
    assert done.exit_code == 0, done.output
    assert "top-1 agreement=" in done.stdout and "stops=6/6" in done.stdout
    weights = load_file(copied.path / "merged" / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.float16}


@pytest.mark.parametrize(
    "lora",
    [
        {"use_dora": True},
        {"use_rslora": True, "modules_to_save": "embed_tokens,norm"},
        {"trainable_tokens": "<|end|>"},
        {"target_modules": "q_proj,lm_head"},
    ],
    ids=lambda lora: next(iter(lora)),
)
def test_every_kind_of_adapter_is_merged_tensor_by_tensor(train_run, lora):
    folder = train_run({f"tuning.lora.{name}": value for name, value in lora.items()})
    line, published = merge_run(folder)
    assert "(tensor by tensor" in published
    report = read_json(folder.path / "merge_report.json")
    assert report["candidates"]["as stored"]["kl"] < 1e-6 and line.endswith("stops=6/6")


@pytest.mark.long
@pytest.mark.parametrize("mode", ["lora", "qlora"])
@pytest.mark.parametrize("model_type", ["qwen3_moe", "mixtral", "gpt_oss"])
def test_experts_are_merged_into_the_files_of_their_base(train_run, base_of, model_type, mode):
    folder = train_run({"model.name": base_of(model_type, mode), "tuning.mode": mode})
    merge_run(folder)
    base = load_file(base_of(model_type, mode) / "model.safetensors")
    merged = load_file(folder.path / "merged" / "model.safetensors")
    assert merged.keys() == base.keys()
    changed = [name for name in base if not torch.equal(base[name], merged[name])]
    assert any("experts" in name for name in changed)
