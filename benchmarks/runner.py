"""Runs cases one by one, each in a process of its own. Loads no CUDA.

Every result is written before the next case starts.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks import ours
from benchmarks.machine import ROOT
from benchmarks.peer import REFERENCE, Job
from benchmarks.processes import clean_environment, fresh_folder, run_limited
from benchmarks.results import Reference, Result, Results, read_as, write_as
from benchmarks.samples import Inputs, Samples, make_inputs
from benchmarks.verdict import COMPARED_STEPS, MAX_DEVIATION, MAX_ROUNDING, check_run, deviation
from benchmarks.workloads import LORA_RANK, NO_REFERENCE, OUR_ARM, Arm, Attempt, Case, Workload
from sft_play.config.schema import Config
from sft_play.plan.counting import load_counted_shape
from sft_play.plan.ranks import visible_entries
from sft_play.plan.speed import step_flops
from sft_play.plan.step import Adapters

WEIGHTS = "layers repeated"  # how inputs.py draws them: other weights have other losses
REFERENCE_SECONDS = 600  # least limit of a reference, which is trained once
REFERENCE_OF = (
    "in_mxfp4 layers learning_rate max_seq_len mode reference rows_per_step shape tokens"
).split()


@dataclass(frozen=True)
class Benchmark:
    """Runs cases and adds their results. Files go to `folder`."""

    results: Results
    folder: Path
    seconds: float  # limit of one process
    on_cpu: bool = False
    steps: int = 0  # timed steps; 0: as many as the workload says
    keep: bool = False  # leave out cases whose result counts already
    compares_gpus: bool = False  # the reference is one GPU, not another program

    def run(self, case: Case) -> None:
        """Run a case, first the reference if it is not known, and write the result."""
        workload, arm = case.workload, case.arm
        known = self.results.find(*case.key)
        if self.keep and known and known.counts:
            return
        total = workload.warm_up + (self.steps or workload.steps)
        inputs = make_inputs(workload, total, self.folder)
        tokens, samples = [], None
        if inputs.samples.exists() and case.has_samples:
            samples = Samples.read(inputs.samples)
            tokens = samples.step_tokens(workload.rows_per_step)
            if not self.compares_gpus:
                self.ensure_reference(workload, inputs, total)
        result = self.run_arm(case, inputs, total)
        if samples and result.status == "done":
            figures = result.figures | self.peak_shares(case, inputs, samples, result)
            result = replace(result, figures=figures)
        reference = self.reference_losses(case, result)
        allowed = MAX_ROUNDING if self.compares_gpus and arm.is_ours else MAX_DEVIATION
        why_not = check_run(workload, arm, result, reference, tokens, allowed)
        if result.status == "refused" and case.may_be_refused:
            why_not = []
        off = deviation(result.losses, reference, workload.warm_up)
        self.results.add(replace(result, off=off, why_not=why_not))
        log(describe(self.results.find(*result.key)))

    def reference_losses(self, case: Case, result: Result) -> list[float]:
        """Return a loss for each step of the reference, [] if there is none."""
        name = case.workload.name
        if not self.compares_gpus:
            reference = self.results.references.get(name)
            return reference.losses if reference else []
        one = self.results.find(name, OUR_ARM)
        if case.gpus == 1 and case.arm.name == OUR_ARM:
            one = result
        losses = one.losses if one else []
        return [logged.loss for logged in losses for _ in range(case.workload.warm_up)]

    def ensure_reference(self, workload: Workload, inputs: Inputs, steps: int) -> None:
        """Train the reference and store its losses, unless the results have the same one."""
        if workload.reference == NO_REFERENCE:
            return
        compared = min(COMPARED_STEPS, steps)
        made_of = self.describe_reference(workload)
        known = self.results.references.get(workload.name)
        if known and known.made_of == made_of and len(known.losses) >= compared:
            return
        # float32 matrix multiplications are slow, and 1B needs no recomputation
        attempt = Attempt(min(4, workload.rows_per_step), workload.reference != "float32")
        started = time.time()
        case = Case(workload, Arm(REFERENCE, "hf"))
        seconds = max(self.seconds, REFERENCE_SECONDS)
        run = self.run_peer(case, inputs, compared, attempt, seconds)
        if run.status != "done":
            log(f"{workload.name} reference {run.status}: {run.cause}")
            return
        losses = [logged.loss for logged in run.losses]
        self.results.references[workload.name] = Reference(workload.reference, made_of, losses)
        self.results.write()
        log(f"{workload.name} reference {workload.reference} in {time.time() - started:.0f} s")

    def describe_reference(self, workload: Workload) -> dict[str, Any]:
        """Return what a reference is trained on."""
        machine = self.results.machine
        return {
            "workload": {name: getattr(workload, name) for name in REFERENCE_OF},
            "weights": WEIGHTS,
            "device": machine.device,
            "torch": machine.versions["torch"],
        }

    def run_arm(self, case: Case, inputs: Inputs, steps: int) -> Result:
        """Run an arm. Of several attempts the first one that fits in memory is its run."""
        if case.arm.is_ours:
            return self.run_ours(case, inputs, steps)
        too_large: list[str] = []
        for attempt in case.arm.attempts(case.workload, case.gpus):
            result = self.run_peer(case, inputs, steps, attempt, self.seconds)
            settings: dict[str, object] = {
                "batch_size": attempt.rows,
                "gradient_checkpointing": attempt.checkpointing,
            }
            if too_large:
                settings["too_large"] = list(too_large)
            if case.arm.program == "unsloth":
                settings["attention"] = unsloth_attention(inputs.folder / case.arm.name / "log")
            result = replace(result, settings=settings)
            if result.status != "out of memory":
                break
            suffix = " with checkpointing" if attempt.checkpointing else ""
            too_large.append(f"{attempt.rows}{suffix}")
        return result

    def run_ours(self, case: Case, inputs: Inputs, steps: int) -> Result:
        """Run a make target of SFT-Play."""
        out = fresh_folder(inputs.folder / case.arm.name)
        settings = ours.make_settings(case, inputs, out, steps)
        environ = clean_environment(os.environ)
        if case.workload.follows_config and not self.on_cpu:
            visible = visible_entries(os.environ.get("CUDA_VISIBLE_DEVICES"), case.gpus)
            environ["CUDA_VISIBLE_DEVICES"] = ",".join(visible)
        command = ours.make_command(case, settings)
        ended = run_limited(command, out / "log", self.seconds, ROOT, environ)
        result = ours.read_run(case, inputs, out, ended)
        # of full fine-tuning: as large as the base model
        shutil.rmtree(out / "run" / "model", ignore_errors=True)
        figures = result.figures | {"total_seconds": ended.at - ended.started}
        return replace(result, figures=figures)

    def run_peer(
        self, case: Case, inputs: Inputs, steps: int, attempt: Attempt, seconds: float
    ) -> Result:
        """Run another program in a process and a folder of its own."""
        out = fresh_folder(inputs.folder / case.arm.name)
        job = Job(
            arm_name=case.arm.name,
            workload_name=case.workload.name,
            inputs=inputs,
            out=out / "report.json",
            steps=steps,
            rows=attempt.rows,
            checkpointing=attempt.checkpointing,
            on_cpu=self.on_cpu,
            started=time.time(),
            ranks=case.gpus,
        )
        write_as(out / "job.json", job)
        launcher = []
        if case.gpus > 1:
            torchrun = ["torch.distributed.run", "--standalone", f"--nproc_per_node={case.gpus}"]
            launcher = ["-m", *torchrun]
        module = ["-m", "benchmarks.peer", str(out / "job.json")]
        command = [sys.executable, *launcher, *module]
        environ = with_repository(clean_environment(os.environ))
        ended = run_limited(command, out / "log", seconds, out, environ)
        if not job.out.exists():
            return Result(*case.key, status="failed", cause=ended.cause)
        result = read_as(Result, job.out)
        figures = result.figures | {"total_seconds": ended.at - ended.started}
        if "last_step_at" in figures:
            figures["ending_seconds"] = ended.at - figures.pop("last_step_at")
        return replace(result, figures=figures, gpus=case.gpus, strategy=case.strategy)

    def peak_shares(
        self, case: Case, inputs: Inputs, samples: Samples, result: Result
    ) -> dict[str, float | None]:
        """Return the FLOP/s that the workload needs, and their share of the card's peaks."""
        settings = {"model": {"name": str(inputs.model)}, "data": {"cache_dir": str(self.folder)}}
        shape = load_counted_shape(Config.model_validate(settings), os.environ)
        adapters = None
        if case.workload.mode != "full":
            adapters = Adapters(LORA_RANK).weights(shape, is_active=True)
        lengths = samples.lengths.tolist()
        flops = step_flops(shape, adapters, lengths, int(samples.labelled.sum()))
        used = flops / sum(lengths) * result.tokens_per_second / case.gpus
        machine = self.results.machine
        return {
            "mfu": used / machine.peak_flops if machine.peak_flops else None,
            "mfu_of_reached": used / machine.reached_flops if machine.reached_flops else None,
        }


