"""What `python -m viking.patch` does to a tree in every state it may be found in."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from support import trees
from support.trees import ONE, TWO, digest, edit
from viking.patch import manifest, series, tree
from viking.patch.command import main
from viking.patch.diff import PatchError, parse
from viking.patch.series import State

PATCHED_ONE = (
    b"import os\n\ndef one():\n    import viking\n    return 1\n\n# a\n# b\n\tvalue = new_viking\nlast()\n# c\n"
)
PATCHED_TWO = b"# two\nviking = True\ntwo()\n# x\n# y\nfive()\nviking_five()\nsix()\n# z\n"


@pytest.fixture(autouse=True)
def made_up(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The patches are the made-up ones, unless a test asks for those that are shipped."""
    if "shipped" not in request.fixturenames:
        folder = trees.made_up_patches(tmp_path / "patches")
        monkeypatch.setattr(manifest, "folder", lambda: folder)


@pytest.fixture
def shipped() -> None:
    """Use the patches of the project itself."""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return trees.made_up_tree(tmp_path / "tree")


def run(command: str, root: Path, *options: str) -> int:
    return main([command, "made-up", "--root", str(root), *options])


def states(root: Path) -> dict[str, State]:
    target = manifest.load("made-up")
    outcome = series.apply(target.patches, tree.read(root, series.paths(target.patches)))
    return {verdict.patch.name: verdict.state for verdict in outcome.verdicts}


# ---- the plain way ----


def test_apply_changes_the_files_and_nothing_else(root, capsys):
    other = (root / "other.py").read_bytes()
    assert run("apply", root) == 0
    assert (root / "lib/one.py").read_bytes() == PATCHED_ONE
    assert (root / "two.py").read_bytes() == PATCHED_TWO
    assert (root / "other.py").read_bytes() == other
    assert "changed: lib/one.py, two.py" in capsys.readouterr().out


def test_revert_gives_back_every_byte_and_mode(root):
    os.chmod(root / "lib/one.py", 0o755)
    stock = digest(root)
    assert run("apply", root) == 0
    assert stat.S_IMODE((root / "lib/one.py").stat().st_mode) == 0o755
    assert run("revert", root) == 0
    assert digest(root) == stock


def test_a_second_apply_and_a_second_revert_have_nothing_to_do(root, capsys):
    run("apply", root)
    patched = digest(root)
    stamps = [(root / path).stat().st_mtime_ns for path in ("lib/one.py", "two.py")]
    capsys.readouterr()
    assert run("apply", root) == 0
    assert "already applied" in (out := capsys.readouterr().out)
    assert "nothing to do" in out
    assert digest(root) == patched
    assert [(root / path).stat().st_mtime_ns for path in ("lib/one.py", "two.py")] == stamps
    run("revert", root)
    stock = digest(root)
    capsys.readouterr()
    assert run("revert", root) == 0
    assert "nothing to do" in capsys.readouterr().out
    assert digest(root) == stock


@pytest.mark.parametrize("command", [["check"], ["apply", "--dry-run"], ["revert", "--dry-run"]])
def test_check_and_dry_run_write_nothing(root, command, capsys):
    if command[0] == "revert":
        run("apply", root)
    before = digest(root)
    assert run(command[0], root, *command[1:]) == 0
    assert digest(root) == before
    assert "would change: lib/one.py, two.py; nothing was written" in capsys.readouterr().out


def test_one_patch_can_be_chosen(root):
    assert run("apply", root, "--only", "second") == 0
    assert (root / "lib/one.py").read_bytes() == ONE
    assert b"viking_five" in (root / "two.py").read_bytes()
    assert states(root) == {"first": State.ABSENT, "second": State.APPLIED}
    assert run("apply", root) == 0
    assert run("revert", root, "--only", "second") == 0
    assert states(root) == {"first": State.APPLIED, "second": State.ABSENT}


def test_list_says_what_each_patch_does(capsys):
    assert main(["list"]) == 0
    out = capsys.readouterr().out
    assert "first\n    Changes one and two." in out
    assert "proven on 1.0" in out
    assert "not proven on any release yet" in out


@pytest.mark.parametrize(
    "arguments", [[], ["frobnicate"], ["apply"], ["apply", "another"], ["apply", "made-up", "--fuzz"]]
)
def test_wrong_usage_is_status_2(arguments):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2


