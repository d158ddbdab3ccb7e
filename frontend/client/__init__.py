"""The client of an engine's socket: processes, connections, requests and their streams."""
