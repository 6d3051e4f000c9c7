"""`make memory-check`: who holds memory now, and each running run with its prediction.

Asks NVML and psutil, never torch.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path

from sft_play.monitor.gpus import gib
from sft_play.plan.devices import (
    Gpu,
    NvmlUnavailable,
    host_memory,
    nvml_answer,
    nvml_gpus,
    nvml_session,
    sample_gpus,
)
from sft_play.runs import lock
from sft_play.runs.folder import list_runs
from sft_play.runs.metrics import GpuSample
from sft_play.runs.report import RunReport

PROCESSES_SHOWN = 5


# The bytes that each process has on a GPU such as cuda:0, None if NVML does not say
UseByPid = Mapping[int, Mapping[str, int | None]]


def memory_check_lines(environ: Mapping[str, str], output_dir: Path) -> list[str]:
    """Return who holds how much memory, then the runs.

    On a host with GPUs that is each GPU with its processes; on another, the Python processes with
    their RAM.
    """
    gpus, reason = nvml_gpus(environ)
    host = host_memory()
    ram = f"RAM: {gib(host.total_bytes - host.available_bytes)} of {gib(host.total_bytes)} GiB used"
    if not gpus:
        return [ram, *_python_lines(), *run_lines(output_dir, {}), f"no GPU: {reason}"]
    lines: list[str] = []
    uses: dict[int, dict[str, int | None]] = {}
    try:
        loads = sample_gpus({gpu.index: gpu.uuid for gpu in gpus})
        with nvml_session() as nvml:
            for gpu, load in zip(gpus, loads, strict=True):
                handle = nvml.nvmlDeviceGetHandleByUUID(gpu.uuid)
                processes: dict[int, int | None] = {}
                for kind in ("Graphics", "Compute"):
                    question = f"nvmlDeviceGet{kind}RunningProcesses"
                    for process in nvml_answer(nvml, question, handle) or []:
                        processes[process.pid] = process.usedGpuMemory
                limit = nvml_answer(nvml, "nvmlDeviceGetEnforcedPowerLimit", handle)
                lines += _gpu_lines(gpu, load, limit, processes)
                for pid, used_bytes in processes.items():
                    uses.setdefault(pid, {})[f"cuda:{gpu.index}"] = used_bytes
    except NvmlUnavailable as error:  # a GPU can fall off the bus between two questions
        return [ram, f"GPUs: {error}"]
    return [*lines, ram, *run_lines(output_dir, uses)]


def run_lines(output_dir: Path, uses: UseByPid) -> list[str]:
    """Return a line for each process of each run below `output_dir` that trains now.

    It has the predicted peak and what the process holds; `uses` is what NVML says of each process.
    The last line says how to see it live.
    """
    lines: list[str] = []
    latest = ""
    for folder in list_runs(output_dir):
        report, holder = folder.read_report(), lock.read_holder(folder.path)
        # of another machine, its processes would have other numbers here
        if report.state == "running" and holder is not None and holder.is_alive():
            lines += _run_lines(folder.name, report, uses)
            latest = f" RUN={folder.name}"
    return [*lines, f"live: make watch{latest} follows a run until it ends"]


def _rank_pids(report: RunReport) -> list[int]:
    """Return the process of each rank: of several, the launcher's children."""
    import psutil

    if report.world_size == 1:
        return [report.pid]
    try:
        return [child.pid for child in psutil.Process(report.launcher_pid).children()]
    except psutil.NoSuchProcess:
        return [report.pid]


def _run_lines(name: str, report: RunReport, uses: UseByPid) -> Iterator[str]:
    start = f"run {name}: predicted peak {gib(report.peak_bytes.predicted)} GiB"
    pids = _rank_pids(report)
    for pid in pids:
        if report.device == "cpu":
            yield f"{start}, {gib(_resident_bytes(pid))} GiB of RAM in use (pid {pid})"
        for gpu, used_bytes in uses.get(pid, {}).items():
            held = "an unknown part" if used_bytes is None else f"{gib(used_bytes)} GiB"
            yield f"{start}, {held} in use on {gpu} (pid {pid})"
    if report.device != "cpu" and not any(pid in uses for pid in pids):
        yield (
            f"{start}; NVML lists none of its processes, as in a container: "
            "the GPUs above say what is in use"
        )


def _resident_bytes(pid: int) -> int:
    import psutil

    try:
        return psutil.Process(pid).memory_info().rss
    except psutil.Error:  # it has just ended
        return 0


def _gpu_lines(
    gpu: Gpu, load: GpuSample, limit_milliwatts: int | None, processes: Mapping[int, int | None]
) -> Iterator[str]:
    """Yield the memory and load of a GPU, then its processes, the largest first."""
    used = f"{gib(gpu.total_bytes - gpu.free_bytes)} of {gib(gpu.total_bytes)} GiB used"
    facts = [f"cuda:{gpu.index} {gpu.name}: {used}", "utilization not available"]
    if load.busy_percent is not None:
        facts[1] = f"{load.busy_percent} % busy"
    if load.watts is not None:
        limit = f" of {limit_milliwatts / 1000:.0f}" if limit_milliwatts else ""
        facts.append(f"{load.watts}{limit} W")
    if load.celsius is not None:
        facts.append(f"{load.celsius} °C")
    yield ", ".join(facts)
    for pid, used_bytes in sorted(processes.items(), key=lambda item: -(item[1] or 0)):
        held = "memory not available" if used_bytes is None else f"{gib(used_bytes)} GiB"
        yield f"  pid {pid} {_process_name(pid)}: {held}"


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

    pythons = []
    for process in psutil.process_iter(["pid", "name", "cmdline", "memory_info"]):
        info = process.info
        # memory_info is None for a process of another user
        if (info["name"] or "").startswith("python") and info["memory_info"]:
            program = _program(info["name"], info["cmdline"] or [])
            pythons.append((info["memory_info"].rss, f"  pid {info['pid']} {program}"))
    largest = sorted(pythons, reverse=True)[:PROCESSES_SHOWN]
    return [f"{line}: {gib(used_bytes)} GiB" for used_bytes, line in largest]


def _program(name: str, command: list[str]) -> str:
    """Return `python train.py` or `python -m sft_play`.

    Further arguments are left out: they may hold a secret.
    """
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
