"""Faults, kills, load and hostile input, for as long as you like: `.venv/bin/python scripts/robustness.py NAME --help`.

Each name is a module of `scripts/robustness/`, with flags of its own. Exit status 0 if nothing was wrong.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "robustness"))

COMMANDS = {
    "chaos": "streams of all kinds while the engine is killed: answers must not change",
    "network": "streams over tcp while packets are late, lost or reordered, or the line is cut; needs root",
    "soak": "a server under load for half an hour, killed every two minutes: nothing may be lost or grow",
    "fuzz": "coverage-guided fuzzing of what reads hostile input",
    "faults": "seeds of the simulation of faults, on a virtual clock and network",
}


def main() -> int | None:
    """Run the named command with the arguments that follow; return its exit status."""
    width = max(map(len, COMMANDS)) + 2
    table = "\n".join(f"  {name:{width}}{line}" for name, line in COMMANDS.items())
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=f"names:\n{table}", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", choices=COMMANDS, metavar="NAME", help="what to run, as below")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="its flags, see `NAME --help`")
    args = parser.parse_args()
    sys.argv = [f"{sys.argv[0]} {args.name}", *args.arguments]
    status: int | None = importlib.import_module(args.name).main()
    return status


if __name__ == "__main__":
    sys.exit(main())
