"""A target's patches against one tree: what each one's state is, and what the files would become.

Nothing here reads or writes a tree: files come in as bytes and go out as bytes. A later patch may change what an
earlier one has changed, so states are found from the last patch to the first, undoing in memory each that is there;
what remains is the tree without us, upon which the patches are made in their order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from viking.patch.diff import FileDiff, Hunk
from viking.patch.manifest import Patch
from viking.patch.text import Found, Place, Text, locate, nearest, replace

Files = dict[str, bytes | None]  # path to bytes; None where the tree has no such file


#: What every change of ours has in it; no other project's file does.
_OURS = b"viking.adapters"
_REMEDY = "put the file back as it was (git checkout, or a reinstall) and run this again"


class State(Enum):
    """Where a patch stands in a tree."""

    ABSENT = "not applied"
    APPLIED = "applied"
    PARTLY = "partly applied"
    SOLVED = "not needed: solved upstream"
    SKIPPED = "skipped: not in this release"
    DRIFTED = "does not fit"
    EDITED = "edited after it was applied"
    AMBIGUOUS = "ambiguous"
    MISSING = "a file is missing"


REFUSED = frozenset({State.DRIFTED, State.EDITED, State.AMBIGUOUS, State.MISSING})


@dataclass(frozen=True)
class Verdict:
    """A patch's state in a tree. `detail` is empty or a sentence; it begins with the file where one is to blame."""

    patch: Patch
    state: State
    detail: str = ""

    @property
    def refused(self) -> bool:
        return self.state in REFUSED


@dataclass(frozen=True)
class Outcome:
    """What `apply` or `revert` makes of a tree: each patch's state before it, and the files that it changes."""

    verdicts: tuple[Verdict, ...]
    changed: Mapping[str, bytes]

    @property
    def refused(self) -> bool:
        return any(verdict.refused for verdict in self.verdicts)


class _Misfit(Exception):
    """One hunk that cannot be made, or undone."""

    def __init__(self, state: State, detail: str) -> None:
        super().__init__(detail)
        self.state = state


def _refuse(path: str, text: Text, hunk: Hunk, place: Place) -> _Misfit:
    where = f"{path}: the change at line {hunk.line}"
    if place.found is Found.MANY:
        return _Misfit(State.AMBIGUOUS, f"{where} fits more than one place of the file")
    if place.found is Found.AFTER:
        return _Misfit(State.AMBIGUOUS, f"{where} is there, and once more when it is undone")
    if place.found is Found.EDITED:
        return _Misfit(State.EDITED, f"{where} was made, and its lines were edited since: {_REMEDY}")
    return _Misfit(State.DRIFTED, f"{where} finds other text than it was made for: {nearest(text, hunk.before)}")


def _edit(path: str, text: Text, hunks: Sequence[tuple[Hunk, Place]]) -> bytes:
    """The file with the hunks made. Raises _Misfit where it could not be undone byte for byte."""
    try:
        data = replace(text, [(hunk, place.at) for hunk, place in hunks])
    except ValueError:
        raise _Misfit(State.AMBIGUOUS, f"{path}: two changes meet in one place of the file") from None
    return data


def _made(path: str, data: bytes, hunks: Sequence[Hunk]) -> bytes:
    """A file with hunks made that it does not have yet."""
    text = Text(data)
    todo = []
    for hunk in hunks:
        place = locate(text, hunk)
        if place.found is not Found.BEFORE:
            raise _refuse(path, text, hunk, place)
        todo.append((hunk, place))
    changed = _edit(path, text, todo)
    if _undone(path, changed, hunks) != data:
        raise _Misfit(State.AMBIGUOUS, f"{path}: the change could not be undone byte for byte (mixed line ends?)")
    return changed


def _undone(path: str, data: bytes, hunks: Sequence[Hunk]) -> bytes:
    """A file without those of the hunks that it has."""
    text = Text(data)
    todo = []
    for hunk in hunks:
        place = locate(text, hunk)
        if place.found is Found.AFTER:
            todo.append((hunk.reversed(), place))
        elif place.found is not Found.BEFORE:
            raise _refuse(path, text, hunk, place)
    return _edit(path, text, todo)


def _found(files: Files, diffs: tuple[FileDiff, ...]) -> list[Found]:
    """What the tree holds of every hunk."""
    found: list[Found] = []
    for diff in diffs:
        data = files.get(diff.path)
        if data is None:
            found += [Found.NEITHER] * len(diff.hunks)
        else:
            text = Text(data)
            found += [locate(text, hunk).found for hunk in diff.hunks]
    return found


def _choose(files: Files, patch: Patch) -> tuple[FileDiff, ...]:
    """The variant that fits a tree: one whose every hunk is there in either form, and of those the most applied; else
    the one of which most is there."""

    def fit(diffs: tuple[FileDiff, ...]) -> tuple[bool, int, int]:
        found = _found(files, diffs)
        applied = found.count(Found.AFTER)
        whole = applied + found.count(Found.BEFORE)
        return whole == len(found), applied, whole

    return max(patch.variants, key=fit)


