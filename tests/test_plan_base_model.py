"""What lies under model.name: each kind of folder that is no base has a sentence at plan time."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from stored_forms import TINY_LLAMA, change_config, copy_of

from sft_play.config.schema import Config
from sft_play.errors import ConfigError, EnvironmentFault, SftPlayError
from sft_play.plan.base_model import require_base
from sft_play.plan.model_shape import load_shape
from sft_play.plan.stored_as import stored_as

LLAMA = json.loads((TINY_LLAMA / "config.json").read_text())
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5319440\n"


def require(name: Path | str, environ: dict[str, str] | None = None, **settings: object) -> None:
    model = {"name": str(name), **settings.pop("model", {})}
    require_base(Config.model_validate({"model": model, "tuning": settings}), environ or {})


def folder_with(folder: Path, **files: object) -> Path:
    """Write files, whose names have __ for a dot: text, or values as JSON."""
    folder.mkdir()
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (folder / name.replace("__", ".")).write_text(text)
    return folder


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({"adapter_config__json": {"base_model_name_or_path": "acme/base"}}, "MODEL_NAME=acme/base"),
        ({"model__Q4_K_M__gguf": "GGUF"}, "a folder of GGUF files, packed for llama.cpp; set"),
        ({"params__json": {}, "consolidated__safetensors": ""}, "format of Mistral's or Meta's"),
        ({"model_index__json": {"_class_name": "FluxPipeline"}}, "a diffusion pipeline; set"),
        ({"config__json": LLAMA, "modules__json": []}, "a sentence-transformers model"),
        ({"config__json": LLAMA, "model__safetensors": POINTER}, "run git lfs pull in"),
        ({"config__json": LLAMA, "tokenizer__json": POINTER}, "tokenizer.json is a pointer of git"),
    ],
)  # fmt: skip
def test_another_kind_of_folder_has_its_sentence(tmp_path, files, says):
    with pytest.raises(EnvironmentFault, match=says):
        require(folder_with(tmp_path / "model", **files))


@pytest.mark.parametrize(
    ("declared", "says"),
    [
        ({"model_type": "bert", "architectures": ["BertForMaskedLM"]}, "an encoder, which fills"),
        ({"model_type": "bert", "architectures": ["BertModel"]}, r"an encoder \(BertModel\)"),
        ({"model_type": "t5", "is_encoder_decoder": True}, "an encoder-decoder"),
        ({"model_type": "bart", "is_encoder_decoder": True}, "an encoder-decoder"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "a classifier or reward model"),
        ({"model_type": "vit", "architectures": ["ViTModel"]}, "without a class that writes text"),
        ({"model_type": "llama9"}, r"model_type=llama9, which transformers \d+\.\d+"),
    ],
)
def test_a_class_that_predicts_no_next_token_has_its_sentence(tmp_path, declared, says):
    base = folder_with(tmp_path / "model", config__json={**LLAMA, **declared})
    with pytest.raises(EnvironmentFault, match=says):
        require(base)


def test_code_beside_the_weights_is_an_error_of_the_setting(tmp_path):
    own = {"model_type": "own", "auto_map": {"AutoModelForCausalLM": "modeling_own.Own"}}
    base = folder_with(tmp_path / "model", config__json={**LLAMA, **own})
    with pytest.raises(ConfigError, match="set MODEL_TRUST_REMOTE_CODE=true"):
        require(base)
    require(base, model={"trust_remote_code": True})
    change_config(base, model_type="llama")
    require(base)


def test_a_gguf_file_and_a_missing_shard_have_their_sentence(tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(EnvironmentFault, match=r"a file, .* packed for llama\.cpp: set MODEL_NAME"):
        require(tmp_path / "model.gguf")
    shards = {"a": "model-1-of-2.safetensors", "b": "model-2-of-2.safetensors"}
    index = {"model__safetensors__index__json": {"weight_map": shards}}
    base = folder_with(tmp_path / "model", config__json=LLAMA, **index)
    shutil.copy(TINY_LLAMA / "model.safetensors", base / shards["a"])
    with pytest.raises(EnvironmentFault, match=r"1 of the 2 files .*, model-2-of-2\.safetensors"):
        require(base)


@pytest.mark.parametrize(
    "declared",
    [
        {},
        {"architectures": None},
        {"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"]},
        {"model_type": "qwen2_5_vl", "architectures": ["Qwen2_5_VLForConditionalGeneration"]},
        {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]},
        {"architectures": ["LLaMAForCausalLM"]},
        {"model_type": "voxtral", "architectures": ["VoxtralForConditionalGeneration"]},
    ],
)
def test_language_models_and_composite_ones_pass(tmp_path, declared):
    base = folder_with(tmp_path / "model", config__json={**LLAMA, **declared})
    assert require(base) is None
    (base / "adapter_config.json").write_text("{}")
    with pytest.raises(SftPlayError):  # the same folder is looked at
        require(base)


def test_a_model_in_the_hub_cache_is_looked_at_there(tmp_path):
    repo = tmp_path / "models--acme--bert"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text("abc")
    declared = {**LLAMA, "model_type": "bert", "architectures": ["BertForMaskedLM"]}
    (repo / "snapshots").mkdir()
    folder_with(repo / "snapshots" / "abc", config__json=declared)
    with pytest.raises(EnvironmentFault, match="acme/bert is an encoder"):
        require("acme/bert", {"HF_HUB_CACHE": str(tmp_path)})


REFUSED = {
    "GPTQ 4-bit": {"quant_method": "gptq", "bits": 4},
    "AWQ 4-bit": {"quant_method": "awq", "bits": 4},
    "HQQ": {"quant_method": "hqq"},
    "torchao": {"quant_method": "torchao"},
    "AQLM": {"quant_method": "aqlm"},
    "AutoRound 4-bit": {"quant_method": "auto-round", "bits": 4},
    "quanto": {"quant_method": "quanto"},
    "EETQ": {"quant_method": "eetq"},
    "HIGGS": {"quant_method": "higgs"},
    "SpQR 3-bit": {"quant_method": "spqr", "bits": 3},
    "VPTQ": {"quant_method": "vptq"},
    "BitNet": {"quant_method": "bitnet"},
    "ModelOpt NVFP4": {"quant_method": "modelopt", "quant_algo": "NVFP4"},
    "compressed-tensors pack-quantized": {
        "quant_method": "compressed-tensors", "format": "pack-quantized",
        "config_groups": {"group_0": {"weights": {"num_bits": 4}}},
    },
    "compressed-tensors nvfp4-pack-quantized": {
        "quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized",
    },
    "compressed-tensors float-quantized, pack-quantized": {
        "quant_method": "compressed-tensors", "format": "mixed-precision",
        "config_groups": {"a": {"format": "float-quantized"}, "b": {"format": "pack-quantized"}},
    },
}  # fmt: skip


@pytest.mark.parametrize("mode", ["lora", "qlora", "full"])
@pytest.mark.parametrize("name", REFUSED)
def test_a_format_that_cannot_be_trained_is_named_with_the_way_out(tmp_path, name, mode):
    config = {**LLAMA, "quantization_config": REFUSED[name]}
    base = folder_with(tmp_path / "model", config__json=config)
    with pytest.raises(ConfigError, match=f"stored as {name}, which .*MODEL_NAME to its 16-bit"):
        require(base, mode=mode)


def test_mlx_is_named_and_nested_sections_are_found():
    assert stored_as({"quantization": {"group_size": 64, "bits": 4}}).name == "MLX 4-bit"
    nested = {"text_config": {"quantization_config": {"quant_method": "gptq", "bits": 4}}}
    assert stored_as(nested).name == "GPTQ 4-bit"
    assert stored_as({"compression_config": {"quant_method": "hqq"}}).way == "refused"
    assert stored_as({}) is None


@pytest.mark.parametrize(
    ("dtypes", "name", "way"),
    [
        ({"a.weight": "F8_E4M3", "a.weight_scale_inv": "F32"}, "FP8", "dequantised"),
        ({"a.weight": "U8", "a.weight_scale": "F8_E4M3", "a.weight_scale_2": "F32"}, "NVFP4", 0),
        ({"a.weight": "U8", "a.weight.absmax": "F32"}, "4 bits of bitsandbytes", "packed"),
        ({"a.weight": "U32", "a.scales": "F16", "a.biases": "F16"}, "packed integers", 0),
        ({"a.qweight": "I32"}, "packed integers (GPTQ or AWQ)", 0),
        ({"a.weight": "I8", "a.SCB": "F32"}, "8 bits of bitsandbytes", "dequantised"),
        ({"h.0.attn.bias": "U8", "a.weight": "F16"}, None, None),
    ],
)
def test_the_files_show_what_config_json_does_not_say(dtypes, name, way):
    found = stored_as({}, dtypes.items())
    assert (found and found.name, found and found.way) == (name, "refused" if way == 0 else way)


def test_plain_weights_under_a_section_of_their_base_are_plain():
    declared = {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}
    assert stored_as(declared, [("a.weight", "BF16")]) is None
    assert stored_as(declared).way == "packed", "the files are not here yet"


def test_weights_in_4_bits_are_for_qlora(tmp_path):
    declared = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    base = folder_with(tmp_path / "model", config__json={**LLAMA, "quantization_config": declared})
    require(base, mode="qlora")
    for mode in ("lora", "full"):
        with pytest.raises(
            ConfigError, match=f"tuning.mode={mode} needs 16: set TUNING_MODE=qlora"
        ):
            require(base, mode=mode)


def test_links_and_read_only_folders_are_models_like_any_other(tmp_path):
    base = copy_of(tmp_path / "blobs")
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    for path in base.iterdir():
        (snapshot / path.name).symlink_to(path)
    (snapshot / "consolidated.safetensors").write_text(POINTER * 40)
    assert load_shape(str(snapshot), None, {}).layers  # it is read through the links
    snapshot.chmod(0o555)
    assert require(snapshot) is None


def test_make_plan_says_it_in_a_moment_without_a_traceback(tmp_path):
    base = folder_with(tmp_path / "model", config__json={**LLAMA, "model_type": "llama9"})
    done = subprocess.run(
        [sys.executable, "-m", "sft_play", "plan"],
        env={**os.environ, "MODEL_NAME": str(base), "DEVICE": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 13, done.stderr
    assert "model_type=llama9" in done.stderr and "Traceback" not in done.stderr
