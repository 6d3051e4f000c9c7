"""The picture of a results file: `python -m tools.docs.speeds FILE.json docs/evidence/X.svg`.

Needs matplotlib, which is in requirements-bench.txt.
"""

import sys
from itertools import groupby
from pathlib import Path

from matplotlib import pyplot

from benchmarks.report import base_name, rows_of
from benchmarks.results import Results
from benchmarks.workloads import WORKLOADS

OURS, PEERS = "#1f4e79", "#b8c4d0"  # colors


def draw(results: Results, path: Path) -> None:
    """Draw tokens/s of the results that count, a panel for each workload. SFT-Play is dark.

    Chats are left out: each program needs other tokens for the same chat.
    """
    order = list(WORKLOADS)
    found = [
        each
        for each in results.results
        if each.counts and each.tokens_per_second and "tokens_per_row" not in each.figures
    ]
    found.sort(key=lambda each: (order.index(base_name(each)), each.tokens_per_second))
    panels = {name: rows_of(results, list(group)) for name, group in groupby(found, base_name)}
    heights = [len(rows) + 1 for rows in panels.values()]
    size = (8, 0.32 * sum(heights) + 0.6)
    figure, drawn = pyplot.subplots(len(panels), figsize=size, height_ratios=heights, squeeze=False)
    for panel, (name, rows) in zip(drawn[:, 0], panels.items(), strict=True):
        speeds = [row.result.tokens_per_second for row in rows]
        names, labels = [], []
        for row in rows:
            result = row.result
            label = f"{result.tokens_per_second:,.0f}   {result.peak_gib:.0f} GiB"
            if result.gpus > 1 and row.speedup:
                label += f"   {row.speedup:.2f} times one GPU"
            labels.append(label)
            names.append(f"{result.arm} {result.gpus} x {row.used_strategy}")
        colors = [OURS if "ours" in arm else PEERS for arm in names]
        bars = panel.barh(range(len(rows)), speeds, color=colors, tick_label=names)
        panel.bar_label(bars, labels, padding=3, size=8)
        panel.set_title(name, loc="left", size=9)
        panel.set_xlim(0, max(speeds) * 1.4)
        panel.tick_params(labelsize=8)
    panel.set_xlabel("real tokens/s", size=8)
    figure.tight_layout()
    figure.savefig(path)


if __name__ == "__main__":
    draw(Results.read(Path(sys.argv[1])), Path(sys.argv[2]))
