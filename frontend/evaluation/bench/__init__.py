"""Benchmarks: latency and throughput of batches, and sweeps over request rates."""
