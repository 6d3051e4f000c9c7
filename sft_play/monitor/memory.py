"""Who holds memory now: `make memory-check` as lines of text, each running run beside what was predicted for it.

Asks NVML and psutil, never torch.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from sft_play.monitor.gpus import gib
from sft_play.monitor.links import answer
from sft_play.plan.devices import Gpu, NvmlUnavailable, host_memory, nvml_gpus, nvml_session
from sft_play.runs.folder import RunFolder, is_alive, listing

PROCESSES_SHOWN = 5


def memory_check_lines(environ: Mapping[str, str], output_dir: Path) -> list[str]:
    """Return who holds how much memory: on each GPU, or, on a host without one, the RAM of the Python processes; then the runs."""
    gpus, reason = nvml_gpus(environ)
    host = host_memory()
    ram = f"RAM: {gib(host.total_bytes - host.available_bytes)} of {gib(host.total_bytes)} GiB used"
    held: dict[int, list[tuple[str, int | None]]] = {}
    try:
        if not gpus:
            return [ram, *_python_lines(), *run_lines(output_dir, held), f"no GPU: {reason}"]
        with nvml_session() as nvml:
            for gpu in gpus:
                for pid, used_bytes in _processes(
                    nvml, nvml.nvmlDeviceGetHandleByUUID(gpu.uuid)
                ).items():
                    held.setdefault(pid, []).append((f"cuda:{gpu.index}", used_bytes))
            return [
                *(line for gpu in gpus for line in _usage_lines(nvml, gpu)),
                ram,
                *run_lines(output_dir, held),
            ]
    except NvmlUnavailable as error:  # a GPU can fall off the bus between two questions
        return [ram, f"GPUs: {error}"]


def run_lines(output_dir: Path, held: Mapping[int, list[tuple[str, int | None]]]) -> list[str]:
    """Return a line for each process of each run below `output_dir` that trains now: the predicted peak, and what it holds.

    `held` is by process what NVML says of it: GPU and bytes, None where it does not tell.
    """
    return [line for folder in listing(output_dir) for line in _run_lines(folder, held)]


def _run_lines(
    folder: RunFolder, held: Mapping[int, list[tuple[str, int | None]]]
) -> Iterator[str]:
    report = folder.read_report()
    if report.get("status") != "running" or not is_alive(report):
        return
    named = f"run {folder.name}: predicted peak {gib(report['peak_bytes']['predicted'])} GiB"
    for pid in _ranks(report):
        if report["device"] == "cpu":
            yield f"{named}, {gib(_resident_bytes(pid))} GiB of RAM in use (pid {pid})"
        for name, used_bytes in held.get(pid, []):
            yield f"{named}, {f'{gib(used_bytes)} GiB' if used_bytes is not None else 'an unknown part'} in use on {name} (pid {pid})"
    if report["device"] != "cpu" and not any(pid in held for pid in _ranks(report)):
        yield f"{named}; NVML lists none of its processes, as in a container: the GPUs above say what is in use"


def _ranks(report: Mapping[str, Any]) -> list[int]:
    """Return the processes of a run: of several, the launcher's children."""
    import psutil

    if report["world_size"] == 1:
        return [report["pid"]]
    try:
        return [child.pid for child in psutil.Process(report["launcher_pid"]).children()]
    except psutil.NoSuchProcess:
        return [report["pid"]]


def _resident_bytes(pid: int) -> int:
    import psutil

    try:
        return psutil.Process(pid).memory_info().rss
    except psutil.Error:  # it has just ended
        return 0


def _usage_lines(nvml: ModuleType, gpu: Gpu) -> Iterator[str]:
    handle = nvml.nvmlDeviceGetHandleByUUID(gpu.uuid)
    rates = answer(nvml, "nvmlDeviceGetUtilizationRates", handle)
    busy = f"{rates.gpu} % busy" if rates else "utilisation not available"
    used = f"{gib(gpu.total_bytes - gpu.free_bytes)} of {gib(gpu.total_bytes)} GiB used"
    yield ", ".join([f"cuda:{gpu.index} {gpu.name}: {used}", busy, *_heat(nvml, handle)])
    for pid, used_bytes in sorted(
        _processes(nvml, handle).items(), key=lambda item: -(item[1] or 0)
    ):
        yield f"  pid {pid} {_process_name(pid)}: {f'{gib(used_bytes)} GiB' if used_bytes is not None else 'memory not available'}"


def _heat(nvml: ModuleType, handle: Any) -> Iterator[str]:
    """Yield power and temperature, where NVML gives them."""
    milliwatts, limit = (
        answer(nvml, question, handle)
        for question in ("nvmlDeviceGetPowerUsage", "nvmlDeviceGetEnforcedPowerLimit")
    )
    if milliwatts is not None:
        yield f"{milliwatts / 1000:.0f}{f' of {limit / 1000:.0f}' if limit else ''} W"
    celsius = answer(nvml, "nvmlDeviceGetTemperature", handle, nvml.NVML_TEMPERATURE_GPU)
    if celsius is not None:
        yield f"{celsius} °C"


def _processes(nvml: ModuleType, handle: Any) -> dict[int, int | None]:
    """Return the bytes of each process on a GPU, None where NVML does not tell them."""
    questions = ("nvmlDeviceGetGraphicsRunningProcesses", "nvmlDeviceGetComputeRunningProcesses")
    return {
        process.pid: process.usedGpuMemory
        for question in questions
        for process in answer(nvml, question, handle) or []
    }


def _process_name(pid: int) -> str:
    import psutil

    try:
        process = psutil.Process(pid)
        return _program(process.name(), process.cmdline())
    except psutil.NoSuchProcess:
        return "(of another container)"
    except psutil.AccessDenied:
        return "(of another user)"


def _python_lines() -> list[str]:
    """Return the Python processes with the largest resident memory."""
    import psutil

    found = [
        process.info for process in psutil.process_iter(["pid", "name", "cmdline", "memory_info"])
    ]
    # a process that is another user's answers None
    pythons = [
        info for info in found if (info["name"] or "").startswith("python") and info["memory_info"]
    ]
    pythons.sort(key=lambda info: -info["memory_info"].rss)
    return [
        f"  pid {info['pid']} {_program(info['name'], info['cmdline'] or [])}: {gib(info['memory_info'].rss)} GiB"
        for info in pythons[:PROCESSES_SHOWN]
    ]


def _program(name: str, command: list[str]) -> str:
    """Return `python train.py` or `python -m sft_play`: no further arguments, which may hold a secret."""
    words = iter(command[1:])
    for word in words:
        if word in ("-X", "-W"):
            next(words, None)
        elif word == "-m":
            return f"{name} -m {next(words, '')}"
        elif word == "-c":
            return f"{name} -c"
        elif not word.startswith("-"):
            return f"{name} {Path(word).name}" if name.startswith("python") else name
    return name
