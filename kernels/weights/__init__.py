"""Weights: checkpoints, quantized formats, packing, and the cache of packed weights."""
