"""What shall wait in host memory and has no room there, in words. Pure: no torch, no I/O."""

from sft_play.plan import activations, memory
from sft_play.plan.inputs import PlanInputs
from sft_play.plan.layout import Layout


def warnings(inputs: PlanInputs, layout: Layout) -> list[str]:
    """Return what to know of offloaded weights and activations."""
    return _of_weights(inputs, layout) + _of_activations(inputs, layout)


def _of_weights(inputs: PlanInputs, layout: Layout) -> list[str]:
    """Say where weights that shall wait in host memory have no room there."""
    needed = memory.host_bytes(inputs.step, layout)
    remedy = "set TUNING_MODE=qlora, or use more machines"
    return _without_room("train.fsdp_offload", needed, inputs, remedy)


def _of_activations(inputs: PlanInputs, layout: Layout) -> list[str]:
    """Say where activations that shall be offloaded have no room on the host, or need none."""
    if inputs.config.train.activation_offloading is not True:
        return []
    if not inputs.can_offload_activations:
        return ["train.activation_offloading=true does nothing here: it is for backend bnb on GPUs"]
    needed = activations.offloaded_bytes(inputs.step, layout)
    remedy = "set a smaller MODEL_MAX_SEQ_LEN"
    return _without_room("train.activation_offloading", needed, inputs, remedy)


def _without_room(setting: str, needed: int, inputs: PlanInputs, remedy: str) -> list[str]:
    """Say that a setting needs more host memory than there is, and what to do; else nothing."""
    if needed <= inputs.host_budget_bytes:
        return []
    return [
        f"{setting}=true needs {needed / memory.GIB:.1f} GiB of host memory for each process, "
        f"and {inputs.host_budget_bytes / memory.GIB:.1f} GiB are there; {remedy}"
    ]
