"""A target's root, the files in it, and writing all of them or none.

Every new file is written and flushed beside the one that it replaces before the first is put in place, and every old
one is kept under a second name until the last is: a full disk is met while nothing has changed yet, and whatever fails
later (an interrupt too) is undone by renames, which need no space.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import stat
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from viking.patch.diff import NotRestored, PatchError, safe_path
from viking.patch.manifest import Target

PREFIX = ".viking-patch-"


# ---- the root ----


def _installed(package: str) -> Path | None:
    """Where the package of this interpreter is that imports call by this name; nothing of it is run."""
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return None
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).resolve().parent


def foreign(target: Target, root: Path) -> str | None:
    """Why a directory is not a tree of the target; None: it is one."""
    for marker in target.markers:
        try:
            data = (root / marker.file).read_bytes()
        except OSError as error:
            return f"{root} is no {target.title}: {marker.file}: {error.strerror or error}"
        if marker.text.encode() not in data:
            return f"{root} is no {target.title}: {marker.file} does not hold {marker.text!r}"
    return None


def find_root(target: Target, given: str | os.PathLike[str] | None = None) -> Path:
    """The root of the tree to work on: the given one, else where the target's manifest says to look. Raises PatchError.

    A torch may be given as the package's own directory or as the one that it is installed in.
    """
    if given is not None:
        tries = [Path(given)]
        if target.find.startswith("package:"):
            package = target.find.removeprefix("package:")
            tries = [Path(given) / package, *tries]
        root = next((each for each in tries if each.is_dir() and foreign(target, each) is None), tries[-1])
    elif target.find == "directory":
        root = Path.cwd()
    else:
        package = target.find.removeprefix("package:")
        installed = _installed(package)
        if installed is None:
            raise PatchError(f"{package} is not installed for this Python; --root says where one is")
        root = installed
    if not root.is_dir():
        raise PatchError(f"{root}: there is no such directory")
    if (reason := foreign(target, root)) is not None:
        raise PatchError(reason + ("" if given is not None else "; --root says where one is"))
    return root.resolve()


# ---- reading ----


def _inside(root: Path, path: str) -> Path:
    """Where a file of the tree really is. Raises PatchError where a link leads out of it."""
    real = Path(os.path.realpath(root / safe_path(path)))
    if not real.is_relative_to(os.path.realpath(root)):
        raise PatchError(f"{path}: a link leads out of the tree, to {real}")
    return real


def read(root: Path, paths: Iterable[str]) -> dict[str, bytes | None]:
    """The files' bytes; None for one that is not there. Raises PatchError for one that cannot be read."""
    files: dict[str, bytes | None] = {}
    for path in paths:
        real = _inside(root, path)
        try:
            if not stat.S_ISREG(real.stat().st_mode):
                raise PatchError(f"{path}: this is no regular file")
            files[path] = real.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            files[path] = None
        except OSError as error:
            raise PatchError(f"{path}: cannot be read: {error.strerror or error}") from None
    return files


# ---- writing ----


@dataclass
class _Replacement:
    path: str
    real: Path
    staged: Path
    kept: Path | None = None
    placed: bool = False  # or about to be


def _refuse_read_only(path: str, real: Path) -> None:
    """Renaming into place would overrule a file's own mode, and an administrator is not stopped by a directory's."""
    for name, place in ((path, real), (f"the directory of {path}", real.parent)):
        if not place.stat().st_mode & 0o222:
            raise PatchError(f"{name}: is read-only")


def _flush_directory(directory: Path) -> None:
    """Have the renames on the disk too, on the file systems that can be asked for it."""
    if os.name != "posix":
        return
    with contextlib.suppress(OSError):
        handle = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _discard(path: Path | None) -> None:
    """Remove a file of ours, if it is there. By now the work is done or undone: an interrupt comes too late."""
    for _ in range(2):
        try:
            if path is not None:
                path.unlink(missing_ok=True)
            return
        except (OSError, KeyboardInterrupt):
            continue


def _beside(real: Path) -> Path:
    """A new empty file in the same directory."""
    handle, name = tempfile.mkstemp(prefix=PREFIX, suffix=".tmp", dir=real.parent)
    os.close(handle)
    return Path(name)


def _fill(staged: Path, real: Path, data: bytes) -> None:
    """Write a file with another's mode and owner, down to the disk."""
    like = real.stat()
    with open(staged, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    if os.name == "posix" and (like.st_uid, like.st_gid) != (os.geteuid(), os.getegid()):
        with contextlib.suppress(OSError):  # one's own tree with a foreign group: not worth a refusal
            os.chown(staged, like.st_uid, like.st_gid)
    mode = stat.S_IMODE(like.st_mode)
    if stat.S_IMODE(staged.stat().st_mode) != mode:  # some file systems have one mode for all, and refuse to be asked
        os.chmod(staged, mode)


def _keep(replacement: _Replacement) -> None:
    """Give the old file a second name; where the file system has no links, a copy."""
    replacement.kept = _beside(replacement.real)
    replacement.kept.unlink()
    try:
        os.link(replacement.real, replacement.kept)
    except OSError:
        # Not into that name: over a network a link may have been made and yet be reported as failed.
        replacement.kept.unlink(missing_ok=True)
        replacement.kept = _beside(replacement.real)
        _fill(replacement.kept, replacement.real, replacement.real.read_bytes())


def _undo(replacements: Iterable[_Replacement]) -> list[str]:
    """Put the old files back and remove what was staged; returns the files that could not be put back."""
    lost = []
    for each in replacements:
        if each.placed and each.kept is not None and not each.staged.exists():
            try:
                os.replace(each.kept, each.real)
            except OSError as error:
                lost.append(f"{each.path} (its old text is in {each.kept.name}: {error.strerror or error})")
                each.kept = None
        _discard(each.staged)
        _discard(each.kept)
    return lost


def write(root: Path, changed: Mapping[str, bytes], was: Mapping[str, bytes | None]) -> None:
    """Replace files of the tree: all of them or, with PatchError, none. `was` holds what they are known to contain."""
    replacements: list[_Replacement] = []
    path = ""
    try:
        for path, data in changed.items():
            real = _inside(root, path)
            _refuse_read_only(path, real)
            replacements.append(_Replacement(path, real, _beside(real)))
            _fill(replacements[-1].staged, real, data)
            _keep(replacements[-1])
        for each in replacements:
            path = each.path
            if each.real.read_bytes() != was[path]:
                raise PatchError(f"{path}: was changed by someone else meanwhile")
            each.placed = True
            os.replace(each.staged, each.real)
        for directory in {each.real.parent for each in replacements}:
            _flush_directory(directory)
    except BaseException as error:
        lost = _undo(replacements)
        if lost:
            raise NotRestored(f"{error}; what could not be put back: {'; '.join(lost)}") from error
        if isinstance(error, OSError):
            raise PatchError(f"{path}: cannot be written: {error.strerror or error}") from None
        raise
    for each in replacements:
        _discard(each.kept)
