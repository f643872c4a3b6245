"""A file as lines, where a hunk's text stands in it, and the file with that text replaced.

A hunk is found by its exact lines, anywhere in the file, or not at all: no fuzz, no guess by line number. What git
itself changes between two checkouts of one file does not count as a difference: the end of a line may be LF or CRLF,
the file may begin with a byte order mark and its last line may have no end. All three are kept, so that undoing a
change gives back the very bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from viking.patch.diff import Hunk

BOM = b"\xef\xbb\xbf"


class Text:
    """The lines of a file without their ends, the ends beside them, and the byte order mark."""

    def __init__(self, data: bytes) -> None:
        self.bom = BOM if data.startswith(BOM) else b""
        self.lines: list[bytes] = []
        self.ends: list[bytes] = []
        rest = data[len(self.bom) :]
        begin = 0
        while begin < len(rest):
            stop = rest.find(b"\n", begin) + 1 or len(rest)
            line = rest[begin:stop]
            end = b"\r\n" if line.endswith(b"\r\n") else b"\n" if line.endswith(b"\n") else b""
            self.lines.append(line[: len(line) - len(end)])
            self.ends.append(end)
            begin = stop

    def data(self) -> bytes:
        return self.bom + b"".join(line + end for line, end in zip(self.lines, self.ends, strict=True))

    def find(self, wanted: Sequence[bytes]) -> list[int]:
        """Where these lines stand one after the other: indices of their first line, ascending."""
        wanted, count = list(wanted), len(wanted)
        return [
            at
            for at in range(len(self.lines) - count + 1)
            if self.lines[at] == wanted[0] and self.lines[at : at + count] == wanted
        ]


class Found(Enum):
    """What of a hunk a file holds."""

    BEFORE = "the original text, once"
    AFTER = "the changed text, once"
    NEITHER = "neither text"
    EDITED = "neither text, but lines that the change has added"
    MANY = "more than one place that it fits"


@dataclass(frozen=True)
class Place:
    """Where a hunk is in a file. `at` and `count` are in lines, and meant for BEFORE and AFTER alone."""

    found: Found
    at: int = 0
    count: int = 0


def _outside(places: list[int], count: int, around: list[int], width: int) -> list[int]:
    """Those places that do not lie within one of the wider places around them."""
    return [at for at in places if not any(wide <= at and at + count <= wide + width for wide in around)]


def locate(text: Text, hunk: Hunk) -> Place:
    """Where a hunk is in a file.

    A change that only adds lines after its context leaves its original text in place, and one that only removes them
    had its changed text there before: of two texts where one holds the other, the longer counts.
    """
    before, after = hunk.before, hunk.after
    old, new = text.find(before), text.find(after)
    if len(before) < len(after):
        old = _outside(old, len(before), new, len(after))
    else:
        new = _outside(new, len(after), old, len(before))
    if len(old) + len(new) > 1:
        return Place(Found.MANY)
    if old:
        return Place(Found.BEFORE, old[0], len(before))
    if new:
        return Place(Found.AFTER, new[0], len(after))
    ours = {line.strip() for line in hunk.added if b"viking" in line.lower()}
    return Place(Found.EDITED if any(line.strip() in ours for line in text.lines) else Found.NEITHER)


def replace(text: Text, hunks: Sequence[tuple[Hunk, int]]) -> bytes:
    """The file with hunks made at the given lines, where their original text stands. The places may not overlap."""
    usual = max((b"\n", b"\r\n"), key=text.ends.count)
    result = Text(text.bom)
    begin = 0
    for hunk, at in sorted(hunks, key=lambda pair: pair[1]):
        if at < begin:
            raise ValueError("two changes overlap")
        result.lines += text.lines[begin:at]
        result.ends += text.ends[begin:at]
        begin = at
        for mark, line in hunk.body:
            if mark == b"+":
                near = text.ends[begin - 1] if begin > 0 else text.ends[begin]
                result.lines.append(line)
                result.ends.append(near or usual)
            else:
                if mark == b" ":
                    result.lines.append(line)
                    result.ends.append(text.ends[begin])
                begin += 1
    result.lines += text.lines[begin:]
    result.ends += text.ends[begin:]
    if text.ends and text.ends[-1] == b"":
        result.ends = [end or usual for end in result.ends[:-1]] + [b""]
    return result.data()


def nearest(text: Text, wanted: Sequence[bytes]) -> str:
    """The first of these lines that is not where it should be, for a person to look at: "line N: ..."."""
    best, where = 0, -1
    for at, line in enumerate(text.lines):
        if line != wanted[0]:
            continue
        same = 0
        while same < len(wanted) and at + same < len(text.lines) and text.lines[at + same] == wanted[same]:
            same += 1
        if same > best:
            best, where = same, at
    if where < 0:
        return f"the line {_shown(wanted[0])} is not there"
    return f"after line {where + best} the line {_shown(wanted[best])} was expected"


def _shown(line: bytes) -> str:
    return repr(line.strip().decode("utf-8", errors="replace"))
