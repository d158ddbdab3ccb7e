"""Kernels: the native extension and the MLIR that it compiles. They know tensors and sequences, not requests."""
