"""Shard experts across the ranks of a run (train.strategy=ep).

Each rank stores an equal share of every layer's experts, with their adapters. Everything else is as
under DDP. Tokens are exchanged before and after the experts of a layer:

1. all ranks gather the hidden states and choices of all tokens,
2. each rank computes its local experts for all tokens; other choices have weight 0,
3. the outputs are summed over ranks, and each rank keeps those of its local tokens.

With W ranks and N tokens of H features per rank, each of the two exchanges moves (W - 1) N H
numbers per rank. Sending each of k choices to its expert's rank would not move fewer if k >= W. It
would also have to send the counts to the host, and wait for the rank with the most tokens. Sums are
in the dtype of the hidden states.

The gradient of a gathered tensor is the sum over ranks, and vice versa. So an adapter of experts
has the gradients of all ranks' tokens. A rank's loss is multiplied by W for the mean of DDP, and
those gradients are divided by W.

transformers reads only the weights of a rank's experts. 4-bit weights are packed as in one process,
and sharded afterwards. PEFT adds adapters for all experts, so a seed gives the same initial
adapters under every strategy. These adapters are then sharded too.

Legend: E experts, W ranks, N tokens, M tokens of the rank with the most, k choices, r rank.
"""

import contextlib
import copy
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from bitsandbytes import functional as bnb_functional
from bitsandbytes.nn import Params4bit
from peft import PeftModel
from peft.tuners.lora.layer import ParamWrapper
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from transformers import PreTrainedModel

from sft_kernels.expert_modules import SharedParamWrapper, find_experts, packed_weight, unwrap
from sft_kernels.process import Process
from sft_play.errors import ConfigError
from sft_play.models.adapter_state import ADAPTER, ExpertPart, part_of
from sft_play.models.experts import expert_weights
from sft_play.models.stored_weights import changing_model
from sft_play.plan.strategy import refuse_remainder

NO_EXPERT = -1  # the choice of a row that pads a rank's tokens


@dataclass
class ExpertRanks:
    """The ranks that share the experts of a model, and the token counts of their forward pass."""

    process: Process
    experts: int  # of a layer, over all ranks
    own_tokens: int = 0
    most_tokens: int = 0

    @property
    def own(self) -> int:
        """Return the number of a layer's experts that each rank stores."""
        return self.experts // self.process.world_size

    @property
    def first(self) -> int:
        """Return the index of this rank's first expert."""
        return self.own * self.process.rank

    def meet(self, tokens: int, is_first: bool) -> int:
        """Return the token count of the rank with the most: requested once per pass, on the CPU."""
        if is_first or tokens != self.own_tokens:
            self.own_tokens = tokens
            self.most_tokens = self.process.max(tokens)
        return self.most_tokens


