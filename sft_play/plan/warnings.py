"""A plan's warnings, and why it does not fit. Loads no torch."""

import importlib.util
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

from sft_kernels.needs import MISSING, why_no_kernels
from sft_play.config.invocation import FORCE_SINGLE, Words
from sft_play.config.loader import LoadedConfig
from sft_play.config.rules import without_effect_on_strategy
from sft_play.config.schema import Config
from sft_play.plan import memory, recipe
from sft_play.plan.candidates import with_layers_on_host
from sft_play.plan.config_json import load_positions
from sft_play.plan.devices import Hardware
from sft_play.plan.inputs import Draft
from sft_play.plan.memory import GIB
from sft_play.plan.model_shape import ModelShape
from sft_play.plan.needs import gpus_here, version_of
from sft_play.plan.ranks import Ranks
from sft_play.plan.step import Layout, StepSpec
from sft_play.plan.strategy import MAP_NAME, why_not_fsdp

TOY_PARAMETERS = 3e8  # a smaller model trains in minutes at any speed
WORTH_A_WORD = 1.05  # times as fast: a smaller gain is not reported
# Switches that are on, and their cost on a GPU
SLOW = {
    "CUDA_LAUNCH_BLOCKING": "the CPU waits for every kernel, which makes training several times "
    "slower; it is for finding the kernel that fails",
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "every tensor is allocated again, which makes training "
    "several times slower",
    "NCCL_P2P_DISABLE": "GPUs reach each other through the host's memory, which makes collectives "
    "several times slower",
    "NCCL_IB_DISABLE": "machines talk over TCP and not over InfiniBand",
}
OF_NCCL = ("NCCL_DEBUG", "NCCL_SOCKET_IFNAME", *(name for name in SLOW if "NCCL" in name))


def shortage(draft: Draft) -> str | None:
    """Return why a draft is not expected to fit, None if it is expected to fit."""
    if draft.fits:
        return None
    request, layout, machine = draft.request, draft.layout, draft.inputs.machine
    needed = f"{draft.peak_bytes / GIB:.2f} GiB"
    budget = f"{machine.budget_bytes / GIB:.2f} GiB"
    if request.batch_size != "auto":
        return (
            f"train.batch_size={layout.batch_size} is estimated to need {needed} and {budget} "
            "are there"
        )
    device = "a GPU" if machine.is_gpu else "this host for each process"
    rows = "1 row"
    if layout.batch_size > 1:
        called_for = f"train.grad_accum={request.grad_accum} calls for"
        rows = f"{layout.batch_size} rows, which {called_for},"
    recomputed = " with checkpointing" if layout.checkpointed_layers else ""
    return (
        f"train.batch_size=auto: even {rows} of {request.row.max_seq_len} tokens{recomputed} needs "
        f"{needed}, {device} has {budget} to give"
    )


def warnings_of(
    loaded: LoadedConfig, draft: Draft, hardware: Hardware, environ: Mapping[str, str]
) -> list[str]:
    """Return all warnings of a plan except those about its precision."""
    config, ranks, step = loaded.config, draft.inputs.machine.ranks, draft.step
    return [
        *_model_warnings(loaded, step),
        *_position_warnings(loaded, environ),
        *_batch_warnings(loaded, draft.layout),
        *recipe.foreign_recipe(loaded),
        *without_effect_on_strategy(config, loaded.is_set, loaded.described),
        *_map_warnings(loaded, ranks, step.layers_by_gpu),
        *recurrent_warnings(step.model, hardware),
        *_faster_than_zero3(draft),
        *_offloading_warnings(draft),
        *_host_warnings(draft),
        *switch_warnings(config, ranks, environ),
    ]


def _model_warnings(loaded: LoadedConfig, step: StepSpec) -> list[str]:
    """Warn if weights and bytes are a guess."""
    name = loaded.described("model.name")
    warnings = []
    if step.model.guess is not None:
        warnings.append(
            f"{name}: its weights could not be counted ({step.model.guess}); the plan takes it for "
            "a Llama of the sizes in its config.json, which may be far off"
        )
    if step.untraced is not None:
        warnings.append(
            f"{name}: a step of it could not be traced ({step.untraced}); the memory is a guess, "
            "and train.probe measures it before the first step on a GPU"
        )
    return warnings


