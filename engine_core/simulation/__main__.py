"""`python -m quire.engine_core.simulation`: one simulation, from stdin to stdout."""

from __future__ import annotations

import sys

from quire.engine_core.simulation.process import main

if __name__ == "__main__":
    sys.exit(main())
