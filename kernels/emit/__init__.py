"""Emitters of kernels as MLIR text, specialised for a model's shapes and the host's instruction set."""
