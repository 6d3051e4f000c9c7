"""Write an expert adapter as lists: one linear layer for each expert and projection.

vLLM reads this layout for models whose published files store their experts in it. It uses the names
in these files: `layers.0.mlp.experts.7.gate_proj.lora_A.weight`, or `w1` for Mixtral. A fused
projection of gate and up is split: both parts have its lora_A, and each has its rows of lora_B.

Legend: E experts, r rank, `in` and `out` features.
"""

from collections.abc import Container
from pathlib import Path

from peft.tuners.lora.layer import ParamWrapper
from peft.utils import SAFETENSORS_WEIGHTS_NAME
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from sft_play.config.schema import Config
from sft_play.errors import ConfigError
from sft_play.models.base_files import base_tensors
from sft_play.models.merging import Merge, as_saved, build_skeleton
from sft_play.runs.files import read_json, write_json

PREFIX = "base_model.model."  # of all names in PEFT's files


def list_experts(config: Config, folder: Path) -> None:
    """Rewrite the adapter in a folder in the layout of lists.

    Raises: ConfigError if the base's files store the experts of a layer in one tensor.
    """
    file = folder / SAFETENSORS_WEIGHTS_NAME
    model = build_skeleton(Merge(config, folder)).model
    listed = listed_layout(model, load_file(file), base_tensors(config))
    saved = read_json(folder / "adapter_config.json")
    modules = {name.rpartition(".lora_")[0] for name in listed}
    saved["target_modules"] = sorted({name.rpartition(".")[2] for name in modules})
    saved["target_parameters"] = None
    file.unlink()  # it may be a hard link to the run's file
    save_file(listed, file, metadata={"format": "pt"})
    write_json(folder / "adapter_config.json", saved)


def listed_layout(
    model: PreTrainedModel, tensors: dict[str, Tensor], published: Container[str]
) -> dict[str, Tensor]:
    """Return the tensors of an adapter's file in the layout of lists.

    `model` has the adapters; `published` contains the names in the files of its base.
    """
    listed = dict(tensors)
    for path, module in model.named_modules():
        if not isinstance(module, ParamWrapper):
            continue
        experts = module.num_experts
        name = f"{path.replace('.base_layer', '')}.{module.parameter_name}"
        a = listed.pop(f"{PREFIX}{path}.lora_A.weight").unflatten(0, (experts, -1))
        b = listed.pop(f"{PREFIX}{path}.lora_B.weight").unflatten(1, (-1, experts))
        # transformers splits and names them in the same way as the parameter that they replace
        of_b = as_saved(model, name, b.permute(2, 0, 1))  # (E, out, r)
        if len(of_b) < experts or any(weight not in published for weight in of_b):
            raise ConfigError(
                f"FORMAT=vllm-adapter: the files of the base have {name} in one tensor, and vLLM "
                "reads its adapter in that form; set FORMAT=adapter"
            )
        of_a = as_saved(model, name, a.repeat(1, len(of_b) // experts, 1))  # (E, r, in)
        for weight in of_b:
            layer = f"{PREFIX}{weight.removesuffix('.weight')}"
            listed[f"{layer}.lora_A.weight"] = of_a[weight].contiguous()
            listed[f"{layer}.lora_B.weight"] = of_b[weight].contiguous()
    return listed
