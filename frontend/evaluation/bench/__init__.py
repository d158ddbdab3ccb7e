"""The usual benchmarks: latency of batches, throughput, service at a rate, and the highest rate that meets limits."""