def test_a_patch_that_is_not_there_is_wrong_usage(root, capsys):
    assert run("apply", root, "--only", "third") == 2
    assert "'third' is no patch of made-up; there are first, second" in capsys.readouterr().err


# ---- files as they are found ----


@pytest.mark.parametrize("end", [b"\n", b"\r\n"], ids=["LF", "CRLF"])
@pytest.mark.parametrize("bom", [b"", b"\xef\xbb\xbf"], ids=["no BOM", "BOM"])
@pytest.mark.parametrize("last", [True, False], ids=["final newline", "no final newline"])
def test_line_ends_byte_order_marks_and_missing_final_newlines_are_kept(tmp_path, end, bom, last):
    def encode(text: bytes) -> bytes:
        text = bom + text.replace(b"\n", end)
        return text if last else text.removesuffix(end)

    root = trees.made_up_tree(tmp_path / "tree", encode(ONE), encode(TWO))
    stock = digest(root)
    assert run("apply", root) == 0
    assert (root / "lib/one.py").read_bytes() == encode(PATCHED_ONE)
    assert (root / "two.py").read_bytes() == encode(PATCHED_TWO)
    assert run("revert", root) == 0
    assert digest(root) == stock


def test_a_change_at_the_last_line_keeps_its_missing_end(tmp_path):
    root = trees.made_up_tree(tmp_path / "tree", ONE, b"two()\r\nfive()\r\nsix()")
    assert run("apply", root) == 0
    assert (root / "two.py").read_bytes() == b"viking = True\r\ntwo()\r\nfive()\r\nviking_five()\r\nsix()"
    assert run("revert", root) == 0
    assert (root / "two.py").read_bytes() == b"two()\r\nfive()\r\nsix()"


def test_a_file_of_mixed_line_ends_comes_back_as_it_was(tmp_path):
    mixed = b"# two\r\ntwo()\n# x\r\n# y\nfive()\r\nsix()\n# z\r\n"
    root = trees.made_up_tree(tmp_path / "tree", ONE, mixed)
    assert run("apply", root) == 0
    assert run("revert", root) == 0
    assert (root / "two.py").read_bytes() == mixed


def test_a_replaced_line_whose_end_differs_from_its_neighbours_is_refused(tmp_path, capsys):
    root = trees.made_up_tree(tmp_path / "tree", ONE.replace(b"old\n", b"old\r\n"))
    before = digest(root)
    assert run("apply", root) == 1
    assert digest(root) == before
    assert "lib/one.py: the change could not be undone byte for byte" in capsys.readouterr().err


def test_bytes_that_are_no_text_pass_through(tmp_path):
    odd = b"# \xff\x00\x0c\x1e\xe2\x80\xa8\r alone\n"
    root = trees.made_up_tree(tmp_path / "tree", odd + ONE + odd, TWO)
    assert run("apply", root) == 0
    assert (root / "lib/one.py").read_bytes() == odd + PATCHED_ONE + odd
    assert run("revert", root) == 0
    assert (root / "lib/one.py").read_bytes() == odd + ONE + odd


def test_hunks_are_found_wherever_their_text_has_gone(root):
    edit(root, "lib/one.py", (b"import os\n", b"import os\n" + b"# new\n" * 500), (b"# a\n# b\n", b""))
    stock = digest(root)
    assert run("apply", root) == 0
    assert run("revert", root) == 0
    assert digest(root) == stock


def test_tabs_and_spaces_are_different_text(root, capsys):
    edit(root, "lib/one.py", (b"\tvalue", b"        value"))
    assert run("apply", root) == 1
    assert "the line 'value = old' is not there" in capsys.readouterr().err


# ---- states told apart ----


def test_drifted_text_is_refused_by_name_and_nothing_is_written(root, capsys):
    edit(root, "lib/one.py", (b"    return 1", b"    return 2"))
    before = digest(root)
    assert run("check", root) == run("apply", root) == run("apply", root, "--dry-run") == 1
    assert digest(root) == before
    assert states(root) == {"first": State.DRIFTED, "second": State.ABSENT}
    error = capsys.readouterr().err
    assert "first: does not fit: lib/one.py: the change at line 3" in error
    assert "after line 3 the line 'return 1' was expected" in error


