"""What `make watch` shows of a run, a frame or a line a log, and the table of `make runs`.

Reads the run's files and nothing else, so it shows a run of another host with the same disk too.
"""

import os
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from sft_play.plan.devices import GIB
from sft_play.progress import duration, short_number
from sft_play.reporting.bootstrap import recorded_scores
from sft_play.reporting.charts import averaged
from sft_play.reporting.run_facts import RunFacts
from sft_play.runs.files import Json
from sft_play.runs.folder import list_runs
from sft_play.runs.metrics import MetricsLine
from sft_play.runs.report import logged_scores

CURVE_WIDTH = 60
CURVE_HEIGHT = 5
BAR_WIDTH = 30
LOG_TAIL_BYTES = 8192
# A run says something every 5 s (training.observers). A step may take minutes.
SILENT_SECONDS = 30.0
LOG_PREFIX = re.compile(r"^\S+ \S+ (INFO|WARNING|ERROR) \S+: (.+)")
FACTS = {
    "tokens_per_second": lambda tokens: f"{short_number(tokens)} tokens/s",
    "step_seconds": "{:.3g} s per step".format,
    "mfu": "MFU {:.0%}".format,
    "learning_rate": "learning rate {:.3g}".format,
    "grad_norm": "gradient norm {:.3g}".format,
}

EIGHTHS = " ▁▂▃▄▅▆▇█"
KILLED = "killed before it could write why; dmesg names what was killed for memory"


def last_log_line(path: Path) -> str:
    """Return the text of the last line of a rank's log, without time and name."""
    if not path.exists():
        return ""
    with path.open("rb") as file:
        file.seek(0, os.SEEK_END)
        file.seek(max(0, file.tell() - LOG_TAIL_BYTES))
        tail = file.read().decode("utf-8", errors="replace")
    for line in reversed(tail.splitlines()):
        found = LOG_PREFIX.match(line)
        if found:
            return plain_line(found[2])
    return ""


def plain_line(text: str) -> str:
    """Return text on one line, without characters that would steer a terminal."""
    return " ".join("".join(char if char.isprintable() else " " for char in text).split())


def frame(run: RunFacts) -> list[str]:
    """Return the lines of a terminal, the most important ones first."""
    lines = [heading(run), *_progress_lines(run), *_loss_lines(run)]
    logged = {name: run.logged(name) for name in FACTS}
    facts = [words(logged[name][-1][1]) for name, words in FACTS.items() if logged[name]]
    if facts:
        lines.append(f"speed  {', '.join(facts)}")
    lines += _gpu_lines(run)
    log = last_log_line(run.folder.logs / "rank-0.log") if run.goes_on else ""
    if log:
        lines.append(f"log    {log}")
    # of the last evaluation that generated some
    for each in next((line.answers for line in reversed(run.lines) if line.answers), ()):
        texts = {"prompt  ": each.prompt, "expected": each.expected, "answer  ": each.answer}
        lines += ["", *(f"{name} {plain_line(text)}" for name, text in texts.items())]
    return lines


def heading(run: RunFacts) -> str:
    """Return name and state of a run, and what it computes on."""
    report = run.report
    facts = [f"run {run.folder.name}: {report.state}"]
    if report.mode and report.backend:
        facts.append(f"{report.mode} with {report.backend}")
    if report.world_size:
        facts.append(f"{report.world_size} x {report.device} ({report.strategy})")
    if report.started_at:
        facts.append(f"started {report.started_at[:16].replace('T', ' ')}")
    if not report.is_here:
        facts.append(f"on {report.host}")
    return ", ".join(facts)


def _progress_lines(run: RunFacts) -> Iterator[str]:
    begun = run.begun
    if begun is None:
        if run.goes_on:
            yield "no step yet: it prepares rows and loads weights"
        return
    last = run.lines[-1]
    done = last.step / max(1, last.steps)
    times = [f"{duration(last.time - begun.time)} gone"]
    if run.goes_on and last.step < last.steps:
        left = seconds_left(run)
        times.append("time left unknown yet" if left is None else f"{duration(left)} left")
    yield (f"step   {last.step}/{last.steps} {bar(done, BAR_WIDTH)} {done:.0%}, {', '.join(times)}")
    silent = run.read_at - last.time
    if run.goes_on and silent > SILENT_SECONDS:
        yield f"       no sign of life for {duration(silent)}"


def seconds_left(run: RunFacts) -> float | None:
    """Return the time that the steps left will take, evaluations included; None before two.

    The first step of a run compiles and allocates: it does not count.
    """
    logs = (line for line in run.lines if line.values and line.time is not None)
    first = next((line for line in logs if line.step > run.begun.step), None)
    last = run.lines[-1]
    if first is None or last.step <= first.step:
        return None
    seconds_per_step = (last.time - first.time) / (last.step - first.step)
    return max(0.0, (last.steps - last.step) * seconds_per_step - (run.read_at - last.time))


def _loss_lines(run: RunFacts) -> Iterator[str]:
    losses = [loss for _, loss in run.logged("loss")]
    if losses:
        yield f"loss   {losses[-1]:.4f} now, {losses[0]:.4f} first, {min(losses):.4f} lowest"
        yield from curve(losses, CURVE_WIDTH, CURVE_HEIGHT)
    names = dict.fromkeys(name for line in run.lines for name in line.values)
    for rows, title in (("eval", "validation rows"), ("test", "held-out rows")):
        for name in ("loss", *logged_scores(names, rows)):
            found = run.logged(f"{rows}_{name}")
            if found:
                shown = [f"{value:.4f} at step {step}" for step, value in found[-3:]]
                yield f"{name:<6} of the {title}: {', '.join(shown)}"