def _position_warnings(loaded: LoadedConfig, environ: Mapping[str, str]) -> list[str]:
    """Warn if rows are longer than the sequences that the model supports."""
    model = loaded.config.model
    if loaded.origin["model.max_seq_len"].startswith(recipe.CHOSEN):  # within them if it looked
        return []
    positions = load_positions(model, environ, may_fetch=False)
    if positions is None or model.max_seq_len <= positions:
        return []
    rope = model.rope_scaling
    own = load_positions(model.changed({"rope_scaling.rope_type": None}), environ, may_fetch=False)
    factor = math.ceil(model.max_seq_len / own)
    reach = f"the {own} tokens of the model's config.json"
    if rope.rope_type:
        reach = f"the {positions} tokens that {rope.rope_type} with factor {rope.factor:g} reaches"
    return [
        f"{loaded.described('model.max_seq_len')} is more than {reach}: what the model knows of "
        "positions does not reach further, and tokens after them train badly; stretch its rope "
        f"with MODEL_ROPE_SCALING_ROPE_TYPE={rope.rope_type or 'yarn'} "
        f"MODEL_ROPE_SCALING_FACTOR={factor}, or set MODEL_MAX_SEQ_LEN={positions}"
    ]


def _batch_warnings(loaded: LoadedConfig, layout: Layout) -> list[str]:
    """Warn if the step does not have the effective batch of the config."""
    train = loaded.config.train
    rows = layout.rows_per_step
    if rows == train.effective_batch_size or "auto" not in (train.batch_size, train.grad_accum):
        return []
    return [
        f"{loaded.described('train.effective_batch_size')} becomes {rows}: train.batch_size="
        f"{layout.batch_size} x world={layout.replicas} x train.grad_accum={layout.grad_accum}; "
        f"TRAIN_EFFECTIVE_BATCH_SIZE={rows} says so"
    ]


def _map_warnings(loaded: LoadedConfig, ranks: Ranks, layers_by_gpu: tuple[int, ...]) -> list[str]:
    """Return the mode that is used under a device map, [] without one."""
    wanted = loaded.config.model.device_map
    if wanted is None:
        return []
    described = loaded.described(MAP_NAME)
    if ranks.world_size > 1:
        holding = "each rank has a full copy"
        if ranks.strategy == "fsdp":  # if a copy does not fit
            holding = "they divide its weights among them"
        return [
            f"{described} is for one process, and this run has {ranks.world_size}: {holding} "
            f"({ranks.strategy}); make train without NUM_GPUS places one model on all GPUs"
        ]
    if ranks.gpus_per_process == 1:
        device = "the CPU" if ranks.device == "cpu" else "one GPU"
        return [f"{described}: {device} has room for the full model; set MODEL_DEVICE_MAP=null"]
    split = " + ".join(map(str, layers_by_gpu))
    return [
        f"{described}: one process places the model on {ranks.gpus_per_process} GPUs ({split} "
        "layers), which compute one after the other, by the model's original implementation "
        "(no fused kernels). MODEL_DEVICE_MAP=null TRAIN_STRATEGY=fsdp "
        f"NUM_GPUS={ranks.gpus_per_process} uses all GPUs at once and is faster."
    ]


def recurrent_warnings(model: ModelShape, hardware: Hardware) -> list[str]:
    """Return the warnings about recurrent layers on the GPUs of this machine."""
    layers = model.counts.recurrent_layers
    if not layers or not (here := gpus_here(hardware)):
        return []
    reason = MISSING
    if importlib.util.find_spec("fla") is not None:
        reason = why_no_kernels(here[0].capability, version_of("triton"))
    if reason is None:
        return []
    return [
        f"{layers} of {model.layers} layers are recurrent, and {reason}: transformers computes "
        "them in plain torch, several times slower and in more memory than is planned"
    ]


def _faster_than_zero3(draft: Draft) -> list[str]:
    """Return a sentence if the planner expects FSDP to train the same step faster than ZeRO-3.

    Only if host memory was not requested and the step also fits under FSDP.
    """
    step, machine = draft.step, draft.inputs.machine
    offloads = step.offload or step.offload_weights
    is_float16 = machine.precision == "fp16"
    if step.zero_stage != 3 or offloads or why_not_fsdp(draft.inputs.config, is_float16):
        return []
    fsdp_step = replace(step, zero_stage=0, is_fsdp=True)
    fsdp = replace(draft, step=fsdp_step, peak_bytes=memory.peak_bytes(fsdp_step, draft.layout))
    zero_speed, fsdp_speed = draft.tokens_per_second(), fsdp.tokens_per_second()
    if not fsdp.fits or zero_speed is None or fsdp_speed < WORTH_A_WORD * zero_speed:
        return []
    return [
        f"train.strategy=zero3: FSDP is expected to train {fsdp_speed / zero_speed:.2f} times as "
        "fast; try make train-distributed TRAIN_STRATEGY=fsdp"
    ]


