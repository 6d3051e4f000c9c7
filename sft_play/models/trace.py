"""The exact bytes of a run's step, traced on a model without weights: `make plan EXACT=1`.

The model is built from its config.json, and a step runs on fake tensors. Architecture, adapters,
4-bit packing, fused kernels and checkpointed layers are those of the run. Autocast is the CPU's,
which leaves norms and losses of 16-bit inputs in 16 bits; models like Llama cast those to float32
themselves.
"""

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from sft_play.config.backends import backend_of
from sft_play.errors import ConfigError
from sft_play.models.checkpointing import checkpoint_layers
from sft_play.models.fake_kernels import fake_kernels
from sft_play.models.fake_model import build_on_meta, materialize
from sft_play.models.fast.install import install_fused_kernels
from sft_play.models.step_meter import MeasuredStep, StepSetup, measure_step
from sft_play.plan.run_plan import PlannedRun
from sft_play.process import Process


def setup_of(planned: PlannedRun) -> StepSetup:
    """Return the step of a planned run.

    Raises: ConfigError for a backend whose model code cannot be traced.
    """
    backend = backend_of(planned.config)
    if not backend.is_traceable:
        raise ConfigError(
            f"EXACT=1 cannot trace tuning.backend={backend.name}, which brings its own model code; "
            "plan without EXACT, or set TUNING_BACKEND=bnb"
        )
    if planned.plan.step.layers_by_gpu:
        raise ConfigError(
            "EXACT=1 traces a model on one GPU, and model.device_map places this one on several; "
            "plan without EXACT"
        )
    tuning = planned.config.tuning
    if tuning.lora.use_dora and tuning.mode == "qlora":
        raise ConfigError(
            "EXACT=1 cannot trace tuning.lora.use_dora over a 4-bit base, whose weights PEFT reads "
            "for it; plan without EXACT, or set TUNING_MODE=lora"
        )
    plan = planned.plan
    layout = plan.layout
    return StepSetup(
        config=planned.config,
        device=plan.ranks.device,
        checkpointed_layers=layout.checkpointed_layers,
        zero_stage=plan.zero_stage,
        accumulates=layout.accumulates or layout.world_size > 1 or plan.zero_stage > 0,
    )


def trace_step(setup: StepSetup) -> MeasuredStep:
    """Return the bytes of a step of full rows in which every token has a label.

    Raises: EnvironmentFault without a config.json; ConfigError when adapters match no layer.
    """
    config = setup.config
    dtype = setup.compute_dtype
    process = Process.alone(torch.device(setup.device), dtype)
    model = build_on_meta(config, dtype, setup.zero_stage)
    with FakeTensorMode(allow_non_fake_inputs=True), fake_kernels(setup.on_gpu):
        materialize(model, dtype if setup.zero_stage else None)  # DeepSpeed casts all weights
        install_fused_kernels(model, config, process, setup.zero_stage)
        offloads = setup.on_gpu and config.train.activation_offloading is True
        checkpoint_layers(model, setup.checkpointed_layers, offloads)
        return measure_step(model.train(), setup)
