"""Two processes of a CPU train a fused model as the original implementation, under DDP and FSDP2."""

from pathlib import Path

import pytest
import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from rank_processes import run_two
from tiny_models import tiny_model, with_adapters
from torch import distributed
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

import sft_kernels


def losses_of(wrapper: str, has_adapters: bool, is_fused: bool) -> list[float]:
    """Return the mean loss of both ranks in 4 steps."""
    model = tiny_model("llama")
    layers = model.model.layers
    if has_adapters:
        model = with_adapters(model)
    if is_fused:
        assert {"attention", "mlp", "loss"} <= sft_kernels.fuse(model).kernels.on.keys()
    wrapped = model
    if wrapper == "ddp":
        wrapped = DistributedDataParallel(model)
    elif wrapper == "accelerate":
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        )
        accelerator = Accelerator(cpu=True)
        accelerator.state.fsdp_plugin = plugin  # it takes FSDP only for GPUs
        wrapped = model = fsdp2_prepare_model(accelerator, model)
        assert isinstance(layers[0], FSDPModule)
    else:
        for part in (*layers, model):
            fully_shard(part)
        with pytest.raises(ValueError, match="before fully_shard" if not is_fused else "already"):
            sft_kernels.fuse(model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for step in range(4):
        draw = torch.Generator().manual_seed(10 * step + distributed.get_rank())
        ids = torch.randint(5, 200, (2, 24), generator=draw)
        loss = wrapped(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        distributed.all_reduce(mean)
        losses.append(mean.item() / 2)
    return losses


def compare() -> None:
    distributed.init_process_group("gloo")
    for wrapper in ("ddp", "fsdp2", "accelerate"):
        for has_adapters in (True, False):
            own, fused = (losses_of(wrapper, has_adapters, is_fused) for is_fused in (False, True))
            assert own[0] != own[-1]
            assert fused == pytest.approx(own, rel=1e-5), (wrapper, has_adapters)


def test_two_ranks_have_the_same_losses(tmp_path: Path) -> None:
    output = tmp_path / "output.txt"
    assert run_two(compare, output=output) == [0, 0], output.read_text()