def sharding_experts_while_loading(process: Process) -> contextlib.AbstractContextManager[Any]:
    """Let from_pretrained read only the weights of this rank's experts.

    Raises: ConfigError if the model has no experts to shard, or if W does not divide their number.
    """

    def divide(model: PreTrainedModel) -> None:
        mesh = init_device_mesh(process.device.type, (process.world_size,))
        for experts in shardable_experts(model, process):
            for name, whole in _by_expert(experts).items():
                part = whole[: len(whole) // process.world_size].detach()
                divided = DTensor.from_local(part, mesh, [Shard(0)], run_check=False)
                setattr(experts, name, nn.Parameter(divided, requires_grad=False))

    return changing_model(divide)


def shardable_experts(model: PreTrainedModel, process: Process) -> list[nn.Module]:
    """Return the expert modules of a model: the outermost wrappers if PEFT has wrapped them.

    Raises: ConfigError if the experts cannot be sharded.
    """
    modules = find_experts(model)
    names = {weight.module_name for weight in expert_weights(model)}
    if not modules or len(modules) != len(names):
        raise ConfigError(
            f"train.strategy=ep: {type(model).__name__} has no experts in a form that ranks can "
            "share; set TRAIN_STRATEGY=ddp or fsdp"
        )
    for module in modules:
        refuse_remainder(unwrap(module)[1].num_experts, process.world_size)
    return modules


def keep_local_experts(model: PreTrainedModel | PeftModel, process: Process) -> None:
    """Keep only this rank's experts and their adapters, and add hooks that exchange tokens."""
    outermost = shardable_experts(model, process)
    sizes = {unwrap(module)[1].num_experts for module in outermost}
    assert len(sizes) == 1, "experts of one number in all layers"
    ranks = ExpertRanks(process, sizes.pop())
    for number, module in enumerate(outermost):
        wrappers, experts = unwrap(module)
        _keep_own_weights(experts, ranks)
        for wrapper in wrappers:
            _keep_own_adapter(wrapper, ranks)
        module.expert_ranks = ranks
        module._asks_for_tokens = number == 0  # only the first does; no new module class needed
        module.register_forward_pre_hook(_gather_tokens, with_kwargs=True)
        module.register_forward_hook(_sum_outputs, always_call=True)


def _by_expert(experts: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that have a row for each expert."""
    own = experts.named_parameters(recurse=False)
    return {name: weight for name, weight in own if len(weight) == experts.num_experts}


@torch.no_grad()
def _keep_own_weights(experts: nn.Module, ranks: ExpertRanks) -> None:
    for name, weight in _by_expert(experts).items():
        if weight.requires_grad:
            raise ConfigError(
                f"train.strategy=ep: tuning.lora.modules_to_save trains {name} of the experts "
                "whole; leave that to the adapters, or set TRAIN_STRATEGY=ddp"
            )
        if isinstance(weight, DTensor):
            own = weight.to_local()
        else:  # read in full, because other weights are packed
            own = weight[ranks.first : ranks.first + ranks.own].clone()
        setattr(experts, name, nn.Parameter(own, requires_grad=False))
    for name in getattr(experts, "parametrizations", ()):
        packed = packed_weight(experts, name)
        if packed is not None:
            _keep_own_blocks(packed, ranks, name)
    experts.num_experts = ranks.own


def _keep_own_blocks(packed: Params4bit, ranks: ExpertRanks, name: str) -> None:
    """Cut a packed weight to this rank's experts: bytes and scales are those of one process."""
    state = copy.copy(packed.quant_state)
    experts, *features = state.shape
    if math.prod(features) % state.blocksize:
        raise ConfigError(
            f"train.strategy=ep: an expert's {name} {tuple(features)} is no whole number of blocks "
            f"of {state.blocksize} weights in 4 bits; set TUNING_MODE=lora, or TRAIN_STRATEGY=fsdp"
        )
    scales = state.absmax
    if state.nested:  # a block of 256 scales may contain scales of two ranks
        scales = bnb_functional.dequantize_blockwise(scales, state.state2).float() + state.offset
        state.nested, state.state2, state.offset = False, None, None
    state.absmax = scales.view(experts, -1)[ranks.first :][: ranks.own].flatten().clone()
    state.shape = torch.Size([ranks.own, *features])
    bytes_of_ranks = packed.data.view(ranks.process.world_size, -1)
    packed.data = bytes_of_ranks[ranks.process.rank].clone().unsqueeze(-1)
    packed.quant_state = state


def _keep_own_adapter(wrapper: ParamWrapper, ranks: ExpertRanks) -> None:
    if isinstance(wrapper, SharedParamWrapper):
        return  # every rank stores it in full, and DDP sums the gradients from all ranks' experts
    wrapper.num_experts = ranks.own
    a, b = wrapper.lora_A[ADAPTER], wrapper.lora_B[ADAPTER]
    rank = wrapper.r[ADAPTER]
    a.out_features = b.in_features = rank * ranks.own
    for linear, shape, dim in (
        (a, (ranks.own, rank, a.in_features), 0),
        (b, (b.out_features, rank, ranks.own), 2),
    ):
        part = ExpertPart(shape, dim, ranks.process.rank, ranks.process.world_size)
        linear.weight = nn.Parameter(part.cut(linear.weight.detach()))
        linear.weight.expert_part = part


def _gather_tokens(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Tensor, Tensor, Tensor], dict[str, Any]]:
    """Return inputs with the tokens of all ranks, and with choices of local experts only."""

    def inputs(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Any:
        return hidden_states, top_k_index, top_k_weights

    hidden, choices, weights = inputs(*args, **kwargs)
    ranks = module.expert_ranks
    most = ranks.meet(len(hidden), module._asks_for_tokens)
    anchor = torch.empty(0, device=hidden.device, requires_grad=True)
    gathered = _Gathered.apply(hidden, anchor, most)
    choices = gather(choices, most, fill=NO_EXPERT) - ranks.first
    is_here = (choices >= 0) & (choices < ranks.own)
    choices = torch.where(is_here, choices, ranks.own)
    weights = torch.where(is_here, _Gathered.apply(weights, anchor, most), 0)
    module.gathered_tokens = gathered
    return (gathered, choices, weights), {}


def _sum_outputs(module: nn.Module, args: tuple[Any, ...], output: Tensor | None) -> Tensor | None:
    """Return the outputs of this rank's tokens; None if checkpointing stops its second pass."""
    gathered = module.__dict__.pop("gathered_tokens")
    if output is None:
        return None
    return _Summed.apply(output, gathered, module.expert_ranks.own_tokens)


class _Gathered(torch.autograd.Function):
    """Gathers the rows of all ranks (W M, ...) from this rank's (N, ...)."""

    @staticmethod
    def forward(ctx, own: Tensor, anchor: Tensor, most: int) -> Tensor:
        """Return the gathered rows; `anchor` requires a gradient, so every rank runs backward."""
        ctx.rows = len(own)
        return gather(own, most)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor | None, None, None]:
        own = sum_and_scatter(gradient, ctx.rows) if ctx.needs_input_grad[0] else None
        return own, None, None


class _Summed(torch.autograd.Function):
    """Reduces rows (W M, ...) to this rank's rows (N, ...) of the sum over ranks."""

    @staticmethod
    def forward(ctx, rows: Tensor, gathered: Tensor, own: int) -> Tensor:
        """Return this rank's rows of the sum.

        `rows` are computed from `gathered`. They have no gradient if no token has chosen an expert
        of this rank. The gradient of `gathered` makes this rank run backward anyway, like the other
        ranks.
        """
        ctx.most = len(rows) // distributed.get_world_size()
        return sum_and_scatter(rows, own)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gather(gradient, ctx.most), None, None


def gather(own: Tensor, most: int, fill: int = 0) -> Tensor:
    """Return the rows (W M, ...) of all ranks, padded to `most` M. Every rank must call it."""
    if len(own) < most:
        filled = own.new_full((most, *own.shape[1:]), fill)
        filled[: len(own)] = own
        own = filled
    rows = own.new_empty(most * distributed.get_world_size(), *own.shape[1:])
    distributed.all_gather_into_tensor(rows, own.contiguous())
    return rows


def sum_and_scatter(rows: Tensor, own: int) -> Tensor:
    """Return this rank's first `own` rows of the sum over ranks. Every rank must call it."""
    part = rows.new_empty(len(rows) // distributed.get_world_size(), *rows.shape[1:])
    distributed.reduce_scatter_tensor(part, rows.contiguous())
    return part[:own]


def average_own_gradients(model: nn.Module, process: Process) -> None:
    """Divide the gradients of local experts by W, as DDP divides all other gradients."""
    for parameter in model.parameters():
        if part_of(parameter) is not None:
            parameter.register_hook(lambda gradient: gradient / process.world_size)


def clip_gradients(parameters: Iterable[nn.Parameter], most: float) -> Tensor:
    """Clip gradients to a global norm that counts every rank's experts once; return that norm."""
    parameters = [each for each in parameters if each.grad is not None]
    own = [each.grad for each in parameters if part_of(each) is not None]
    shared = [each.grad for each in parameters if part_of(each) is None]
    of_experts = get_total_norm(own).square().to(parameters[0].device)  # on the CPU without experts
    distributed.all_reduce(of_experts)
    norm = (get_total_norm(shared).square() + of_experts).sqrt()
    clip_grads_with_norm_(parameters, most, norm)
    return norm
