"""How the processes of a run share the work: train.strategy, the make target, model.device_map.

Loads no torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from operator import attrgetter
from pathlib import Path

from sft_play.config import deepspeed
from sft_play.config.backends import backend_of
from sft_play.config.invocation import Invocation
from sft_play.config.loader import PROJECT_ROOT, LoadedConfig
from sft_play.config.schedules import MATRIX_OPTIMIZERS
from sft_play.config.schema import Config
from sft_play.config.sections.model import ModuleDevices
from sft_play.errors import ConfigError
from sft_play.plan.devices import Hardware
from sft_play.plan.ranks import Ranks, Strategy, visible_entries

# The JSON for a stage if the user names none
ZERO_CONFIGS = {
    f"zero{stage}": PROJECT_ROOT / "configs" / f"deepspeed_zero{stage}.json" for stage in (1, 2, 3)
}
UNSHARDED = (
    "tuning.lora.use_dora",
    "tuning.lora.modules_to_save",
    "tuning.lora.trainable_tokens",
    "model.add_tokens",
)
# The optimizers whose step torch can shard across ranks; bitsandbytes' kernels need full tensors
DIVISIBLE_OPTIMIZERS = ("adamw_torch", "adamw_torch_fused", "sgd")


@dataclass(frozen=True)
class ChosenStrategy:
    """A strategy, with DeepSpeed's JSON if it is ZeRO."""

    strategy: Strategy
    deepspeed_path: Path | None = None

    @cached_property
    def deepspeed_json(self) -> deepspeed.DeepSpeedJson:
        """The settings in the JSON, {} without one."""
        path = self.deepspeed_path
        return deepspeed.read_deepspeed_json(path) if path else {}


@dataclass(frozen=True)
class AskedStrategy:
    """The strategy that a config and a make target request."""

    name: str  # of train.strategy
    described: str  # with its value and origin
    uses_deepspeed: bool
    deepspeed_path: Path | None  # the user's JSON

    @property
    def is_shared(self) -> bool:
        """Whether it needs several processes, and therefore uses all GPUs by default."""
        return self.name not in ("auto", "ddp")


def asked_strategy(
    loaded: LoadedConfig, invocation: Invocation, use_deepspeed: bool
) -> AskedStrategy:
    """Return the requested strategy; `use_deepspeed` is True for make train-deepspeed.

    Raises: ConfigError if train.strategy contradicts the target or the user's DeepSpeed JSON.
    """
    name = loaded.config.train.strategy
    described = loaded.described("train.strategy")
    is_zero = name in ZERO_CONFIGS
    if loaded.config.train.fsdp_offload:
        offload = loaded.described("train.fsdp_offload")
        if use_deepspeed or name not in ("auto", "fsdp"):
            asked = "make train-deepspeed" if use_deepspeed else described
            raise ConfigError(
                f"{offload}: it is FSDP's, and {asked} asks for another strategy; set "
                "TRAIN_STRATEGY=fsdp and use make train-distributed, or name offload_param in a "
                "DeepSpeed JSON of ZeRO-3"
            )
        return AskedStrategy("fsdp", offload if name == "auto" else described, False, None)
    if use_deepspeed and not is_zero and name != "auto":
        raise ConfigError(
            f"{described}: make train-deepspeed trains with ZeRO; use make train-distributed for "
            f"{name}, or set TRAIN_STRATEGY=zero3"
        )
    path = None
    if (use_deepspeed or is_zero) and invocation.deepspeed_config:
        path = Path(invocation.deepspeed_config)
        stage = deepspeed.zero_stage(deepspeed.read_deepspeed_json(path))
        if is_zero and name != f"zero{stage}":
            raise ConfigError(
                f"{described}: zero_optimization.stage={stage} in DEEPSPEED_CONFIG={path}; set "
                f"TRAIN_STRATEGY={f'zero{stage}' if stage else 'auto'}, or name another JSON"
            )
    return AskedStrategy(name, described, use_deepspeed or is_zero, path)


