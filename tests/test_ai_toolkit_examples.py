"""The example configs for ai-toolkit: well-formed, with keys that the toolkit reads and the strengths they claim."""

from __future__ import annotations

import inspect
import math
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from support import toolkit_tree
from viking import shapes

yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")

FOLDER = Path(__file__).parent.parent / "examples" / "ai-toolkit"
FILES = sorted(FOLDER.glob("*.yaml"))
SECTIONS = {
    "network": "NetworkConfig",
    "save": "SaveConfig",
    "train": "TrainConfig",
    "model": "ModelConfig",
    "sample": "SampleConfig",
}
VIKING_KEYS = {"viking_rank_stabilized", "viking_bf16", "viking_alpha"}


def process(path: Path) -> dict[str, Any]:
    job = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert job["job"] == "extension"
    assert job["config"]["name"] == path.stem
    assert len(job["config"]["process"]) == 1
    section: dict[str, Any] = job["config"]["process"][0]
    return section


def strength(network: dict[str, Any]) -> float:
    root = math.sqrt(network["linear"]) if network.get("viking_rank_stabilized") else network["linear"]
    return network["linear_alpha"] / root


def test_the_ranks_that_were_promised_are_there():
    ranks = [process(path)["network"]["linear"] for path in FILES if path.stem.startswith("flux2-rank")]
    assert sorted(ranks) == [16, 128, 512, 1024, 1280]
    assert {process(path)["model"]["arch"] for path in FILES} == {"flux", "flux2", "sdxl", "wan21"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_numbers_are_numbers_and_sections_are_known(path):
    section = process(path)
    assert set(section) == {*SECTIONS, "type", "training_folder", "device", "datasets", "trigger_word"}
    assert isinstance(section["train"]["lr"], float)  # YAML reads 1e-4 as a word
    assert {key for key in section["network"] if key.startswith("viking_")} <= VIKING_KEYS
    assert section["save"]["dtype"] == section["train"]["dtype"] == "bf16"


@pytest.mark.parametrize("path", [path for path in FILES if "lokr" not in path.stem], ids=lambda path: path.stem)
def test_the_comment_says_the_strength_and_the_memory(path):
    text = path.read_text(encoding="utf-8")
    network = process(path)["network"]
    claimed = re.search(r"Strength: \d+ / (?:sqrt\()?\d+\)? = ([\d.]+?)(?:\.?\s|\.? )", text)
    assert claimed, "no strength is claimed"
    assert float(claimed[1]) == pytest.approx(strength(network), rel=5e-3)
    if path.stem.startswith("flux2-rank"):
        parameters = network["linear"] * sum(layer.inputs + layer.outputs for layer in shapes.get("flux2").layers)
        assert f"{parameters / 1e6:,.0f} million trained parameters: {parameters * 2 / 1e9:.1f} GB" in text
        assert f"{parameters * 6 / 1e9:.1f} GB together" in text


@pytest.fixture(scope="module")
def config_modules(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The tree's `toolkit.config_modules`, patched."""
    if toolkit_tree.tree() is None:
        pytest.skip(f"{toolkit_tree.VARIABLE} does not name an ai-toolkit checkout")
    if "toolkit.config_modules" not in sys.modules:
        root = toolkit_tree.patched_copy(toolkit_tree.tree(), tmp_path_factory.mktemp("toolkit"))
        toolkit_tree.enter(root)
    import toolkit.config_modules

    return toolkit.config_modules


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_toolkits_own_classes_take_the_config(path, config_modules):
    section = process(path)
    for name, kind in SECTIONS.items():
        made = getattr(config_modules, kind)(**section[name])
        source = inspect.getsource(type(made))
        unread = {key for key in section[name] if f"'{key}'" not in source and f'"{key}"' not in source}
        if kind == "SampleConfig":
            unread -= set(inspect.signature(config_modules.SampleConfig.__init__).parameters)
        assert unread <= VIKING_KEYS, f"{kind} reads no {unread}"
    for dataset in section["datasets"]:
        source = inspect.getsource(config_modules.DatasetConfig)
        assert not {key for key in dataset if f"'{key}'" not in source and f'"{key}"' not in source}
        config_modules.DatasetConfig(**dataset)
    network = config_modules.NetworkConfig(**section["network"])
    if network.type == "lora":
        assert network.viking["linear_alpha"] == section["network"]["linear_alpha"]
