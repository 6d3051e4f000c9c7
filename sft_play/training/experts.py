"""MoE models: the load-balancing loss, and which experts and adapters were trained.

    L = NLL + coefficient x experts x sum_i f_i p_i

f_i is the share of tokens that are routed to expert i, p_i is the router's mean probability for it
(Switch Transformer, equations 4 to 6). The model computes the loss as in transformers. Adapters
leave the router frozen, so the loss changes the router's inputs. Tokens are counted on the
device: nothing waits for the counts before the run ends.
"""

import logging
from typing import Any

import torch
from peft.tuners.lora import LoraLayer, ParamWrapper
from torch import Tensor, nn

from sft_kernels.expert_modules import ranks_of_experts
from sft_kernels.process import Process
from sft_kernels.training_setup import base_model_of, is_training
from sft_play.config.schema import Config
from sft_play.errors import ConfigError
from sft_play.models.adapter_state import ADAPTER, part_of
from sft_play.models.experts import BALANCE, computes_balance, expert_weights
from sft_play.runs.report import ExpertsReport
from sft_play.training.guards import module_of

logger = logging.getLogger(__name__)


class RouterLoss:
    """Collects the load-balancing loss of a model's forward passes, and its mean for the log.

    A micro-batch counts by its share of the step's labeled tokens, so the loss has the same weight
    however a step is split. The balance is that of a micro-batch, as in transformers.
    """

    def __init__(self, model: nn.Module, coefficient: float):
        self.coefficient = coefficient
        self._taken: Tensor | None = None
        self._sum: Tensor | None = None  # of this rank's shares since the last log
        self._shares = 0.0  # their sum over all ranks is 1 per step
        base_model_of(model).register_forward_hook(self._take)

    def _take(self, module: nn.Module, args: Any, outputs: Any) -> None:
        if module.training:
            self._taken = getattr(outputs, "aux_loss", None)

    def of_micro_batch(self, share: float) -> Tensor:
        """Return the loss of the last forward pass, times coefficient and share of the step."""
        assert self._taken is not None, "the model returned no load-balancing loss"
        loss = self._taken * share
        self._taken = None
        self._sum = loss.detach() if self._sum is None else self._sum + loss.detach()
        self._shares += share
        return self.coefficient * loss

    def mean_since_log(self, process: Process) -> float | None:
        """Return the mean over steps, without the coefficient. Every rank must call it."""
        own = 0.0 if self._sum is None else self._sum.item()
        totals = process.gather((own, self._shares))
        self._sum = None
        self._shares = 0.0
        shares = sum(share for _, share in totals)
        return sum(loss for loss, _ in totals) / shares if shares else None


def router_loss_of(model: nn.Module, config: Config) -> RouterLoss | None:
    """Return the load-balancing loss of a run, None if it is off.

    Raises: ConfigError if a coefficient is set for a model that does not compute it.
    """
    wanted = config.train.router_aux_loss_coef
    base = base_model_of(model)
    text_config = base.config.get_text_config()
    has_loss = computes_balance(base)
    if wanted == "auto":
        is_on = has_loss and getattr(text_config, BALANCE, False)
        wanted = getattr(text_config, "router_aux_loss_coef", 0.0) if is_on else 0.0
        if has_loss and not wanted:
            logger.info(
                "router: no load-balancing loss, as the model's config has %s=false; "
                "TRAIN_ROUTER_AUX_LOSS_COEF=%g adds it",
                BALANCE,
                getattr(text_config, "router_aux_loss_coef", None) or 0.001,
            )
    if not wanted:
        return None
    if not has_loss:
        raise ConfigError(
            f"train.router_aux_loss_coef={wanted}: {text_config.model_type} computes no "
            "load-balancing loss in transformers; set TRAIN_ROUTER_AUX_LOSS_COEF=auto"
        )
    logger.info("router: load-balancing loss with coefficient %g", wanted)
    return RouterLoss(model, wanted)


NAMED = 8  # modules that a log line names


