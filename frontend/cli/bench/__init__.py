"""`quire bench`: standard benchmarks, with the names of `vllm bench`."""
