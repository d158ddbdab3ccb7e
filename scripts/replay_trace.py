"""Replays a trace and reports what its requests felt: `quire replay`, whose flags it takes."""

from __future__ import annotations

import sys

from quire.frontend.cli import main

if __name__ == "__main__":
    sys.argv[1:1] = ["replay"]
    main()
