"""One work through the command line that a user types, and what plan.json and run.json say of it. Loads no torch."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.inputs import fixed_rows, ragged_rows
from benchmarks.planner.workloads import HELD_OUT_ROWS, RAGGED_ROWS, Work
from benchmarks.speed.ours import environment, last_lines, limited
from benchmarks.speed.samples import ROOT, TOY_MEDIAN, made_model
from benchmarks.speed.workloads import FULL_RATE, LORA_ALPHA, LORA_RANK, RAGGED_MEDIAN, SEED, TOY
from sft_play.errors import ExitClass
from sft_play.plan.memory import PHASES
from sft_play.runs.files import read_json

PLAN_SECONDS = 120.0  # limit of `plan`, which takes one or two, and some more with --exact


@dataclass(frozen=True)
class Place:
    """Where works are run, for how long, on what."""

    folder: Path  # of models and rows
    runs: Path  # of run folders, with the weights that a run saves
    seconds: float  # limit of one run
    on_cpu: bool

    @property
    def environ(self) -> dict[str, str]:
        """The caller's environment without settings of SFT-Play."""
        kept = {
            name: value
            for name, value in environment(os.environ).items()
            if name not in ("GPUS", "EXACT")
        }
        return {**kept, "NUM_GPUS": "1", **({"DEVICE": "cpu"} if self.on_cpu else {})}


def measure(work: Work, place: Place, with_trace: bool = False) -> dict[str, Any]:
    """Plan a work, run it, and return what was predicted and what was measured; see `facts_of`."""
    started, words = time.time(), settings(work, place)
    before = plan(words, place, ("--exact",) if with_trace else ())
    shutil.rmtree(place.runs / work.name, ignore_errors=True)
    place.runs.mkdir(parents=True, exist_ok=True)
    log = place.runs / f"{work.name}.log"
    status = limited(command("train", words), log, place.seconds, ROOT, place.environ)
    report, after = (
        read_json(path) if path.exists() else {}
        for path in (place.runs / work.name / name for name in ("run.json", "plan.json"))
    )
    shutil.rmtree(
        place.runs / work.name / "model", ignore_errors=True
    )  # of full fine-tuning: as large as the base
    if report.get("status") == "done":  # it has counted its rows, which before it were estimated
        before["workload"] = plan(words, place, ()).get("workload")
    told = report.get("cause") or last_lines(log).partition(" exit class")[0]
    cause = (
        None
        if status == 0
        else f"not done within {place.seconds:.0f} s"
        if status is None
        else told
    )
    return {
        **facts_of(before, after, report, status),
        "cause": cause,
        "wall_seconds": round(time.time() - started, 1),
    }


def settings(work: Work, place: Place) -> dict[str, Any]:
    """Return what a run is told. Nothing of it concerns the micro-batch: that is the plan's work."""
    rows = made_rows(work, place.folder)
    return {
        "model.name": made_model(work.shape, place.folder)
        if work.fits or work.shape == TOY
        else work.shape,  # a name is enough to refuse it
        "model.max_seq_len": work.max_seq_len,
        "model.dtype": work.dtype,
        "tuning.mode": work.mode,
        "tuning.lora.r": LORA_RANK,
        "tuning.lora.alpha": LORA_ALPHA,
        "data.train_path": rows / "rows.jsonl",
        "data.val_path": rows / "held-out.jsonl",
        "data.cache_dir": place.folder / "cache",
        "train.output_dir": place.runs,
        "train.run_name": work.name,
        "train.effective_batch_size": work.rows_per_step,
        "train.max_steps": work.steps,
        "train.learning_rate": FULL_RATE if work.mode == "full" else 2e-4,
        "train.seed": SEED,
        "train.gradient_checkpointing": work.checkpointing,
        "train.logging_steps": work.steps,
        "train.save_strategy": "no",
        "train.predict_with_generate": "false",
    }


def command(action: str, words: Mapping[str, Any], options: tuple[str, ...] = ()) -> list[str]:
    """Return the command line of `plan` or `train`."""
    told = [part for name, value in words.items() for part in ("--set", f"{name}={value}")]
    return [
        sys.executable,
        "-m",
        "sft_play",
        action,
        "--config",
        "configs/base.yaml",
        *options,
        *told,
    ]


def plan(words: Mapping[str, Any], place: Place, options: tuple[str, ...]) -> dict[str, Any]:
    """Return what `plan --json` says on this machine, of a step that does not fit, too. Raises CalledProcessError where it says nothing."""
    asked = command("plan", words, ("--json", *options))
    done = subprocess.run(
        asked,
        cwd=ROOT,
        env=place.environ,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
        timeout=PLAN_SECONDS,
    )
    if done.returncode != ExitClass.OUT_OF_MEMORY:
        done.check_returncode()
    return json.loads(done.stdout)


