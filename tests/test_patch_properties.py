"""What holds for any file and any change: undone is as before, failed is untouched, found is never misplaced."""

from __future__ import annotations

import os
import shutil
import tempfile
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import assume, event, given, settings
from hypothesis import strategies as st

from support.trees import digest
from viking.patch import series, tree
from viking.patch.diff import FileDiff, Hunk, PatchError, parse
from viking.patch.manifest import Patch
from viking.patch.series import State

# Few different lines, so that text fits twice, and changes touch and look like what is around them.
FEW = st.sampled_from([b"", b"a", b"b", b"\tc", b"    c", b"viking()", b"\xff\x00", b"d \r d"])
WORDS = st.binary(max_size=6).filter(lambda line: b"\n" not in line and not line.endswith(b"\r"))
LINE = st.one_of(FEW, FEW, WORDS)


@dataclass(frozen=True)
class Change:
    """Lines [begin, end) of a file become others; so many lines around them are context."""

    begin: int
    end: int
    lines: tuple[bytes, ...]
    above: int
    below: int

    def hunk(self, lines: list[bytes]) -> Hunk:
        first, last = max(0, self.begin - self.above), min(len(lines), self.end + self.below)
        body = [(b" ", line) for line in lines[first : self.begin]]
        body += [(b"-", line) for line in lines[self.begin : self.end]]
        body += [(b"+", line) for line in self.lines]
        body += [(b" ", line) for line in lines[self.end : last]]
        return Hunk(first + 1, tuple(body))


@st.composite
def changes(draw: st.DrawFn, count: int) -> list[Change]:
    """Changes of a file of so many lines, from top to bottom, not overlapping."""
    made, at, inserted = [], 0, -1
    for _ in range(draw(st.integers(1, 3))):
        begin = draw(st.integers(at, count))
        # Two insertions at one place have no order that their contexts tell: a diff has them as one change.
        end = min(count, begin + draw(st.integers(1 if begin == inserted else 0, 2)))
        lines = tuple(draw(st.lists(LINE, min_size=0 if end > begin else 1, max_size=3)))
        made.append(Change(begin, end, lines, draw(st.integers(0, 3)), draw(st.integers(0, 3))))
        at, inserted = end, end if end == begin else -1
        if at >= count:
            break
    return made


def data_of(lines: list[bytes], end: bytes, bom: bool, last: bool) -> bytes:
    data = (b"\xef\xbb\xbf" if bom else b"") + b"".join(line + end for line in lines)
    return data if last or not lines or lines[-1] == b"" else data.removesuffix(end)


def patch_of(*hunks: Hunk, name: str = "p", path: str = "f") -> Patch:
    return Patch(name, "", ((FileDiff(path, hunks),),), ("",), (path,), (), (), None)


def diff_text(hunks: list[Hunk]) -> bytes:
    """The hunks as `git diff` would write them."""
    text, moved = b"--- a/f\n+++ b/f\n", 0
    for hunk in hunks:
        old, new = len(hunk.before), len(hunk.after)
        text += b"@@ -%d,%d +%d,%d @@\n" % (hunk.line, old, hunk.line + moved, new)
        text += b"".join(mark + line + b"\n" for mark, line in hunk.body)
        moved += new - old
    return text


FILES = st.tuples(
    st.lists(LINE, min_size=1, max_size=14), st.sampled_from([b"\n", b"\r\n"]), st.booleans(), st.booleans()
)


