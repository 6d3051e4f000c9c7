"""A guide's machines on larger GPUs, whose memory is held to that of the cards it names.

python -m benchmarks.promised_hardware --plan                what each case needs; takes no GPU
python -m benchmarks.promised_hardware qwen-7b-4090          a case, or several; default all
python -m benchmarks.promised_hardware gemma-27b-h100 --steps 6 --grad-accum 1
python -m benchmarks.promised_hardware --toy                 the tiny model, two CPU processes
python -m benchmarks.promised_hardware --report FILE         the tables of results that are there

Cases: qwen-7b-4090, gemma-27b-h100 and llama-70b-h200 are rows of the guide's table, trained as the
shipped configs of these machines say. 8b-lora-17-gib is too large for one GPU,
8b-qlora-7.7-gib just fits on one, and both are trained on two. The others are mixtures of experts
on one: 30b-a3b-lora-72-gib, 30b-a3b-qlora-20.4-gib, gpt-oss-20b-qlora-16-gib,
gpt-oss-120b-qlora-78-gib and gpt-oss-120b-qlora.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.inputs import fixed_rows
from benchmarks.machine import GIB, ROOT, repository_commit
from benchmarks.planner.workloads import HELD_OUT_ROWS
from benchmarks.processes import clean_environment, run_limited
from benchmarks.promised_hardware.cases import CASES, Case
from benchmarks.promised_hardware.report import markdown
from benchmarks.promised_hardware.results import Outcome, PromisedResults, read_outcome
from benchmarks.speed.runner import log
from benchmarks.speed.samples import make_model, model_folder
from benchmarks.speed.workloads import TOY
from sft_play.commands import call as calls
from sft_play.plan import devices
from sft_play.plan.devices import Gpu
from sft_play.plan.ranks import visible_entries
from sft_play.plan.run_plan import RunPlan

TOY_CASE = "toy"
LOG_LINES = 30  # of a run that failed
MXFP4_BYTES = 0.66  # of a weight, where some are in bfloat16
DRAWN_STEPS = 2  # whose rows are made; later steps train on the same again


def main() -> None:
    """Run the cases that were asked for, and write what was measured after each."""
    args = parse_arguments()
    if args.report:
        write_report(PromisedResults.read(args.report), args.docs)
        return
    cases = chosen_cases(args)
    if args.plan:
        for case in cases:
            print("\n".join(plan_lines(case)))
        return
    # an exit kills the run that goes on; it would hold the GPUs
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    folder = args.folder.resolve()
    check_room(cases, folder)
    if not args.toy:
        cases = on_these_gpus(cases)
    results = PromisedResults.on_this_machine(args.results, args.toy, "promised")
    for case in cases:
        run_case(case, results, folder, args)
    write_report(results, args.docs)


def write_report(results: PromisedResults, folder: Path | None) -> None:
    """Print the page, and write it to `folder` where one is named."""
    text = markdown(results)
    if folder is not None:
        (folder / f"{results.path.stem}.md").write_text(text, encoding="utf-8")
    print(text, end="")


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options. Exits with words where one is not possible."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.promised_hardware",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)}")
    add("--gpus", type=int, help="1 to 8, where a case is to run on another number of them")
    add("--grad-accum", type=int, help="micro-batches of a step; default what the config says")
    add("--steps", type=int, default=12, help="optimizer steps; the first is not timed")
    add("--seconds", type=float, default=300, help="limit of one run")
    add("--plan", action="store_true", help="what each case needs, without a GPU")
    add("--toy", action="store_true", help="the tiny model, two processes on the CPU")
    add("--report", type=Path, metavar="FILE", help="run nothing")
    add("--folder", type=Path, default=ROOT / "outputs" / "benchmarks" / "promised")
    add("--results", type=Path, help="default benchmarks/results/promised-CARD.json")
    add("--docs", type=Path, help="folder of the page; by default it is only printed")
    args = parser.parse_args(words)
    unknown = [name for name in args.cases if name not in CASES]
    if unknown:
        parser.error(f"there is no case {', '.join(unknown)}; there are {', '.join(CASES)}")
    if args.gpus is not None and not 1 <= args.gpus <= 8:
        parser.error(f"--gpus {args.gpus}: write a number from 1 to 8")
    if args.steps < 2:
        parser.error(f"--steps {args.steps}: the first is not timed, so write 2 or more")
    if args.grad_accum is not None and args.grad_accum < 1:
        parser.error(f"--grad-accum {args.grad_accum}: write 1 or more")
    return args


def chosen_cases(args: argparse.Namespace) -> list[Case]:
    """Return the cases that were named, else all but the toy."""
    names = args.cases or [name for name in CASES if (name == TOY_CASE) == args.toy]
    return [CASES[name].on(args.gpus, args.grad_accum) for name in names]


def on_these_gpus(cases: Sequence[Case]) -> list[Case]:
    """Return the cases, with nothing held where a GPU is such a card itself.

    Exits with words where a case takes more GPUs than are visible, or more of their memory.
    """
    gpus = devices.detect("auto", os.environ).gpus
    lacking = [f"{case.name} takes {case.gpus}" for case in cases if case.gpus > len(gpus)]
    if lacking:
        enough = [case.name for case in cases if case.gpus <= len(gpus)]
        others = f"; name the others: {' '.join(enough)}" if enough else ""
        sys.exit(
            f"visible GPUs: {len(gpus)}; {', '.join(lacking)}{others}; --gpus takes another number"
        )
    found = [
        replace(case, leave_gib=None) if is_on_such_cards(case, gpus) else case for case in cases
    ]
    for case in found:
        for gpu in gpus[: case.gpus]:
            if case.free_gib is not None and gpu.free_bytes < case.free_gib * GIB:
                sys.exit(
                    f"{case.name} is to find {case.free_gib:.2f} GiB free, and GPU {gpu.index} has "
                    f"{gpu.free_bytes / GIB:.1f}; end what runs there, or take larger GPUs"
                )
    return found


def is_on_such_cards(case: Case, gpus: Sequence[Gpu]) -> bool:
    """Return whether the GPUs have what a case leaves of larger ones, to 1 GiB."""
    leave_bytes = (case.leave_gib or 0) * GIB
    return all(abs(gpu.total_bytes - leave_bytes) < GIB for gpu in gpus[: case.gpus])


def check_room(cases: Sequence[Case], folder: Path) -> None:
    """Exit with words where the disk has no room for the models that are not made yet."""
    needed_bytes = 0.0
    for case in {case.shape: case for case in cases if case.shape != TOY}.values():
        if not model_folder(case.shape, folder, in_mxfp4=case.in_mxfp4).exists():
            size = MXFP4_BYTES if case.in_mxfp4 else 2  # bfloat16
            needed_bytes += size * plan_of(case, case.gpus).step.model.parameters
    folder.mkdir(parents=True, exist_ok=True)
    free_bytes = shutil.disk_usage(folder).free
    if needed_bytes > free_bytes:
        sys.exit(
            f"the models take {needed_bytes / GIB:.0f} GiB, and {folder} has "
            f"{free_bytes / GIB:.0f} GiB free; name another with --folder, or fewer cases"
        )


def plan_of(case: Case, gpus: int) -> RunPlan:
    """Return the plan of a case on so many GPUs of the memory that it finds there."""
    environ = clean_environment(os.environ) | case.settings(gpus)
    environ |= {"MODEL_NAME": case.shape, "TRAIN_PREDICT_WITH_GENERATE": "false"}
    size = case.card if case.free_gib is None else f"{case.free_gib}GiB"
    call = calls.read_call(None, [], gpus=f"{gpus}x{size}", environ=environ)
    return calls.plan_run(call, calls.load_config(call), distributed=gpus > 1).plan


def plan_lines(case: Case) -> list[str]:
    """Return what the plan says of a case, a line for each of its runs."""
    lines = []
    for gpus in runs_of(case):
        if case.shape == TOY:
            lines.append(f"{case.name:<18} {gpus} processes on the CPU")
            continue
        plan = plan_of(case, gpus)
        words = f"refused: {plan.shortage}"
        if plan.fits:
            layout = plan.layout
            words = (
                f"{plan.ranks.strategy} {layout.batch_size} x {gpus} x {layout.grad_accum} rows, "
                f"{plan.memory.predicted_peak / GIB:.2f} of {plan.budget_bytes / GIB:.2f} GiB"
            )
        left = "" if case.free_gib is None else f" of {case.free_gib:.2f} GiB"
        lines.append(f"{case.name:<18} {gpus} GPU{left}: {words}")
    return lines


def runs_of(case: Case) -> list[int]:
    """Return on how many GPUs a case is run, one after the other."""
    return [1, case.gpus] if case.alone is not None and case.gpus > 1 else [case.gpus]


def make_files(case: Case, folder: Path) -> tuple[Path, Path]:
    """Return the model and the folder of rows of a case, made unless they exist."""
    model = make_model(case.shape, folder, in_mxfp4=case.in_mxfp4)
    rows = folder / f"{case.name}-{case.step_rows}"
    if not (rows / "held-out.jsonl").exists():
        rows.mkdir(parents=True, exist_ok=True)
        fixed_rows(rows / "rows.jsonl", case.tokens, DRAWN_STEPS * case.step_rows)
        fixed_rows(rows / "held-out.jsonl", case.tokens, HELD_OUT_ROWS, seed=1)
    return model, rows


def run_case(case: Case, results: PromisedResults, folder: Path, args: argparse.Namespace) -> None:
    """Run a case, first on one GPU where it is too large for that, and keep what became of it."""
    model, rows = make_files(case, folder)
    for gpus in runs_of(case):
        out = folder / "runs" / f"{case.name}-{gpus}"
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir(parents=True)
        command = make_command(case, gpus, model, rows, out, args.steps)
        environ = clean_environment(os.environ)
        if case.shape != TOY:
            visible = visible_entries(os.environ.get("CUDA_VISIBLE_DEVICES"), gpus)
            environ["CUDA_VISIBLE_DEVICES"] = ",".join(visible)
        log(f"{case.name} on {gpus}: {shlex.join(command)}")
        started = time.monotonic()
        status = run_limited(command, out / "log", args.seconds, ROOT, environ)
        outcome = Outcome(
            case.name,
            gpus,
            shlex.join(command_of(case, gpus, "python", {"MODEL_NAME": case.shape})),
            seconds=time.monotonic() - started,
            steps=args.steps,
            grad_accum=case.grad_accum,
            commit=repository_commit(),
            **read_outcome(status, args.seconds, out),
        )
        results.add(outcome)
        tell(outcome, out / "log")


def make_command(
    case: Case, gpus: int, model: Path, rows: Path, out: Path, steps: int
) -> list[str]:
    """Return the make command of a run, with what holds the memory before it."""
    settings = {
        "RUN": "run",
        "PY": sys.executable,
        "MODEL_NAME": str(model),
        "DATA_TRAIN_PATH": str(rows / "rows.jsonl"),
        "DATA_VAL_PATH": str(rows / "held-out.jsonl"),
        "DATA_CACHE_DIR": str(rows / "cache"),
        "TRAIN_OUTPUT_DIR": str(out),
        "TRAIN_MAX_STEPS": str(steps),
        "TRAIN_LOGGING_STEPS": "1",
        "TRAIN_SAVE_STRATEGY": "no",
        "TRAIN_PREDICT_WITH_GENERATE": "false",
        "TRAIN_REOPEN_SAVED": "false",
    }
    return command_of(case, gpus, sys.executable, settings)


def command_of(case: Case, gpus: int, python: str, settings: dict[str, str]) -> list[str]:
    """Return the make command of a run with more settings than the case has."""
    settings = case.settings(gpus) | settings
    if gpus > 1:
        settings["NUM_GPUS"] = str(gpus)
    command = ["make", "train-distributed" if gpus > 1 else "train-bnb"]
    command += [f"{name}={value}" for name, value in settings.items()]
    if case.leave_gib is None:
        return command
    return [python, "-m", "benchmarks.smaller_gpus", "--leave", f"{case.leave_gib:g}", *command]


def tell(outcome: Outcome, path: Path) -> None:
    """Print what became of a run, and the end of its log where nothing was measured."""
    trained = outcome.trained
    start = f"{outcome.case} on {outcome.gpus}: {outcome.status} after {outcome.seconds:.0f} s"
    if trained is not None:
        reserved = ", ".join(f"{size:.2f}" for size in trained.reserved_gib)
        log(
            f"{start}, {trained.strategy}, {trained.tokens_per_second:,.0f} tokens/s, "
            f"{trained.measured_gib:.2f} GiB (planned {trained.planned_gib:.2f}; reserved "
            f"{reserved}), losses {' '.join(f'{loss:.3f}' for loss in trained.losses)}"
        )
        return
    log(f"{start}: {outcome.cause}")
    if outcome.status != "refused" and path.exists():
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        log("\n".join(lines[-LOG_LINES:]))


if __name__ == "__main__":
    main()
