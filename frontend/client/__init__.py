"""The client of an engine: its process, the connection to its socket, open requests and their streams."""
