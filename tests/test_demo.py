"""`python -m viking.demo` and the example do what the README says."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import matplotlib.image
import pytest
import torch

from viking.demo import digits, figure, story
from viking.demo.model import DiT, add_lora, loras
from viking.demo.train import sample


def run(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MPLCONFIGDIR": str(cwd)}
    return subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env=environment, capture_output=True, text=True, timeout=280, check=False
    )


def test_the_quick_demo_agrees_in_every_bit_and_draws_its_picture(tmp_path: Path) -> None:
    result = run("-m", "viking.demo", "--quick", "--output", "picture.png", cwd=tmp_path)

    assert result.returncode == 0, result.stdout + result.stderr
    assert "identical, bit for bit (12 losses" in result.stdout
    assert "fetched too late after step 5    0 times" in result.stdout
    assert "copied back per step             0.00 MB" in result.stdout
    assert [path.name for path in tmp_path.glob("*.png")] == ["picture.png"]
    picture = matplotlib.image.imread(tmp_path / "picture.png")[..., :3]
    height, width, _ = picture.shape
    assert height > 700
    assert width > 1000
    quarters = [picture[: height // 3, : width // 2], picture[: height // 3, width // 2 :],
                picture[height // 2 :, : width // 2], picture[height // 2 :, width // 2 :]]  # fmt: skip
    assert all(quarter.std() > 0.05 for quarter in quarters), "a part of the picture is empty"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--weights-budget", "much"], "much"),
        (["--weights-budget", "1kB"], "smallest"),
        (["--steps", "0"], "not a positive number"),
        pytest.param(["--device", "cuda"], "no CUDA device",
                     marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_said_in_one_sentence(arguments: list[str], sentence: str, tmp_path: Path) -> None:
    result = run("-m", "viking.demo", "--quick", *arguments, cwd=tmp_path)
    assert result.returncode == 2
    assert sentence in result.stderr
    assert "Traceback" not in result.stderr


def test_without_its_packages_the_demo_names_the_extra(tmp_path: Path) -> None:
    code = "import sys; sys.modules['matplotlib'] = None; from viking.demo import main; sys.exit(main([]))"
    result = run("-c", code, cwd=tmp_path)
    assert result.returncode == 2
    assert result.stderr.strip() == "The demo needs matplotlib as well: pip install 'viking-engine[demo]'"


def test_runs_that_differ_are_called_different() -> None:
    one = story.Run(losses=[1.0], weights=[torch.ones(3)], samples=torch.empty(0), seconds=1.0)
    assert "identical" in story.verdict(True, True, one)
    for losses, weights in ((False, True), (True, False), (False, False)):
        assert "DIFFERENT" in story.verdict(losses, weights, one)


def test_a_fresh_lora_changes_nothing_and_a_trained_one_does() -> None:
    torch.manual_seed(0)
    model, labels = DiT(hidden=32, depth=1), torch.arange(10)
    torch.nn.init.normal_(model.blocks[0].modulation.weight, std=0.1)
    before = sample(model, labels, seed=1, steps=4)
    parameters = add_lora(model, rank=2)
    assert torch.equal(sample(model, labels, seed=1, steps=4), before)
    assert {p for p in model.parameters() if p.requires_grad} == set(parameters)
    for lora in loras(model):
        torch.nn.init.normal_(lora.up.weight)
    assert not torch.equal(sample(model, labels, seed=1, steps=4), before)


def test_the_reader_reads_real_digits_in_both_styles_and_no_noise() -> None:
    images, labels = digits.load()
    assert digits.legible(images[:300], labels[:300]) > 290
    assert digits.legible(digits.restyle(images[:300]), labels[:300]) > 290
    noise = torch.rand(300, 3, 8, 8, generator=torch.Generator().manual_seed(0)) * 2 - 1
    assert digits.legible(noise, labels[:300]) < 100


def test_a_picture_of_runs_that_differ_says_so() -> None:
    from matplotlib.figure import Figure

    axes = Figure().add_subplot()
    one = story.Run(losses=[1.0, 0.5], weights=[], samples=torch.empty(0), seconds=1.0)
    figure.losses(axes, one, one, identical=False)
    assert "DIFFER" in axes.get_title(loc="left")
