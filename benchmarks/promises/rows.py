"""What is done for the rows of docs/evidence/promises.md that need GPUs, and what it must show.

A function does a piece of work of works.yaml. It returns what was seen of each row, and whether
that is what was promised.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil

from benchmarks.promises.place import Place
from benchmarks.workloads import WORKLOADS
from sft_play.errors import ExitClass
from sft_play.plan.cards import CARDS
from sft_play.runs.folder import RunFolder

Findings = dict[int, tuple[object, bool]]
CELLS = Path(__file__).with_name("cells.ipynb")
LEAST_RATIO = 5  # of the seconds of answers to those of the loss
SECONDS_TO_END = 120  # at most, for the others once a rank is killed
CLOSE_MIB = 512  # two readings of the memory of a run may differ by this


def links(place: Place) -> Findings:
    """Compare the links that `make gpu-info` prints with those of nvidia-smi."""
    ours = place.run("make", "gpu-info", f"PY={sys.executable}")
    theirs = place.run("nvidia-smi", "topo", "-m")
    # cuda:0  -  NV18  generation 5, 16 lanes; GPU0  X  NV18  0-15  0  N/A
    row = r"(?m)^(?:cuda:\d+  |GPU\d+\s+)((?:(?:-|X|[A-Z]{2,4}\d*)\s+)+)"
    lines = re.findall(row, f"{ours}\n{theirs}")
    count = len(lines) // 2
    cells = [line.replace("X", "-").split()[:count] for line in lines]
    return {110: (cells, count > 1 and cells[:count] == cells[count:])}


def notebook(place: Place) -> Findings:
    """Run a notebook as one process."""
    cells = json.loads(CELLS.read_text())["cells"]
    code = "\n".join("".join(cell["source"]) for cell in cells)
    printed = place.run(sys.executable, "-c", code, place.folder / "notebook")
    used = json.loads(re.findall(r'(?m)^{"steps".*', printed)[0])
    mode, allocator = re.findall("Mode: .*", printed), used["allocator"]
    is_one = mode == ["Mode: one process on cuda:0"] and used["wrapped"] != "DataParallel"
    is_set = {*place.work.environ.values()} <= {*map(str, allocator.values())}
    return {
        9: ([mode, used], is_one and len(place.gpus) > 1 and not any(used["reserved"][1:])),
        41: (allocator, is_set),
    }


def examples(place: Place) -> Findings:
    """Run the examples and a script as a process for each GPU."""
    ranks = len(place.gpus)
    output = place.folder / f"examples-{ranks}"
    one = [sys.executable]
    several = [*one, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    words = ["--rows", "data/desk/test.jsonl", "--max-steps=5", "--output-dir", output, "--model"]
    place.run(*several, "examples/multi_gpu_training.py", *words, "data/tiny_llama")
    results = json.loads((output / "results.json").read_text())
    logs = [path.read_text().splitlines()[0] for path in sorted(output.glob("debug_gpu_*.log"))]
    answers = []
    for launcher in (several, one):
        place.run(*launcher, "examples/multi_gpu_inference.py", *words, output)
        answers.append((output / "results.json").read_text())
    settings = ("--set=train.max_steps=2", f"--set=train.output_dir={output}")
    done = re.findall("done steps=.*", place.run(*several, "scripts/train.py", *settings))
    return {
        30: (done, len(done) == 1 and f"world={ranks} " in done[0]),
        56: (results, results["num_processes"] == ranks),
        57: (f"{len(json.loads(answers[0]))} answers", answers[0] == answers[1]),
        123: (logs, logs == [f"process {rank} of {ranks} on cuda:{rank}" for rank in range(ranks)]),
    }


def zero(place: Place) -> Findings:
    """Compare the memory of ZeRO with that of one GPU, on the fullest GPU."""
    gib = {name: each.peak_gib or 0 for name, each in place.train().items()}
    one, two, two_offloaded, three, three_offloaded = gib.values()
    # stage 3 may keep 1e9 gathered weights, most of this model, so it needs no less than stage 2
    is_less = len(place.gpus) > 1 and max(two, three) < one
    is_less_offloaded = two_offloaded < two and three_offloaded < min(three, two_offloaded)
    return {71: (gib, is_less), 92: (gib, is_less_offloaded)}


def single(place: Place) -> Findings:
    """Train steps of 64 accumulated rows on each GPU."""
    (result,) = place.train().values()
    chosen = [result.settings[name] for name in ("strategy", "batch_size", "micro_batches")]
    return {95: (chosen, chosen == ["deepspeed", 1, 64])}


def cards(place: Place) -> Findings:
    """Train in the memory of the GPUs that a guide names."""
    gib = {name: each.peak_gib or 0 for name, each in place.train().items()}
    finding = gib, all(size < CARDS[WORKLOADS[name].card].gib for name, size in gib.items())
    return {97: finding, 98: finding}


def scores(place: Place) -> Findings:
    """Compare the seconds of the loss with those of answers."""
    (result,) = place.train().values()
    found = result.figures["scores"]
    rows, answers = found["rows"], found["answers"]
    loss, made = found["eval_loss_seconds"], found["generation_seconds"]
    ratio = (made / answers) / (loss / rows)
    seen = f"loss of {rows} rows {loss:.1f} s, {answers} answers {made:.1f} s: {ratio:.0f} times"
    return {115: (f"{seen} as long per row", ratio > LEAST_RATIO)}


def watched(place: Place) -> Findings:
    """Watch a run while it trains, then kill a rank."""
    workload = WORKLOADS[place.work.cases[0]]
    out = place.folder / f"{workload.name}-{workload.warm_up + workload.steps}" / "ours-bnb"
    folder, log = RunFolder(out / "run"), out / "log"
    log.unlink(missing_ok=True)  # of an earlier run
    with ThreadPoolExecutor() as thread:
        training = thread.submit(place.train)
        while not (log.exists() and "step 20/" in log.read_text()):
            assert training.running(), training.exception()
            time.sleep(0.2)
        children = psutil.Process().children(recursive=True)
        everyone = [each for each in children if str(folder.path) in each.cmdline()]
        environs = {}  # of each rank; forks of it have the same, and are younger
        for each in sorted(everyone, key=psutil.Process.create_time):
            if "RANK" in (environ := each.environ()):
                environs.setdefault(environ["RANK"], (each, environ))
        ranks = [environs[rank][0] for rank in sorted(environs)]
        pids = [each.pid for each in ranks]
        check = place.run("make", "memory-check", f"TRAIN_OUTPUT_DIR={out}", f"PY={sys.executable}")
        wanted = place.work.environ.items()
        is_set = all(wanted <= environ.items() for _, environ in environs.values())
        logs = log.read_text(), (folder.path / "logs" / "rank-1.log").read_text()
        printed = re.findall(r":(\d+):\d+ \[\d+\] NCCL INFO", "".join(logs))
        findings: Findings = {
            41: (f"{len(ranks)} processes train with the guides' string", is_set),
            44: (f"{len(printed)} lines of NCCL INFO", {*map(str, pids)} <= {*printed}),
        }
        if not place.on_cpu:
            findings |= _on_gpus(place, folder, check, pids)
        started = time.monotonic()
        ranks[1].kill()
        _, alive = psutil.wait_procs(everyone, SECONDS_TO_END)
    seconds, report = time.monotonic() - started, folder.read_report()
    seen = f"all ended {seconds:.0f} s after rank 1 was killed: {report.cause_line}"
    return findings | {43: (seen, report.exit_class == ExitClass.PEER_LOST and not alive)}


def _on_gpus(place: Place, folder: RunFolder, check: str, ranks: list[int]) -> Findings:
    """Compare memory, load and processes of each GPU with nvidia-smi."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    used = {uuid: float(mib) for uuid, mib in place.smi("gpu=uuid,memory.used")}
    listed = place.smi("compute-apps=gpu_uuid,pid,used_memory")
    theirs = {(list(used).index(uuid), int(pid)): float(mib) for uuid, pid, mib in listed}
    pattern = r"([\d.]+) GiB in use on cuda:(\d+) \(pid (\d+)\)"
    ours = {(int(gpu), int(pid)): float(gib) for gib, gpu, pid in re.findall(pattern, check)}
    events = EventAccumulator(str(folder.path / "tb"))
    events.Reload()
    loads, memory = (
        [
            take(each.value for each in events.Scalars(f"gpu/{gpu}/{name}"))
            for gpu in range(len(used))
        ]
        # the memory of now; that of the probe before the first step may be more
        for name, take in (("util_percent", max), ("used_gib", lambda values: [*values][-1]))
    )
    return {
        69: (check, _are_near([ours.get(key, 0) for key in theirs], theirs.values())),
        101: (loads, all(0 < load <= 100 for load in loads)),
        102: ([memory, used], _are_near(memory, used.values())),
        123: ([*theirs], sorted(theirs) == list(enumerate(ranks))),
    }


def _are_near(gib: Iterable[float], mib: Iterable[float]) -> bool:
    """Return whether two readings of some memory are about the same."""
    return all(abs(1024 * ours - theirs) < CLOSE_MIB for ours, theirs in zip(gib, mib, strict=True))