def _host_warnings(draft: Draft) -> list[str]:
    """Return a sentence if the micro-batches that the user set are too small for the GPU."""
    layout, request = draft.layout, draft.request
    share = request.host_tokens / layout.mean_tokens
    is_large = request.batch_size == "auto" or layout.micro_batches == 1 or share < WORTH_A_WORD
    if is_large or draft.step.model.parameters < TOY_PARAMETERS:
        return []
    return [
        f"train.batch_size={layout.batch_size}: the CPU takes about {share:.1f} times as long to "
        "launch a micro-batch as the GPU to compute it; for larger ones set TRAIN_BATCH_SIZE=auto "
        f"TRAIN_GRAD_ACCUM=auto TRAIN_EFFECTIVE_BATCH_SIZE={layout.rows_per_step}"
    ]


def _offloading_warnings(draft: Draft) -> list[str]:
    """Return notes on offloaded weights and activations."""
    remedies = {
        "train.fsdp_offload": "set TUNING_MODE=qlora, or use more machines",
        "train.weight_offloading": "set TUNING_MODE=qlora, or use a larger host",
        "train.activation_offloading": "set a smaller MODEL_MAX_SEQ_LEN",
    }
    host_budget = draft.inputs.machine.host_budget_bytes
    warnings = []
    for setting, needed in draft.host_bytes.items():
        if needed > host_budget:
            warnings.append(
                f"{setting}=true needs {needed / GIB:.1f} GiB of host memory for each process, "
                f"and {host_budget / GIB:.1f} GiB are there; {remedies[setting]}"
            )
    if not draft.fits and draft.inputs.may_offload_weights:
        on_host = with_layers_on_host(draft, draft.step.model.layers)
        if on_host.fits:  # but this host does not have enough memory
            needed = memory.offloaded_weight_bytes(on_host.step) / GIB
            warnings.append(
                f"train.weight_offloading=auto: with {needed:.0f} GiB of free host memory it would "
                "fit; use a larger host"
            )
    wants_offloading = draft.inputs.config.train.activation_offloading is True
    if wants_offloading and not draft.inputs.can_offload_activations:
        warnings.append(
            "train.activation_offloading=true does nothing here: it is for backend bnb on GPUs"
        )
    return warnings


def switch_warnings(config: Config, ranks: Ranks, environ: Mapping[str, str]) -> list[str]:
    """Return a sentence for each variable that slows this run, or that it does not read."""
    found = list(slow_switches(environ)) if ranks.device == "cuda" else []
    for name in sorted(environ):
        reason = _unread_because(name, config, ranks) if environ[name].strip() else None
        if reason:
            found.append(f"{name}={environ[name]} has no effect: {reason}")
    return found


def slow_switches(environ: Mapping[str, str]) -> Iterator[str]:
    """Yield a sentence for each variable that slows training on GPUs."""
    words = Words(environ)
    for name, effect in SLOW.items():
        if words.is_on(name):
            yield f"{name}={environ[name]}: {effect}"
    if environ.get("TORCH_DISTRIBUTED_DEBUG", "").upper() == "DETAIL":
        yield "TORCH_DISTRIBUTED_DEBUG=DETAIL: every collective is checked by another one"


def _unread_because(name: str, config: Config, ranks: Ranks) -> str | None:
    """Return why a run does not read a variable, None if it may."""
    backend = config.tuning.backend
    if name.startswith("UNSLOTH_") and name != FORCE_SINGLE and backend != "unsloth":
        return f"tuning.backend={backend}, and TUNING_BACKEND=unsloth reads it"
    if name == "DEEPSPEED_CONFIG" and ranks.strategy != "deepspeed":
        return "this run does without DeepSpeed; make train-deepspeed reads it"
    if name == "NCCL_TIMEOUT" and config.train.ddp_timeout is not None:
        return "train.ddp_timeout is set; no library reads this name"
    if name in OF_NCCL and ranks.device == "cpu" and ranks.strategy != "single":
        return "processes on a CPU talk over gloo, which reads GLOO_SOCKET_IFNAME"
    return None