def test_text_that_is_there_twice_is_refused(root, capsys):
    edit(root, "lib/one.py", (b"# c\n", b"\tvalue = old\nlast()\n"))
    before = digest(root)
    assert run("apply", root) == 1
    assert digest(root) == before
    assert states(root)["first"] is State.AMBIGUOUS
    assert "fits more than one place" in capsys.readouterr().err


def test_half_a_patch_is_named_and_completed(root, capsys):
    run("apply", root)
    (root / "lib/one.py").write_bytes(ONE)
    assert states(root) == {"first": State.PARTLY, "second": State.APPLIED}
    assert run("check", root) == 0
    assert "partly applied, would be completed: 1 of 3 changes are there" in capsys.readouterr().out
    assert run("apply", root) == 0
    assert ((root / "lib/one.py").read_bytes(), (root / "two.py").read_bytes()) == (PATCHED_ONE, PATCHED_TWO)


def test_half_a_patch_is_reverted(root):
    run("apply", root)
    (root / "two.py").write_bytes(TWO)
    assert run("revert", root) == 0
    assert ((root / "lib/one.py").read_bytes(), (root / "two.py").read_bytes()) == (ONE, TWO)


def test_a_patch_solved_upstream_is_left_out(root, capsys):
    edit(root, "two.py", (b"two()\n", b"two_solved()\n"))
    assert run("apply", root) == 0
    assert "not needed: solved upstream: the project does it itself" in capsys.readouterr().out
    assert (root / "lib/one.py").read_bytes() == ONE
    assert states(root) == {"first": State.SOLVED, "second": State.APPLIED}


def test_a_missing_file_is_named(root, capsys):
    (root / "lib/one.py").unlink()
    assert run("apply", root) == 1
    assert "lib/one.py: there is no such file" in capsys.readouterr().err


def test_a_missing_file_that_a_release_may_lack_is_skipped(root, tmp_path, capsys):
    path = tmp_path / "patches/made-up/manifest.toml"
    path.write_text(path.read_text().replace('proven = ["1.0"]', 'proven = ["1.0"]\nabsent = "older than 1.0"'))
    (root / "lib/one.py").unlink()
    assert run("apply", root) == 0
    assert "skipped: not in this release: lib/one.py: older than 1.0" in capsys.readouterr().out
    assert b"viking_five" in (root / "two.py").read_bytes()


def test_a_foreign_tree_is_refused(tmp_path, capsys):
    (tmp_path / "elsewhere").mkdir()
    assert run("apply", tmp_path / "elsewhere") == 1
    assert "is no made-up project: one.marker" in capsys.readouterr().err
    assert run("apply", tmp_path / "nowhere") == 1
    assert "there is no such directory" in capsys.readouterr().err


def test_a_tree_with_the_marker_but_without_its_text_is_foreign(root, capsys):
    (root / "one.marker").write_bytes(b"another project\n")
    assert run("apply", root) == 1
    assert "one.marker does not hold 'made up'" in capsys.readouterr().err


def test_the_current_directory_is_the_tree_without_a_root(root, monkeypatch, capsys):
    monkeypatch.chdir(root)
    assert main(["apply", "made-up"]) == 0
    assert (root / "two.py").read_bytes() == PATCHED_TWO
    monkeypatch.chdir(root / "lib")
    assert main(["apply", "made-up"]) == 1
    assert "--root says where one is" in capsys.readouterr().err


# ---- other edits ----


def test_revert_keeps_the_users_other_edits(root):
    run("apply", root)
    edit(root, "lib/one.py", (b"import os\n", b"import os, sys\n"), (b"# c\n", b"# mine\n\n"))
    assert run("revert", root) == 0
    assert (root / "lib/one.py").read_bytes() == ONE.replace(b"import os\n", b"import os, sys\n").replace(
        b"# c\n", b"# mine\n\n"
    )


def test_revert_refuses_where_our_lines_were_edited(root, capsys):
    run("apply", root)
    edit(root, "lib/one.py", (b"    import viking\n", b"    import viking\n    print(1)\n"))
    before = digest(root)
    assert run("revert", root) == 1
    assert digest(root) == before
    error = capsys.readouterr().err
    assert "first: edited after it was applied: lib/one.py: the change at line 3 was made, and its lines were" in error
    assert run("apply", root) == 1


