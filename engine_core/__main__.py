"""`python -m quire.engine_core`: one engine process."""

from __future__ import annotations

import sys

from quire.protocol.memory_limit import explain_failure


def run() -> int:
    """Run the engine; return the exit status."""
    try:
        from quire.engine_core.process import main  # its libraries need memory
    except Exception as error:
        if (words := explain_failure(error, is_import=True)) is None:
            raise
        print(f"error: {words}", file=sys.stderr)
        return 1
    return main()


if __name__ == "__main__":
    sys.exit(run())