def made_rows(work: Work, folder: Path) -> Path:
    """Return the folder of a work's rows.jsonl and held-out.jsonl, made unless they are there; works of one length share them."""
    tokens = work.max_seq_len if work.fits else 64
    made = folder / f"rows-{'ragged-' if work.is_ragged else ''}{tokens}"
    if not (made / "held-out.jsonl").exists():
        made.mkdir(parents=True, exist_ok=True)
        if work.is_ragged:
            ragged_rows(
                made / "all.jsonl",
                RAGGED_ROWS,
                median=TOY_MEDIAN if work.shape == TOY else RAGGED_MEDIAN,
                most=tokens,
            )
        else:
            fixed_rows(made / "all.jsonl", tokens, 16 * work.rows_per_step)
        lines = (made / "all.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
        (made / "rows.jsonl").write_text("".join(lines[:-HELD_OUT_ROWS]), encoding="utf-8")
        (made / "held-out.jsonl").write_text("".join(lines[-HELD_OUT_ROWS:]), encoding="utf-8")
    return made


def was_changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> bool:
    """Return whether a run trained with other micro-batches or checkpointed layers than were planned before it."""
    return bool(after) and any(
        before[name] != after[name] for name in ("per_device_batch_size", "checkpointed_layers")
    )


def facts_of(
    before: Mapping[str, Any],
    after: Mapping[str, Any],
    report: Mapping[str, Any],
    status: int | None,
) -> dict[str, Any]:
    """Return a run's facts: `predicted` in closed form, `traced`, `probed` and `measured`, each with `peak`, `phases` in bytes and `tokens_per_second`.

    `before` is what `plan --json` said, `after` the plan.json of the run and `report` its run.json, {} where it was refused, `status` that of its
    process. All predictions are of the step that was trained, which the probe may have changed; what nobody predicted or measured is None.
    """
    probe, is_as_planned = (
        report.get("probe") or after.get("probe") or {},
        not was_changed(before, after),
    )
    closed = probe.get("predicted_before") or (before["phases"] if is_as_planned else None)
    speeds = [
        (before.get(name) or {}).get("tokens_per_second") for name in ("workload", "speed")
    ]  # of these rows; of full ones
    speed = next(filter(None, speeds), None) if is_as_planned else None
    measured = phase_bytes((report.get("memory") or {}).get("measured"))
    return {
        "status": _status(report, status),
        "steps": report.get("global_step", 0),
        "losses": [entry["loss"] for entry in report.get("loss", [])],
        "settings": {
            name: (after or before)[name]
            for name in ("per_device_batch_size", "micro_batches", "checkpointed_layers", "packing")
        },
        "budget_bytes": before["budget_bytes"],
        "predicted": {**_of_phases(closed), "tokens_per_second": speed},
        "traced": _of_phases((before.get("exact") or {}).get("phases") if is_as_planned else None),
        "probed": {
            **_of_phases(probe.get("predicted_after")),
            "seconds": probe.get("seconds"),
            "is_cached": probe.get("cached"),
        },
        "measured": {
            "peak": (report.get("peak_bytes") or {}).get("measured"),
            "phases": measured,
            "tokens_per_second": report.get("tokens_per_second"),
        },
    }


def failed(cause: str) -> dict[str, Any]:
    """Return the facts of a work that could not even be planned."""
    nothing: dict[str, Any] = {"peak": None, "phases": {}, "tokens_per_second": None}
    kinds = dict.fromkeys(("predicted", "traced", "probed", "measured"), nothing)
    return {
        "status": "failed",
        "cause": cause,
        "steps": 0,
        "losses": [],
        "settings": {},
        "budget_bytes": None,
        **kinds,
    }


def _status(report: Mapping[str, Any], status: int | None) -> str:
    """done, refused (by the plan), out of memory, or failed."""
    if status == 0 and report.get("status") == "done":
        return "done"
    if status == ExitClass.OUT_OF_MEMORY:
        return "out of memory" if report else "refused"
    return "failed"


def _of_phases(phases: Mapping[str, Any] | None) -> dict[str, Any]:
    found = phase_bytes(phases)
    return {"peak": max(found.values(), default=None), "phases": found}


def phase_bytes(phases: Mapping[str, Any] | None) -> dict[str, int]:
    """Return the bytes of the phases that are there, each a number or an object with a `total`.

    >>> phase_bytes({"load": 5, "forward": {"weights": 3, "total": 7}, "save": None})
    {'load': 5, 'forward': 7}
    """
    totals = {
        name: found["total"] if isinstance(found, Mapping) else found
        for name, found in (phases or {}).items()
        if name in PHASES
    }
    return {name: total for name, total in totals.items() if total is not None}
