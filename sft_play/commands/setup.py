"""What is set up beside runs: the accelerate file and TensorBoard. Loads no torch."""

import sys
from pathlib import Path

from sft_play.commands.call import Call, load_config, pid_file, plan_run
from sft_play.config.loader import PROJECT_ROOT
from sft_play.config.schema import Config
from sft_play.plan import launch
from sft_play.plan.precision import precision

ACCELERATE_FILE = PROJECT_ROOT / ".accelerate.yaml"


def mixed_precision(config: Config) -> str:
    """Return the compute type as accelerate names it."""
    name = precision(config)
    return "no" if name == "float32" else name


def setup_accelerate(call: Call) -> list[str]:
    """Write the project's accelerate file for this machine; the same call writes the same file."""
    planned = plan_run(call, load_config(call), distributed=True)
    config = launch.accelerate_config(planned.plan.ranks, mixed_precision(planned.config))
    header = (
        "Written by make setup-accelerate for this machine; "
        "NUM_GPUS=N make setup-accelerate changes the number."
    )
    launch.write_accelerate_config(ACCELERATE_FILE, config, header)
    device = planned.plan.ranks.device
    return [
        f"wrote {ACCELERATE_FILE.name}: {config['num_processes']} processes on {device}, "
        f"mixed precision {config['mixed_precision']}",
        "make train-distributed uses it; NUM_GPUS=N on its command line wins over it",
    ]


def start_tensorboard(call: Call, logdir: Path) -> str:
    """Start TensorBoard beside a run; return the line that says where it is."""
    from sft_play.monitor import tensorboard

    started = tensorboard.start(
        logdir, call.invocation.tb_port, sys.executable, call.environ, pid_file(call)
    )
    return f"{started.message}; make tb-stop ends it"
