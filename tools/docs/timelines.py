"""The picture of docs/several-gpus.md: what two GPUs do in a step under DDP, FSDP and a device map.

`python -m tools.docs` writes it. The widths are those of a thought, not of a measurement.
"""

from __future__ import annotations

from typing import NamedTuple

UNIT, BAR, GAP = 44, 26, 6  # pixels: of a width of 1, of a bar, between bars
LEFT, TOP = 130, 40
COLOURS = {
    "forward": "#4c72b0",
    "backward": "#dd8452",
    "gather": "#8c8c8c",
    "sum": "#c44e52",
    "step": "#55a868",
}


class Part(NamedTuple):
    """Something that a GPU does, from `begin` on for `width`, in units of time."""

    kind: str
    begin: float
    width: float
    lane: int = 0  # 1: beside the computation


class Strategy(NamedTuple):
    """A way to share a step, and what each GPU does in it."""

    title: str
    gpus: tuple[tuple[Part, ...], ...]


_DDP = (
    Part("forward", 0, 2),
    Part("backward", 2, 4),
    Part("sum", 3, 3.3, lane=1),
    Part("step", 6.3, 0.5),
)
_FSDP = (
    Part("gather", 0, 2, lane=1),
    Part("forward", 0.3, 2),
    Part("gather", 2.3, 3.5, lane=1),
    Part("backward", 2.5, 4),
    Part("sum", 5.9, 0.9, lane=1),
    Part("step", 6.8, 0.3),
)
_FIRST_HALF = (Part("forward", 0, 2), Part("backward", 8, 4), Part("step", 12, 0.5))
_SECOND_HALF = (Part("forward", 2, 2), Part("backward", 4, 4), Part("step", 12, 0.5))
STRATEGIES = (
    Strategy("DDP", (_DDP, _DDP)),
    Strategy("FSDP", (_FSDP, _FSDP)),
    Strategy("device map", (_FIRST_HALF, _SECOND_HALF)),
)
WORDS = {
    "forward": "forward pass",
    "backward": "backward pass",
    "gather": "gather weights",
    "sum": "sum gradients",
    "step": "optimizer",
}


def svg() -> str:
    """Return the picture."""
    parts = [_legend()]
    y = TOP
    for strategy in STRATEGIES:
        for number, gpu in enumerate(strategy.gpus):
            label = f"{strategy.title}, GPU {number}"
            parts.append(_text(LEFT - 10, y + BAR * 0.7, label, anchor="end"))
            parts += [_bar(part, y) for part in gpu]
            y += 2 * BAR + GAP
        y += 2 * GAP
    width = LEFT + 13 * UNIT
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {y}" '
        'font-family="sans-serif" font-size="13">\n'
        f'<rect width="{width}" height="{y}" fill="white"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def _bar(part: Part, y: float) -> str:
    """Return a part of a step; what goes on beside the computation is thinner and below it."""
    top = y + part.lane * (BAR + 2)
    height = BAR / 2 if part.lane else BAR
    return (
        f'<rect x="{LEFT + part.begin * UNIT:g}" y="{top:g}" width="{part.width * UNIT:g}" '
        f'height="{height:g}" fill="{COLOURS[part.kind]}"/>'
    )


def _legend() -> str:
    found = []
    for number, (kind, words) in enumerate(WORDS.items()):
        x = 20 + number * 3 * UNIT
        found.append(f'<rect x="{x:g}" y="10" width="12" height="12" fill="{COLOURS[kind]}"/>')
        found.append(_text(x + 17, 21, words))
    return "\n".join(found)


def _text(x: float, y: float, words: str, anchor: str = "start") -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}">{words}</text>'
