"""The picture that the demo leaves."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib
import numpy as np
import torch.nn.functional as F
from matplotlib.collections import PolyCollection
from matplotlib.colors import LinearSegmentedColormap, to_rgb
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from torch import Tensor

from viking.timeline import stays

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.gridspec import SubplotSpec

    from .record import Step
    from .story import Run

INK = "#1b2036"
STREAMED = "#f0629b"
LAYERS = LinearSegmentedColormap.from_list("layers", ["#f4b03c", "#f0629b", "#6246be"])
PAPER = "#fbfaf7"


def draw(path: Path, before: Tensor, streamed: Run, resident: Run, identical: bool) -> None:
    """Samples before and after, the losses of both runs, and the memory of one step, as one PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    with matplotlib.rc_context({"font.size": 10, "text.color": INK, "axes.labelcolor": INK, "axes.titlesize": 11}):
        layout = ConstrainedLayoutEngine(w_pad=0.15, h_pad=0.1)
        picture = Figure(figsize=(13, 7.8), facecolor=PAPER, layout=layout)
        FigureCanvasAgg(picture)
        if streamed.stats is not None:
            managed = streamed.stats.resident_bytes + streamed.stats.streamed_bytes
            budget = streamed.stats.weights_budget_bytes
            headline = f"{managed / 1e6:.2f} MB of weights, a LoRA trained in {budget / 1e6:.2f} MB of device memory"
            picture.suptitle(headline, x=0.012, ha="left", fontsize=15, fontweight="bold")
        grid = picture.add_gridspec(2, 2, height_ratios=[0.62, 1])
        gallery(picture.add_subplot(grid[0, 0]), before, "Before: the base model")
        gallery(picture.add_subplot(grid[0, 1]), streamed.samples, "After: the same noise, with the streamed LoRA")
        losses(picture.add_subplot(grid[1, 0]), streamed, resident, identical)
        if streamed.step is not None:
            memory(picture, grid[1, 1], streamed.step)
        picture.savefig(path, dpi=110)


def gallery(axes: Axes, images: Tensor, title: str, zoom: int = 12, gap: int = 14) -> None:
    """Images `(N, 3, 8, 8)` in [-1, 1] as rows of ten, enlarged smoothly: 8 pixels a side are hard on the eye."""
    side = 8 * zoom
    large = F.interpolate(images, scale_factor=zoom, mode="bicubic").clamp(-1, 1).permute(0, 2, 3, 1).numpy() / 2 + 0.5
    sheet = np.ones((len(large) // 10 * (side + gap) - gap, 10 * (side + gap) - gap, 3)) * to_rgb(PAPER)
    for index, image in enumerate(large):
        y, x = index // 10 * (side + gap), index % 10 * (side + gap)
        sheet[y : y + side, x : x + side] = image
    axes.imshow(sheet)
    axes.set_title(title, loc="left", fontweight="bold")
    axes.set_axis_off()


def losses(axes: Axes, streamed: Run, resident: Run, identical: bool) -> None:
    """Both curves, one drawn inside the other, so that two equal ones are both seen."""
    axes.plot(streamed.losses, color=STREAMED, linewidth=5, alpha=0.55, label="weights streamed by Viking")
    axes.plot(resident.losses, color=INK, linewidth=1.1, label="all weights resident")
    verdict = "both runs, equal in every bit" if identical else "THE RUNS DIFFER"
    axes.set_title(f"Loss: {verdict}", loc="left", fontweight="bold")
    axes.set_xlabel("step")
    axes.set_ylim(bottom=0)
    axes.set_facecolor(PAPER)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)


def memory(picture: Figure, place: SubplotSpec, step: Step) -> None:
    """One training step: what computes, what is on the link, and which bytes of the slab hold which weight."""
    grid = place.subgridspec(3, 1, height_ratios=[1, 1, 6], hspace=0.0)
    compute, link, slab = (picture.add_subplot(grid[row]) for row in range(3))
    colours = [LAYERS(index / max(1, len(step.weights) - 1)) for index in range(len(step.weights))]
    ms = step.period_ns / 1e6
    for axes, spans, name in ((compute, step.computes, "computes"), (link, step.copies, "on the link")):
        axes.broken_barh(
            [(span.begin_ns / 1e6, max(span.end_ns - span.begin_ns, step.period_ns / 400) / 1e6) for span in spans],
            (0, 1),
            facecolors=[colours[span.weight] for span in spans],
        )
        axes.set_yticks([0.5], [name])
        axes.set_ylim(-0.15, 1.15)
    boxes, faces = [], []
    for index, begin, _, end in stays(step.weights, step.copies, step.period_ns):
        boxes.append(box(max(0.0, begin) / 1e6, end / 1e6, step.weights[index].offset, step.weights[index].nbytes))
        faces.append(colours[index])
    for index, weight in enumerate(step.weights):
        if weight.resident:
            boxes.append(box(0.0, ms, weight.offset, weight.nbytes))
            faces.append(colours[index])
    slab.add_collection(PolyCollection(boxes, facecolors=faces, edgecolors=PAPER, linewidths=0.4, alpha=0.55))
    used = [
        box(span.begin_ns / 1e6, span.end_ns / 1e6, step.weights[span.weight].offset, step.weights[span.weight].nbytes)
        for span in step.computes
    ]
    slab.add_collection(PolyCollection(used, facecolors=[colours[span.weight] for span in step.computes]))
    slab.set_ylim(0, max((weight.offset + weight.nbytes for weight in step.weights), default=1) / 1e6)
    slab.set_ylabel("place in device memory (MB)")
    slab.set_xlabel("ms since the step began; each colour is a layer; dark: it computes")
    for axes in (compute, link, slab):
        axes.set_xlim(0, ms)
        axes.set_facecolor(PAPER)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(length=0)
        if axes is not slab:
            axes.spines["bottom"].set_visible(False)
            axes.set_xticks([])
    compute.set_title("The device's memory during one step, as measured", loc="left", fontweight="bold")


def box(left: float, right: float, offset: int, nbytes: int) -> list[tuple[float, float]]:
    low, high = offset / 1e6, (offset + nbytes) / 1e6
    return [(left, low), (left, high), (right, high), (right, low)]
