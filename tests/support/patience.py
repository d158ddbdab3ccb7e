"""The time that tests wait for what must happen.

A wait that ends well ends at once, so the limit costs nothing: only a hang reaches it, however busy the machine is.
"""

PATIENCE = 600.0  # seconds
