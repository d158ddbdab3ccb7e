"""Replay a trace and report the latency of its requests: the same as `quire replay`, with the same flags."""

from __future__ import annotations

import sys

from quire.frontend.cli import main

if __name__ == "__main__":
    sys.argv[1:1] = ["replay"]
    main()
