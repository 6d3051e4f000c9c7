"""Work by work, arm by arm: a process for each, its result judged and written down before the next begins. Loads no CUDA."""

import dataclasses
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.speed import ours
from benchmarks.speed.peer import REFERENCE, Job
from benchmarks.speed.samples import ROOT, Inputs, Samples, made_inputs, step_tokens
from benchmarks.speed.verdict import COMPARED_STEPS, judge
from benchmarks.speed.workloads import ARMS, LORA_RANK, WARM_UP, Arm, Work
from sft_play.plan.cards import CARDS, REACHED, key_of
from sft_play.plan.flops import step_flops
from sft_play.plan.model_shape import load_shape
from sft_play.runs.files import read_json, write_json

PACKAGES = (
    "torch",
    "transformers",
    "peft",
    "accelerate",
    "trl",
    "unsloth",
    "liger-kernel",
    "bitsandbytes",
    "xformers",
    "flash-attn",
)
REFERENCE_SECONDS = 600  # limit of a reference: it is trained once


class Results:
    """The results file: read at the beginning, written after every arm, so that a run that is cut off keeps what it has."""

    def __init__(self, path: Path, facts: dict[str, Any]):
        self.path, self.facts = path, facts

    @classmethod
    def there(cls, path: Path) -> "Results":
        """Return the results of a file, as they were measured."""
        return cls(path, read_json(path))

    @classmethod
    def to_be_measured_here(cls, path: Path | None, on_cpu: bool, kind: str = "speed") -> "Results":
        """Return the results of this machine, by default of the file that is named after them and its card, with those that it has."""
        device = "CPU" if on_cpu else device_name()
        key = None if on_cpu else key_of(device)
        card = "cpu" if on_cpu else key or device.replace(" ", "-")
        path = path or ROOT / "benchmarks" / "results" / f"{kind}-{card.lower()}.json"
        machine = {
            "device": device,
            "python": platform.python_version(),
            "versions": {name: _version(name) for name in PACKAGES},
            "peak_flops": CARDS[key].flops if key else None,
            "reached_flops": REACHED.get(device),
        }
        return cls(path, (read_json(path) if path.exists() else {"works": {}}) | machine)

    def of(self, work: Work) -> dict[str, Any]:
        """Return {"reference": {...}, "arms": {...}} of a work, to be changed in place."""
        return self.facts["works"].setdefault(work.name, {"arms": {}})

    def write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_json(self.path, self.facts)


def device_name() -> str:
    """Return what nvidia-smi calls the first GPU. Exits where there is none."""
    if shutil.which("nvidia-smi") is None:
        sys.exit(
            "no NVIDIA GPU is here to measure on; --toy runs the benchmark on the CPU, --report FILE shows results that are there"
        )
    found = subprocess.run(
        ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        check=True,
    )
    return found.stdout.splitlines()[0].strip()


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