def _gpu_lines(run: RunFacts) -> Iterator[str]:
    ranks = {rank.rank: rank for rank in run.report.memory_by_rank or []}
    hosts = {rank.host for rank in ranks.values()}
    for sample in run.gpus:
        rank = ranks.get(sample.rank)
        name = f" {rank.name}" if rank else ""
        host = f" of {rank.host}" if rank and len(hosts) > 1 else ""
        total = f" of {rank.total_bytes / GIB:.1f}" if rank else ""
        known = {
            "{:.0f} % busy": sample.busy_percent,
            f"{{:.1f}}{total} GiB used": sample.used_gib,
            "{:.0f} W": sample.watts,
            "{:.0f} °C": sample.celsius,
        }
        loads = [words.format(value) for words, value in known.items() if value is not None]
        yield f"GPU {sample.rank}{name}{host}: {', '.join(loads)}"


def pipe_line(run: RunFacts, line: MetricsLine) -> str | None:
    """Return a log in one line for a pipe; None for a line that logged no loss."""
    names = ["loss", "grad_norm", "learning_rate", "mfu"]
    for rows in ("eval", "test"):
        names += [f"{rows}_{name}" for name in ("loss", *logged_scores(line.values, rows))]
    facts = [f"{name}={line.values[name]:.4g}" for name in names if name in line.values]
    if line.time is None or not any("loss" in fact for fact in facts):
        return None
    if "tokens_per_second" in line.values:
        facts.append(f"tokens_per_second={line.values['tokens_per_second']:.0f}")
    for name, digits in (("busy_percent", 0), ("used_gib", 1)):
        loads = [getattr(gpu, name) for gpu in line.gpus]
        shown = ",".join(f"{load:.{digits}f}" for load in loads if load is not None)
        if shown:
            facts.append(f"gpu_{name}={shown}")
    left = seconds_left(run)
    if left is not None and line.step == run.lines[-1].step < line.steps:
        facts.append(f"left={duration(left).replace(' ', '')}")
    clock = time.strftime("%H:%M:%S", time.localtime(line.time))
    return f"{clock} step {line.step}/{line.steps} {' '.join(facts)}"


def bar(fraction: float, width: int) -> str:
    """Return a bar that is filled to `fraction`.

    >>> bar(0.25, 8)
    '██░░░░░░'
    """
    filled = round(min(1.0, max(0.0, fraction)) * width)
    return "█" * filled + "░" * (width - filled)


def curve(values: Sequence[float], width: int, height: int) -> list[str]:
    """Return lines that draw the values from left to right, the top one first.

    More values than columns are averaged. The top line is labeled with the largest value that is
    drawn, the bottom line with the least.

    >>> for line in curve([4.0, 3.0, 2.0, 0.0], width=4, height=2): print(line)
    4.000 ┤█▅▁▁
    0.000 ┤████
    """
    columns = averaged(values, width)
    low, high = min(columns), max(columns)
    # a value at the bottom still shows: its column has an eighth
    span = (high - low) or 1.0
    levels = [1 + round((value - low) / span * (8 * height - 1)) for value in columns]
    labels = {0: f"{low:.4g}", height - 1: f"{high:.4g}"}
    lines = []
    for row in range(height - 1, -1, -1):
        cells = [EIGHTHS[min(8, max(0, level - 8 * row))] for level in levels]
        lines.append(f"{labels.get(row, ''):>8} ┤{''.join(cells)}")
    return lines


def run_table(output_dir: Path) -> list[str]:
    """Return a line for each run below `output_dir`, oldest first."""
    runs = list(map(RunFacts.read, list_runs(output_dir)))
    if not runs:
        return [f"{output_dir} holds no run yet; make train makes one"]
    width = max(len(run.run) for run in runs)
    return [f"{run.run:<{width}}  {_run_words(run)}" for run in runs]


def runs_json(output_dir: Path) -> list[Json]:
    """Return the content of run.json of each run, with its folder and its state of now."""
    return [
        {**run.report.to_json(), "folder": str(run.folder.path), "state": run.report.state}
        for run in map(RunFacts.read, list_runs(output_dir))
    ]


def _run_words(run: RunFacts) -> str:
    """Return status, steps and scores of a run, and how to resume it."""
    report = run.report
    after = report.scores("after")
    words = [f"{name}={score}" for name, score in recorded_scores(after).items()]
    if "eval_loss" in after:
        words.insert(0, f"eval_loss={after['eval_loss']:.4f}")
    scores = " ".join(words)
    mode = f"{report.mode or '-'}/{report.backend or '-'}"
    cause = (report.cause or report.warning or "").partition("\n")[0]
    if report.state == "died" and not cause:
        cause = KILLED
    facts = f"world={report.world_size or '-'} step={run.reached_step} {scores} {cause}"
    if report.state in ("failed", "died", "stopped") and report.next and "RESUME" not in cause:
        facts += f"; continue with {report.next}"
    elif report.state == "died":
        facts += "; nothing is kept: the same command starts it again"
    return f"{report.state:<8} {mode:<13} {facts}".rstrip()
