"""The targets and their patches, as patches/<target>/manifest.toml describes them.

patches/README.md says what the keys mean. A manifest and its diffs are checked against each other whenever they are
read: a wrong one is an error that names the file, never a wrong change.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import viking
from viking.patch.diff import FileDiff, PatchError, parse, safe_path


@dataclass(frozen=True)
class Marker:
    """A file by which a target's tree is known, and a text that it holds."""

    file: str
    text: str


@dataclass(frozen=True)
class Solved:
    """How a tree shows that it has no need of a patch: a pattern that one of its files matches."""

    file: str
    pattern: re.Pattern[str]
    reason: str


@dataclass(frozen=True)
class Patch:
    """One change that a user can name. `variants` are diffs for different releases; the first that fits is taken."""

    name: str
    summary: str
    variants: tuple[tuple[FileDiff, ...], ...]
    diffs: tuple[str, ...]
    files: tuple[str, ...]
    proven: tuple[str, ...]
    solved: tuple[Solved, ...]
    absent: str | None  # why a tree may lack the files; None: it may not


@dataclass(frozen=True)
class Target:
    """Something that can be patched."""

    name: str
    title: str
    find: str
    markers: tuple[Marker, ...]
    patches: tuple[Patch, ...]


def folder() -> Path:
    """Where the patches are: beside the modules where Viking is installed, else at the root of its source tree."""
    package = Path(viking.__file__).resolve().parent
    for place in (package / "patches", package.parents[1] / "patches"):
        if place.is_dir():
            return place
    raise PatchError(f"Viking's patches are not installed: there is no {package / 'patches'}")


def names() -> list[str]:
    """The targets there are."""
    return sorted(path.parent.name for path in folder().glob("*/manifest.toml"))


def _known(table: dict[str, Any], required: set[str], optional: set[str] = frozenset()) -> None:  # type: ignore[assignment]
    missing, unknown = required - set(table), set(table) - required - optional
    if missing or unknown:
        raise PatchError(f"keys missing: {sorted(missing)}, unknown: {sorted(unknown)}")


def _patch(place: Path, table: dict[str, Any]) -> Patch:
    _known(table, {"name", "summary", "diffs", "files", "proven"}, {"solved", "absent"})
    variants = []
    for name in table["diffs"]:
        try:
            variants.append(parse((place / safe_path(name)).read_bytes()))
        except (OSError, PatchError, UnicodeDecodeError) as error:
            raise PatchError(f"{name}: {error}") from None
    for diffs, name in zip(variants, table["diffs"], strict=True):
        changed = {each.path for each in diffs}
        if not changed <= set(table["files"]):
            raise PatchError(f"{name} changes {sorted(changed)}, the manifest says {sorted(table['files'])}")
    solved = []
    for each in table.get("solved", []):
        _known(each, {"file", "pattern", "reason"})
        solved.append(Solved(safe_path(each["file"]), re.compile(each["pattern"], re.MULTILINE), each["reason"]))
    return Patch(
        name=table["name"],
        summary=table["summary"],
        variants=tuple(variants),
        diffs=tuple(table["diffs"]),
        files=tuple(table["files"]),
        proven=tuple(table["proven"]),
        solved=tuple(solved),
        absent=table.get("absent"),
    )


def load(name: str, place: Path | None = None) -> Target:
    """Read a target. Raises PatchError where the manifest or a diff is damaged."""
    place = folder() / name if place is None else place
    path = place / "manifest.toml"
    try:
        table = tomllib.loads(path.read_bytes().decode("utf-8"))
        _known(table, {"title", "find", "markers"}, {"patch"})
        markers = []
        for each in table["markers"]:
            _known(each, {"file", "text"})
            markers.append(Marker(safe_path(each["file"]), each["text"]))
        patches = tuple(_patch(place, each) for each in table.get("patch", []))
        if len({patch.name for patch in patches}) != len(patches):
            raise PatchError("two patches have one name")
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, PatchError, re.error, TypeError) as error:
        raise PatchError(f"{path} cannot be used: {error}") from None
    return Target(name, table["title"], table["find"], tuple(markers), patches)