@dataclasses.dataclass(frozen=True)
class Bench:
    """How the arms are run: where, for how long, on what."""

    results: Results
    folder: Path
    seconds: float  # limit of one process
    on_cpu: bool
    steps: int  # that are timed; 0: as the work says
    keeps: bool  # results that count already
    refers: bool  # to a reference, which is trained first

    def run(self, work: Work, arms: list[Arm]) -> None:
        """Run the reference, unless it is known, and the arms of a work."""
        steps = self.steps or work.steps
        inputs = made_inputs(work, steps, self.folder)
        found, samples = self.results.of(work), Samples.read(inputs.samples)
        tokens = step_tokens(work, samples, WARM_UP + steps)
        if self.refers:
            self.refer(work, inputs, steps)
        reference = found.get("reference", {}).get("losses", [])
        for name, facts in found["arms"].items():  # measured before there was a reference
            if facts["timed_steps"] == steps:
                facts |= judge(work, ARMS[name], facts, reference, tokens)
        for arm in arms:
            if self.keeps and found["arms"].get(arm.name, {}).get("counts"):
                continue
            facts = self.first_that_fits(work, arm, inputs, steps)
            facts |= judge(work, arm, facts, reference, tokens)
            facts |= self.shares(work, inputs, samples, facts)
            found["arms"][arm.name] = facts | {
                "commit": ours.repository_commit(),
                "timed_steps": steps,
                "versions": self.results.facts["versions"],
            }
            self.results.write()
            print(line(work, arm, facts), file=sys.stderr, flush=True)

    def refer(self, work: Work, inputs: Inputs, steps: int) -> None:
        """Train the reference and write its curve down, unless the results have one of the same work."""
        found = self.results.of(work)
        described = dataclasses.asdict(work) | {
            "padded_rows": list(work.padded_rows)
        }  # as a file gives it back: JSON has no tuples
        run_stamp = {
            "work": described,
            "device": self.results.facts["device"],
            "torch": self.results.facts["versions"]["torch"],
        }
        compared = min(COMPARED_STEPS, WARM_UP + steps)
        known = found.get("reference", {})
        if known.get("run_stamp") == run_stamp and len(known["losses"]) >= compared:
            return
        tried = (
            min(4, work.rows_per_step),
            work.reference != "float32",
        )  # float32 products are slow, and 1B needs no recomputing
        facts = dataclasses.replace(self, seconds=max(self.seconds, REFERENCE_SECONDS)).peer(
            work, REFERENCE, inputs, compared, tried
        )
        if facts["status"] != "done":
            print(
                f"{work.name} reference {facts['status']}: {facts['error']}",
                file=sys.stderr,
                flush=True,
            )
            return
        found["reference"] = {
            "precision": work.reference,
            "run_stamp": run_stamp,
            "losses": [entry["loss"] for entry in facts["losses"]],
        }
        self.results.write()
        print(
            f"{work.name} reference {work.reference} in {time.time() - facts['started']:.0f} s",
            file=sys.stderr,
            flush=True,
        )

    def first_that_fits(self, work: Work, arm: Arm, inputs: Inputs, steps: int) -> dict[str, Any]:
        """Return what the first try of an arm measured that did not run out of memory."""
        too_large = []
        for rows, checkpointing in arm.tries(work):
            if arm.is_ours:
                return self.own(work, arm, inputs, steps)
            facts = self.peer(work, arm.name, inputs, WARM_UP + steps, (rows, checkpointing))
            facts["settings"] = {
                "batch_size": rows,
                "gradient_checkpointing": checkpointing,
                **({"too_large": too_large} if too_large else {}),
            }
            if arm.program == "unsloth":
                facts["settings"]["attention"] = attention_told(inputs.folder / arm.name / "log")
            if facts["status"] != "out of memory":
                break
            too_large = [*too_large, f"{rows}{' with checkpointing' if checkpointing else ''}"]
        return facts

    def own(self, work: Work, arm: Arm, inputs: Inputs, steps: int) -> dict[str, Any]:
        """Run a make target of ours."""
        out = _fresh(inputs.folder / arm.name)
        started, total = time.time(), WARM_UP + steps
        status = ours.limited(
            ours.command(work, arm, inputs, out, total, self.on_cpu),
            out / "log",
            self.seconds,
            ROOT,
            ours.environment(os.environ),
        )
        if status is None:
            return {
                "status": "failed",
                "error": f"not done within {self.seconds:.0f} s",
                "settings": {},
            }
        facts = {
            "settings": {},
            "started": started,
            **ours.read(work, out, inputs.samples, total, started),
        }
        shutil.rmtree(
            out / "run" / "model", ignore_errors=True
        )  # of full fine-tuning: as large as the base
        return facts

    def peer(
        self, work: Work, arm: str, inputs: Inputs, steps: int, tried: tuple[int, bool]
    ) -> dict[str, Any]:
        """Run a program of others in a process of its own, in a folder of its own."""
        out = _fresh(inputs.folder / arm)
        job = Job(
            arm,
            work.name,
            inputs.model,
            inputs.samples,
            inputs.adapters,
            out / "report.json",
            steps,
            *tried,
            time.time(),
            self.on_cpu,
        )
        write_json(
            out / "job.json",
            {
                name: str(value) if isinstance(value, Path) else value
                for name, value in dataclasses.asdict(job).items()
            },
        )
        command = [sys.executable, "-m", "benchmarks.speed.peer", str(out / "job.json")]
        status = ours.limited(
            command, out / "log", self.seconds, out, _found_here(ours.environment(os.environ))
        )
        told = {"started": job.started}
        if job.out.exists():
            return told | read_json(job.out)
        error = (
            f"not done within {self.seconds:.0f} s"
            if status is None
            else f"ended with {status}: {ours.last_lines(out / 'log')}"
        )
        return told | {"status": "failed", "error": error}

    def shares(
        self, work: Work, inputs: Inputs, samples: Samples, facts: dict[str, Any]
    ) -> dict[str, float]:
        """Return the shares of the card's peaks that went into operations that the work cannot do without."""
        if facts["status"] != "done":
            return {}
        shape = load_shape(str(inputs.model), None, {})
        adapters = None if work.mode == "full" else shape.lora_parameters(LORA_RANK, "all-linear")
        all_rows = step_flops(shape, adapters, samples.lengths.tolist(), int(samples.trained.sum()))
        used = all_rows / int(samples.lengths.sum()) * facts["real_tokens"] / facts["seconds"]
        peaks = {
            "mfu": self.results.facts["peak_flops"],
            "mfu_of_reached": self.results.facts["reached_flops"],
        }
        return {
            "flops_per_second": used,
            **{name: used / peak for name, peak in peaks.items() if peak},
        }


def attention_told(log: Path) -> str:
    """Return which attention Unsloth says that it found: an xformers that is installed need not load."""
    told = re.search(r"FA \[(.*?)\]", log.read_text(encoding="utf-8", errors="replace"))
    return told[1] if told else "not told"


def _fresh(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def _found_here(environ: Mapping[str, str]) -> dict[str, str]:
    """Add this repository to where Python looks; the peers work in folders of their own, for what they drop."""
    path = os.pathsep.join([str(ROOT), *filter(None, [environ.get("PYTHONPATH")])])
    return {**environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def line(work: Work, arm: Arm, facts: dict[str, Any]) -> str:
    """Return an arm's result in one line."""
    if facts["status"] != "done":
        return f"{work.name:<15} {arm.name:<16} {facts['status']}: {facts.get('error', '')}"
    speed = facts["real_tokens"] / facts["seconds"]
    off = f"{facts['off']:.2%}" if facts["off"] is not None else "-"
    verdict = "" if facts["counts"] else f" DOES NOT COUNT: {'; '.join(facts['why_not'])}"
    return (
        f"{work.name:<15} {arm.name:<16} tokens/s={speed:>8.0f} trained/s={facts['trained_tokens'] / facts['seconds']:>8.0f} "
        f"GiB={facts['peak_reserved_gib']:>6.1f} mfu={facts.get('mfu', 0):.1%} ready={facts['ready_seconds']:.0f}s off={off} {facts['settings']}{verdict}"
    )