@settings(max_examples=600, deadline=None)
@given(FILES, st.data())
def test_apply_is_exact_and_revert_is_its_inverse(file, draw):
    """Whatever is not refused is what a hand would have written, and comes off without a trace."""
    lines, end, bom, last = file
    stock = data_of(lines, end, bom, last)
    wanted = draw.draw(changes(len(lines)))
    hunks = [change.hunk(lines) for change in wanted]
    assume(all(any(mark == b" " for mark, _ in hunk.body) for hunk in hunks))
    patch = patch_of(*hunks)
    outcome = series.apply([patch], {"f": stock})
    event(outcome.verdicts[0].state.value)
    if outcome.refused:
        assert outcome.changed == {}
        return
    if outcome.verdicts[0].state is not State.ABSENT:  # the change is in the file already: nothing is done
        return
    end = end if end in stock else b"\n"  # a single line without an end does not tell
    by_hand = list(lines)
    for change in reversed(wanted):
        by_hand[change.begin : change.end] = change.lines
    patched = outcome.changed.get("f", stock)
    expected = b"".join(line + end for line in by_hand)
    assert patched.removeprefix(b"\xef\xbb\xbf" if bom else b"") in (expected, expected.removesuffix(end))
    assert patched.startswith(b"\xef\xbb\xbf") or not bom
    assert series.apply([patch], {"f": patched}).changed == {}
    back = series.revert([patch], {"f": patched})
    assert not back.refused
    assert back.changed.get("f", patched) == stock


@settings(max_examples=300, deadline=None)
@given(FILES, st.data())
def test_a_diff_says_what_it_was_made_from(file, draw):
    lines = [line for line in file[0] if b"\r" not in line] or [b"a"]
    hunks = [change.hunk(lines) for change in draw.draw(changes(len(lines)))]
    hunks = [hunk for hunk in hunks if not any(b"\r" in line for _, line in hunk.body)]
    assume(hunks and all({mark for mark, _ in hunk.body} > {b" "} for hunk in hunks))
    assume(all(one.line + len(one.before) <= next.line for one, next in pairwise(hunks)))
    assert parse(diff_text(hunks)) == (FileDiff("f", tuple(hunks)),)


@settings(max_examples=500, deadline=None)
@given(st.data())
def test_unrelated_edits_never_misplace_a_hunk(data):
    """Lines come, go and are doubled all around a change; it lands where it belongs or is refused."""
    lines = [b"line %d" % number for number in range(data.draw(st.integers(3, 20)))]
    begin = data.draw(st.integers(1, len(lines) - 2))
    change = Change(begin, begin + data.draw(st.integers(0, 1)), (b"viking()",), 1, 1)
    hunk = change.hunk(lines)
    core = range(hunk.line - 1, hunk.line - 1 + len(hunk.before))
    edited: list[tuple[int, bytes]] = list(enumerate(lines))  # where a line is from; -1: it is new
    for _ in range(data.draw(st.integers(0, 8))):
        inner = {at for at, (origin, _) in enumerate(edited) if origin in core}
        at = data.draw(st.integers(0, len(edited)))
        between = at in inner and at - 1 in inner
        kind = data.draw(st.sampled_from(["new", "double", "drop"]))
        if kind == "drop":
            if at < len(edited) and at not in inner:
                del edited[at]
        elif not between:
            edited.insert(at, (-1, data.draw(st.sampled_from(lines if kind == "double" else [b"x", b"", b"# y"]))))
    text = [line for _, line in edited]
    stock = b"\n".join(text) + b"\n"
    outcome = series.apply([patch_of(hunk)], {"f": stock})
    first = next(at for at, (origin, _) in enumerate(edited) if origin == core[0])
    places = [at for at in range(len(text)) if tuple(text[at : at + len(hunk.before)]) == hunk.before]
    event(f"{len(places)} places")
    if len(places) > 1:
        assert outcome.refused
        return
    assert not outcome.refused
    expected = [*text[:first], *hunk.after, *text[first + len(hunk.before) :]]
    assert outcome.changed["f"] == b"\n".join(expected) + b"\n"
    assert series.revert([patch_of(hunk)], {"f": outcome.changed["f"]}).changed["f"] == stock


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_edits_between_apply_and_revert_stay_or_the_revert_is_refused(data):
    lines = [b"line %d" % number for number in range(12)]
    change = Change(5, 6, (b"viking()", b"more"), 1, 1)
    patch = patch_of(change.hunk(lines))
    patched = series.apply([patch], {"f": b"\n".join(lines) + b"\n"}).changed["f"].split(b"\n")[:-1]
    at = data.draw(st.integers(0, len(patched)))
    dropped = data.draw(st.integers(0, 2))
    ours = range(4, 4 + len(patch.variants[0][0].hunks[0].after))
    edited = [*patched[:at], *data.draw(st.lists(st.sampled_from([b"x", b"y"]), max_size=2)), *patched[at + dropped :]]
    outcome = series.revert([patch], {"f": b"\n".join(edited) + b"\n"})
    touched = edited != patched and (
        any(number in ours for number in range(at, at + dropped)) or (at in ours and at - 1 in ours)
    )
    event("touched" if touched else "elsewhere")
    if touched and tuple(patched[ours.start : ours.stop]) != tuple(edited[ours.start : ours.stop]):
        assert outcome.changed == {} or b"viking()" not in outcome.changed["f"]
        return
    assert not outcome.refused
    start = edited.index(patched[ours.start])
    expected = [*edited[:start], *lines[4:7], *edited[start + len(ours) :]]
    assert outcome.changed["f"] == b"\n".join(expected) + b"\n"


