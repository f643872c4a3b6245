"""Changes to other projects that let them use Viking: `python -m viking.patch`.

    diff.py      what a unified diff says
    text.py      a file as lines, where a hunk's text stands in it, and the file with it replaced
    manifest.py  the targets and their patches, read from patches/<target>/
    series.py    a target's patches against one tree: what each one's state is and what the files would become
    tree.py      a target's root, the files in it, and writing all of them or none
    command.py   the command line

Nothing is imported here, so that `python -m viking.patch` can leave the current directory out of its imports first.
"""
