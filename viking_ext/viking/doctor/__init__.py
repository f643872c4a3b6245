"""What Viking finds on this machine: `python -m viking.doctor`.

    survey.py   what is there, section by section
    command.py  the command line

Nothing is imported here, so that `python -m viking.doctor` can leave the current directory out of its imports first.
"""
