"""Kernels of GPUs: what is launched, a builder for half a warp, and the hot kernels in the contract's order of sums."""
