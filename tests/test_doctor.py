"""What `python -m viking.doctor` says, whatever is missing; and what `python -m viking` lists."""

from __future__ import annotations

import builtins
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import viking
from support import trees
from viking import machine
from viking.doctor import survey
from viking.doctor.command import as_text, main
from viking.patch import manifest
from viking.patch.command import main as patch

SECTIONS = ["viking", "python", "torch", "cuda", "processor", "memory", "ai_toolkit", "torch_patches"]


def run(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *arguments], cwd=cwd, capture_output=True, text=True, timeout=120, check=False
    )


def found(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, dict[str, object]]:
    assert main(["--json", *arguments]) == 0
    sections = json.loads(capsys.readouterr().out)
    assert list(sections) == SECTIONS
    return sections


def test_every_section_is_there_and_the_versions_are_true(capsys):
    sections = found(capsys)
    assert sections["viking"]["version"] == viking.__version__
    assert sections["python"]["version"] == sys.version.split()[0]
    torch = pytest.importorskip("torch")
    assert sections["torch"]["version"] == torch.__version__
    assert sections["torch"]["exchange_api"] == hasattr(torch.Tensor, "__dlpack_c_exchange_api__")
    assert sections["processor"]["convert"] in ("avx512", "avx2", "scalar")
    assert ("problem" in sections["cuda"]) == (not sections["cuda"]["devices"])


def test_the_processors_converter_agrees_with_the_system(capsys):
    flags = Path("/proc/cpuinfo")
    if not flags.exists():
        pytest.skip("there is no /proc/cpuinfo")
    words = set(flags.read_text().split())
    expected = (
        "avx512" if {"avx512f", "avx512bw", "avx512vl"} <= words else "avx2" if {"avx2", "f16c"} <= words else None
    )
    assert found(capsys)["processor"]["convert"] == (expected or "scalar")


def test_as_text_it_names_each_section_and_every_problem():
    sections = survey.survey()
    text = as_text(sections)
    for title in ("Viking", "Python", "torch", "CUDA", "processor", "memory", "ai-toolkit", "torch patches"):
        assert f"\n{title:14} " in f"\n{text}"
    for section in sections.values():
        if "problem" in section:
            assert f"! {section['problem']}" in text


def test_a_checkout_is_told_stock_from_patched(tmp_path, capsys):
    root = trees.stock_tree(manifest.load("ai-toolkit"), tmp_path / "tree")
    (root / "version.py").write_text('VERSION = "0.1.2"\n')
    section = found(capsys, "--root", str(root))["ai_toolkit"]
    assert (section["root"], section["patched"], section["version"]) == (str(root), False, "0.1.2")
    assert f"not patched: {root} (version 0.1.2)" in as_text(survey.survey(str(root)))
    if not manifest.load("ai-toolkit").patches:
        return
    patch(["apply", "ai-toolkit", "--root", str(root)])
    capsys.readouterr()
    section = found(capsys, "--root", str(root))["ai_toolkit"]
    assert section["patched"] is True
    assert set(section["patches"].values()) == {"applied"}
    assert f"\nai-toolkit     patched: {root}" in as_text(survey.survey(str(root)))


def test_the_current_directory_is_looked_at_and_its_modules_are_not_imported(tmp_path):
    root = trees.stock_tree(manifest.load("ai-toolkit"), tmp_path / "tree")
    for name in ("typing", "json", "argparse", "platform", "torch", "numpy"):
        (root / f"{name}.py").write_text(f"raise SystemExit('the tree has its own {name}')\n")
    result = run("viking.doctor", "--json", cwd=root)
    assert result.returncode == 0, result.stderr
    sections = json.loads(result.stdout)
    assert sections["ai_toolkit"]["root"] == str(root)
    assert "the tree has" not in result.stdout


