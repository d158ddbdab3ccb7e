"""Quire's kernels: the native extension and the MLIR that it compiles. Knows tensors and sequences, no request."""
