"""Merged models have the tensor names of their base's files, also where transformers saves others."""

from pathlib import Path

import pytest
import torch
from published_models import write_published
from safetensors.torch import load_file

from sft_kernels.process import Process
from sft_play.config.schema import Config
from sft_play.models.base_files import names_in_base
from sft_play.models.load import load_model
from sft_play.models.merging import CannotStream, Merge, merge_files, merge_whole


def shapes(folder: Path) -> dict[str, torch.Size]:
    files = sorted(folder.glob("*.safetensors"))
    return {name: tensor.shape for file in files for name, tensor in load_file(file).items()}


@pytest.mark.parametrize("model_type", ["kimi_k25", "qwen3_vl_moe"])
def test_a_merged_composite_mixture_has_the_names_of_its_base(
    tmp_path: Path, tokenizer, model_type: str
) -> None:
    base = tmp_path / "base"
    write_published(model_type, base, tokenizer)
    config = Config.model_validate({"model": {"name": str(base)}, "train": {"fast_path": False}})
    process = Process.alone(torch.device("cpu"))
    load_model(config, process).save_pretrained(tmp_path / "adapter")
    merge = Merge(config, tmp_path / "adapter")
    try:
        merge_files(merge, tmp_path / "merged")
    except CannotStream:
        merge_whole(merge, tmp_path / "merged")
    assert shapes(tmp_path / "merged") == shapes(base)


def test_pieces_of_one_tensor_keep_their_places() -> None:
    base = {f"a.layers.0.experts.{expert}.up.weight": "own.experts.up" for expert in range(3)}
    saved = {f"a.blocks.0.experts.{expert}.up.weight": "own.experts.up" for expert in range(3)}
    found = names_in_base({**saved, "b.weight": "b", "c": None}, {**base, "b.weight": "b"})
    assert found == dict(zip(saved, base, strict=True))
