"""The packages that `train.report_to` asks for. Imports none of them."""

import sys
from collections.abc import Iterable

from sft_play.errors import EnvironmentFault
from sft_play.monitor.installed import installed_version

# mlflow-skinny has the client alone
PACKAGES = {
    "tensorboard": ("tensorboard",),
    "wandb": ("wandb",),
    "mlflow": ("mlflow", "mlflow-skinny"),
    "trackio": ("trackio",),
}


def check_installed(trackers: Iterable[str]) -> None:
    """Raise EnvironmentFault for the first tracker whose package is not installed."""
    for name in trackers:
        if not any(map(installed_version, PACKAGES[name])):
            raise EnvironmentFault(
                f"train.report_to={name}: its package is not installed; type "
                f"{sys.executable} -m pip install {name}, or TRAIN_REPORT_TO=tensorboard"
            )
