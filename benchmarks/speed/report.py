"""The results as tables and as a plot. Loads no torch."""

from __future__ import annotations

from pathlib import Path

from benchmarks.files import grid, number
from benchmarks.machine import Machine
from benchmarks.speed.results import ArmResult, SpeedResults, WorkloadResults
from benchmarks.speed.workloads import ARMS, TOY, WORKLOADS, Workload

WITHOUT_FLASH = (
    "flash-attn was not installed for any arm: where it is, the packed paths of TRL and Unsloth "
    "gain."
)
WITH_FLASH = "flash-attn was installed; only an arm that finds it by itself uses it."
OUR_COLOR = "#1f4e79"
PEER_COLOR = "#b8c4d0"


def markdown(results: SpeedResults) -> str:
    """Return a table for each workload, fastest arm first, arms that do not count last."""
    machine = results.machine
    lines = [
        describe_machine(machine),
        "",
        WITH_FLASH if machine.versions.get("flash-attn") else WITHOUT_FLASH,
    ]
    for name, workload in WORKLOADS.items():
        if name in results.works:
            lines.append(table(workload, results.works[name], machine).rstrip("\n"))
    return "\n".join(lines) + "\n"


def describe_machine(machine: Machine) -> str:
    """Return hardware and versions in one sentence."""
    installed = [
        f"{name} {version}" for name, version in sorted(machine.versions.items()) if version
    ]
    return f"Measured on one {machine.device}, Python {machine.python}, {', '.join(installed)}."


def table(workload: Workload, found: WorkloadResults, machine: Machine) -> str:
    """Return one workload's table with its heading."""
    basis = "no reference"
    if found.reference:
        steps = len(found.reference.losses)
        basis = f"reference: transformers + PEFT, {found.reference.precision}, {steps} steps"
    peaks = (machine.peak_flops, machine.reached_flops)
    peak, reached = (f"{flops / 1e12:.0f} TFLOP/s" if flops else "-" for flops in peaks)
    head = ["", "real tokens/s", "with loss/s", "GiB reserved", f"MFU {peak}", f"of {reached}"]
    head += ["ready s", "off reference", "as it ran"]
    by_speed = sorted(found.arms.items(), key=lambda item: -speed(item[1]))
    arms = sorted(by_speed, key=lambda item: not item[1].verdict.counts)
    rows = [row(arm, result) for arm, result in arms]
    lines = grid(head, rows, ("", "as it ran")).replace("|  |", "| |", 1)
    return f"\n### {workload.name}\n\n{describe_workload(workload)}; {basis}.\n\n{lines}"


def describe_workload(workload: Workload) -> str:
    """Return what a workload is."""
    rows = f"ragged rows of at most {workload.max_seq_len} tokens"
    if workload.tokens:
        rows = f"rows of {workload.tokens} tokens"
    model = f"{workload.shape.rpartition('/')[2]} with random weights"
    if workload.layers is not None:
        model = f"{workload.layers} layers of {model}"
    if workload.shape == TOY:
        model = "the tiny model that ships"
    return f"{model}, {workload.mode}, {rows}, {workload.rows_per_step} a step"


def speed(result: ArmResult) -> float:
    """Return real tokens a second, 0 where nothing was measured."""
    return result.run.measured.tokens_per_second if result.run.measured else 0.0


def row(arm: str, result: ArmResult) -> list[str]:
    """Return an arm's cells; speeds that do not count are struck out, and the last says why."""
    run = result.run
    if run.measured is None:
        error = (run.error or "").replace("|", "/")
        return [arm, *["-"] * 7, f"{run.status}: {error}"]
    measured = run.measured
    speeds = [
        f"{measured.tokens_per_second:,.0f}",
        f"{measured.trained_tokens_per_second:,.0f}",
    ]
    if result.verdict.counts:
        remark = f"{ARMS[arm].description}; {describe_settings(run.settings)}"
    else:
        speeds = [f"~~{figure}~~" for figure in speeds]
        remark = "does not count: " + "; ".join(result.verdict.why_not)
    return [
        arm,
        *speeds,
        f"{measured.peak_reserved_gib:.1f}",
        number(result.shares.mfu, ".1%"),
        number(result.shares.mfu_of_reached, ".1%"),
        f"{measured.ready_seconds:.0f}",
        number(result.verdict.off, ".2%"),
        remark,
    ]


def describe_settings(settings: dict[str, object]) -> str:
    """Return the settings that were tried or planned."""
    items = sorted(settings.items())
    return ", ".join(f"{name.replace('_', ' ')} {str(value).lower()}" for name, value in items)


def draw(results: SpeedResults, path: Path) -> None:
    """Draw tokens a second of the arms that count, a panel for each workload; ours are dark."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    counting = {}
    for name in WORKLOADS:
        arms = counting_arms(results.works.get(name))
        if arms:
            counting[name] = arms
    if not counting:
        return
    heights = [len(arms) + 1 for arms in counting.values()]
    figure, panels = pyplot.subplots(
        len(counting),
        1,
        figsize=(8, 0.32 * sum(heights) + 0.6),
        height_ratios=heights,
        squeeze=False,
    )
    for panel, (name, arms) in zip(panels[:, 0], counting.items(), strict=True):
        draw_panel(panel, name, arms)
    panels[-1, 0].set_xlabel("real tokens a second", size=8)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


def counting_arms(found: WorkloadResults | None) -> dict[str, ArmResult]:
    """Return the arms whose speed counts, slowest first."""
    if found is None:
        return {}
    arms = [(name, result) for name, result in found.arms.items() if result.verdict.counts]
    return dict(sorted(arms, key=lambda item: speed(item[1])))


def draw_panel(panel, name: str, arms: dict[str, ArmResult]) -> None:
    """Draw a bar for each arm on a panel of matplotlib."""
    speeds = [speed(result) for result in arms.values()]
    colors = [OUR_COLOR if ARMS[arm].is_ours else PEER_COLOR for arm in arms]
    labels = []
    for value, result in zip(speeds, arms.values(), strict=True):
        labels.append(f"{value:,.0f}   {result.run.measured.peak_reserved_gib:.0f} GiB")
    bars = panel.barh(list(arms), speeds, color=colors)
    panel.bar_label(bars, labels, padding=3, size=8)
    panel.set_title(name, loc="left", size=9)
    panel.set_xlim(0, max(speeds) * 1.25)
    panel.tick_params(labelsize=8)
    panel.spines[["top", "right"]].set_visible(False)
