"""Replays the patches on real trees and prints a table; the trees are given, nothing of them is kept.

    python tests/prove_patches.py ai-toolkit --repo GITDIR [--commits 60]
    python tests/prove_patches.py torch --releases DIR      (DIR/<version>/torch/..., from wheels)

On each tree: check, apply, apply again (nothing to do), compile every changed file, `git apply --check` of the diffs
against the stock tree, revert, and the tree is as it was (by `git status` where there is a repository).
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from viking.patch import manifest, series, tree
from viking.patch.diff import PatchError
from viking.patch.series import State


def digest(root: Path) -> dict[str, str]:
    """Every file below a directory and what is in it."""
    return {
        str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(root.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts and ".git" not in path.relative_to(root).parts
    }


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "viking.patch", *arguments], capture_output=True, text=True, check=False
    )


def git_takes(root: Path, patch: manifest.Patch, place: Path) -> bool:
    """Whether git itself would apply one of the variants."""
    for name in patch.diffs:
        done = subprocess.run(
            ["git", "apply", "--check", str(place / name)], cwd=root, capture_output=True, check=False
        )
        if done.returncode == 0:
            return True
    return False


def prove(name: str, root: Path) -> tuple[bool, str]:
    """Whether everything held on a tree, and what became of each patch."""
    target, place = manifest.load(name), manifest.folder() / name
    if (reason := tree.foreign(target, root)) is not None:
        return False, f"foreign: {reason}"
    stock = digest(root)
    try:
        outcome = series.apply(target.patches, tree.read(root, series.paths(target.patches)))
    except PatchError as error:
        return False, str(error)
    words = [f"{verdict.patch.name}: {verdict.state.value}" for verdict in outcome.verdicts]
    faults = []
    for verdict in outcome.verdicts:
        if verdict.state is State.ABSENT and not git_takes(root, verdict.patch, place):
            faults.append(f"git apply refuses {verdict.patch.name}")
        if verdict.refused:
            faults.append(verdict.detail)
    where = ["--root", str(root)]
    expected = 1 if outcome.refused else 0
    if command("check", name, *where).returncode != expected or digest(root) != stock:
        faults.append("check disagrees, or writes")
    if command("apply", name, *where).returncode != expected:
        faults.append("apply disagrees with check")
    patched = digest(root)
    changed = sorted(path for path in patched if patched[path] != stock.get(path))
    if set(changed) != set(outcome.changed) or set(patched) != set(stock):
        faults.append(f"apply changed {changed}")
    if command("apply", name, *where).returncode != expected or digest(root) != patched:
        faults.append("a second apply does something")
    for path in changed:
        try:
            compile((root / path).read_bytes(), path, "exec")
        except SyntaxError as error:
            faults.append(f"{path} does not compile: {error}")
    if command("revert", name, *where).returncode != 0 or digest(root) != stock:
        faults.append("revert leaves a difference")
    return not faults, "; ".join([*words, f"{len(changed)} files changed", *faults])


def git(repository: Path, *arguments: str) -> str:
    return subprocess.run(
        ["git", "--git-dir", str(repository), *arguments], capture_output=True, text=True, check=True
    ).stdout


def commits(repository: Path, count: int) -> list[str]:
    """The newest commit, and the last ones that touch what the ai-toolkit patches change."""
    files = sorted({file for patch in manifest.load("ai-toolkit").patches for file in patch.files})
    files = files or ["jobs/process/BaseSDTrainProcess.py", "toolkit/lora_special.py", "toolkit/network_mixins.py"]
    touching = git(repository, "log", f"-{count}", "--format=%H", "HEAD", "--", *files).split()
    newest = git(repository, "rev-parse", "HEAD").strip()
    return [newest, *(commit for commit in touching if commit != newest)]


def write_python_files(repository: Path, commit: str, folder: Path) -> None:
    """A commit's Python files. The others do not matter here, and a partial copy of a repository may lack them."""
    listing = git(repository, "ls-tree", "-r", "-z", commit, "--", "run.py", "version.py", "toolkit", "jobs")
    entries = [entry.split("\t", 1) for entry in listing.split("\0") if entry.endswith(".py")]
    names = "".join(f"{meta.split()[2]}\n" for meta, _ in entries)
    batch = ["git", "--git-dir", str(repository), "cat-file", "--batch"]
    data = subprocess.run(batch, input=names.encode(), capture_output=True, check=True).stdout
    at = 0
    for _, path in entries:
        header = data.index(b"\n", at)
        size = int(data[at:header].split()[2])
        place = folder / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(data[header + 1 : header + 1 + size])
        at = header + 1 + size + 1


def checkouts(repository: Path, count: int) -> Iterator[tuple[str, Path]]:
    """Each commit as a tree with a repository of its own, for `git status`."""
    for commit in commits(repository, count):
        with tempfile.TemporaryDirectory(prefix="prove-") as name:
            folder = Path(name)
            write_python_files(repository, commit, folder)
            identity = ["-c", "user.name=prove", "-c", "user.email=prove@localhost", "-c", "core.autocrlf=false"]
            for step in (["init", "-q"], ["add", "-A", "-f"], [*identity, "commit", "-q", "-m", "stock"]):
                subprocess.run(["git", *step], cwd=folder, check=True)
            yield git(repository, "log", "-1", "--format=%h %cs", commit).strip(), folder


def releases(folder: Path) -> Iterator[tuple[str, Path]]:
    """A copy of each release's tree."""

    def key(path: Path) -> list[int]:
        return [int(part) for part in path.name.split(".")]

    for release in sorted((path for path in folder.iterdir() if (path / "torch").is_dir()), key=key):
        with tempfile.TemporaryDirectory(prefix="prove-") as copy:
            yield release.name, Path(shutil.copytree(release / "torch", Path(copy) / "torch"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    targets = parser.add_subparsers(dest="target", required=True)
    toolkit = targets.add_parser("ai-toolkit")
    toolkit.add_argument("--repo", type=Path, required=True, help="a git directory of ai-toolkit")
    toolkit.add_argument("--commits", type=int, default=60)
    torch = targets.add_parser("torch")
    torch.add_argument("--releases", type=Path, required=True)
    options = parser.parse_args()
    trees = checkouts(options.repo, options.commits) if options.target == "ai-toolkit" else releases(options.releases)
    good = total = 0
    for name, root in trees:
        fine, text = prove(options.target, root)
        if fine and (root / ".git").exists():
            dirty = subprocess.run(
                ["git", "status", "--porcelain"], cwd=root, capture_output=True, text=True, check=True
            )
            fine, text = not dirty.stdout, text + (f"; git status: {dirty.stdout}" if dirty.stdout else "")
        good, total = good + fine, total + 1
        print(f"{name:22} {'ok' if fine else 'NO':3} {text}", flush=True)
    print(f"{good} of {total}")
    return 0 if good == total and total > 0 else 1


if __name__ == "__main__":
    sys.exit(main())