def test_without_torch_it_says_so_and_goes_on(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setattr(survey, "status", lambda *arguments: (_ for _ in ()).throw(RuntimeError("no torch at all")))
    sections = found(capsys)
    assert "problem" in sections["torch"]
    assert sections["torch_patches"]["problem"] == "could not be looked at: RuntimeError: no torch at all"
    assert sections["memory"]["total_bytes"] is None or sections["memory"]["total_bytes"] > 0
    as_text(sections)


def test_a_torch_that_cannot_be_loaded_is_told_from_one_that_is_missing(monkeypatch):
    real = builtins.__import__

    def broken(name, *arguments, **keywords):
        if name == "torch":
            raise OSError("libtorch_cpu.so: cannot open shared object file")
        return real(name, *arguments, **keywords)

    monkeypatch.setattr(builtins, "__import__", broken)
    assert survey.torch()["problem"] == "torch cannot be loaded: libtorch_cpu.so: cannot open shared object file"


def test_without_an_engine_it_says_what_to_do():
    code = (
        "import sys; sys.modules['viking._engine'] = None\nfrom viking.doctor.command import main; sys.exit(main([]))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")
    assert "! the engine cannot be loaded" in result.stdout
    assert "pip install it again" in result.stdout


@pytest.mark.parametrize("broken", SECTIONS)
def test_any_section_may_fail(monkeypatch, broken, capsys):
    def fail(*arguments):
        raise ValueError("unheard of")

    monkeypatch.setattr(survey, {"viking": "package"}.get(broken, broken), fail)
    sections = found(capsys)
    assert sections[broken] == {"problem": "could not be looked at: ValueError: unheard of"}
    assert "unheard of" in as_text(sections)


def test_limits_of_control_groups_are_found(monkeypatch):
    files = {
        "/proc/self/cgroup": "3:cpu,memory:/box\n0::/user/box",
        "/sys/fs/cgroup/user/memory.max": "9000",
        "/sys/fs/cgroup/user/box/memory.max": "max",
        "/sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
    }
    monkeypatch.setattr(machine, "text_of", lambda path: files.get(str(path), ""))
    assert machine.control_group_limit() == 9000
    files["/sys/fs/cgroup/memory/box/memory.limit_in_bytes"] = "5000"
    assert machine.control_group_limit() == 5000
    files["/proc/meminfo"] = "MemTotal:  4 kB"
    assert machine.memory_limit() == 4096
    files["/proc/meminfo"] = "MemTotal:  5 kB"
    assert machine.memory_limit() == 5000
    files["/proc/self/cgroup"] = ""
    assert machine.control_group_limit() is None
    assert machine.memory_limit() == 5120


def test_wsl_is_recognised(monkeypatch):
    monkeypatch.setattr(survey, "text_of", lambda path: "5.15.167.4-microsoft-standard-WSL2")
    assert survey.is_wsl()


def test_an_ascii_terminal_is_enough():
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "LC_ALL": "C"}
    result = subprocess.run([sys.executable, "-m", "viking.doctor"], capture_output=True, env=environment, check=False)
    assert result.returncode == 0, result.stderr


@pytest.mark.skipif(sys.platform == "win32", reason="there is no such signal")
@pytest.mark.parametrize("command", [["viking.doctor"], ["viking.patch", "list", "torch"], ["viking", "doctor"]])
def test_a_reader_that_has_seen_enough_ends_it_quietly(command):
    read, write = os.pipe()
    os.close(read)
    result = subprocess.run([sys.executable, "-m", *command], stdout=write, stderr=subprocess.PIPE, check=False)
    os.close(write)
    assert (result.returncode, result.stderr) == (1, b"")


# ---- python -m viking ----


def test_viking_lists_its_commands():
    result = run("viking")
    assert result.returncode == 0
    assert [line.split()[0] for line in result.stdout.splitlines()[1:]] == ["demo", "plan", "bench", "doctor", "patch"]


def test_viking_runs_a_command_with_its_arguments_and_its_status():
    assert run("viking", "patch", "list", "torch").stdout == run("viking.patch", "list", "torch").stdout != ""
    assert run("viking", "patch", "frobnicate").returncode == 2


def test_an_unknown_command_is_wrong_usage():
    result = run("viking", "sail")
    assert result.returncode == 2
    assert "'sail' is no command" in result.stderr
