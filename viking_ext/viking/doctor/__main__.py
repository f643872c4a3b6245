from __future__ import annotations

import sys

from viking.startup import ignore_current_directory, run

if __name__ == "__main__":
    ignore_current_directory()
    from viking.doctor.command import main

    sys.exit(run(main))
