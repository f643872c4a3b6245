"""The program of tests/flatness.py, in short: what an engine holds is the same after any number of steps."""

from __future__ import annotations

import dataclasses

import flatness
import pytest
import torch

from viking import _engine
from viking.nn.device import DeviceEngine


def test_sixty_steps_of_changing_sizes_with_samples_leave_everything_as_it_was() -> None:
    DeviceEngine.make_engine = lambda device: _engine.Engine("host", pin_limit_bytes=1 << 30)

    readings = flatness.run(60, torch.device("cpu"), hidden=64, each=10)

    first, last = dataclasses.asdict(readings[0]), dataclasses.asdict(readings[-1])
    assert first["pins"] > 0
    assert first["events"] > 0
    for name in ("streams", "events", "pins", "paths", "threads"):
        assert first[name] == last[name], name
    assert set(flatness.grown(readings)) <= {"rss_bytes"}  # its noise is larger than a leak of sixty steps


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(flatness.Held)])
def test_what_grows_is_named(name: str) -> None:
    readings = [flatness.Held(**{f.name: 5 for f in dataclasses.fields(flatness.Held)}) for _ in range(6)]
    assert flatness.grown(readings) == []
    assert flatness.report(readings, 100).endswith("\nFLAT")

    for i, reading in enumerate(readings):
        setattr(reading, name, 5 + i * (1 << 22))

    assert flatness.grown(readings) == [name]
    assert flatness.report(readings, 100).endswith(f"\nGROWS: {name}")
