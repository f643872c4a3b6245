"""No test leaves an engine behind for the next one."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def no_engine_stays_open() -> Iterator[None]:
    yield
    if importlib.util.find_spec("torch") is None:
        return
    from viking.nn.device import DeviceEngine

    DeviceEngine.make_engine = DeviceEngine.make_memory = None
    for device in list(DeviceEngine._open.values()):
        for manager in {id(m.manager): m.manager for together in device.linears.values() for m in together}.values():
            with contextlib.suppress(RuntimeError):  # a test that failed in the middle of a use
                manager.stop()
        DeviceEngine._open.pop(device.device, None)
