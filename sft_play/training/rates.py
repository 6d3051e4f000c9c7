"""The learning rates of an optimizer, by its schedule."""

from typing import Any

from torch.optim.lr_scheduler import LambdaLR


def set_rates(scheduler: Any) -> None:
    """Give the optimizer the rates of its schedule for the step to come.

    A checkpoint has those of the schedule that it was saved with, which train.extend makes longer.
    """
    schedule = getattr(scheduler, "scheduler", scheduler)  # under accelerate's wrapper
    if not isinstance(schedule, LambdaLR):
        return
    factors = [factor(schedule.last_epoch) for factor in schedule.lr_lambdas]
    rates = [base * factor for base, factor in zip(schedule.base_lrs, factors, strict=True)]
    for group, rate in zip(schedule.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    schedule._last_lr = rates  # what is logged