def _solved(files: Files, patch: Patch) -> str | None:
    """Why a tree without the patch has no need of it."""
    for each in patch.solved:
        data = files.get(each.file)
        if data is not None and each.pattern.search(data.decode("utf-8", errors="replace").replace("\r\n", "\n")):
            return each.reason
    return None


def _peel(files: Files, patch: Patch) -> tuple[Files, Verdict]:
    """The tree without what it has of a patch, and the state that the patch was in."""
    diffs = _choose(files, patch)
    found = _found(files, diffs)
    applied = found.count(Found.AFTER)
    if applied == 0 and Found.EDITED not in found:
        missing = [diff.path for diff in diffs if files.get(diff.path) is None]
        if missing and patch.absent is not None:
            return files, Verdict(patch, State.SKIPPED, f"{missing[0]}: {patch.absent}")
        return files, Verdict(patch, State.ABSENT)
    partly = f"{applied} of {len(found)} changes are there"
    peeled = dict(files)
    try:
        for diff in diffs:
            peeled[diff.path] = _undone(diff.path, _data(files, diff.path), diff.hunks)
    except _Misfit as misfit:
        return files, Verdict(patch, misfit.state, str(misfit) + (f" ({partly})" if applied else ""))
    if applied < len(found):
        return peeled, Verdict(patch, State.PARTLY, partly)
    return peeled, Verdict(patch, State.APPLIED)


def _add(files: Files, patch: Patch) -> Files:
    """The tree with a patch that it has nothing of. Raises _Misfit."""
    result = dict(files)
    for diff in _choose(files, patch):
        result[diff.path] = _made(diff.path, _data(files, diff.path), diff.hunks)
    return result


def _data(files: Files, path: str) -> bytes:
    data = files.get(path)
    if data is None:
        raise _Misfit(State.MISSING, f"{path}: there is no such file")
    return data


def _leftover(files: Files, patch: Patch, known: set[bytes]) -> str | None:
    """A change of ours in the files of a patch that is none of the known ones: another version of Viking made it."""
    for path in patch.files:
        for number, line in enumerate(Text(files.get(path) or b"").lines, 1):
            if _OURS in line and line.strip() not in known:
                return f"{path}: line {number} is from another version of Viking: {_REMEDY}"
    return None


def _peel_all(patches: Sequence[Patch], files: Files, others: Sequence[Patch]) -> tuple[Files, list[Verdict]]:
    """The tree without the patches, and their states in it. `others` are the target's patches that may stay."""
    verdicts = []
    for patch in reversed(patches):
        files, verdict = _peel(files, patch)
        verdicts.append(verdict)
    verdicts.reverse()
    known = {
        line.strip()
        for patch in others
        for variant in patch.variants
        for diff in variant
        for hunk in diff.hunks
        for line in hunk.added
    }
    if not any(verdict.refused for verdict in verdicts):
        for index, verdict in enumerate(verdicts):
            if (detail := _leftover(files, verdict.patch, known)) is not None:
                verdicts[index] = Verdict(verdict.patch, State.EDITED, detail)
    return files, verdicts


def _changes(old: Files, new: Files) -> dict[str, bytes]:
    return {path: data for path, data in new.items() if data is not None and data != old.get(path)}


def revert(patches: Sequence[Patch], files: Files, others: Sequence[Patch] = ()) -> Outcome:
    """The tree without the patches; every other edit stays, and so do the target's `others`."""
    peeled, verdicts = _peel_all(patches, files, others)
    outcome = Outcome(tuple(verdicts), _changes(files, peeled))
    return Outcome(outcome.verdicts, {}) if outcome.refused else outcome


def apply(patches: Sequence[Patch], files: Files, others: Sequence[Patch] = ()) -> Outcome:
    """The tree with all of the patches that it needs; those partly there are completed. `others` as for revert."""
    current, verdicts = _peel_all(patches, files, others)
    for index, verdict in enumerate(verdicts):
        if verdict.refused or verdict.state is State.SKIPPED:
            continue
        if verdict.state is State.ABSENT and (reason := _solved(current, verdict.patch)) is not None:
            verdicts[index] = Verdict(verdict.patch, State.SOLVED, reason)
            continue
        try:
            current = _add(current, verdict.patch)
        except _Misfit as misfit:
            verdicts[index] = Verdict(verdict.patch, misfit.state, str(misfit))
    todo = any(verdict.state in (State.ABSENT, State.PARTLY) for verdict in verdicts)
    refused = any(verdict.refused for verdict in verdicts)
    return Outcome(tuple(verdicts), _changes(files, current) if todo and not refused else {})


def paths(patches: Sequence[Patch]) -> list[str]:
    """The files that these patches change or look at."""
    wanted = {diff.path for patch in patches for variant in patch.variants for diff in variant}
    return sorted(wanted | {solved.file for patch in patches for solved in patch.solved})
