"""The page of a results file: a Markdown table for each workload. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from benchmarks.machine import Machine
from benchmarks.results import Result, Results
from benchmarks.verdict import MIN_FALL, fall
from benchmarks.workloads import ARMS, OUR_ARM, SCALED, TOY, WORKLOADS, Workload, find_workload
from sft_play.plan.cards import CARDS

NO_FLASH = "flash-attn was not installed. With it, the packed paths of TRL and Unsloth are faster."
# of each kind of results
HEADS = {
    "speed": "# Training speed on one GPU\n\n"
    "A speed that is struck out does not count, for the reason in its last column.",
    "scaling": "# Training speed on several GPUs\n\n"
    "A guide promises 1.8 times the speed on two GPUs, 3.4 on four and 6.4 on eight.",
    "promised": "# Machines of a guide\n\n"
    "Another process occupies the rest of each GPU, so that a run finds the memory of "
    "the named card. The speed is that of the GPU it ran on, not of that card.",
}


class Row(NamedTuple):
    """A result, and what its cells are computed from."""

    result: Result
    workload: Workload
    results: Results

    @property
    def speedup(self) -> float | None:
        """How many times as fast it is as one GPU with the same program and its own rows."""
        result, base = self.result, base_name(self.result)
        is_weak = self.workload == WORKLOADS[base].scaled(result.gpus)
        one = self.results.find(base if is_weak else result.workload, result.arm)
        if one and one.counts and result.counts and one.tokens_per_second:
            return result.tokens_per_second / one.tokens_per_second
        return None

    @property
    def of_linear(self) -> float | None:
        """The speed-up as a fraction of the number of GPUs."""
        return self.speedup and self.speedup / self.result.gpus

    @property
    def per_gpu(self) -> float | None:
        """Tokens per second and GPU."""
        speed = self.result.tokens_per_second
        return speed and speed / self.result.gpus

    @property
    def used_strategy(self) -> str:
        """How the GPUs shared the model."""
        return self.result.settings.get("strategy", self.result.strategy)

    @property
    def cut(self) -> str:
        """The rows of an optimizer step: micro-batch x GPUs x micro-batches."""
        settings = self.result.settings
        if "micro_batches" not in settings:
            return str(self.workload.rows_per_step)
        return f"{settings['batch_size']} x {self.result.gpus} x {settings['micro_batches']}"

    @property
    def loss(self) -> str | None:
        """The first and the last loss of a workload without a reference."""
        losses = [logged.loss for logged in self.result.losses]
        if not losses or self.result.off is not None:
            return None
        words = f"{losses[0]:.3f} to {losses[-1]:.3f}"
        return words if fall(losses) >= MIN_FALL else f"{words}, too small a fall to prove anything"

    @property
    def remark(self) -> str:
        """The arm and its settings, or why the run does not count."""
        result = self.result
        if result.status != "done":
            return f"{result.status}: {result.cause or ''}".replace("|", "/")
        if not result.counts:
            return f"does not count: {'; '.join(result.why_not)}"
        settings = sorted(result.settings.items())
        words = [f"{name.replace('_', ' ')} {str(value).lower()}" for name, value in settings]
        arm = ARMS[result.arm]
        # on several GPUs SFT-Play runs another make target than the arm says
        described = "" if arm.is_ours and result.gpus > 1 else arm.description
        return "; ".join(filter(None, [described, ", ".join(words)]))

    def value(self, name: str) -> float | str | None:
        """Return what a column shows: a property of the row, a field or a figure of the result."""
        for source in (self, self.result):
            if hasattr(source, name):
                return getattr(source, name)
        return self.result.figure(name)


class Column(NamedTuple):
    """A column of a table. It is left out if no row has a value."""

    title: str
    name: str  # of Row.value
    form: str = "s"
    needs_gpus: bool = False  # only in tables with several GPUs


def rows_of(results: Results, found: Sequence[Result]) -> list[Row]:
    """Return the rows of some results."""
    return [Row(result, find_workload(result.workload), results) for result in found]


STRUCK = (
    "tokens_per_second",
    "per_gpu",
    "labelled_tokens_per_second",
)  # if the result does not count
COLUMNS = (
    Column("", "arm"),
    Column("GPUs", "gpus", "d", needs_gpus=True),
    Column("strategy", "used_strategy", needs_gpus=True),
    Column("rows per step", "cut", needs_gpus=True),
    Column("real tokens/s", "tokens_per_second", ",.0f"),
    Column("per GPU", "per_gpu", ",.0f", needs_gpus=True),
    Column("labelled tokens/s", "labelled_tokens_per_second", ",.0f"),
    Column("rows/s", "rows_per_second", ".2f"),
    Column("tokens per row", "tokens_per_row", ",.0f"),
    Column("distinct", "distinct_tokens_per_row", ",.0f"),
    Column("speed-up", "speedup", ".2f", needs_gpus=True),
    Column("of linear", "of_linear", ".1%", needs_gpus=True),
    Column("GiB reserved", "peak_gib", ".2f"),
    Column("GiB of the process", "process_gib", ".2f"),
    Column("GiB planned", "planned_gib", ".2f"),
    Column("MFU", "mfu", ".1%"),
    Column("of reached", "mfu_of_reached", ".1%"),
    Column("ready s", "ready_seconds", ".0f"),
    Column("ending s", "ending_seconds", ".1f"),
    Column("off reference", "off", ".2%"),
    Column("loss", "loss"),
    Column("as it ran", "remark"),
)


def markdown(results: Results) -> str:
    """Return the page: the machine, a table for each workload, and the commands."""
    machine = results.machine
    lines = [HEADS.get(results.kind, ""), describe_machine(machine, results.gpus)]
    if results.kind in HEADS:
        lines.append("Models have random weights.")
    if any(result.figure("mfu") for result in results.results):
        line = f"MFU is a share of {machine.peak_flops / 1e12:.0f} TFLOP/s, the data sheet"
        if machine.reached_flops is not None:
            line += f"; large matrix multiplications reach {machine.reached_flops / 1e12:.0f}"
        lines.append(f"{line}.")
    if results.kind == "speed" and not machine.versions.get("flash-attn"):
        lines.append(NO_FLASH)
    parts = ["\n\n".join(line for line in lines if line)]
    order = list(WORKLOADS)
    by_workload = sorted(results.results, key=lambda each: order.index(base_name(each)))
    for name, group in groupby(by_workload, base_name):
        found = list(group)
        described, reference = describe_workload(WORKLOADS[name]), results.references.get(name)
        if reference:
            steps = len(reference.losses)
            described += f"; reference: transformers + PEFT, {reference.precision}, {steps} steps"
        parts += [f"### {name}", f"{described}."]
        parts.append(table(results, found).rstrip("\n"))
    return "\n\n".join(parts) + "\n"


def base_name(result: Result) -> str:
    """Return the workload of one GPU."""
    return result.workload.partition(SCALED)[0]


def describe_machine(machine: Machine, gpus: int = 1) -> str:
    """Return hardware and versions in one sentence. 0 GPUs: on several hosts."""
    installed = [
        f"{name} {version}" for name, version in sorted(machine.versions.items()) if version
    ]
    host = {0: "", 1: "one "}.get(gpus, f"a host with {gpus} ")
    return f"Measured on {host}{machine.device}, Python {machine.python}, {', '.join(installed)}."


def describe_workload(workload: Workload) -> str:
    """Return the model, the rows, the variables of make, and what a guide promises."""
    rows = f"rows of log-normal lengths, at most {workload.max_seq_len:,} tokens"
    if workload.tokens:
        rows = f"rows of {workload.tokens:,} tokens"
    if workload.with_images:
        rows = "rows with one image"
    if workload.answers:
        rows = f"chats of {workload.answers} answers, each with reasoning"
    model = workload.shape.rpartition("/")[2]
    if workload.layers is not None:
        model = f"{workload.layers} layers of {model}"
    if workload.as_published:
        model = f"{model} and its vision encoder"
    if workload.shape == TOY:
        model = "the tiny model that ships"
    mode = workload.mode or dict(workload.variables).get("TUNING_MODE") or f"`{workload.config}`"
    text = f"{model}, {mode}, {rows}, {workload.rows_per_step} per step"
    text += "".join(f", {name}={value}" for name, value in workload.variables)
    if workload.free_gib is not None:
        named = f" (as a {CARDS[workload.card].name})" if workload.card else ""
        text += f"; each GPU limited to {workload.free_gib:.2f} GiB{named}"
    if workload.promise:
        gigabytes, speed = workload.promise
        text += f"; a guide promises about {gigabytes:g} GB per GPU and {speed:,.0f} tokens/s"
    return text


def table(results: Results, found: Sequence[Result]) -> str:
    """Return the table of one workload: fastest arm first, or by the number of GPUs."""
    several = any(result.gpus > 1 for result in found)
    rows = sorted(rows_of(results, found), key=_place_by_gpus if several else _place_by_speed)
    head, columns = [], []
    for column in COLUMNS:
        cells = [cell(column, row) for row in rows]
        if (several or not column.needs_gpus) and any(each != "-" for each in cells):
            head.append(column)
            columns.append(cells)
    texts = [column.title for column in head if column.form == "s"]
    return grid([column.title for column in head], list(zip(*columns, strict=True)), texts)


def _place_by_speed(row: Row) -> tuple:
    return (not row.result.counts, -(row.result.tokens_per_second or 0))


def _place_by_gpus(row: Row) -> tuple:
    result = row.result
    return (result.gpus, -row.workload.rows_per_step, result.arm != OUR_ARM, result.strategy)


def cell(column: Column, row: Row) -> str:
    """Return a cell: the value, "-" without one, struck out if it does not count."""
    value = row.value(column.name)
    if value is None:
        return "-"
    text = format(value, column.form)
    return f"~~{text}~~" if column.name in STRUCK and not row.result.counts else text


def grid(head: Sequence[str], rows: Sequence[Sequence[str]], texts: Sequence[str] = ()) -> str:
    """Return a table whose columns are numbers, except for `texts`."""
    rule = ["---" if title in texts else "--:" for title in head]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (head, rule, *rows))


def number(value: float | None, form: str = ",.0f") -> str:
    """Return a number as a cell."""
    return "-" if value is None else format(value, form)


def write_page(results: Results, folder: Path | None) -> None:
    """Print the page; write it to `folder`, by default that of the results."""
    path = (folder or results.path.parent) / results.path.stem
    path.parent.mkdir(parents=True, exist_ok=True)
    if results.kind == "planner":
        from benchmarks.planner.report import markdown as planner_markdown

        text = planner_markdown(results)
    else:
        text = markdown(results)
    path.with_suffix(".md").write_text(text, encoding="utf-8")
    print(text)
