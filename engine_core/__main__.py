"""`python -m quire.engine_core`: one engine process."""

from __future__ import annotations

import sys

from quire.engine_core.process import main

if __name__ == "__main__":
    sys.exit(main())
