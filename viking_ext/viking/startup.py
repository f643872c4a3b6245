"""What a command does before it imports anything else.

`python -m` puts the current directory first on the module search path, and our commands are meant to be run from inside
other projects' trees: a `types.py` or a `toolkit/` there would be imported in place of the standard library's or of
ours. This module needs `sys` and `os` alone, which every interpreter has loaded by then.
"""

from __future__ import annotations

import os
import sys


def ignore_current_directory() -> None:
    """Take the current directory off the module search path, wherever it stands there."""
    try:
        here = os.path.realpath(os.getcwd())
    except OSError:  # the directory is gone; nothing can be imported from it
        return
    sys.path[:] = [entry for entry in sys.path if entry and os.path.realpath(entry) != here]
