"""What lies under model.name: each kind of folder that is no base has a sentence at plan time."""

import json
from pathlib import Path

import pytest
from stored_forms import TINY_LLAMA

from sft_play.config.schema import Config
from sft_play.errors import ConfigError
from sft_play.plan.base_model import require_base
from sft_play.plan.stored_as import stored_as

LLAMA = json.loads((TINY_LLAMA / "config.json").read_text())


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


REFUSED = {
    "GPTQ 4-bit": {"quant_method": "gptq", "bits": 4},
    "AWQ 4-bit": {"quant_method": "awq", "bits": 4},
    "HQQ": {"quant_method": "hqq"},
    "torchao": {"quant_method": "torchao"},
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
    "dtypes, name, way",
    [
        ({"a.weight": "F8_E4M3", "a.weight_scale_inv": "F32"}, "FP8", "dequantized"),
        ({"a.weight": "U8", "a.weight_scale": "F8_E4M3", "a.weight_scale_2": "F32"}, "NVFP4", 0),
        ({"a.weight": "U8", "a.weight.absmax": "F32"}, "4 bits of bitsandbytes", "packed"),
        ({"a.weight": "U32", "a.scales": "F16", "a.biases": "F16"}, "packed integers", 0),
        ({"a.qweight": "I32"}, "packed integers (GPTQ or AWQ)", 0),
        ({"a.weight": "I8", "a.SCB": "F32"}, "8 bits of bitsandbytes", "dequantized"),
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
