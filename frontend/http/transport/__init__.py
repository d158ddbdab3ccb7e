"""HTTP itself, independent of any API: sockets, connections, bodies, server-sent events, access log, API keys."""
