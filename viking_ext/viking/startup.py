"""What a command does before it imports anything else, and after it has done its work.

`python -m` puts the current directory first on the module search path, and our commands are meant to be run from inside
other projects' trees: a `types.py` or a `toolkit/` there would be imported in place of the standard library's or of
ours. This module needs `sys` and `os` alone, which every interpreter has loaded by then.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # typing's own is not imported, see above

if TYPE_CHECKING:
    from collections.abc import Callable


def ignore_current_directory() -> None:
    """Take the current directory off the module search path, wherever it stands there."""
    try:
        here = os.path.realpath(os.getcwd())
    except OSError:  # the directory is gone; nothing can be imported from it
        return
    sys.path[:] = [entry for entry in sys.path if entry and os.path.realpath(entry) != here]


def run(main: Callable[[], int]) -> int:
    """Run a command. A reader that has seen enough (`... | head`) ends it without a complaint, with status 1."""
    try:
        status = main()
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter's last flush complains
        return 1
    return status
