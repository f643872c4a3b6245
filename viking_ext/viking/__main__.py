"""`python -m viking`: the commands there are; `python -m viking X ...` runs `python -m viking.X ...`."""

from __future__ import annotations

import sys

from viking.startup import ignore_current_directory

COMMANDS = {
    "demo": "trains a LoRA on a small diffusion transformer, streamed and resident, and compares both",
    "plan": "says what a training step will cost under a budget, without a GPU",
    "bench": "measures a training step on this machine beside its floor",
    "doctor": "says what Viking finds on this machine, and what is missing",
    "patch": "lets ai-toolkit use Viking by small changes to its files, and undoes them",
}


def main() -> int:
    """List the commands, or run one. 0: listed; 2: there is no such command; else what the command returns."""
    import importlib.util
    import runpy

    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name in COMMANDS:
        module = f"viking.{name}"
        sys.argv = [module, *sys.argv[2:]]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        return 0
    lines = [
        f"  {command:8} {text}" for command, text in COMMANDS.items() if importlib.util.find_spec(f"viking.{command}")
    ]
    text = "\n".join(["python -m viking COMMAND ... (each has --help):", *lines])
    if name in ("-h", "--help"):
        print(text)
        return 0
    print(f"viking: {name!r} is no command\n{text}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    ignore_current_directory()
    sys.exit(main())