def test_a_single_change_that_was_edited_is_not_taken_for_one_never_made(root, capsys):
    run("apply", root, "--only", "second")
    edit(root, "two.py", (b"viking_five()\n", b"viking_five()\nmine()\n"))
    before = digest(root)
    assert run("revert", root, "--only", "second") == 1
    assert "edited after it was applied" in capsys.readouterr().err
    assert digest(root) == before


@pytest.mark.parametrize("command", ["apply", "check", "revert"])
def test_what_another_version_of_viking_has_changed_is_not_taken_for_stock(root, command, capsys):
    edit(root, "two.py", (b"# x\n", b"# x\nimport viking.adapters.older\n"))
    before = digest(root)
    assert run(command, root) == 1
    assert digest(root) == before
    error = capsys.readouterr().err
    assert "edited after it was applied: two.py: line 4 is from another version of Viking: put the file back" in error


def test_one_patch_comes_off_while_another_stays(shipped, tmp_path):
    """The hooks of the patch that stays are not taken for another version's."""
    root = trees.stock_tree(manifest.load("ai-toolkit"), tmp_path / "tree")
    where = ["ai-toolkit", "--root", str(root)]
    assert main(["apply", *where]) == 0
    assert main(["revert", *where, "--only", "alpha"]) == 0
    text = (root / "toolkit/network_mixins.py").read_text()
    assert "viking_adapter.before_save" not in text
    assert "multiplier_dtype" in text
    assert main(["apply", *where, "--only", "alpha"]) == 0
    assert main(["check", *where]) == 0


def test_reverting_a_stock_tree_that_has_drifted_has_nothing_to_do(root):
    edit(root, "lib/one.py", (b"    return 1", b"    return 2"))
    assert run("revert", root) == 0


# ---- nothing outside, nothing by halves ----


@pytest.mark.parametrize(
    "path", ["../x.py", "/etc/x.py", "a/../../x.py", "C:/x.py", "a//x.py", "a\\x.py", "./x.py", "", "a/\0.py"]
)
def test_a_patch_cannot_name_a_file_outside_the_tree(path):
    data = FIRST_LINES.replace(b"two.py", path.encode())
    with pytest.raises(PatchError):
        parse(data)


FIRST_LINES = b"--- a/two.py\n+++ b/two.py\n@@ -1 +1,2 @@\n+viking\n two()\n"


@pytest.mark.parametrize("what", ["file", "directory"])
def test_a_link_out_of_the_tree_is_refused(root, tmp_path, what, capsys):
    outside = tmp_path / "outside"
    shutil.copytree(root / "lib", outside)
    if what == "file":
        (root / "lib/one.py").unlink()
        (root / "lib/one.py").symlink_to(outside / "one.py")
    else:
        shutil.rmtree(root / "lib")
        (root / "lib").symlink_to(outside)
    assert run("apply", root) == 1
    assert "lib/one.py: a link leads out of the tree" in capsys.readouterr().err
    assert (outside / "one.py").read_bytes() == ONE
    assert (root / "two.py").read_bytes() == TWO


def test_a_link_within_the_tree_stays_a_link(root):
    (root / "real").mkdir()
    (root / "lib/one.py").rename(root / "real/one.py")
    (root / "lib/one.py").symlink_to("../real/one.py")
    assert run("apply", root) == 0
    assert (root / "lib/one.py").is_symlink()
    assert (root / "real/one.py").read_bytes() == PATCHED_ONE


def test_another_name_of_the_same_file_keeps_the_old_text(root, tmp_path):
    """Package managers share files between environments by hard links."""
    os.link(root / "two.py", tmp_path / "cache.py")
    assert run("apply", root) == 0
    assert (tmp_path / "cache.py").read_bytes() == TWO
    assert (root / "two.py").read_bytes() == PATCHED_TWO


def test_a_directory_in_place_of_a_file_is_refused(root, capsys):
    (root / "two.py").unlink()
    (root / "two.py").mkdir()
    assert run("apply", root) == 1
    assert "two.py: this is no regular file" in capsys.readouterr().err


@pytest.mark.parametrize("what", ["file", "directory"])
def test_a_read_only_tree_is_refused(root, what, capsys):
    place = root / "two.py" if what == "file" else root / "lib"
    place.chmod(0o444 if what == "file" else 0o555)
    before = digest(root)
    try:
        assert run("apply", root) == 1
        assert "is read-only" in capsys.readouterr().err
        assert digest(root) == before
    finally:
        place.chmod(0o755)


