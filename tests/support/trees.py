"""Trees to patch: made from a target's own diffs, or from a small target made up for a test."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

from viking.patch.manifest import Target


def digest(root: Path) -> dict[str, tuple[int, str]]:
    """Every file and link below a directory, with its mode and what is in it."""
    return {
        str(path.relative_to(root)): (path.lstat().st_mode, hashlib.sha256(path.read_bytes()).hexdigest())
        for path in sorted(root.rglob("*"))
        if path.is_file() or path.is_symlink()
    }


def stock_tree(target: Target, root: Path, variant: Callable[[int], int] = lambda count: 0) -> Path:
    """A tree in which every patch of a target fits: the lines that its diffs expect, where they expect them, among
    others that no diff knows. `variant` chooses one of a patch's `count` diffs."""
    files: dict[str, dict[int, bytes]] = {}
    for patch in target.patches:
        for diff in patch.variants[variant(len(patch.variants))]:
            lines = files.setdefault(diff.path, {})
            for hunk in diff.hunks:
                for number, line in enumerate(hunk.before, hunk.line):
                    assert lines.setdefault(number, line) == line, f"{patch.name}: {diff.path}:{number} differs"
    for marker in target.markers:
        files.setdefault(marker.file, {})
    for path, lines in files.items():
        texts = [marker.text.encode() for marker in target.markers if marker.file == path]
        count = max(lines, default=0) + 3
        whole = [lines.get(number, b"# line %d of %s" % (number, path.encode())) for number in range(1, count)]
        place = root / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(b"\n".join([*whole, *(b"# " + text for text in texts), b"# end", b""]))
    return root


# ruff: noqa: W291 (a mail's signature begins with a line that ends in a blank)
FIRST = b"""\
diff --git a/lib/one.py b/lib/one.py
--- a/lib/one.py
+++ b/lib/one.py
@@ -3,2 +3,3 @@
 def one():
+    import viking
     return 1
@@ -8,2 +9,2 @@
-\tvalue = old
+\tvalue = new_viking
 last()
diff --git a/two.py b/two.py
--- a/two.py
+++ b/two.py
@@ -2 +2,2 @@
+viking = True
 two()
"""

SECOND = b"""\
A description, as a mail has it.
---
 two.py | 1 +

diff --git a/two.py b/two.py
index 1234567..89abcde 100644
--- a/two.py
+++ b/two.py
@@ -5,2 +5,3 @@ class Four:
 five()
+viking_five()
 six()
-- 
2.39.0
"""

MANIFEST = """\
title = "made-up project"
find = "directory"
markers = [{ file = "one.marker", text = "made up" }]

[[patch]]
name = "first"
summary = "Changes one and two."
diffs = ["0001-first.patch"]
files = ["lib/one.py", "two.py"]
proven = ["1.0"]
solved = [{ file = "two.py", pattern = "^two_solved\\\\(\\\\)$", reason = "the project does it itself" }]

[[patch]]
name = "second"
summary = "Changes two alone."
diffs = ["0002-second.patch"]
files = ["two.py"]
proven = []
"""

ONE = b"import os\n\ndef one():\n    return 1\n\n# a\n# b\n\tvalue = old\nlast()\n# c\n"
TWO = b"# two\ntwo()\n# x\n# y\nfive()\nsix()\n# z\n"


def made_up_patches(folder: Path) -> Path:
    """A folder as patches/ is, with one target, "made-up"."""
    place = folder / "made-up"
    place.mkdir(parents=True)
    (place / "manifest.toml").write_text(MANIFEST, encoding="utf-8")
    (place / "0001-first.patch").write_bytes(FIRST)
    (place / "0002-second.patch").write_bytes(SECOND)
    return folder


def made_up_tree(root: Path, one: bytes = ONE, two: bytes = TWO) -> Path:
    """The tree that those patches are for."""
    (root / "lib").mkdir(parents=True)
    (root / "one.marker").write_bytes(b"this is made up\n")
    (root / "lib" / "one.py").write_bytes(one)
    (root / "two.py").write_bytes(two)
    (root / "other.py").write_bytes(b"other = 1\r\n")
    return root


def edit(root: Path, path: str, *changes: tuple[bytes, bytes]) -> None:
    """Replace text that occurs once."""
    data = (root / path).read_bytes()
    for old, new in changes:
        assert data.count(old) == 1, old
        data = data.replace(old, new)
    (root / path).write_bytes(data)
