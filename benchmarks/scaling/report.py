"""Tables and a plot of how training speeds up with the number of GPUs. Loads no torch."""

from __future__ import annotations

from pathlib import Path

from benchmarks.files import grid, number
from benchmarks.scaling.results import Case, ScalingResults
from benchmarks.speed.report import describe_machine, describe_workload
from benchmarks.speed.workloads import find_workload

# What a guide to several GPUs may promise of them
PROMISED = {1: 1.0, 2: 1.8, 4: 3.4, 8: 6.4}
HEAD = [
    "GPUs",
    "program",
    "strategy",
    "real tokens/s",
    "a GPU",
    "speed-up",
    "of linear",
    "promised",
    "GiB reserved a GPU",
    "planned",
    "waits for others",
    "off one GPU",
]
LINE_COLORS = ("#1f4e79", "#c0504d", "#7f7f7f", "#9bbb59", "#8064a2")


def markdown(results: ScalingResults) -> str:
    """Return two tables for each workload: as many rows for every GPU, and as many in all."""
    host = describe_machine(results.machine).replace("one ", f"a host with {results.gpus} ", 1)
    lines = [host]
    for work in dict.fromkeys(case.work for case in results.found):
        lines += ["", f"### {work}", "", f"{describe_workload(find_workload(work))} on one GPU."]
        lines += table(results, work, "As many rows for every GPU (weak scaling):", is_weak=True)
        lines += table(results, work, "As many rows in all (strong scaling):", is_weak=False)
    return "\n".join(lines) + "\n"


def table(results: ScalingResults, work: str, title: str, is_weak: bool) -> list[str]:
    """Return the lines of one table, [] where nothing was measured."""
    cases = []
    for case in results.found:
        is_baseline = case.gpus == 1 and case.times == 1
        if case.work == work and (is_baseline or (case.gpus > 1 and case.is_weak == is_weak)):
            cases.append(case)
    if all(case.gpus == 1 for case in cases):
        return []
    cases.sort(key=lambda case: (case.gpus, case.arm != "ours-bnb", case.strategy))
    rows = [row(results, case) for case in cases]
    return ["", title, "", grid(HEAD, rows, ("program", "strategy")).rstrip("\n")]


def row(results: ScalingResults, case: Case) -> list[str]:
    """Return a case's cells; a speed that does not count is struck out, with the reason."""
    result = results.found[case]
    measured = result.run.measured
    start = [str(case.gpus), case.arm, case.strategy]
    if measured is None:
        reason = f"{result.run.status}: {result.run.error or ''}".replace("|", "/")
        return [*start, reason, *[""] * 8]
    speed = measured.tokens_per_second
    figures = [f"{speed:,.0f}", f"{speed / case.gpus:,.0f}"]
    if not result.verdict.counts:
        figures = [f"~~{figure}~~" for figure in figures]
    speedup = results.speedup(case)
    return [
        *start,
        *figures,
        number(speedup, ".2f"),
        number(speedup and speedup / case.gpus, ".1%"),
        number(PROMISED.get(case.gpus), ".1f"),
        f"{measured.peak_reserved_gib:.1f}",
        number(measured.predicted_gib, ".1f"),
        number(measured.unhidden_communication, ".1%"),
        number(result.verdict.off, ".2%"),
    ]


def draw(results: ScalingResults, path: Path) -> None:
    """Draw the share of linear speed over the number of GPUs, a panel for each workload."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    works = list(dict.fromkeys(case.work for case in results.found if results.speedup(case)))
    if not works:
        return
    figure, panels = pyplot.subplots(
        len(works), 1, figsize=(7, 2.4 * len(works)), squeeze=False, sharex=True
    )
    for panel, work in zip(panels[:, 0], works, strict=True):
        draw_panel(panel, results, work)
    panels[-1, 0].set_xlabel("GPUs", size=8)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


def draw_panel(panel, results: ScalingResults, work: str) -> None:
    """Draw a line for each program and strategy of a workload, each GPU with its own rows."""
    lines: dict[str, dict[int, float]] = {}
    for case in results.found:
        speedup = results.speedup(case)
        if case.work == work and case.gpus > 1 and case.is_weak and speedup is not None:
            points = lines.setdefault(f"{case.arm} {case.strategy}", {1: 1.0})
            points[case.gpus] = speedup / case.gpus
    lines["promised"] = {gpus: speedup / gpus for gpus, speedup in PROMISED.items()}
    for index, (label, points) in enumerate(sorted(lines.items())):
        gpus = sorted(point for point in points if point <= results.gpus)
        color = LINE_COLORS[index % len(LINE_COLORS)]
        style = ":" if label == "promised" else "-"
        panel.plot(
            gpus, [points[count] for count in gpus], style, marker="o", color=color, label=label
        )
    panel.set_title(work, loc="left", size=9)
    panel.set_ylabel("of linear", size=8)
    panel.tick_params(labelsize=8)
    panel.legend(fontsize=7)
    panel.spines[["top", "right"]].set_visible(False)