@pytest.mark.skipif(sys.platform == "win32", reason="there are no limits on file sizes")
def test_a_disk_that_is_full_changes_nothing(root):
    import resource

    (root / "two.py").write_bytes(TWO + b"# filler\n" * 10_000)
    before = digest(root)
    code = (
        "import sys; from pathlib import Path\n"
        "from viking.patch import command, manifest\n"
        "folder = Path(sys.argv[1]); manifest.folder = lambda: folder\n"
        "sys.exit(command.main(['apply', 'made-up', '--root', sys.argv[2]]))"
    )
    result = subprocess.run(
        [sys.executable, "-B", "-c", code, str(manifest.folder()), str(root)],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000)),
        capture_output=True,
        text=True,
        check=False,
    )
    assert (result.returncode, result.stderr.count("\n")) == (1, 1), result.stderr
    assert "nothing was written: two.py: cannot be written: File too large" in result.stderr
    assert digest(root) == before


BEFORE = [(os, "replace"), (os, "link"), (os, "fsync"), (os, "chmod"), (tree.tempfile, "mkstemp"), (tree, "open")]
BEFORE += [(Path, "read_bytes"), (Path, "unlink"), (Path, "stat")]
AFTER = [(os, "replace"), (os, "link"), (os, "fsync"), (os, "chmod"), (Path, "read_bytes")]
FAULTS = [*((owner, name, False) for owner, name in BEFORE), *((owner, name, True) for owner, name in AFTER)]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()], ids=["OSError", "^C"])
@pytest.mark.parametrize(
    ("owner", "name", "late"), FAULTS, ids=[f"{'after' if late else 'before'} {name}" for _, name, late in FAULTS]
)
def test_whatever_fails_while_writing_all_or_nothing_is_changed(tmp_path, monkeypatch, owner, name, late, error):
    """Every call of a function fails in turn, before or after it has done its work."""
    target = manifest.load("made-up")
    real = getattr(owner, name, open)
    failures, reached = 0, True
    nth = 0
    while reached:
        nth += 1
        root = trees.made_up_tree(tmp_path / f"tree{nth}")
        files = tree.read(root, series.paths(target.patches))
        changed = series.apply(target.patches, files).changed
        before, calls = digest(root), 0

        def failing(*arguments, nth=nth, **keywords):
            nonlocal calls
            calls += 1
            if calls == nth and not late:
                raise error
            result = real(*arguments, **keywords)
            if calls == nth:
                raise error
            return result

        raised = False
        with monkeypatch.context() as patched:
            patched.setattr(owner, name, failing, raising=False)
            try:
                tree.write(root, changed, files)
            except (PatchError, KeyboardInterrupt):
                raised = True
        reached = calls >= nth
        failures += raised
        if raised:
            assert digest(root) == before, f"call {nth}"
        else:
            assert ((root / "lib/one.py").read_bytes(), (root / "two.py").read_bytes()) == (PATCHED_ONE, PATCHED_TWO)
            assert set(digest(root)) == set(before), f"call {nth}"
    forgiven = {"link", "unlink"} if isinstance(error, OSError) else set()
    assert nth > 1
    assert failures > 0 or name in forgiven


def test_every_write_failing_changes_nothing(root, monkeypatch):
    target = manifest.load("made-up")
    files = tree.read(root, series.paths(target.patches))
    changed = series.apply(target.patches, files).changed
    before = digest(root)

    def full(*arguments, **keywords):
        raise OSError(28, "No space left on device")

    for name in ("replace", "fsync"):
        with monkeypatch.context() as patched:
            patched.setattr(os, name, full)
            with pytest.raises(PatchError, match="No space left on device"):
                tree.write(root, changed, files)
        assert digest(root) == before


def test_a_file_that_changes_between_check_and_write_is_left_alone(root):
    target = manifest.load("made-up")
    files = tree.read(root, series.paths(target.patches))
    changed = series.apply(target.patches, files).changed
    (root / "two.py").write_bytes(TWO + b"# someone else\n")
    before = digest(root)
    with pytest.raises(PatchError, match=r"two\.py: was changed by someone else"):
        tree.write(root, changed, files)
    assert digest(root) == before


