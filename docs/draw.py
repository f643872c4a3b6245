"""Draws the README's pictures: `python docs/draw.py` writes overview.svg and step.svg beside itself.

The step is not drawn by hand: a model of ten layers is played through a device that holds five, by the rules of the
engine (one address for each weight, a fetch as soon as what it overwrites is no longer needed, one copy at a time).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

LAYERS = 10
RESIDENT = (2, 7)
SLOTS = 3
FORWARD, BACKWARD, COPY = 1.0, 2.6, 1.25
"""How long a layer computes in each sweep, and how long its copy takes."""

INK, PAPER, SOFT = "#1b2036", "#fbfaf7", "#e6e3db"
STYLE = "font-family='Helvetica, Arial, sans-serif'"


def colour(layer: int) -> str:
    """From yellow over pink to violet, along the model."""
    stops = ((0.0, (244, 176, 60)), (0.5, (240, 98, 155)), (1.0, (98, 70, 190)))
    at = layer / (LAYERS - 1)
    (low, a), (high, b) = (stops[0], stops[1]) if at <= 0.5 else (stops[1], stops[2])
    share = (at - low) / (high - low)
    return "#" + "".join(f"{round(x + (y - x) * share):02x}" for x, y in zip(a, b, strict=True))


@dataclass
class Bar:
    layer: int
    begin: float
    end: float


def slot_of(layer: int) -> int | None:
    """The place of a streamed layer in the ring; None for a resident one."""
    if layer in RESIDENT:
        return None
    return [other for other in range(LAYERS) if other not in RESIDENT].index(layer) % SLOTS


def play(periods: int = 4) -> tuple[list[Bar], list[Bar], float]:
    """Uses, copies and the begin of the last of several steps."""
    order = [*range(LAYERS), *reversed(range(LAYERS))]
    uses: list[Bar] = []
    copies: list[Bar] = []
    inside: dict[int, int] = {}
    released: dict[int, float] = {}
    link = now = start = 0.0
    for index, layer in enumerate(order * periods):
        if index % len(order) == 0:
            start = now
        slot = slot_of(layer)
        if slot is not None and inside.get(slot) != layer:
            begin = max(link, released.get(slot, 0.0))
            link = begin + COPY
            copies.append(Bar(layer, begin, link))
            inside[slot] = layer
            now = max(now, link)
        end = now + (FORWARD if index % len(order) < LAYERS else BACKWARD)
        uses.append(Bar(layer, now, end))
        if slot is not None:
            released[slot] = end
        now = end
    return uses, copies, start


def box(x: float, y: float, w: float, h: float, fill: str, label: str = "", size: int = 11, radius: int = 3) -> str:
    shape = f"<rect x='{x:.1f}' y='{y:.1f}' width='{w:.1f}' height='{h:.1f}' rx='{radius}' fill='{fill}'/>"
    if not label or w < 9:
        return shape
    return shape + text(x + w / 2, y + h / 2 + size * 0.36, label, size, "middle", "#ffffff", "bold")


def text(
    x: float, y: float, what: str, size: int = 13, anchor: str = "start", fill: str = INK, weight: str = "normal"
) -> str:
    look = f"font-size='{size}' text-anchor='{anchor}' fill='{fill}' font-weight='{weight}'"
    return f"<text x='{x:.1f}' y='{y:.1f}' {look}>{what}</text>"


def page(width: int, height: int, parts: list[str]) -> str:
    size = f"viewBox='0 0 {width} {height}' width='{width}' height='{height}'"
    head = f"<svg xmlns='http://www.w3.org/2000/svg' {size} {STYLE}>"
    return "\n".join([head, box(0, 0, width, height, PAPER, radius=10), *parts, "</svg>\n"])


def step() -> str:
    """What computes, what is on the link and what is in device memory, over one training step."""
    uses, copies, start = play()
    end = uses[-1].end
    left, right, scale = 150.0, 930.0, 780.0 / (end - start)

    def at(moment: float) -> float:
        return min(right, max(left, left + (moment - start) * scale))

    def row(bars: list[Bar], y: float) -> list[str]:
        return [
            box(at(bar.begin) + 0.6, y, at(bar.end) - at(bar.begin) - 1.2, 24, colour(bar.layer), str(bar.layer + 1))
            for bar in bars
            if bar.end > start and bar.begin < end
        ]

    turn = next(bar.end for bar in uses if bar.begin >= start and bar.layer == LAYERS - 1)
    parts = [
        text((left + at(turn)) / 2, 30, "forward", 13, "middle"),
        text((at(turn) + right) / 2, 30, "recompute and backward", 13, "middle"),
        f"<path d='M{at(turn):.1f} 18 V262' stroke='{INK}' stroke-dasharray='2 3'/>",
        text(18, 61, "computes", weight="bold"),
        *row([bar for bar in uses if bar.begin >= start], 44),
        text(18, 97, "on the link", weight="bold"),
        f"<rect x='{left}' y='80' width='{right - left}' height='24' fill='{SOFT}' rx='3'/>",
        *row(copies, 80),
        text(18, 143, "in device", weight="bold"),
        text(18, 159, "memory", weight="bold"),
    ]
    for lane, layer in enumerate(RESIDENT):
        parts += row([Bar(layer, start, end)], 124 + 28 * lane)
    for slot in range(SLOTS):
        tenants = [bar for bar in copies if slot_of(bar.layer) == slot]
        stays = [
            Bar(bar.layer, bar.begin, tenants[index + 1].begin if index + 1 < len(tenants) else end)
            for index, bar in enumerate(tenants)
        ]
        parts += row(stays, 124 + 28 * (len(RESIDENT) + slot))
    notes = (
        "Layers 3 and 8 stay for ever; the other eight share three places. A copy starts the moment its place is free,",
        "long before the layer computes; at the turn the last layers are still there and are simply used again.",
    )
    parts += [text(left, 290 + 16 * line, note, 12) for line, note in enumerate(notes)]
    return page(950, 322, parts)


def overview() -> str:
    """The model in host memory, the window on the device, and what travels between them."""
    parts = [text(30, 40, "Host memory", 16, weight="bold"), text(30, 60, "the whole model", 13)]
    per_row = 5
    for layer in range(2 * LAYERS):
        x, y = 30 + layer % per_row * 46, 78 + layer // per_row * 46
        parts.append(box(x, y, 40, 40, colour(layer // 2), str(layer + 1), 12, 5))
    for index, layer in enumerate((16, 15, 14)):
        parts.append(box(305 + index * 52, 118, 40, 40, colour(layer // 2), str(layer + 1), 12, 5))
    parts.append(text(378, 88, "just in time", 13, "middle"))
    parts.append(f"<path d='M285 176 H462' stroke='{INK}' stroke-width='2.5'/>")
    parts.append(f"<path d='M460 169 L474 176 L460 183 Z' fill='{INK}'/>")
    parts.append(text(378, 204, "planned once,", 12, "middle"))
    parts.append(text(378, 220, "copied ahead of need", 12, "middle"))
    parts.append(text(500, 40, "GPU memory", 16, weight="bold"))
    parts.append(text(500, 60, "the weights stay within a budget that you choose", 13))
    parts.append(f"<rect x='494' y='72' width='236' height='98' rx='8' fill='none' stroke='{INK}' stroke-width='2'/>")
    for index, layer in enumerate((3, 9, 17, 10, 11, 12, 13)):
        x, y = 500 + index % per_row * 46, 78 + index // per_row * 46
        parts.append(box(x, y, 40, 40, colour(layer // 2), str(layer + 1), 12, 5))
    parts.append(f"<path d='M497 121 h46 v46 h-46 Z' fill='none' stroke='{INK}' stroke-width='3'/>")
    parts.append(text(500, 192, "layer 13 computes now,", 12))
    parts.append(text(500, 208, "in torch, with the same bits as ever", 12))
    parts.append(text(500, 240, "LoRA, optimizer, activations: yours, untouched", 12))
    return page(840, 280, parts)


if __name__ == "__main__":
    folder = Path(__file__).parent
    (folder / "step.svg").write_text(step(), encoding="utf-8")
    (folder / "overview.svg").write_text(overview(), encoding="utf-8")
