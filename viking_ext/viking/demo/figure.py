"""The picture that the demo leaves."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib
import numpy as np
import torch.nn.functional as F
from matplotlib.colors import to_rgb
from torch import Tensor

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from .story import Run

INK = "#1b2036"
STREAMED = "#f0629b"
PAPER = "#fbfaf7"


def draw(path: Path, before: Tensor, streamed: Run, resident: Run, identical: bool) -> None:
    """Samples before and after, the losses of both runs, and the memory of one step, as one PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"font.size": 10, "text.color": INK, "axes.labelcolor": INK, "axes.titlesize": 11}):
        picture = Figure(figsize=(13, 8.6), facecolor=PAPER, layout="constrained")
        FigureCanvasAgg(picture)
        grid = picture.add_gridspec(2, 2, height_ratios=[1, 1.35])
        gallery(picture.add_subplot(grid[0, 0]), before, "Before: the base model")
        gallery(picture.add_subplot(grid[0, 1]), streamed.samples, "After: the same noise, with the streamed LoRA")
        losses(picture.add_subplot(grid[1, 0]), streamed, resident, identical)
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
