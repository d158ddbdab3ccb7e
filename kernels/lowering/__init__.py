"""Lowering of a graph of operations to a plan of kernels."""
