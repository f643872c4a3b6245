"""The demo from beginning to end: base model, the LoRA resident and streamed, the comparison, the picture."""

from __future__ import annotations

import copy
import sys
import time
from dataclasses import dataclass

import torch
from torch import Tensor
from tqdm import tqdm

import viking

from . import Options, digits, figure
from .model import DiT, add_lora
from .record import Step, record
from .train import BATCH, Course, Progress, pretrain, sample

LEARNED_BY = 5
"""Steps after which nothing should need a fetch on demand any more."""


@dataclass
class Run:
    """What one LoRA training left behind."""

    losses: list[float]
    weights: list[Tensor]
    samples: Tensor
    seconds: float
    stats: viking.Stats | None = None
    late_demand_fetches: int = 0
    step: Step | None = None


def tell(options: Options) -> int:
    device = options.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        print("There is no CUDA device that torch can use here; run the demo with --device cpu.", file=sys.stderr)
        return 2
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    try:  # before anything that takes long
        trial = DiT().requires_grad_(False)
        viking.detach(viking.attach(trial, device, weights_budget=options.weights_budget, progress=False))
    except ValueError as error:  # unreadable or too small: the error names the smallest that works
        print(error, file=sys.stderr)
        return 2

    torch.manual_seed(options.seed)
    images, labels = (tensor.to(device) for tensor in digits.load())
    print(f"Viking's demo on {torch.cuda.get_device_name() if device == 'cuda' else 'the CPU'}\n")
    with steps("base model, white digits", options.base_steps) as progress:
        base = pretrain(DiT().to(device), images, labels, options.base_steps, options.seed, progress)
    asked = torch.arange(10, device=device).repeat(3)
    before = sample(base, asked, options.seed)

    styled = digits.restyle(images)
    resident = train_lora(base, styled, labels, asked, options, "LoRA, all weights resident", streamed=False)
    streamed = train_lora(base, styled, labels, asked, options, "LoRA, weights streamed", streamed=True)
    same_losses = streamed.losses == resident.losses
    same_weights = all(torch.equal(a, b) for a, b in zip(streamed.weights, resident.weights, strict=True))

    figure.draw(options.output, before, streamed, resident, same_losses and same_weights)
    report(streamed, resident, before, asked.cpu())
    print(f"Losses and LoRA weights of both runs are {verdict(same_losses, same_weights, streamed)}")
    print(f"The picture is in {options.output}")
    return 0 if same_losses and same_weights else 1


def train_lora(
    base: DiT, images: Tensor, labels: Tensor, asked: Tensor, options: Options, title: str, *, streamed: bool
) -> Run:
    """Train a LoRA on a copy of the base model, with or without Viking; nothing else differs."""
    device = images.device
    model = copy.deepcopy(base).cpu()
    torch.manual_seed(options.seed + 1)
    parameters = add_lora(model, options.rank)
    model.checkpointing = True
    if streamed:
        viking.attach(model, str(device), weights_budget=options.weights_budget, progress=False)
    else:
        model.to(device)
    demanded: list[int] = []
    with steps(title, options.steps) as progress:

        def watch(step: int, loss: float) -> None:
            if streamed and step + 1 in (min(LEARNED_BY, options.steps), options.steps):
                demanded.append(viking.stats(model).demand_fetches)
            progress(step, loss)

        began = time.perf_counter()
        losses = Course(parameters, 4e-3, options.steps, options.seed + 2).run(model, images, labels, watch)
        seconds = time.perf_counter() - began
    run = Run(losses, [p.detach().cpu().clone() for p in parameters], torch.empty(0), seconds)
    if streamed:
        run.stats = viking.stats(model)
        run.late_demand_fetches = demanded[-1] - demanded[0]
        batch, moment = slice(0, BATCH), torch.full((BATCH,), 0.5, device=device)
        run.step = record(model, lambda: model(images[batch], moment, labels[batch]).sum().backward(), device.type)
    run.samples = sample(model, asked, options.seed)
    viking.detach(model)
    return run


class steps:
    """A progress bar over a number of steps that shows the loss."""

    def __init__(self, title: str, count: int) -> None:
        layout = "{desc} {n_fmt:>4}/{total_fmt} {bar:30} {elapsed}{postfix}"
        self.bar = tqdm(total=count, desc=f"{title:28}", bar_format=layout, mininterval=0.5, file=sys.stdout)

    def __enter__(self) -> Progress:
        return self.advance

    def __exit__(self, *exception: object) -> None:
        self.bar.close()

    def advance(self, step: int, loss: float) -> None:
        self.bar.set_postfix_str(f"loss {loss:.3f}", refresh=False)
        self.bar.update()


def verdict(same_losses: bool, same_weights: bool, run: Run) -> str:
    if same_losses and same_weights:
        values = sum(weight.numel() for weight in run.weights)
        return f"identical, bit for bit ({len(run.losses)} losses, {values:,} weights)."
    return f"DIFFERENT: losses {'same' if same_losses else 'differ'}, weights {'same' if same_weights else 'differ'}."


def report(streamed: Run, resident: Run, before: Tensor, asked: Tensor) -> None:
    stats, count = streamed.stats, len(asked)
    assert stats is not None
    rows = [
        ("weights that Viking manages", size(stats.resident_bytes + stats.streamed_bytes)),
        ("device memory they may take", size(stats.weights_budget_bytes)),
        ("copied to the device per step", size(stats.fetched_bytes)),
        ("copied back per step", size(stats.written_bytes)),
        (f"fetched too late after step {LEARNED_BY}", f"{streamed.late_demand_fetches} times"),
        ("time per step, streamed", f"{1e3 * streamed.seconds / len(streamed.losses):.1f} ms"),
        ("time per step, resident", f"{1e3 * resident.seconds / len(resident.losses):.1f} ms"),
        ("samples a classifier can read", f"{digits.legible(before, asked)} of {count} before, "
                                          f"{digits.legible(streamed.samples, asked)} of {count} after"),
    ]  # fmt: skip
    print()
    for name, value in rows:
        print(f"  {name:32} {value}")
    print()


def size(count: int) -> str:
    return f"{count / 1e6:.2f} MB"