def test_an_interrupt_is_one_sentence_and_changes_nothing(root, monkeypatch, capsys):
    before = digest(root)
    real, calls = os.replace, 0

    def interrupted(*arguments):
        nonlocal calls
        calls += 1
        real(*arguments)
        if calls == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupted)
    assert run("apply", root) == 1
    assert capsys.readouterr().err == "viking.patch: interrupted; nothing was written\n"
    assert digest(root) == before


def test_a_file_that_cannot_be_put_back_is_named_with_where_its_old_text_is(root, monkeypatch, capsys):
    real, calls = os.replace, 0

    def broken(*arguments):
        nonlocal calls
        calls += 1
        if calls > 1:
            raise OSError(5, "Input/output error")
        real(*arguments)

    monkeypatch.setattr(os, "replace", broken)
    assert run("apply", root) == 1
    error = capsys.readouterr().err
    assert "could not be put back: lib/one.py (its old text is in .viking-patch-" in error
    assert "nothing was written" not in error
    kept = [path for path in (root / "lib").iterdir() if path.name.startswith(".viking-patch-")]
    assert [path.read_bytes() for path in kept] == [ONE]


def test_paths_that_a_terminal_cannot_show_are_no_obstacle(tmp_path):
    root = trees.made_up_tree(tmp_path / "tr\xe9e\u4e2d")
    code = (
        "import sys; from pathlib import Path\n"
        "from viking.patch import command, manifest\n"
        "folder = Path(sys.argv[1]); manifest.folder = lambda: folder\n"
        "sys.exit(command.main(['apply', 'made-up', '--root', sys.argv[2]]))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, str(manifest.folder()), str(root)],
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert (root / "two.py").read_bytes() == PATCHED_TWO


# ---- from inside a checkout ----


def test_the_trees_own_modules_never_shadow_ours_or_the_standard_library(shipped, tmp_path):
    root = trees.stock_tree(manifest.load("ai-toolkit"), tmp_path / "tree")
    for name in ("typing", "argparse", "tomllib", "re", "dataclasses", "tempfile", "stat", "json", "enum", "pathlib"):
        (root / f"{name}.py").write_text(f"raise SystemExit('the tree has its own {name}')\n")
    for name in ("toolkit", "jobs", "importlib_metadata"):
        (root / name).mkdir(exist_ok=True)
        (root / name / "__init__.py").write_text("raise SystemExit('imported from the tree')\n")
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    for arguments in (["check", "ai-toolkit", "--root", "."], ["apply", "ai-toolkit"], ["revert", "ai-toolkit"]):
        result = subprocess.run(
            [sys.executable, "-m", "viking.patch", *arguments],
            cwd=root,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert (result.returncode, result.stderr) == (0, "")


# ---- the patches that are shipped ----

TARGETS = ["ai-toolkit", "torch"]


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("variant", [0, -1])
def test_shipped_patches_apply_to_the_text_they_name_and_come_off_again(shipped, tmp_path, name, variant):
    target = manifest.load(name)
    root = trees.stock_tree(target, tmp_path / "tree", lambda count: variant % count)
    stock = digest(root)
    assert main(["apply", name, "--root", str(root)]) == 0
    outcome = series.apply(target.patches, tree.read(root, series.paths(target.patches)))
    assert {verdict.state for verdict in outcome.verdicts} <= {State.APPLIED, State.SOLVED}
    assert main(["revert", name, "--root", str(root)]) == 0
    assert digest(root) == stock


@pytest.mark.parametrize("name", TARGETS)
def test_shipped_patches_are_described_and_recognisable(shipped, name):
    target = manifest.load(name)
    for patch in target.patches:
        assert patch.summary.endswith(".")
        assert {diff.path for variant in patch.variants for diff in variant} == set(patch.files)
        for diff in (diff for variant in patch.variants for diff in variant):
            for hunk in diff.hunks:
                assert hunk.body[-1][0] == b" ", f"{patch.name}: git apply takes a hunk without a last line of context"
                assert any(b"viking" in line.lower() for line in hunk.added), f"{patch.name}: line {hunk.line}"


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.skipif(shutil.which("git") is None, reason="there is no git")
def test_git_applies_the_shipped_patches_and_agrees_with_us(shipped, tmp_path, name):
    target = manifest.load(name)
    ours = trees.stock_tree(target, tmp_path / "ours")
    theirs = trees.stock_tree(target, tmp_path / "theirs")
    subprocess.run(["git", "init", "-q"], cwd=theirs, check=True)
    assert main(["apply", name, "--root", str(ours)]) == 0
    for patch in target.patches:
        path = manifest.folder() / name / patch.diffs[0]
        subprocess.run(["git", "apply", str(path)], cwd=theirs, check=True)
    shutil.rmtree(theirs / ".git")
    assert digest(theirs) == digest(ours)


def test_an_ai_toolkit_that_chooses_the_dtype_itself_gets_the_other_patches(shipped, tmp_path, capsys):
    root = trees.stock_tree(manifest.load("ai-toolkit"), tmp_path / "tree")
    edit(root, "jobs/process/BaseSDTrainProcess.py", (b"dtype=torch.float32)", b"dtype=chosen_dtype)"))
    assert main(["apply", "ai-toolkit", "--root", str(root)]) == 0
    out = capsys.readouterr().out
    assert "not needed: solved upstream: this version chooses the network's dtype itself" in out
    assert "jobs/" not in out.splitlines()[-1]
    assert "toolkit/network_mixins.py" in out.splitlines()[-1]


def test_torch_is_found_without_being_imported(shipped):
    pytest.importorskip("torch")
    code = (
        "import sys; from viking.patch.command import main; code = main(['check', 'torch'])\n"
        "sys.exit(code if 'torch' not in sys.modules else 9)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert "stream-priority" in result.stdout


# ---- damaged patches ----


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        (b"", "there is no change in it"),
        (b"--- a/x\n+++ b/x\n", "has no hunk"),
        (b"--- a/x\n+++ b/y\n@@ -1 +1,2 @@\n+a\n b\n", "is renamed or named twice"),
        (b"--- x\n+++ x\n@@ -1 +1,2 @@\n+a\n b\n", "does not start with a/"),
        (b"--- a/x\n+++ b/x\n@@ -1 +1 @@\n+a\n", "the hunk ends before its header says so"),
        (b"--- a/x\n+++ b/x\n@@ -1,2 +1 @@\n+a\n b\n c\n", "longer than its header says"),
        (b"--- a/x\n+++ b/x\n@@ -0,0 +1 @@\n+a\n", "no context"),
        (b"--- a/x\n+++ b/x\n@@ -1 +1 @@\n a\n", "changes nothing"),
        (b"--- a/x\n+++ b/x\n@@ broken @@\n a\n", "no hunk header"),
        (
            b"--- a/x\n+++ b/x\n@@ -1 +1,2 @@\n+a\n b\n\\ No newline at end of file\n",
            "may not touch a file's last line",
        ),
        (b"diff --git a/x b/x\nnew file mode 100644\n--- /dev/null\n+++ b/x\n", "only changes inside existing"),
        (b"diff --git a/x b/x\nold mode 100644\nnew mode 100755\n", "only changes inside existing"),
    ],
)
def test_a_diff_that_is_none_of_ours_is_refused(data, complaint):
    with pytest.raises(PatchError) as caught:
        parse(data)
    assert complaint in str(caught.value)


def test_a_diff_checked_out_with_crlf_is_the_same_diff():
    assert parse(trees.FIRST.replace(b"\n", b"\r\n")) == parse(trees.FIRST)


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ('title = "made-up project"', "", "keys missing: ['title']"),
        ('find = "directory"', 'find = "directory"\ncolour = "red"', "unknown: ['colour']"),
        ('files = ["lib/one.py", "two.py"]', 'files = ["two.py"]', "the manifest says ['two.py']"),
        ("0001-first.patch", "0009-first.patch", "0009-first.patch"),
        ('name = "second"', 'name = "first"', "two patches have one name"),
        ("[[patch]]", "[[patch", "manifest.toml cannot be used"),
        ("^two_solved", "(", "manifest.toml cannot be used"),
    ],
)
def test_a_damaged_manifest_is_a_refusal_that_names_it(root, tmp_path, old, new, complaint, capsys):
    path = tmp_path / "patches/made-up/manifest.toml"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    assert run("apply", root) == 1
    error = capsys.readouterr().err
    assert "manifest.toml" in error
    assert complaint in error
