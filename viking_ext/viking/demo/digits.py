"""The data: scikit-learn's 1797 handwritten digits as white ink on black, and the style that the LoRA is to learn."""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from sklearn.datasets import load_digits
from sklearn.svm import SVC
from torch import Tensor

PAPER = (-0.80, -0.84, -0.50)
INK_TOP = (1.0, 0.86, 0.20)
INK_BOTTOM = (0.95, -0.55, 0.35)


def load() -> tuple[Tensor, Tensor]:
    """Images `(1797, 3, 8, 8)`, float32 in [-1, 1], and labels `(1797,)`, int64."""
    data = load_digits()
    gray = torch.from_numpy(data.images.astype(np.float32)) / 8 - 1
    return gray[:, None].expand(-1, 3, -1, -1).contiguous(), torch.from_numpy(data.target).long()


def restyle(images: Tensor) -> Tensor:
    """The same digits in an ink that runs from yellow to magenta, on midnight-blue paper."""
    ink = (images + 1) / 2
    rows = torch.linspace(0, 1, 8)[None, :, None]
    colour = torch.tensor(INK_TOP)[:, None, None].lerp(torch.tensor(INK_BOTTOM)[:, None, None], rows)
    return torch.lerp(torch.tensor(PAPER)[:, None, None].expand_as(images), colour.expand_as(images), ink)


def brightness(images: Tensor) -> Tensor:
    """`(N, 8, 8)` in [0, 1]: how much ink there is, in either style."""
    return ((images.amax(dim=1) + 1) / 2).clamp(0, 1)


@cache
def reader() -> SVC:
    """A classifier that has seen only real digits."""
    data = load_digits()
    return SVC(gamma=0.001).fit(data.data, data.target)


def legible(images: Tensor, labels: Tensor) -> int:
    """How many of the images the classifier reads as their label."""
    ink = brightness(images).flatten(1)
    least, most = ink.amin(dim=1, keepdim=True), ink.amax(dim=1, keepdim=True)
    read = reader().predict((16 * (ink - least) / (most - least)).numpy())
    return int((read == labels.numpy()).sum())
