"""The load-balancing loss of a mixture of experts, added to the loss of the tokens.

    L = NLL + coefficient x experts x sum_i f_i p_i

f_i is the share of tokens that go to expert i, p_i the router's mean probability for it (Switch
Transformer, equations 4 to 6). The model computes it, as transformers has it. A router is frozen
under adapters, and the loss then moves what it reads.
"""

import logging
from typing import Any

from peft import PeftModel
from torch import Tensor, nn

from sft_play.config.schema import Config
from sft_play.errors import ConfigError
from sft_play.models.experts import BALANCE, computes_balance
from sft_play.process import Process

logger = logging.getLogger(__name__)


class RouterLoss:
    """Takes the load-balancing loss from a model's forward passes, and keeps its mean for the log.

    A micro-batch counts by its share of the step's labelled tokens, so that the loss has the same
    weight however a step is cut. The balance itself is that of a micro-batch, as in transformers.
    """

    def __init__(self, model: nn.Module, coefficient: float):
        self.coefficient = coefficient
        self._taken: Tensor | None = None
        self._sum: Tensor | None = None  # of this rank's shares since the last log
        self._shares = 0.0  # which are one a step, over all ranks
        base = model.get_base_model() if isinstance(model, PeftModel) else model
        base.register_forward_hook(self._take)

    def _take(self, module: nn.Module, args: Any, outputs: Any) -> None:
        if module.training:
            self._taken = getattr(outputs, "aux_loss", None)

    def inputs(self) -> dict[str, bool]:
        """Return the inputs with which the model computes the loss."""
        return {BALANCE: True}

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
    """Return the load-balancing loss of a run, None where it is off.

    Raises: ConfigError where a coefficient is set for a model that does not compute it.
    """
    wanted = config.train.router_aux_loss_coef
    base = model.get_base_model() if isinstance(model, PeftModel) else model
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
