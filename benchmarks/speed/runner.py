"""Runs the arms of a workload one by one, each in a process of its own. Loads no CUDA.

Every result is written before the next arm begins.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.files import read_as, write_as
from benchmarks.machine import ROOT, repository_commit
from benchmarks.processes import clean_environment, failure_cause, run_limited
from benchmarks.speed import ours
from benchmarks.speed.peer import REFERENCE, Job
from benchmarks.speed.results import (
    ArmResult,
    ArmRun,
    PeakShares,
    Reference,
    SpeedResults,
    Verdict,
)
from benchmarks.speed.samples import Inputs, Samples, count_step_tokens, make_inputs
from benchmarks.speed.verdict import COMPARED_STEPS, check_run
from benchmarks.speed.workloads import (
    ALONE,
    LORA_RANK,
    WARM_UP,
    Arm,
    Attempt,
    Launch,
    Workload,
)
from sft_play.config.schema import Config
from sft_play.plan.counting import load_counted_shape
from sft_play.plan.model_shape import ModelShape
from sft_play.plan.speed import step_flops
from sft_play.plan.step import AdapterOptions

WEIGHTS = "layers repeated"  # how inputs.py draws them: losses of others are of other models
REFERENCE_SECONDS = 600  # least limit of a reference, which is trained once


def number_of_steps(text: str) -> int:
    """Return how many steps are timed, of an option or a variable.

    Raises: argparse.ArgumentTypeError for a number with which the last loss would not be logged.
    """
    if not text.isdigit() or int(text) % WARM_UP:
        raise argparse.ArgumentTypeError(
            f"STEPS={text}: a loss is logged every {WARM_UP} steps, so write a multiple of "
            f"{WARM_UP}, such as {2 * WARM_UP}, or 0 for as many as the workload says"
        )
    return int(text)


@dataclasses.dataclass(frozen=True)
class Options:
    """How arms are run."""

    seconds: float  # limit of one process
    on_cpu: bool = False
    steps: int = 0  # that are timed; 0: as the workload says
    keep: bool = False  # arms whose results count already are left out
    launch: Launch = ALONE


@dataclasses.dataclass(frozen=True)
class Benchmark:
    """Runs workloads and adds to their results; files go to `folder`."""

    results: SpeedResults
    folder: Path
    options: Options

    def run(self, workload: Workload, arms: list[Arm]) -> None:
        """Run the reference, unless it is known, and the arms of a workload."""
        steps = self.options.steps or workload.steps
        inputs = make_inputs(workload, steps, self.folder)
        samples = Samples.read(inputs.samples)
        tokens = count_step_tokens(workload, samples, WARM_UP + steps)
        self.ensure_reference(workload, inputs, steps)
        found = self.results.of(workload.name)
        for arm in arms:
            known = found.arms.get(arm.name)
            if self.options.keep and known and known.verdict.counts:
                continue
            run = self.run_arm(workload, arm, inputs, steps)
            found.arms[arm.name] = ArmResult(
                run,
                check_run(workload, arm, run, self.reference_losses(workload), tokens),
                self.peak_shares(workload, inputs, samples, run),
                timed_steps=steps,
                versions=self.results.machine.versions,
                commit=repository_commit(),
            )
            self.results.write()
            log(f"{workload.name:<15} {describe(found.arms[arm.name], arm)}")

    def reference_losses(self, workload: Workload) -> list[float]:
        """Return the loss of each step of the reference, [] where there is none."""
        reference = self.results.of(workload.name).reference
        return reference.losses if reference else []

    def ensure_reference(self, workload: Workload, inputs: Inputs, steps: int) -> None:
        """Train the reference and keep its losses, unless the results have the same one."""
        compared = min(COMPARED_STEPS, WARM_UP + steps)
        made_of = self.describe_reference(workload)
        found = self.results.of(workload.name)
        known = found.reference
        if known and known.made_of == made_of and len(known.losses) >= compared:
            return
        # float32 products are slow, and 1B needs no recomputing
        attempt = Attempt(min(4, workload.rows_per_step), workload.reference != "float32")
        seconds = max(self.options.seconds, REFERENCE_SECONDS)
        run = self.run_peer(workload, REFERENCE, inputs, compared, attempt, seconds)
        if run.measured is None:
            log(f"{workload.name} reference {run.status}: {run.error}")
            return
        losses = [logged.loss for logged in run.measured.losses]
        found.reference = Reference(workload.reference, made_of, losses)
        self.results.write()
        seconds = time.time() - run.started
        log(f"{workload.name} reference {workload.reference} in {seconds:.0f} s")

    def describe_reference(self, workload: Workload) -> dict[str, Any]:
        """Return what a reference is trained on, as a file gives it back: JSON has no tuples.

        What of a workload is not given is left out, and so are recipes, which only cut its rows.
        """
        described = json.loads(json.dumps(dataclasses.asdict(workload)))
        del described["recipe"], described["recipe_strategy"]
        if workload.layers is None:
            del described["layers"]
        machine = self.results.machine
        return {
            "work": described,
            "weights": WEIGHTS,
            "device": machine.device,
            "torch": machine.versions["torch"],
        }

    def run_arm(self, workload: Workload, arm: Arm, inputs: Inputs, steps: int) -> ArmRun:
        """Run an arm; the first attempt that does not run out of memory is its run."""
        if arm.is_ours:
            return self.run_ours(workload, arm, inputs, steps)
        too_large: list[str] = []
        for attempt in arm.attempts(workload, self.options.launch.ranks):
            run = self.run_peer(
                workload, arm.name, inputs, WARM_UP + steps, attempt, self.options.seconds
            )
            settings: dict[str, object] = {
                "batch_size": attempt.rows,
                "gradient_checkpointing": attempt.checkpointing,
            }
            if too_large:
                settings["too_large"] = list(too_large)
            if arm.program == "unsloth":
                settings["attention"] = unsloth_attention(inputs.folder / arm.name / "log")
            run = dataclasses.replace(run, settings=settings)
            if run.status != "out of memory":
                break
            suffix = " with checkpointing" if attempt.checkpointing else ""
            too_large.append(f"{attempt.rows}{suffix}")
        return run

    def run_ours(self, workload: Workload, arm: Arm, inputs: Inputs, steps: int) -> ArmRun:
        """Run a make target of ours."""
        out = _fresh_folder(inputs.folder / arm.name)
        started = time.time()
        total = WARM_UP + steps
        command = ours.make_command(
            workload, arm, inputs, out, total, self.options.on_cpu, self.options.launch
        )
        environ = clean_environment(os.environ)
        status = run_limited(command, out / "log", self.options.seconds, ROOT, environ)
        if status is None:
            error = failure_cause(status, self.options.seconds, out / "log")
            return ArmRun("failed", started, error=error)
        run = ours.read_run(workload, out, inputs.samples, total, started)
        # of full fine-tuning: as large as the base
        shutil.rmtree(out / "run" / "model", ignore_errors=True)
        return run

    def run_peer(
        self,
        workload: Workload,
        arm_name: str,
        inputs: Inputs,
        steps: int,
        attempt: Attempt,
        seconds: float,
    ) -> ArmRun:
        """Run another program in a process and a folder of its own."""
        out = _fresh_folder(inputs.folder / arm_name)
        ranks = self.options.launch.ranks
        job = Job(
            arm_name=arm_name,
            workload_name=workload.name,
            ranks=ranks,
            model=inputs.model,
            samples=inputs.samples,
            adapters=inputs.adapters,
            out=out / "report.json",
            steps=steps,
            rows=attempt.rows,
            checkpointing=attempt.checkpointing,
            started=time.time(),
            on_cpu=self.options.on_cpu,
        )
        write_as(out / "job.json", job)
        launcher = []
        if ranks > 1:
            launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
        module = ["-m", "benchmarks.speed.peer", str(out / "job.json")]
        command = [sys.executable, *launcher, *module]
        environ = _with_repository(clean_environment(os.environ))
        status = run_limited(command, out / "log", seconds, out, environ)
        if job.out.exists():
            return read_as(ArmRun, job.out)
        error = failure_cause(status, seconds, out / "log")
        return ArmRun("failed", job.started, error=error)

    def count_shape(self, model: Path) -> ModelShape:
        """Return the shape of a model, counted on its modules where its config does not say it."""
        settings = {"model": {"name": str(model)}, "data": {"cache_dir": str(self.folder)}}
        return load_counted_shape(Config.model_validate(settings), os.environ)

    def peak_shares(
        self, workload: Workload, inputs: Inputs, samples: Samples, run: ArmRun
    ) -> PeakShares:
        """Return how much of a card's peaks went into operations that the workload needs."""
        if run.measured is None:
            return PeakShares()
        shape = self.count_shape(inputs.model)
        adapters = None
        if workload.mode != "full":
            adapters = AdapterOptions().adapter_weights(
                shape, LORA_RANK, "all-linear", is_active=True
            )
        flops = step_flops(shape, adapters, samples.lengths.tolist(), int(samples.trained.sum()))
        flops_per_token = flops / int(samples.lengths.sum())
        used = flops_per_token * run.measured.real_tokens / run.measured.seconds
        used /= self.options.launch.ranks
        machine = self.results.machine
        return PeakShares(
            flops_per_second=used,
            mfu=used / machine.peak_flops if machine.peak_flops else None,
            mfu_of_reached=used / machine.reached_flops if machine.reached_flops else None,
        )


