"""Kernels as MLIR text: small emitters, specialised for a model's shapes and the host's instruction set."""
