"""Serves a workload by an engine, or by a server, and notes what each of its requests has felt."""
