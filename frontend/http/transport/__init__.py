"""HTTP itself: sockets, connections, bodies, server-sent events, access logs, API keys."""