class ExpertUse:
    """Counts the tokens that each expert gets in training steps."""

    def __init__(self, model: nn.Module):
        self._counts: dict[str, Tensor] = {}  # (experts + 1,); the last: no expert
        ranks = ranks_of_experts(model)
        for weight in expert_weights(model):
            # a hook on the outermost wrapper: fused kernels do not call the inner modules
            name = weight.module_name.replace(".base_layer", "")
            if name not in self._counts:
                device = next(model.get_submodule(weight.module_name).parameters()).device
                counts = torch.zeros(ranks * weight.experts + 1, dtype=torch.int64, device=device)
                self._counts[name] = counts
                self._watch(model.get_submodule(name), counts)

    def _watch(self, module: nn.Module, counts: Tensor) -> None:
        def count(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
            choices = _choices(args, kwargs)
            if choices is not None and is_training(module):
                # the largest number means "no expert", if a router has that
                numbers = choices.detach().reshape(-1).to(torch.int64).clamp(max=len(counts) - 1)
                counts.scatter_add_(0, numbers, torch.ones_like(numbers))

        # before the tokens of all ranks are gathered, if the ranks share the experts
        module.register_forward_pre_hook(count, with_kwargs=True, prepend=True)

    def tokens_of_experts(self, process: Process) -> dict[str, list[int]]:
        """Return the tokens of each expert on all ranks, by module. Every rank must call it.

        A checkpointed layer counts its tokens twice. Modules whose inputs do not contain the expert
        numbers of a token are left out.
        """
        own = {name: counts[:-1].tolist() for name, counts in self._counts.items()}
        of_ranks = process.gather(own)
        totals: dict[str, list[int]] = {}
        for name in own:
            columns = zip(*(counts[name] for counts in of_ranks), strict=True)
            tokens = [sum(column) for column in columns]
            if any(tokens):
                totals[name] = tokens
        return totals


def _choices(args: Any, kwargs: dict[str, Any]) -> Tensor | None:
    """Return the numbers of the experts of each token: (N, k) integers."""
    for value in (*args, *kwargs.values()):
        is_tensor = isinstance(value, Tensor) and value.dim() == 2
        if is_tensor and not value.is_floating_point() and value.dtype != torch.bool:
            return value
    return None


@torch.no_grad()
def untrained_adapters(model: nn.Module, process: Process) -> dict[str, list[int]]:
    """Return the adapters whose B is still zero, by module: their experts, or [] for all of it.

    B is initialized to zero, and a step with any gradient changes it. Adapters with another
    initialization and those that ZeRO-3 partitions are left out. The result is empty if the run
    changed nothing, e.g. one step with a learning rate of zero. Every rank must call it.
    """
    own: dict[str, list[bool]] = {}  # whether B of each expert is zero
    shared: set[str] = set()
    for name, module in model.named_modules():
        if not isinstance(module, LoraLayer) or ADAPTER not in module.lora_B:
            continue
        b = module.lora_B[ADAPTER].weight
        if hasattr(b, "ds_id"):
            continue
        key = module_of(name)
        experts = 1
        if isinstance(module, ParamWrapper):
            key = f"{key}.{module.parameter_name}"
            experts = module.num_experts
        is_zero = (b.reshape(-1, experts) == 0).all(dim=0)  # (experts,): the fastest index of B
        own[key] = is_zero.tolist()
        shared |= {key} if part_of(b) is not None else set()
    untrained: dict[str, list[int]] = {}
    has_trained = False
    of_ranks = process.gather(own) if shared else [own]
    for key in own:
        is_zero = own[key]
        if key in shared:  # the experts are in the order of the ranks
            is_zero = [each for rank in of_ranks for each in rank[key]]
        numbers = [number for number, zero in enumerate(is_zero) if zero]
        has_trained |= len(numbers) < len(is_zero)
        if numbers:
            untrained[key] = numbers if len(numbers) < len(is_zero) else []
    return untrained if has_trained else {}


def experts_report(use: ExpertUse, model: nn.Module, process: Process) -> ExpertsReport | None:
    """Return what was trained of experts and adapters; None for a dense model if all was trained.

    Every rank must call it.
    """
    tokens = use.tokens_of_experts(process)
    untrained = untrained_adapters(model, process)
    if not tokens and not untrained:
        return None
    never: dict[str, list[int]] = {}
    shares: list[float] = []
    for name, counts in tokens.items():
        numbers = [number for number, count in enumerate(counts) if count == 0]
        if numbers:
            never[module_of(name)] = numbers
        shares.append(max(counts) / sum(counts))
    return ExpertsReport(
        layers=len(tokens),
        experts=sum(map(len, tokens.values())),
        never_reached=never,
        largest_share=round(max(shares), 4) if shares else None,
        untrained=untrained,
    )


def log_experts(report: ExpertsReport) -> None:
    """Log how many experts were used; warn of unused experts and of untrained adapters."""
    missed = sum(map(len, report.never_reached.values()))
    if report.layers:
        logger.info(
            "experts: %d of %d in %d layers were reached; the busiest of a layer got %.1f %% of "
            "its tokens",
            report.experts - missed,
            report.experts,
            report.layers,
            100 * report.largest_share,
        )
    if missed:
        logger.warning("experts that no token reached: %s", _named(report.never_reached))
    beyond = {
        name: numbers
        for name, numbers in report.untrained.items()
        if numbers != report.never_reached.get(name.rpartition(".")[0])
    }
    if beyond:
        logger.warning("adapters that no gradient reached: %s", _named(beyond))


def _named(found: dict[str, list[int]]) -> str:
    """Return the first modules with the numbers of their experts."""
    parts: list[str] = []
    for name, numbers in list(found.items())[:NAMED]:
        shown = ", ".join(map(str, numbers[:NAMED]))
        more = f" and {len(numbers) - NAMED} more" if len(numbers) > NAMED else ""
        parts.append(f"{name} {shown}{more}".rstrip())
    if len(found) > NAMED:
        parts.append(f"{len(found) - NAMED} more in run.json")
    return "; ".join(parts)
