"""What model.device_map means for the processes of a run, or why it cannot be. Loads no torch."""

from collections.abc import Mapping
from dataclasses import replace

from sft_play.config.backends import backend_of
from sft_play.config.invocation import Invocation
from sft_play.config.loader import LoadedConfig
from sft_play.config.sections.model import MapRule, ModuleDevices
from sft_play.errors import ConfigError
from sft_play.plan.devices import Hardware
from sft_play.plan.ranks import Ranks, visible_entries
from sft_play.plan.strategy import AskedStrategy

NAME = "model.device_map"


def gpus_of_one_process(
    loaded: LoadedConfig,
    asked: AskedStrategy,
    ranks: Ranks,
    invocation: Invocation,
    hardware: Hardware,
    environ: Mapping[str, str],
) -> Ranks:
    """Return the ranks of a run, where model.device_map asks for it with all GPUs for one process.

    NUM_GPUS=1 is one GPU, also under a device map.
    Raises: ConfigError where the map cannot be.
    """
    wanted = loaded.config.model.device_map
    if wanted is None:
        return ranks
    _refuse(loaded, asked, ranks)
    gpus = 1
    if ranks.world_size == 1 and hardware.kind == "cuda" and invocation.num_gpus is None:
        gpus = hardware.count
    if isinstance(wanted, dict):
        _refuse_devices(loaded, wanted, hardware, gpus)
    if gpus == 1:
        return ranks
    visible = visible_entries(environ.get("CUDA_VISIBLE_DEVICES"), gpus)
    return replace(ranks, gpus_per_process=gpus, visible=visible)


def _refuse(loaded: LoadedConfig, asked: AskedStrategy, ranks: Ranks) -> None:
    described = loaded.described(NAME)
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
    if asked.name == "fsdp":
        raise ConfigError(
            f"{described}: {asked.described} divides the model itself, and all GPUs compute at "
            "once; set MODEL_DEVICE_MAP=null, or TRAIN_STRATEGY=auto and use make train"
        )
    if isinstance(loaded.config.model.device_map, dict) and ranks.world_size > 1:
        raise ConfigError(
            f"{described}: it places the modules of one process, and this run has "
            f"{ranks.world_size}; use make train without NUM_GPUS, or set MODEL_DEVICE_MAP=auto "
            "for a whole copy in each process"
        )


def _refuse_devices(
    loaded: LoadedConfig, devices: ModuleDevices, hardware: Hardware, gpus: int
) -> None:
    described = loaded.described(NAME)
    is_cuda = hardware.kind == "cuda"
    for name, device in devices.items():
        if device == "cpu" and is_cuda:
            raise ConfigError(
                f"{described}: {name or 'the whole model'} would wait on the CPU, where nothing is "
                f"trained beside GPUs; write GPU numbers below {gpus}, or TRAIN_STRATEGY=fsdp"
            )
        if device != "cpu" and not is_cuda:
            raise ConfigError(
                f"{described}: {name or 'the whole model'} is put on GPU {device}, and this run "
                "computes on the CPU; write cpu, or MODEL_DEVICE_MAP=null"
            )
        if device != "cpu" and device >= gpus:
            raise ConfigError(
                f"{described}: {name or 'the whole model'} is put on GPU {device}, and this run "
                f"sees {gpus}; write numbers below {gpus}, see make gpu-info (NUM_GPUS and "
                "CUDA_VISIBLE_DEVICES hide others)"
            )


def resolved(value: MapRule | ModuleDevices | None, ranks: Ranks) -> MapRule | ModuleDevices | None:
    """Return the map that the run folder names: null where each process has one device."""
    if isinstance(value, dict):
        return value
    if ranks.gpus_per_process == 1:
        return None
    return "balanced" if value == "auto" else value


def sentences(loaded: LoadedConfig, ranks: Ranks, layers_by_gpu: tuple[int, ...]) -> list[str]:
    """Return which mode is in force under a device map, [] without one."""
    wanted = loaded.config.model.device_map
    if wanted is None:
        return []
    described = loaded.described(NAME)
    if ranks.world_size > 1:
        holding = "each rank holds a whole copy"
        if ranks.strategy == "fsdp":  # where a copy does not fit
            holding = "they divide its weights among them"
        return [
            f"{described} is for one process, and this run has {ranks.world_size}: {holding} "
            f"({ranks.strategy}); make train without NUM_GPUS places one model on all GPUs"
        ]
    if ranks.gpus_per_process == 1:
        device = "the CPU" if ranks.device == "cpu" else "one GPU"
        return [f"{described}: {device} holds the whole model; MODEL_DEVICE_MAP=null says so"]
    split = " + ".join(map(str, layers_by_gpu))
    return [
        f"{described}: one process places the model on {ranks.gpus_per_process} GPUs ({split} "
        "layers), which compute one after the other: more memory, and the speed of one GPU; "
        f"TRAIN_STRATEGY=fsdp NUM_GPUS={ranks.gpus_per_process} computes on all at once"
    ]
