"""`quire bench`: the usual benchmarks, with the names of `vllm bench`."""
