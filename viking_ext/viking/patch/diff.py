"""Unified diffs, as `git diff` writes them and `git apply` reads them.

Only what a patch of ours may be is read: changes inside existing text files, each hunk with context. Anything else
(new, deleted, renamed and binary files, changed modes, changed final newlines) is an error here rather than a
surprise when a tree is written.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_HUNK = re.compile(rb"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")
_OTHER = (b"new file", b"deleted file", b"rename ", b"copy ", b"old mode", b"new mode", b"Binary ", b"GIT binary")


class PatchError(Exception):
    """Why nothing is written, as a sentence that names the file."""


class NotRestored(PatchError):
    """Writing failed, and so did putting back what had been written."""


@dataclass(frozen=True)
class Hunk:
    """One change. `body` holds (b" ", b"-" or b"+", line without its end); `line` is where it stood originally."""

    line: int
    body: tuple[tuple[bytes, bytes], ...]

    @property
    def before(self) -> tuple[bytes, ...]:
        """The lines that the change is made to."""
        return tuple(line for mark, line in self.body if mark != b"+")

    @property
    def after(self) -> tuple[bytes, ...]:
        """The lines that it leaves."""
        return tuple(line for mark, line in self.body if mark != b"-")

    @property
    def added(self) -> tuple[bytes, ...]:
        return tuple(line for mark, line in self.body if mark == b"+")

    def reversed(self) -> Hunk:
        """The change that undoes this one."""
        swap = {b"+": b"-", b"-": b"+", b" ": b" "}
        return Hunk(self.line, tuple((swap[mark], line) for mark, line in self.body))


@dataclass(frozen=True)
class FileDiff:
    """The changes of one file; `path` is relative to the target's root, with forward slashes."""

    path: str
    hunks: tuple[Hunk, ...]


def safe_path(path: str) -> str:
    """The path itself, where it can only lead into the root it is joined to. Raises PatchError."""
    parts = path.split("/")
    if not path or "\\" in path or ":" in path or "\0" in path or any(part in ("", ".", "..") for part in parts):
        raise PatchError(f"{path!r} is no path inside a tree")
    return path


def _path(line: bytes, prefix: bytes) -> str:
    name = line[4:].split(b"\t")[0]
    if not name.startswith(prefix):
        raise PatchError(f"{name.decode(errors='replace')!r} does not start with {prefix.decode()}")
    return safe_path(name[len(prefix) :].decode("utf-8"))


def _hunk(lines: list[bytes], at: int) -> tuple[Hunk, int]:
    header = _HUNK.match(lines[at])
    if header is None:
        raise PatchError(f"line {at + 1}: this is no hunk header")
    old, new = (int(header[index]) if header[index] is not None else 1 for index in (2, 4))
    body: list[tuple[bytes, bytes]] = []
    begin = at
    at += 1
    while old > 0 or new > 0:
        line = lines[at] if at < len(lines) else b"\\"
        mark, text = line[:1] or b" ", line[1:]  # an editor may have stripped the blank of an empty context line
        if mark not in b" -+":
            raise PatchError(f"line {begin + 1}: the hunk ends before its header says so")
        old -= mark != b"+"
        new -= mark != b"-"
        body.append((mark, text))
        at += 1
    if old or new:
        raise PatchError(f"line {begin + 1}: the hunk is longer than its header says")
    if at < len(lines) and lines[at].startswith(b"\\"):
        raise PatchError(f"line {at + 1}: a patch may not touch a file's last line")
    if all(mark != b" " for mark, _ in body):
        raise PatchError(f"line {begin + 1}: the hunk has no context to find it by")
    if all(mark == b" " for mark, _ in body):
        raise PatchError(f"line {begin + 1}: the hunk changes nothing")
    return Hunk(int(header[1]), tuple(body)), at


def parse(data: bytes) -> tuple[FileDiff, ...]:
    """Read a patch. A description before the first file and a signature after the last are passed over."""
    lines = [line.removesuffix(b"\r") for line in data.removesuffix(b"\n").split(b"\n")]
    files: dict[str, tuple[Hunk, ...]] = {}
    at = 0
    while at < len(lines):
        line = lines[at]
        if line.startswith(_OTHER):
            raise PatchError(f"line {at + 1}: only changes inside existing text files can be made")
        if not (line.startswith(b"--- ") and at + 1 < len(lines) and lines[at + 1].startswith(b"+++ ")):
            at += 1
            continue
        path = _path(line, b"a/")
        if _path(lines[at + 1], b"b/") != path or path in files:
            raise PatchError(f"line {at + 1}: {path} is renamed or named twice")
        at += 2
        hunks: list[Hunk] = []
        while at < len(lines) and lines[at].startswith(b"@@"):
            hunk, at = _hunk(lines, at)
            hunks.append(hunk)
        if not hunks:
            raise PatchError(f"line {at}: {path} has no hunk")
        files[path] = tuple(hunks)
    if not files:
        raise PatchError("there is no change in it")
    return tuple(FileDiff(path, hunks) for path, hunks in files.items())