def unsloth_attention(path: Path) -> str:
    """Return the attention that Unsloth reports: an installed xformers may fail to load."""
    found = re.search(r"FA \[(.*?)\]", path.read_text(encoding="utf-8", errors="replace"))
    return found[1] if found else "not reported"


def describe(result: Result) -> str:
    """Return a result in one line."""
    words = f"{result.workload:<24} {result.arm:<16} {result.strategy} x{result.gpus}"
    if result.status != "done":
        return f"{words} {result.status}: {result.cause or ''}"
    losses = " ".join(f"{logged.loss:.3f}" for logged in result.losses)
    fault = f" DOES NOT COUNT: {'; '.join(result.why_not)}" if result.why_not else ""
    return (
        f"{words} tokens/s={result.tokens_per_second or 0:.0f} GiB={result.peak_gib or 0:.1f} "
        f"planned={result.planned_gib or 0:.1f} loss={losses} {result.settings}{fault}"
    )


def log(text: str) -> None:
    """Print progress. Standard output is for the tables."""
    print(text, file=sys.stderr, flush=True)


def with_repository(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a program that works in another folder and imports from here."""
    paths = [str(ROOT)]
    if environ.get("PYTHONPATH"):
        paths.append(environ["PYTHONPATH"])
    return {
        **environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
