"""The workflow that builds the wheels, as far as it can be judged without its service."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / ".github" / "workflows" / "wheels.yml").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def jobs() -> dict[str, Any]:
    return yaml.safe_load(TEXT)["jobs"]


def steps_of(jobs: dict[str, Any]) -> list[dict[str, Any]]:
    return [step for job in jobs.values() for step in job["steps"]]


def test_every_job_has_a_runner_a_limit_and_steps_that_do_something(jobs: dict[str, Any]) -> None:
    for name, job in jobs.items():
        assert {"runs-on", "timeout-minutes", "steps"} <= job.keys(), name
    assert all(("uses" in step) != ("run" in step) for step in steps_of(jobs))


def test_actions_are_pinned_to_a_major_version(jobs: dict[str, Any]) -> None:
    used = [step["uses"] for step in steps_of(jobs) if "uses" in step]
    assert used
    assert [name for name in used if not re.fullmatch(r"[\w-]+/[\w-]+@v\d+", name)] == []


def test_nothing_is_published_and_no_secret_is_read(jobs: dict[str, Any]) -> None:
    assert yaml.safe_load(TEXT)["permissions"] == {"contents": "read"}
    assert "secrets" not in TEXT
    assert not re.search(r"\btwine\b|publish@|gh-action-pypi|id-token", TEXT)
    uploads = {step["uses"].split("@")[0] for step in steps_of(jobs) if "upload" in step.get("uses", "")}
    assert uploads == {"actions/upload-artifact"}


def test_the_wheel_is_built_on_the_oldest_python_and_tested_on_every_named_one(jobs: dict[str, Any]) -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    named = re.findall(r"Python :: 3\.(\d+)", project)
    step = next(step for step in jobs["wheels"]["steps"] if "cibuildwheel --" in step.get("run", ""))
    built = re.findall(r"cp3(\d+)-", step["env"]["CIBW_BUILD"])
    assert built == sorted(built, key=int)
    assert f'requires-python = ">=3.{built[0]}"' in project
    assert set(named) <= set(built)
    tests = step["env"]["CIBW_TEST_COMMAND"].split("{project}/")[1]
    assert (ROOT / tests).is_file()
