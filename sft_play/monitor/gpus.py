"""`make gpu-info`: this host's GPUs as lines of text. Asks NVML, never torch."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from sft_play.config.backends import UNSLOTH
from sft_play.monitor.installed import nccl, torch_build
from sft_play.monitor.links import link_lines, links, matrix_lines, slots
from sft_play.plan.devices import (
    GIB,
    Gpu,
    NvmlUnavailable,
    cpu_count,
    host_memory,
    nvml_gpus,
    nvml_session,
)

NF4_CAPABILITY = (6, 0)  # the least that bitsandbytes' documentation asks for


@dataclass(frozen=True)
class Driver:
    """The NVIDIA driver."""

    version: str
    cuda: tuple[int, int]  # the newest that it runs, as (13, 0)


def gpu_info_lines(environ: Mapping[str, str]) -> list[str]:
    """Return what this host trains with, one fact a line; the first is `Number of GPUs: N`."""
    gpus, reason = nvml_gpus(environ)
    host = host_memory()
    return [
        f"Number of GPUs: {len(gpus)}",
        *([f"no GPU: {reason}"] if reason else []),
        *map(_gpu_line, gpus),
        *_order_lines(gpus, environ),
        *_driver_lines(),
        *_link_lines(gpus),
        f"CPU: {cpu_count()} cores, {gib(host.available_bytes)} of {gib(host.total_bytes)} GiB RAM "
        "available",
        _torch_line(),
        _precision_line(gpus),
        *_backend_lines(gpus),
    ]


def nvidia_driver() -> Driver | None:
    """Return the NVIDIA driver that answers on this host, or None."""
    try:
        with nvml_session() as nvml:
            cuda = nvml.nvmlSystemGetCudaDriverVersion()  # 13000 is 13.0
            return Driver(nvml.nvmlSystemGetDriverVersion(), (cuda // 1000, cuda % 1000 // 10))
    except NvmlUnavailable:
        return None


def gib(size_bytes: int) -> str:
    """Return bytes as GiB with one decimal."""
    return f"{size_bytes / GIB:.1f}"


def dotted(version: tuple[int, int]) -> str:
    """Return (13, 0) as 13.0."""
    return f"{version[0]}.{version[1]}"


def _gpu_line(gpu: Gpu) -> str:
    return (
        f"cuda:{gpu.index} {gpu.name}: {gib(gpu.free_bytes)} of {gib(gpu.total_bytes)} GiB free, "
        f"capability {dotted(gpu.capability)}, bf16 {'yes' if gpu.supports_bf16 else 'no'}"
    )


def _order_lines(gpus: tuple[Gpu, ...], environ: Mapping[str, str]) -> Iterator[str]:
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        yield f"CUDA_VISIBLE_DEVICES={visible} is set: cuda:0 is the first GPU that it names"
    if len({gpu.name for gpu in gpus}) > 1 and environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        yield (
            "GPUs of several models: CUDA counts the fastest first, this list goes by PCI address; "
            "set CUDA_DEVICE_ORDER=PCI_BUS_ID"
        )


def _driver_lines() -> list[str]:
    driver = nvidia_driver()
    return [f"driver: {driver.version}, runs CUDA up to {dotted(driver.cuda)}"] if driver else []


def _link_lines(gpus: tuple[Gpu, ...]) -> list[str]:
    if not gpus:
        return []
    found = links(gpus)
    return [*link_lines(found), *matrix_lines(gpus, found, slots(gpus))]


def _torch_line() -> str:
    build = torch_build()
    if build is None:
        return "torch: not installed; run `make install`"
    line = f"torch: {build.version}, {build.kind}"
    return f"{line}, NCCL {nccl() or 'of its own'}" if build.cuda else line


def _precision_line(gpus: tuple[Gpu, ...]) -> str:
    if not gpus:
        return (
            "precision: float32, and bfloat16 where TRAIN_BF16=true asks for it; "
            "NF4 weights under qlora"
        )
    types = "float16, float32"
    if all(gpu.supports_bf16 for gpu in gpus):
        types = f"bfloat16, {types}"
    nf4 = "NF4 weights under qlora"
    if _lowest_capability(gpus) < NF4_CAPABILITY:
        nf4 = f"no NF4, which needs capability {dotted(NF4_CAPABILITY)}"
    return f"precision: {types}; {nf4}"


def _backend_lines(gpus: tuple[Gpu, ...]) -> list[str]:
    if not gpus:
        return [
            "bnb backend on the CPU: lora, qlora, full in float32",
            "unsloth backend: not here, it needs an NVIDIA GPU",
        ]
    half = "bfloat16" if all(gpu.supports_bf16 for gpu in gpus) else "float16"
    lowest = _lowest_capability(gpus)
    unsloth = (
        "unsloth backend on the GPU: lora, qlora, full; `make doctor` says whether it is installed"
    )
    if lowest < UNSLOTH.min_capability:
        unsloth = (
            "unsloth backend: not here, it needs capability "
            f"{dotted(UNSLOTH.min_capability)} and finds {dotted(lowest)}"
        )
    return [f"bnb backend on the GPU: lora, qlora, full in {half}", unsloth]


def _lowest_capability(gpus: tuple[Gpu, ...]) -> tuple[int, int]:
    return min(gpu.capability for gpu in gpus)
