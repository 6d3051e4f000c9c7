"""The results as tables for docs/benchmark.md and as a plot. Pure but for the plot's file; loads no torch."""

from pathlib import Path
from typing import Any

from benchmarks.speed.workloads import ARMS, TOY, WORKS

HEAD = "| | real tokens/s | with loss/s | GiB reserved | MFU {peak} | of {reached} | ready s | off reference | as it ran |"
RULE = "| --- | --: | --: | --: | --: | --: | --: | --: | --- |"
WITHOUT_FLASH = (
    "flash-attn was installed for no one: where it is, the packed paths of TRL and Unsloth gain."
)
WITH_FLASH = "flash-attn was installed; only an arm that finds it by itself uses it."


def markdown(results: dict[str, Any]) -> str:
    """Return a table for each work, fastest arm first, arms that do not count last with the reason."""
    lines = [
        machine(results),
        "",
        WITH_FLASH if results["versions"].get("flash-attn") else WITHOUT_FLASH,
    ]
    for name, found in sorted(
        results["works"].items(), key=lambda item: list(WORKS).index(item[0])
    ):
        reference = found.get("reference")
        basis = (
            f"reference: transformers + PEFT, {reference['precision']}, {len(reference['losses'])} steps"
            if reference
            else "no reference"
        )
        lines += [
            "",
            f"### {name}",
            "",
            f"{described(name)}; {basis}.",
            "",
            HEAD.format(**peaks_of(results)),
            RULE,
        ]
        lines += [
            row(arm, facts)
            for arm, facts in sorted(
                found["arms"].items(), key=lambda item: (not item[1]["counts"], -speed(item[1]))
            )
        ]
    return "\n".join(lines) + "\n"


def machine(results: dict[str, Any]) -> str:
    """Return hardware and versions in one sentence."""
    versions = ", ".join(
        f"{name} {version}" for name, version in sorted(results["versions"].items()) if version
    )
    return f"Measured on one {results['device']}, Python {results['python']}, {versions}."


def peaks_of(results: dict[str, Any]) -> dict[str, str]:
    """Return the peaks that both MFU columns are shares of."""
    return {
        name: f"{value / 1e12:.0f} TFLOP/s" if value else "-"
        for name, value in (("peak", results["peak_flops"]), ("reached", results["reached_flops"]))
    }


def described(name: str) -> str:
    """Return what a work is."""
    work = WORKS[name]
    rows = (
        f"rows of {work.tokens} tokens"
        if work.tokens
        else f"ragged rows of at most {work.max_seq_len} tokens"
    )
    model = (
        "the tiny model that ships"
        if work.shape == TOY
        else f"{work.shape.rpartition('/')[2]} with random weights"
    )
    return f"{model}, {work.mode}, {rows}, {work.rows_per_step} a step"


def speed(facts: dict[str, Any]) -> float:
    """Return real tokens a second, 0 where nothing was measured."""
    return facts["real_tokens"] / facts["seconds"] if facts.get("seconds") else 0.0


def row(arm: str, facts: dict[str, Any]) -> str:
    """Return an arm's line; figures that do not count are struck out, with the reason behind them."""
    if facts["status"] != "done":
        return f"| {arm} | - | - | - | - | - | - | - | {facts['status']}: {facts.get('error', '').replace('|', '/')} |"
    figures = [f"{speed(facts):,.0f}", f"{facts['trained_tokens'] / facts['seconds']:,.0f}"]
    figures = figures if facts["counts"] else [f"~~{figure}~~" for figure in figures]
    shares = [
        f"{facts[name]:.1%}" if facts.get(name) else "-" for name in ("mfu", "mfu_of_reached")
    ]
    off = f"{facts['off']:.2%}" if facts["off"] is not None else "-"
    told = (
        ARMS[arm].told + "; " + as_it_ran(facts)
        if facts["counts"]
        else "does not count: " + "; ".join(facts["why_not"])
    )
    return " | ".join(
        [
            f"| {arm}",
            *figures,
            f"{facts['peak_reserved_gib']:.1f}",
            *shares,
            f"{facts['ready_seconds']:.0f}",
            off,
            f"{told} |",
        ]
    )


def as_it_ran(facts: dict[str, Any]) -> str:
    """Return the settings that were tried or planned."""
    return ", ".join(
        f"{name.replace('_', ' ')} {str(value).lower()}"
        for name, value in sorted(facts["settings"].items())
    )


def draw(results: dict[str, Any], path: Path) -> None:
    """Draw tokens a second of the arms that count, a panel for each work; ours are dark."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    counted = {
        name: {arm: facts for arm, facts in found["arms"].items() if facts["counts"]}
        for name, found in results["works"].items()
    }
    works = [name for name in WORKS if counted.get(name)]
    if not works:
        return
    heights = [len(counted[name]) + 1 for name in works]
    figure, panels = pyplot.subplots(
        len(works), 1, figsize=(8, 0.32 * sum(heights) + 0.6), height_ratios=heights, squeeze=False
    )
    for panel, name in zip(panels[:, 0], works, strict=True):
        arms = sorted(counted[name].items(), key=lambda item: speed(item[1]))
        speeds = [speed(facts) for _, facts in arms]
        bars = panel.barh(
            [arm for arm, _ in arms],
            speeds,
            color=["#1f4e79" if ARMS[arm].is_ours else "#b8c4d0" for arm, _ in arms],
        )
        panel.bar_label(
            bars,
            [
                f"{value:,.0f}   {facts['peak_reserved_gib']:.0f} GiB"
                for value, (_, facts) in zip(speeds, arms, strict=True)
            ],
            padding=3,
            size=8,
        )
        panel.set_title(name, loc="left", size=9)
        panel.set_xlim(0, max(speeds) * 1.25)
        panel.tick_params(labelsize=8)
        panel.spines[["top", "right"]].set_visible(False)
    panels[-1, 0].set_xlabel("real tokens a second", size=8)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