@pytest.mark.parametrize("count", range(4))
def test_patches_that_build_on_each_other_are_completed_and_taken_off_in_order(count):
    """The second patch changes what the first has added, and the third what the second has; `count` are there."""
    files = {"f": b"top\nbottom\n"}
    hunks = [
        Hunk(1, ((b" ", b"top"), (b"+", b"viking one"), (b" ", b"bottom"))),
        Hunk(2, ((b" ", b"viking one"), (b"+", b"viking two"), (b" ", b"bottom"))),
        Hunk(3, ((b" ", b"viking two"), (b"+", b"viking three"), (b" ", b"bottom"))),
    ]
    patches = [patch_of(hunk, name=str(number)) for number, hunk in enumerate(hunks)]
    applied = dict(files)
    applied.update(series.apply(patches[:count], files).changed)
    whole = series.apply(patches, applied)
    assert not whole.refused
    full = {**applied, **whole.changed}
    assert full["f"] == b"top\nviking one\nviking two\nviking three\nbottom\n"
    assert {**full, **series.revert(patches, full).changed} == files


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trees")


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_a_write_that_fails_leaves_every_file_as_it_was(scratch, data):
    """Some files, any call that writes them failing, once or from then on."""
    root = Path(tempfile.mkdtemp(dir=scratch))
    names = [f"d{number % 2}/f{number}" for number in range(data.draw(st.integers(1, 4)))]
    was = {name: data.draw(st.binary(max_size=20)) for name in names}
    changed = {name: data.draw(st.binary(max_size=20)) for name in names}
    for name, content in was.items():
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_bytes(content)
    before = digest(root)
    owner, call = data.draw(
        st.sampled_from([(os, "replace"), (os, "link"), (os, "fsync"), (os, "chmod"), (tempfile, "mkstemp")])
    )
    nth, forever = data.draw(st.integers(1, 12)), data.draw(st.booleans())
    error = data.draw(st.sampled_from([OSError(28, "full"), PermissionError(13, "denied"), KeyboardInterrupt()]))
    real, calls = getattr(owner, call), 0

    def failing(*arguments, **keywords):
        nonlocal calls
        calls += 1
        if calls == nth or (forever and calls > nth and isinstance(error, OSError) and call != "replace"):
            raise error
        return real(*arguments, **keywords)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(owner, call, failing)
        try:
            tree.write(root, changed, was)
            failed = False
        except (PatchError, KeyboardInterrupt):
            failed = True
    event(f"{call}: {'failed' if failed else 'done'}")
    if failed:
        assert digest(root) == before
    else:
        assert {name: (root / name).read_bytes() for name in names} == changed
        assert set(digest(root)) == set(names)
    shutil.rmtree(root)
