"""The command line of `python -m viking.patch`."""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from viking.patch import manifest, series, tree
from viking.patch.diff import NotRestored, PatchError
from viking.patch.manifest import Patch, Target
from viking.patch.series import Outcome, State, Verdict

DONE, REFUSED = 0, 1  # argparse ends the process with 2 for a usage that makes no sense


@dataclass(frozen=True)
class Status:
    """A tree and what `apply` would find in it."""

    target: Target
    root: Path
    verdicts: tuple[Verdict, ...]

    @property
    def patched(self) -> bool:
        """Whether anything of ours is in the tree."""
        return any(each.state in (State.APPLIED, State.PARTLY, State.EDITED) for each in self.verdicts)


def status(name: str, root: str | Path | None = None) -> Status:
    """The state of a target's tree. Raises PatchError where there is none."""
    target = manifest.load(name)
    place = tree.find_root(target, root)
    outcome = series.apply(target.patches, tree.read(place, series.paths(target.patches)))
    return Status(target, place, outcome.verdicts)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m viking.patch",
        description="Let another project use Viking by small changes to its files, which can be undone.",
        epilog="Exit status 0: done, or nothing to do; 1: refused, and nothing was written; 2: wrong usage.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="list | check | apply | revert")
    helps = {
        "list": "what there is to apply, and on which versions it was proven",
        "check": "say what apply would do",
        "apply": "make the changes: all of them or none",
        "revert": "undo the changes, and keep every other edit",
    }
    for name, text in helps.items():
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("target", choices=manifest.names(), nargs="?" if name == "list" else None)
        if name == "list":
            continue
        command.add_argument(
            "--root", metavar="DIR", help="the tree (default: the current directory, or this Python's torch)"
        )
        command.add_argument("--only", metavar="NAME", action="append", help="this patch alone; may be repeated")
        command.add_argument("--dry-run", action="store_true", help="say what would be done, and write nothing")
    return parser


def _list(target: Target) -> None:
    print(f"{target.name}: patches for {target.title}")
    for patch in target.patches:
        print(f"\n  {patch.name}\n    {patch.summary}")
        print(f"    changes {', '.join(patch.files)}")
        print(f"    proven on {', '.join(patch.proven)}" if patch.proven else "    not proven on any release yet")
    if not target.patches:
        print("  none yet")


def _select(target: Target, only: Sequence[str] | None) -> tuple[Patch, ...]:
    if only is None:
        return target.patches
    known = {patch.name for patch in target.patches}
    unknown = [name for name in only if name not in known]
    if unknown:
        raise KeyError(f"{unknown[0]!r} is no patch of {target.name}; there are {', '.join(sorted(known)) or 'none'}")
    return tuple(patch for patch in target.patches if patch.name in only)


def _word(command: str, verdict: Verdict, written: bool) -> str:
    """What becomes of a patch, in a few words."""
    state = verdict.state
    if command == "revert":
        if state in (State.APPLIED, State.PARTLY):
            return "reverted" if written else "would be reverted"
        return "not applied" if state is State.ABSENT else state.value
    if state is State.ABSENT:
        return "applied" if written else "would apply"
    if state is State.PARTLY:
        return "completed" if written else "partly applied, would be completed"
    return "already applied" if state is State.APPLIED else state.value


def _report(command: str, outcome: Outcome, written: bool) -> None:
    width = max((len(verdict.patch.name) for verdict in outcome.verdicts), default=0)
    for verdict in outcome.verdicts:
        if verdict.refused:
            continue
        if outcome.refused and verdict.state in (State.ABSENT, State.PARTLY):
            word = "held back" if command != "check" else _word(command, verdict, False)
        else:
            word = _word(command, verdict, written)
        detail = f": {verdict.detail}" if verdict.detail else ""
        print(f"  {verdict.patch.name:{width}}  {word}{detail}")
    for verdict in outcome.verdicts:
        if verdict.refused:
            print(f"viking.patch: {verdict.patch.name}: {verdict.state.value}: {verdict.detail}", file=sys.stderr)


def _run(options: argparse.Namespace, target: Target) -> int:
    patches = _select(target, options.only)
    root = tree.find_root(target, options.root)
    files = tree.read(root, series.paths(patches))
    others = [patch for patch in target.patches if patch not in patches]
    outcome = (series.revert if options.command == "revert" else series.apply)(patches, files, others)
    dry = options.dry_run or options.command == "check"
    print(f"{target.title} at {root}")
    written = bool(outcome.changed) and not dry and not outcome.refused
    if written:
        tree.write(root, outcome.changed, files)
    _report(options.command, outcome, written)
    if outcome.refused:
        print("viking.patch: refused; nothing was written", file=sys.stderr)
        return REFUSED
    if written:
        print(f"changed: {', '.join(sorted(outcome.changed))}")
    elif outcome.changed:
        print(f"would change: {', '.join(sorted(outcome.changed))}; nothing was written")
    else:
        print("nothing to do")
    return DONE


def main(arguments: Sequence[str] | None = None) -> int:
    """The command. 0: done or nothing to do; 1: refused, and nothing was written; 2: wrong usage."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a path may have letters that a terminal has not
    try:
        parser = _parser()
        options = parser.parse_args(arguments)
        if options.command == "list":
            for index, name in enumerate([options.target] if options.target else manifest.names()):
                print("\n" * bool(index), end="")
                _list(manifest.load(name))
            return DONE
        return _run(options, manifest.load(options.target))
    except KeyError as error:
        print(f"viking.patch: {error.args[0]}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("viking.patch: interrupted; nothing was written", file=sys.stderr)
        return REFUSED
    except NotRestored as error:
        print(f"viking.patch: {error}", file=sys.stderr)
        return REFUSED
    except PatchError as error:
        print(f"viking.patch: refused; nothing was written: {error}", file=sys.stderr)
        return REFUSED