def why_not_fsdp(config: Config, is_float16: bool = False) -> str | None:
    """Return why a config cannot run under FSDP and which strategy can, None if it can."""
    backend = backend_of(config)
    if not backend.runs_under_fsdp:
        return (
            f"tuning.backend={backend.name} does not run under FSDP; set TRAIN_STRATEGY=ddp, or "
            "TUNING_BACKEND=bnb"
        )
    if config.tuning.encoders == "full":
        return (
            "tuning.encoders=full: FSDP does not shard encoders, and trains what it shards; set "
            "TRAIN_STRATEGY=ddp, or TUNING_ENCODERS=frozen"
        )
    if config.tuning.mode == "full":
        if is_float16 or config.train.fp16 is True:
            return (
                "float16 scales the loss, which nobody has tried with weights that FSDP divides; "
                "set TRAIN_STRATEGY=zero2, or TRAIN_BF16=true on GPUs that have it"
            )
        if config.train.optim not in DIVISIBLE_OPTIMIZERS:
            other = "ddp" if config.train.optim in MATRIX_OPTIMIZERS else "zero2"
            return (
                f"train.optim={config.train.optim} steps complete weights, which FSDP shards in "
                f"tuning.mode=full; set TRAIN_OPTIM=adamw_torch_fused, or TRAIN_STRATEGY={other}"
            )
        return None
    for name in unsharded(config):
        return (
            f"{name}: PEFT reads complete weights for it, which FSDP shards; set "
            "TRAIN_STRATEGY=ddp or zero2, or delete the setting"
        )
    return None


def unsharded(config: Config) -> list[str]:
    """Return the adapter settings for which PEFT reads full weights."""
    return [name for name in UNSHARDED if attrgetter(name)(config)]


def refuse_shared(asked: AskedStrategy, config: Config, ranks: Ranks, is_float16: bool) -> None:
    """Raise ConfigError if ranks cannot share a model by the requested strategy."""
    why_not = why_not_ep if asked.name == "ep" else why_not_fsdp
    reason = why_not(config, is_float16)
    if ranks.world_size == 1:
        offload = "" if asked.name == "ep" else " and TRAIN_FSDP_OFFLOAD=false"
        reason = (
            "processes share the model, and this run has one; set NUM_GPUS=2 or more (without "
            f"a GPU DEVICE=cpu too), or TRAIN_STRATEGY=auto{offload}"
        )
    if reason:
        raise ConfigError(f"{asked.described}: {reason}")


def why_not_ep(config: Config, is_float16: bool = False) -> str | None:
    """Return why ranks cannot share the experts of a config's model, and what can; else None."""
    backend = backend_of(config)
    train = config.train
    if not backend.runs_under_fsdp:
        return (
            f"tuning.backend={backend.name} does not run under it; set TRAIN_STRATEGY=ddp, or "
            "TUNING_BACKEND=bnb"
        )
    if config.tuning.mode == "full":
        return "tuning.mode=full trains the experts themselves; set TRAIN_STRATEGY=fsdp"
    if config.tuning.has_float8_base:
        return (
            "tuning.base_dtype=float8 is read completely; set TUNING_BASE_DTYPE=auto, or "
            "TRAIN_STRATEGY=fsdp"
        )
    if is_float16 or train.fp16 is True:
        return (
            "the loss scaler of float16 judges a step by one rank's gradients; set "
            "TRAIN_STRATEGY=ddp, or TRAIN_BF16=true on GPUs that have it"
        )
    if train.optim not in DIVISIBLE_OPTIMIZERS:
        return (
            f"train.optim={train.optim} was only verified if each rank has all experts; set "
            "TRAIN_OPTIM=adamw_torch_fused, or TRAIN_STRATEGY=ddp"
        )
    if train.context_parallel not in (1, "auto"):
        return (
            f"train.context_parallel={train.context_parallel}: ranks that share experts share no "
            "rows; set TRAIN_CONTEXT_PARALLEL=1, or TRAIN_STRATEGY=ddp"
        )
    return None


