"""Replay: sends a workload to an engine or a server, and records the latency of each request."""