def unsloth_attention(path: Path) -> str:
    """Return which attention Unsloth says that it found: an installed xformers need not load."""
    said = re.search(r"FA \[(.*?)\]", path.read_text(encoding="utf-8", errors="replace"))
    return said[1] if said else "not told"


def describe(result: ArmResult, arm: Arm) -> str:
    """Return an arm's result in one line."""
    run = result.run
    if run.measured is None:
        return f"{arm.name:<16} {run.status}: {run.error or ''}"
    measured = run.measured
    off = "-" if result.verdict.off is None else f"{result.verdict.off:.2%}"
    return (
        f"{arm.name:<16} tokens/s={measured.tokens_per_second:>8.0f} "
        f"trained/s={measured.trained_tokens_per_second:>8.0f} "
        f"GiB={measured.peak_reserved_gib:>6.1f} mfu={result.shares.mfu or 0:.1%} "
        f"ready={measured.ready_seconds:.0f}s off={off} {run.settings}"
        f"{describe_fault(result.verdict)}"
    )


def describe_fault(verdict: Verdict) -> str:
    """Return why a result does not count, "" where it does."""
    return "" if verdict.counts else f" DOES NOT COUNT: {'; '.join(verdict.why_not)}"


def log(text: str) -> None:
    """Print progress; standard output is for the tables."""
    print(text, file=sys.stderr, flush=True)


def _fresh_folder(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def _with_repository(environ: Mapping[str, str]) -> dict[str, str]:
    """Return a peer's environment: it works in another folder and imports from this repository."""
    paths = [str(ROOT)]
    if environ.get("PYTHONPATH"):
        paths.append(environ["PYTHONPATH"])
    return {
        **environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