def refuse_remainder(experts: int, ranks: int) -> None:
    """Raise ConfigError unless ranks get an equal number of a layer's experts, two or more each."""
    if not experts:
        raise ConfigError(
            "train.strategy=ep: the model has no experts in a form that ranks can share; set "
            "TRAIN_STRATEGY=ddp or fsdp"
        )
    fitting = [number for number in range(2, experts // 2 + 1) if experts % number == 0]
    if ranks not in fitting:
        numbers = f"NUM_GPUS to one of {', '.join(map(str, fitting))}, or " if fitting else ""
        raise ConfigError(
            f"train.strategy=ep: {ranks} ranks cannot share {experts} experts equally, two or more "
            f"each; set {numbers}TRAIN_STRATEGY=fsdp"
        )


MAP_NAME = "model.device_map"


def apply_device_map(
    loaded: LoadedConfig,
    asked: AskedStrategy,
    ranks: Ranks,
    invocation: Invocation,
    hardware: Hardware,
    environ: Mapping[str, str],
) -> Ranks:
    """Return the ranks of a run: one process with all GPUs if model.device_map requests it.

    NUM_GPUS=1 means one GPU, also under a device map.
    Raises: ConfigError for a map that is not possible in this run.
    """
    wanted = loaded.config.model.device_map
    if wanted is None:
        return ranks
    _refuse_map(loaded, asked, ranks)
    gpus = 1
    if ranks.world_size == 1 and hardware.kind == "cuda" and invocation.num_gpus is None:
        gpus = hardware.count
    if isinstance(wanted, dict):
        _refuse_devices(loaded, wanted, hardware, gpus)
    if gpus == 1:
        return ranks
    if loaded.config.train.fast_path is True:
        raise ConfigError(
            f"{loaded.described('train.fast_path')}: {MAP_NAME} places one model on {gpus} GPUs, "
            "and only its original implementation runs there. Type TRAIN_FAST_PATH=auto, or "
            "MODEL_DEVICE_MAP=null TRAIN_STRATEGY=fsdp to use all GPUs at once."
        )
    visible = visible_entries(environ.get("CUDA_VISIBLE_DEVICES"), gpus)
    return replace(ranks, gpus_per_process=gpus, visible=visible)


def _refuse_map(loaded: LoadedConfig, asked: AskedStrategy, ranks: Ranks) -> None:
    described = loaded.described(MAP_NAME)
    backend = backend_of(loaded.config)
    if not backend.takes_device_map:
        raise ConfigError(
            f"{described}: {backend.title} trains on one GPU in each process; set "
            "TUNING_BACKEND=bnb, or MODEL_DEVICE_MAP=null"
        )
    if asked.uses_deepspeed:
        raise ConfigError(
            f"{described}: DeepSpeed divides the model itself; use make train for one model over "
            "the GPUs of one process, or set MODEL_DEVICE_MAP=null"
        )
    if asked.name in ("fsdp", "ep"):
        raise ConfigError(
            f"{described}: {asked.described} divides the model itself, and all GPUs compute at "
            "once; set MODEL_DEVICE_MAP=null, or TRAIN_STRATEGY=auto and use make train"
        )
    if isinstance(loaded.config.model.device_map, dict) and ranks.world_size > 1:
        raise ConfigError(
            f"{described}: it places the modules of one process, and this run has "
            f"{ranks.world_size}; use make train without NUM_GPUS, or set MODEL_DEVICE_MAP=auto "
            "for a full copy in each process"
        )


def _refuse_devices(
    loaded: LoadedConfig, devices: ModuleDevices, hardware: Hardware, gpus: int
) -> None:
    is_cuda = hardware.kind == "cuda"
    for name, device in devices.items():
        module = f"{loaded.described(MAP_NAME)}: {name or 'the whole model'}"
        if device == "cpu":
            if is_cuda:
                raise ConfigError(
                    f"{module} is placed on the CPU, but only modules on GPUs are trained; write "
                    f"GPU numbers below {gpus}, or set TRAIN_STRATEGY=fsdp"
                )
        elif not is_cuda:
            raise ConfigError(
                f"{module} is put on GPU {device}, and this run computes on the CPU; write cpu, or "
                "MODEL_DEVICE_MAP=null"
            )
        elif device >= gpus:
            raise ConfigError(
                f"{module} is put on GPU {device}, and this run sees {gpus}; write numbers below "
                f"{gpus}, see make gpu-info (NUM_GPUS and CUDA_VISIBLE_DEVICES hide others)"
            )
