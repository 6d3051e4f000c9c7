"""What a person reads about this host's GPUs: `make gpu-info` as lines of text.

Asks NVML, never torch; loads and prints nothing at import.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

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

UNSLOTH_CAPABILITY = (7, 0)  # the least that Unsloth's documentation asks for
NF4_CAPABILITY = (6, 0)  # the least that bitsandbytes' documentation asks for


@dataclass(frozen=True)
class Driver:
    """The NVIDIA driver; `cuda` is the newest CUDA that it runs, as (13, 0)."""

    version: str
    cuda: tuple[int, int]


def gpu_info_lines(environ: Mapping[str, str]) -> list[str]:
    """Return what this host trains with, one fact a line; the first is always `Number of GPUs: N`."""
    gpus, reason = nvml_gpus(environ)
    host = host_memory()
    return [
        f"Number of GPUs: {len(gpus)}",
        *([f"no GPU: {reason}"] if reason else []),
        *map(_gpu_line, gpus),
        *_order_lines(gpus, environ),
        *_driver_lines(),
        *_link_lines(gpus),
        f"CPU: {cpu_count()} cores, {gib(host.available_bytes)} of {gib(host.total_bytes)} GiB RAM available",
        _torch_line(),
        _precision_line(gpus),
        *_backend_lines(gpus),
    ]


def driver() -> Driver | None:
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


def _gpu_line(gpu: Gpu) -> str:
    memory = f"{gib(gpu.free_bytes)} of {gib(gpu.total_bytes)} GiB free"
    return f"cuda:{gpu.index} {gpu.name}: {memory}, capability {_dotted(gpu.capability)}, bf16 {'yes' if gpu.supports_bf16 else 'no'}"


def _order_lines(gpus: tuple[Gpu, ...], environ: Mapping[str, str]) -> Iterator[str]:
    if "CUDA_VISIBLE_DEVICES" in environ:
        yield f"CUDA_VISIBLE_DEVICES={environ['CUDA_VISIBLE_DEVICES']} is set: cuda:0 is the first GPU that it names"
    if len({gpu.name for gpu in gpus}) > 1 and environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        yield "GPUs of several models: CUDA counts the fastest first, this list goes by PCI address; set CUDA_DEVICE_ORDER=PCI_BUS_ID"


def _driver_lines() -> list[str]:
    found = driver()
    return [f"driver: {found.version}, runs CUDA up to {_dotted(found.cuda)}"] if found else []


def _link_lines(gpus: tuple[Gpu, ...]) -> list[str]:
    if not gpus:
        return []
    found = links(gpus)
    return [*(link_lines(found)), *matrix_lines(gpus, found, slots(gpus))]


def _torch_line() -> str:
    build = torch_build()
    if build is None:
        return "torch: not installed; run `make install`"
    kind = (
        f"built for CUDA {_dotted(build.cuda)}, NCCL {nccl() or 'of its own'}"
        if build.cuda
        else "a CPU build"
    )
    return f"torch: {build.version}, {kind}"


def _precision_line(gpus: tuple[Gpu, ...]) -> str:
    if not gpus:
        return "precision: float32, and bfloat16 where TRAIN_BF16=true asks for it; NF4 weights under qlora"
    computes = ["bfloat16"] * all(gpu.supports_bf16 for gpu in gpus) + ["float16", "float32"]
    nf4 = (
        "NF4 weights under qlora"
        if min(gpu.capability for gpu in gpus) >= NF4_CAPABILITY
        else f"no NF4, which needs capability {_dotted(NF4_CAPABILITY)}"
    )
    return f"precision: {', '.join(computes)}; {nf4}"


def _backend_lines(gpus: tuple[Gpu, ...]) -> list[str]:
    on_cpu = "bnb backend on the CPU: lora, qlora, full in float32"
    if not gpus:
        return [on_cpu, "unsloth backend: not here, it needs an NVIDIA GPU"]
    on_gpu = f"bnb backend on the GPU: lora, qlora, full in {'bfloat16' if all(gpu.supports_bf16 for gpu in gpus) else 'float16'}"
    slowest = min(gpu.capability for gpu in gpus)
    if slowest < UNSLOTH_CAPABILITY:
        return [
            on_gpu,
            f"unsloth backend: not here, it needs capability {_dotted(UNSLOTH_CAPABILITY)} and finds {_dotted(slowest)}",
        ]
    return [
        on_gpu,
        "unsloth backend on the GPU: lora, qlora, full; `make doctor` says whether it is installed",
    ]


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"
