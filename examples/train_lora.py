"""Train a LoRA on a frozen diffusion transformer whose weights are larger than the device memory they may use.

    pip install 'viking-engine[demo]' && python train_lora.py

The model is the demo's, small enough for any machine. With a large one the lines marked <-- stay the same.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import viking  # <--
from viking.demo.digits import load, restyle  # your data ...
from viking.demo.model import ANY_CLASS, DiT  # ... and your model
from viking.demo.train import pretrain


class LoRA(nn.Module):
    """A frozen Linear and, beside it, what is trained: the product of two thin matrices."""

    def __init__(self, base: nn.Linear, rank: int, alpha: float) -> None:
        super().__init__()
        self.base, self.scale = base, alpha / rank
        self.down, self.up = nn.Linear(base.in_features, rank, False), nn.Linear(rank, base.out_features, False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.scale * self.up(self.down(x))


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a LoRA whose base model is streamed.")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--weights-budget", default="1MB")
    parser.add_argument("--output", default="lora.pt")
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)

    # A base model, as you would load one from disk: on the CPU, frozen, with a LoRA around the Linears of its blocks.
    images, labels = load()
    model = pretrain(DiT(), images, labels, options.steps, seed=0, progress=lambda step, loss: None)
    model.requires_grad_(False)
    model.checkpointing = True
    for block in model.blocks:
        for name, child in list(block.named_children()):
            if isinstance(child, nn.Linear):
                setattr(block, name, LoRA(child, rank=16, alpha=16))

    viking.attach(model, options.device, weights_budget=options.weights_budget)  # <-- instead of model.to(device)

    images, labels = restyle(images).to(options.device), labels.to(options.device)
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    optimizer = torch.optim.AdamW(trained.values(), lr=4e-3, weight_decay=0.0)
    for step in range(options.steps):
        batch = torch.randint(len(images), (64,), device=options.device)
        times = torch.randn(64, device=options.device).sigmoid()
        noise = torch.randn_like(images[batch])
        noisy = torch.lerp(images[batch], noise, times[:, None, None, None])
        label = torch.where(torch.rand_like(times) < 0.1, ANY_CLASS, labels[batch])
        loss = F.mse_loss(model(noisy, times, label), noise - images[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            print(f"step {step:4}  loss {loss.item():.3f}")

    stats = viking.stats(model)  # <-- what travelled
    print(f"{stats.fetched_bytes / 1e6:.1f} MB copied per step, {stats.slab_bytes / 1e6:.1f} MB of device memory")
    torch.save({name: parameter.detach().cpu() for name, parameter in trained.items()}, options.output)


if __name__ == "__main__":
    main()
