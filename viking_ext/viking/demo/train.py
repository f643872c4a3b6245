"""Training and sampling: flow matching, the way current image models are trained."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from .model import ANY_CLASS, DiT

BATCH = 64
Progress = Callable[[int, float], None]
"""Called after each step with its number and its loss."""


@dataclass
class Course:
    """One optimization: which parameters, how fast, for how long, from which random numbers."""

    parameters: Sequence[Tensor]
    rate: float
    steps: int
    seed: int

    def run(
        self, model: DiT, images: Tensor, labels: Tensor, progress: Progress, ema: DiT | None = None
    ) -> list[float]:
        """Train and return the loss of every step. `ema` becomes the running average of the model's weights."""
        device = images.device
        random = torch.Generator().manual_seed(self.seed)  # on the CPU, so that every device draws the same numbers
        optimizer = torch.optim.AdamW(self.parameters, lr=self.rate, betas=(0.9, 0.99), weight_decay=0.0)
        warmup = min(50, self.steps // 5 + 1)
        schedule = torch.optim.lr_scheduler.SequentialLR(
            optimizer,
            [
                torch.optim.lr_scheduler.LinearLR(optimizer, 1 / warmup, total_iters=warmup),
                torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(1, self.steps - warmup)),
            ],
            milestones=[warmup],
        )
        losses = []
        for step in range(self.steps):
            chosen = torch.randint(len(images), (BATCH,), generator=random)
            times = torch.randn(BATCH, generator=random).sigmoid().to(device)
            noise = draw_noise(BATCH, random).to(device)
            unlabelled = (torch.rand(BATCH, generator=random) < 0.1).to(device)
            clean = images[chosen.to(device)]
            label = labels[chosen.to(device)].masked_fill(unlabelled, ANY_CLASS)
            at = times[:, None, None, None]
            loss = F.mse_loss(model(torch.lerp(clean, noise, at), times, label), noise - clean)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            if ema is not None:
                with torch.no_grad():
                    keep = min(0.995, (1 + step) / (10 + step))
                    for average, current in zip(ema.parameters(), model.parameters(), strict=True):
                        average.lerp_(current, 1 - keep)
            losses.append(loss.item())
            progress(step, losses[-1])
        return losses


def pretrain(model: DiT, images: Tensor, labels: Tensor, steps: int, seed: int, progress: Progress) -> DiT:
    """Train all weights from scratch; returns the averaged weights: the model that one would download."""
    ema = copy.deepcopy(model)
    Course(list(model.parameters()), 2e-3, steps, seed).run(model, images, labels, progress, ema)
    return ema


def draw_noise(count: int, random: torch.Generator) -> Tensor:
    """`(count, 3, 8, 8)`: mostly gray, so that a small network need not spend itself on the noise of colours."""
    gray = torch.randn(count, 1, 8, 8, generator=random)
    return gray + 0.3 * torch.randn(count, 3, 8, 8, generator=random)


@torch.no_grad()
def sample(model: DiT, labels: Tensor, seed: int, steps: int = 20, guidance: float = 2.0) -> Tensor:
    """Draw an image `(3, 8, 8)` for each label by following the flow from noise; returned on the CPU in [-1, 1]."""
    random = torch.Generator().manual_seed(seed)
    x = draw_noise(len(labels), random).to(labels.device)
    both = torch.cat([labels, torch.full_like(labels, ANY_CLASS)])
    moments = torch.linspace(1, 0, steps + 1).tolist()
    for now, then in pairwise(moments):
        with_label, without = model(x.repeat(2, 1, 1, 1), torch.full((len(both),), now, device=x.device), both).chunk(2)
        x = x + (then - now) * (without + guidance * (with_label - without))
    return x.clamp(-1, 1).cpu()
